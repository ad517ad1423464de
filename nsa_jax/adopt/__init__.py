"""`python -m nsa_jax.adopt`: from a dense model to one of NSA that is taught, trained and measured."""
