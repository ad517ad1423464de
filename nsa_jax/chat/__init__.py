"""A chat in a terminal, `python -m nsa_jax.chat`; and what a program needs to hold one."""
