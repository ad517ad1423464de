"""A decoder layer: attention and a gated MLP on a residual stream, each after a norm."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from nsa_jax.array_typing import Array, Float, Float32, Int
from nsa_jax.cache import DenseCache, NSACache
from nsa_jax.dispatch import Implementation
from nsa_jax.model.config import TransformerConfig
from nsa_jax.nn import DenseAttention, NSAAttention, products
from nsa_jax.nn.distillation import Target
from nsa_jax.nn.joined import projected
from nsa_jax.nn.projections import Sharding, check_sharding, sharding_metadata
from nsa_jax.parallel import Order

type LayerCache = NSACache | DenseCache


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """The gated MLP of arXiv:2002.05202, Eq. 6: `down(activation(gate(x)) * up(x))`, without biases."""

    def __init__(self, config: TransformerConfig, *, sharding: Sharding | None, rngs: nnx.Rngs):
        width = config.model_dim
        inner = config.mlp_width
        self.activation = config.activation
        check_sharding(sharding, mlp=inner)
        project = functools.partial(
            nnx.Linear, use_bias=False, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        inward = sharding_metadata(sharding, "model", "mlp")
        into = functools.partial(project, kernel_metadata=inward, promote_dtype=products.promote_columns)
        self.gate_proj = into(width, inner)
        self.up_proj = into(width, inner)
        self.down_proj = project(
            inner,
            width,
            kernel_init=_residual_init(config),
            kernel_metadata=sharding_metadata(sharding, "mlp", "model"),
            promote_dtype=products.promote_rows,
            dot_general=products.add_rows,
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the MLP to each token."""
        made = projected(self, x, self.input_projections)
        return self.down_proj(_ACTIVATIONS[self.activation](made["gate_proj"]) * made["up_proj"])

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections of the input."""
        return "gate_proj", "up_proj"


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream.

    With `post_norms` each also ends in a norm. Its `config` is one of `TransformerConfig.per_layer`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sharding: Sharding | None,
        context_axis: str | None,
        context_order: Order,
        implementation: Implementation | None,
        rngs: nnx.Rngs,
    ):
        arguments: dict[str, Any] = dict(
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            use_bias=config.qkv_bias,
            out_bias=config.out_bias,
            normalize_qk=config.normalize_qk,
            norm_epsilon=config.norm_epsilon,
            scale=config.scale,
            dropout_rate=config.dropout_rate,
            rope_base=config.rope_base,
            rope_scaling=config.rope_scaling,
            rotary=config.rotary,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            out_kernel_init=_residual_init(config),
            sharding=sharding,
            implementation=implementation,
            rngs=rngs,
        )
        heads, width = config.num_heads, config.model_dim
        self.attention_norm = norm(config, rngs)
        self.attention: Any
        if config.attention == "nsa":
            self.attention = NSAAttention(
                heads,
                width,
                config=config.nsa,
                branches=config.branches,
                selector=config.selector,
                share_keys_values=config.share_keys_values,
                compression=config.compression,
                compressor=config.compressor,
                gate=config.gate,
                initial_gates=config.initial_gates,
                context_axis=context_axis,
                context_order=context_order,
                **arguments,
            )
        else:
            size: Any = config.nsa.window_size if config.window_size is None else config.window_size
            window = size if config.attention == "window" else None
            self.attention = DenseAttention(heads, width, window_size=window, **arguments)
        self.mlp_norm = norm(config, rngs)
        self.mlp = GatedMLP(config, sharding=sharding, rngs=rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(config, rngs), norm(config, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
        block_indices: Int[Array, "B T K R"] | None = None,
        deterministic: bool | None = None,
        distil: Target | None = None,
    ) -> tuple[Float[Array, "B T D"], Float32[Array, ""] | None]:
        """Applies the layer to the residual stream; arguments as in `NSAAttention`.

        Returns:
          The residual stream after the layer, and the selection loss of an NSA layer if `distil` asks for it.
        """
        given = dict(block_indices=block_indices, distil=distil)
        out = self.attention(
            self.attention_norm(x),
            positions=positions,
            segment_ids=segment_ids,
            deterministic=deterministic,
            **{name: value for name, value in given.items() if value is not None},
        )
        out, loss = (out, None) if distil is None else out
        return self._add(x, out), loss

    def prefill(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        num_tokens: Int[Array, " B"] | None,
        block_indices: Int[Array, "B T K R"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Applies the layer to a prompt and appends it to the cache, see `NSAAttention.prefill`."""
        out, cache = self.attention.prefill(
            self.attention_norm(x), cache, num_tokens=num_tokens, block_indices=block_indices
        )
        return self._add(x, out), cache

    def decode_step(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache,
        num_tokens: Int[Array, " B"] | None,
        block_indices: Int[Array, "B T K R"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Applies the layer to a few new tokens and appends them, see `NSAAttention.decode_step`."""
        out, cache = self.attention.decode_step(
            self.attention_norm(x), cache, num_tokens=num_tokens, block_indices=block_indices
        )
        return self._add(x, out), cache

    def _add(self, x: Float[Array, "B T D"], out: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The residual stream after the layer, given the output of its attention."""
        x = x + (self.attention_post_norm(out) if self.post_norms else out)
        out = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_post_norm(out) if self.post_norms else out)


def norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Makes an RMSNorm (arXiv:1910.07467) of the residual stream, or of what is added to it."""
    return nnx.RMSNorm(
        config.model_dim,
        epsilon=config.norm_epsilon,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _residual_init(config: TransformerConfig) -> nnx.Initializer:
    """LeCun's variance divided by the number of additions to the residual stream.

    So the variance of the stream starts near 1.
    """
    return nnx.initializers.variance_scaling(0.5 / config.num_layers, "fan_in", "truncated_normal")
