"""Decoding state of one attention layer, NSA or dense, and the two pure functions that extend it.

Tokens are scattered into arrays of fixed capacity, so that XLA updates a donated cache, or one carried
through a compiled loop, in place. The compressor is passed as a function or as data: nothing here knows the
module that owns its parameters.
"""

from nsa_jax.cache.dense import DenseStep, dense_decode_step, dense_prefill, init_dense_cache
from nsa_jax.cache.state import CountedStep, Step, expected_reads, init_cache
from nsa_jax.cache.steps import decode_step, prefill
from nsa_jax.compression import Compression, ResidualMLP, Rotation
from nsa_jax.layout import DenseCache, NSACache, Reads, TokenKeysValues

__all__ = [
    "Compression",
    "CountedStep",
    "DenseCache",
    "DenseStep",
    "NSACache",
    "Reads",
    "ResidualMLP",
    "Rotation",
    "Step",
    "TokenKeysValues",
    "decode_step",
    "dense_decode_step",
    "dense_prefill",
    "expected_reads",
    "init_cache",
    "init_dense_cache",
    "prefill",
]
