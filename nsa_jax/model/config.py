"""What a `Transformer` is: the configuration that its checkpoint stores."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from nsa_jax.config import NSAConfig
from nsa_jax.nn.projections import head_width

_ATTENTION = ("nsa", "dense", "window")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What decides which parameters a `Transformer` has and what it computes; a checkpoint stores it.

    Attributes:
      vocab_size: tokens of the vocabulary.
      num_layers: decoder layers.
      model_dim: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: KV heads.
      head_dim: width of queries and keys, `model_dim // num_heads` by default.
      mlp_dim: inner width of SwiGLU, by default 8/3 of `model_dim`, rounded up to a multiple of 8.
      attention: "nsa", "dense" (full causal attention) or "window" (the last `nsa.window_size` tokens alone).
      nsa: block structure.
      compression: "mlp" or "mean", see `nsa_jax.nn.Compressor`.
      tie_embeddings: whether the output projection is the transposed embedding.
      rope_base: base of the rotary embedding.
      dtype: name of the dtype of the computation. Logits are float32 at least.
      param_dtype: name of the dtype of the parameters.
      remat: whether the backward pass recomputes each layer instead of storing what it computed.

    Raises:
      ValueError: a value is out of range or unknown, or head counts or widths do not divide.
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
    compression: Literal["mlp", "mean"] = "mlp"
    tie_embeddings: bool = True
    rope_base: float = 10000.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}. Pass a positive number."
                )
        head_width(self.num_heads, self.model_dim, self.num_kv_heads, self.head_dim)
        if self.attention not in _ATTENTION:
            raise ValueError(
                f"attention must be one of {_ATTENTION}, got {self.attention!r}. Choose one of them."
            )
        for name in ("dtype", "param_dtype"):
            if not jnp.issubdtype(jnp.dtype(getattr(self, name)), jnp.floating):
                raise ValueError(
                    f'{name} must be floating, got {getattr(self, name)!r}. Pass "float32" or "bfloat16".'
                )
