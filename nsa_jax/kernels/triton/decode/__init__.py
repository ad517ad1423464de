"""Kernels of a decode step: few new tokens, a cache, and nothing but bytes to wait for."""

from nsa_jax.kernels.triton.decode.dense_step import dense_decode_step
from nsa_jax.kernels.triton.decode.step import StepResult, decode_step

__all__ = ["StepResult", "decode_step", "dense_decode_step"]
