"""Sizes of the kernels that compute again what is not finite: that is rare, so speed hardly matters."""

RECOMPUTED_HEADS = 16  # query heads at a time: the fewest rows of a product
RECOMPUTED_KEYS = 32  # keys of a step
RECOMPUTED_KEYS_OF_A_PROGRAM = 64  # keys whose gradients one program searches
RECOMPUTED_TOKENS = 32  # query tokens of a program, and of a step for a key
