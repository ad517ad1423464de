"""`python -m parity`: outputs, gradients, block sets, decode steps of `nsa_jax` against `nsa_torch_ref`."""
