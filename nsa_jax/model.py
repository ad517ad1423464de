"""A small decoder-only language model whose attention is NSA, dense or a window alone, by one field."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.nn import DenseAttention, NSAAttention, Selection, partitioning

NORM_EPSILON = 1e-6

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
      ValueError: a value is out of range or unknown.
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
        if self.attention not in _ATTENTION:
            raise ValueError(
                f"attention must be one of {_ATTENTION}, got {self.attention!r}. Choose one of them."
            )
        for name in ("dtype", "param_dtype"):
            if not jnp.issubdtype(jnp.dtype(getattr(self, name)), jnp.floating):
                raise ValueError(
                    f'{name} must be floating, got {getattr(self, name)!r}. Pass "float32" or "bfloat16".'
                )


class SwiGLU(nnx.Module):
    """The gated MLP of arXiv:2002.05202, Eq. 6: `down(silu(gate(x)) * up(x))`, without biases."""

    def __init__(self, config: TransformerConfig, *, sharding: partitioning.Sharding | None, rngs: nnx.Rngs):
        width = config.model_dim
        inner = -(-8 * width // 24) * 8 if config.mlp_dim is None else config.mlp_dim
        project = functools.partial(
            nnx.Linear, use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        inward = partitioning.metadata(sharding, "model", "mlp")
        self.gate_proj = project(width, inner, kernel_metadata=inward)
        self.up_proj = project(width, inner, kernel_metadata=inward)
        self.down_proj = project(
            inner,
            width,
            kernel_init=_residual_init(config),
            kernel_metadata=partitioning.metadata(sharding, "mlp", "model"),
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the MLP to each token."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sharding: partitioning.Sharding | None,
        implementation: str | None,
        rngs: nnx.Rngs,
    ):
        arguments = dict(
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_base=config.rope_base,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            out_kernel_init=_residual_init(config),
            sharding=sharding,
            implementation=implementation,
            rngs=rngs,
        )
        heads, width = config.num_heads, config.model_dim
        self.attention_norm = _norm(config, rngs)
        if config.attention == "nsa":
            self.attention = NSAAttention(
                heads, width, config=config.nsa, compression=config.compression, **arguments
            )
        else:
            window = config.nsa.window_size if config.attention == "window" else None
            self.attention = DenseAttention(heads, width, window_size=window, **arguments)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = SwiGLU(config, sharding=sharding, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        """One layer of the residual stream."""
        x = x + self.attention(self.attention_norm(x), positions=positions, segment_ids=segment_ids)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """Decoder-only language model: embedding, pre-norm layers of attention and SwiGLU, RMSNorm, logits.

    Args:
      config: widths, depth and kind of attention.
      sharding: mesh axes of the dimensions "model", "heads", "kv_heads", "mlp" and "vocab", see
        `NSAAttention`.
      implementation: which implementation attends, see `nsa_jax.attention`.
      rngs: source of the initial parameters.

    Example:
      >>> config = TransformerConfig(vocab_size=256, num_layers=2, model_dim=128, num_heads=4, num_kv_heads=1)
      >>> logits = Transformer(config, rngs=nnx.Rngs(0))(tokens)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sharding: partitioning.Sharding | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        partitioning.check_sharding(sharding)
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.model_dim,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_metadata=partitioning.metadata(sharding, "vocab", "model"),
            rngs=rngs,
        )
        arguments = dict(sharding=sharding, implementation=implementation, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, **arguments) for _ in range(config.num_layers)])
        self.final_norm = _norm(config, rngs)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(
                config.model_dim,
                config.vocab_size,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_metadata=partitioning.metadata(sharding, "model", "vocab"),
                rngs=rngs,
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of the token after each token, from its sequence up to itself.

        Args:
          tokens: token ids below `vocab_size`.
          positions: rotary positions, by default the index of each token in its sequence.
          segment_ids: sequences of packed rows: each non-zero id one contiguous run, 0 = padding.

        Returns:
          Logits in float32, or in float64 for a float64 computation.

        Raises:
          ValueError: `tokens` is not a matrix of integers, or an argument's shape does not fit it.
        """
        x = self._embed(tokens)
        run = nnx.remat(DecoderLayer.__call__) if self.config.remat else DecoderLayer.__call__
        for layer in self.layers:
            x = run(layer, x, positions, segment_ids)
        return self._logits(x)

    def inspect(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> list[Selection]:
        """What each layer selects and how it gates its branches, for pictures.

        Raises:
          NotImplementedError: the model's attention is not NSA.
        """
        self._needs_nsa("inspect")
        x, selections = self._embed(tokens), []
        for layer in self.layers:
            per_token = dict(positions=positions, segment_ids=segment_ids)
            selections.append(layer.attention.inspect(layer.attention_norm(x), **per_token))
            x = layer(x, positions, segment_ids)
        return selections

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens must be integers of shape [batch, tokens], got {tokens.dtype} of shape "
                f"{tokens.shape}. Add a batch axis, or convert them."
            )
        return self.embed(tokens)

    def _logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        x = self.final_norm(x)
        kernel = self.embed.embedding[...].T if self.config.tie_embeddings else self.lm_head.kernel[...]
        logits_dtype = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=logits_dtype)

    def _needs_nsa(self, what: str) -> None:
        if self.config.attention != "nsa":
            raise NotImplementedError(
                f"{what} needs NSA layers, got attention={self.config.attention!r}. "
                'Build the model with attention="nsa".'
            )


def _norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.model_dim, epsilon=NORM_EPSILON, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
    )


def _residual_init(config: TransformerConfig) -> nnx.Initializer:
    """LeCun's variance over the number of additions to the residual stream, which then starts near 1."""
    return nnx.initializers.variance_scaling(0.5 / config.num_layers, "fan_in", "truncated_normal")
