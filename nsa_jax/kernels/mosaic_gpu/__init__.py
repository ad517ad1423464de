"""Kernels in Pallas for Hopper GPUs (Mosaic GPU): warpgroups of a program with roles of their own.

They take lists of blocks from `nsa_jax.kernels.lists`.
"""
