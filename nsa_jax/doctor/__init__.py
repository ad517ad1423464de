"""`python -m nsa_jax.doctor` says whether `nsa_jax` works on this machine, what runs here, and why.

It uses the library as its users do, so it stands above everything else and nothing imports it.
"""
