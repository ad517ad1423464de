"""Kernels of a decode step: few new tokens, a cache, and nothing but bytes to wait for."""

from nsa_jax.kernels.triton.decode.step import GivenBlocks, StepResult, decode_step

__all__ = ["GivenBlocks", "StepResult", "decode_step"]
