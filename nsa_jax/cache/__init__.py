"""The decoding state of one attention layer, NSA or dense, and the pure functions that extend it.

`prefill` appends a prompt of any length, `decode_step` appends a few tokens; both attend from the new tokens
and return a new cache. `dense_prefill` and `dense_decode_step` do the same for a dense or window layer.

The arrays of a cache have a fixed capacity, and tokens are scattered into them. So XLA updates a cache in
place if it is donated or carried through a compiled loop. The compressor is passed as a function or as data;
nothing here depends on the module that owns its parameters.
"""

from nsa_jax.cache.dense import DenseStep, dense_decode_step, dense_prefill, init_dense_cache
from nsa_jax.cache.kept import keep
from nsa_jax.cache.reads import Reads, count_reads, expected_reads
from nsa_jax.cache.rewinding import rewind
from nsa_jax.cache.state import Step, init_cache
from nsa_jax.cache.steps import decode_step, prefill
from nsa_jax.compression import Compression, ResidualMLP, Rotation
from nsa_jax.keywords import gone
from nsa_jax.layout import DenseCache, NSACache, TokenKeysValues

__all__ = [
    "Compression",
    "DenseCache",
    "DenseStep",
    "NSACache",
    "Reads",
    "ResidualMLP",
    "Rotation",
    "Step",
    "TokenKeysValues",
    "count_reads",
    "decode_step",
    "dense_decode_step",
    "dense_prefill",
    "expected_reads",
    "init_cache",
    "init_dense_cache",
    "keep",
    "prefill",
    "rewind",
]

__getattr__ = gone(__name__, CountedStep="nsa_jax.cache.count_reads")
