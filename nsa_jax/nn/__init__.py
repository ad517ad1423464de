"""Flax NNX layers of Native Sparse Attention."""

from nsa_jax.nn.attention import NSAAttention, Operands, Selection
from nsa_jax.nn.compressor import Compressor
from nsa_jax.nn.dense import DenseAttention
from nsa_jax.nn.gate import Gate
from nsa_jax.nn.parameters import load_weights, weights
from nsa_jax.nn.rotary import rotate

__all__ = [
    "Compressor",
    "DenseAttention",
    "Gate",
    "NSAAttention",
    "Operands",
    "Selection",
    "load_weights",
    "rotate",
    "weights",
]
