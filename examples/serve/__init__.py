"""A server for the clients of OpenAI, on top of `nsa_jax.generate.Batcher`."""
