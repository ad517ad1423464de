"""The configuration of a `Transformer`, which its checkpoint stores."""

import dataclasses
from typing import Literal

from nsa_jax import arguments
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.nn.checks import check_dropout_rate, head_width
from nsa_jax.nn.parts import MakeCompressor, MakeGate, check_parts
from nsa_jax.nn.rope_scaling import RopeScaling
from nsa_jax.nn.rotary import DEFAULT_BASE, RotaryFunction, rotary_function
from nsa_jax.option_checks import check_choice, check_dtype, check_flag, check_int

_ATTENTION, _COMPRESSION = ("nsa", "dense", "window"), ("mlp", "mean")
_FLAGS = ("share_keys_values", "normalize_qk", "tie_embeddings", "remat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a `Transformer`: decides its parameters and what it computes.

    `share_keys_values`, `compression`, `compressor` and `gate` only matter for `attention="nsa"`. A model
    with its own `compressor`, `gate` or `rotary` function cannot be saved, because a checkpoint cannot hold
    functions.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      num_layers: number of decoder layers.
      model_dim: width of the residual stream.
      num_heads: number of query heads, a multiple of `num_kv_heads`.
      num_kv_heads: number of KV heads.
      head_dim: width of queries and keys, `model_dim // num_heads` by default.
      mlp_dim: inner width of SwiGLU, by default 8/3 of `model_dim`, rounded up to a multiple of 8.
      attention: "nsa", "dense" (full causal attention) or "window" (only the last `nsa.window_size` tokens).
      nsa: block structure.
      share_keys_values: whether the branches share keys and values, see `nsa_jax.nn.NSAAttention`.
      compression: "mlp" or "mean", see `nsa_jax.nn.Compressor`.
      compressor: makes your own compressors, see `nsa_jax.nn.NSAAttention`.
      gate: makes your own gate, see `nsa_jax.nn.NSAAttention`.
      normalize_qk: whether queries and keys pass an RMSNorm over the head dim, see `nsa_jax.nn.NSAAttention`.
      scale: factor of the attention logits, `head_dim**-0.5` by default.
      dropout_rate: share of the outputs of each attention layer that training drops, from 0 to below 1. The
        methods `train()` and `eval()` of the model switch it on and off. `prefill` and `decode_step` drop
        nothing.
      rope_base: base of the rotary embedding.
      rope_scaling: a `LinearScaling`, `Llama3Scaling` or `YarnScaling` from `nsa_jax.nn`, or None.
      rotary: your own rotary function instead of `rope_base` and `rope_scaling`, see
        `nsa_jax.nn.NSAAttention`.
      tie_embeddings: whether the output projection is the transposed embedding.
      dtype: name of the dtype of the computation. Logits are float32 at least.
      param_dtype: name of the dtype of the parameters.
      remat: whether the backward pass recomputes each layer instead of storing its intermediate results.

    Raises:
      TypeError: an option is of the wrong kind, or cannot be called as described.
      ValueError: a value is out of range or unknown; head counts or widths do not divide; or `rotary` or
        `compressor` is given together with the options that it replaces.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    mlp_dim: int | None = None
    attention: Literal["nsa", "dense", "window"] = "nsa"
    nsa: NSAConfig = NSAConfig()  # noqa: RUF009 (frozen)
    share_keys_values: bool = False
    compression: Literal["mlp", "mean"] = "mlp"
    compressor: MakeCompressor | None = None
    gate: MakeGate | None = None
    normalize_qk: bool = False
    scale: float | None = None
    dropout_rate: float = 0.0
    rope_base: float = DEFAULT_BASE
    rope_scaling: RopeScaling | None = None
    rotary: RotaryFunction | None = None
    tie_embeddings: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "model_dim", *([] if self.mlp_dim is None else ["mlp_dim"]))
        check_int(low=1, **{name: getattr(self, name) for name in sizes})
        check_config(self.nsa)
        head_dim = head_width(self.num_heads, self.model_dim, self.num_kv_heads, self.head_dim)
        for name in (*sizes, "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) is not None:  # products of narrow ints of NumPy would overflow
                object.__setattr__(self, name, int(getattr(self, name)))
        check_dtype(dtype=self.dtype, param_dtype=self.param_dtype)
        arguments.resolve_scale(self.scale, head_dim, self.dtype)
        check_dropout_rate(self.dropout_rate)
        rotary_function(self.rope_base, self.rope_scaling, self.rotary)
        check_choice(_ATTENTION, attention=self.attention)
        check_choice(_COMPRESSION, compression=self.compression)
        check_parts(self.gate, self.compressor, self.compression)
        check_flag(**{name: getattr(self, name) for name in _FLAGS})

    @property
    def mlp_width(self) -> int:
        """Inner width of SwiGLU: `mlp_dim` or its default."""
        return -(-8 * self.model_dim // 24) * 8 if self.mlp_dim is None else self.mlp_dim
