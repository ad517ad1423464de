"""Flax NNX layers: Native Sparse Attention and its parts, and dense and window attention to compare with."""

from nsa_jax.layout import token_windows
from nsa_jax.nn.attention import NSAAttention
from nsa_jax.nn.compressor import Compressor
from nsa_jax.nn.dense import DenseAttention
from nsa_jax.nn.gate import Gate
from nsa_jax.nn.indexer import Indexer, IndexerConfig
from nsa_jax.nn.operands import Operands, Selection
from nsa_jax.nn.parameters import load_weights, weights
from nsa_jax.nn.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from nsa_jax.nn.rotary import rotate
from nsa_jax.nn.selector import Selector

__all__ = [
    "Compressor",
    "DenseAttention",
    "Gate",
    "Indexer",
    "IndexerConfig",
    "LinearScaling",
    "Llama3Scaling",
    "NSAAttention",
    "Operands",
    "RopeScaling",
    "Selection",
    "Selector",
    "YarnScaling",
    "load_weights",
    "rotate",
    "token_windows",
    "weights",
]
