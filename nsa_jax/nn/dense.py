"""The layers that NSA is compared with: full causal attention, and a sliding window alone."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax import arguments, attention
from nsa_jax.array_typing import Array, DType, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation, default_platform
from nsa_jax.nn.dense_steps import DenseCacheSteps
from nsa_jax.nn.projections import (
    Sharding,
    check_inputs,
    head_norm,
    head_width,
    output_dropout,
    projection,
    token_positions,
)
from nsa_jax.nn.rope_scaling import RopeScaling
from nsa_jax.nn.rotary import DEFAULT_BASE, RotaryFunction, rotary_function, turn


class DenseAttention(DenseCacheSteps):
    """Causal self-attention with rotary embedding and grouped queries, for comparisons with `NSAAttention`.

    Call it on whole sequences; `prefill` and `decode_step` extend a cache instead.

    Full attention is `jax.nn.dot_product_attention`, by cuDNN where that runs; with `window_size` a query
    sees that many most recent tokens, its own included, through `nsa_jax.attention.window_attention`. Both
    have the same parameters: `query_proj`, `key_proj`, `value_proj`, `out_proj`; with `normalize_qk` also
    `query_norm` and `key_norm`.

    Args:
      num_heads: query heads.
      in_features: width of the layer's input and output.
      num_kv_heads: KV heads.
      head_dim: width of queries, keys and values, `in_features // num_heads` by default.
      window_size: tokens of the window; None for full attention.
      use_bias: whether the projections have biases.
      normalize_qk: whether queries and keys pass an RMSNorm over the head dim before they are rotated.
      scale: factor of the logits, `head_dim**-0.5` by default.
      dropout_rate: share of the outputs that training drops, see `NSAAttention`.
      rope_base: base of the rotary embedding, see `rotate`.
      rope_scaling: a scaling of its frequencies, see `NSAAttention`.
      rotary: a function in the place of the two, see `NSAAttention`.
      dtype: dtype of the computation; by default that of the promoted inputs and parameters, as in
        `nnx.Linear`.
      param_dtype: dtype of the parameters.
      precision: precision of the products, see `jax.lax.Precision`.
      kernel_init: initializer of the projections' kernels.
      out_kernel_init: initializer of the output projection's kernel, `kernel_init` by default.
      bias_init: initializer of the projections' biases.
      sharding: mesh axes of named dimensions, see `NSAAttention`.
      implementation: which implementation attends with a window, or through a cache, see
        `nsa_jax.attention`.
      rngs: source of the initial parameters.

    Raises:
      TypeError, ValueError: as in `NSAAttention`.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int,
        head_dim: int | None = None,
        window_size: int | None = None,
        use_bias: bool = False,
        normalize_qk: bool = False,
        scale: float | None = None,
        dropout_rate: float = 0.0,
        rope_base: float = DEFAULT_BASE,
        rope_scaling: RopeScaling | None = None,
        rotary: RotaryFunction | None = None,
        dtype: DType | None = None,
        param_dtype: DType = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),  # noqa: B008 (pure)
        out_kernel_init: nnx.Initializer | None = None,
        bias_init: nnx.Initializer = nnx.initializers.zeros_init(),  # noqa: B008 (pure)
        sharding: Sharding | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        head_dim = head_width(num_heads, in_features, num_kv_heads, head_dim)
        self.num_kv_heads, self.in_features, self.head_dim = num_kv_heads, in_features, head_dim
        self.dtype, self.implementation = dtype, implementation
        self.scale = arguments.resolve_scale(scale, head_dim)
        self.rotary = rotary_function(rope_base, rope_scaling, rotary)
        self.window = None if window_size is None else NSAConfig(window_size=window_size)
        project = functools.partial(
            projection,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            sharding=sharding,
            rngs=rngs,
        )
        into_kv_heads = functools.partial(project, dimensions=("model", "kv_heads", None))
        self.query_proj = project(in_features, (num_heads, head_dim), dimensions=("model", "heads", None))
        self.key_proj = into_kv_heads(in_features, (num_kv_heads, head_dim))
        self.value_proj = into_kv_heads(in_features, (num_kv_heads, head_dim))
        self.out_proj = project(
            (num_heads, head_dim),
            in_features,
            dimensions=("heads", None, "model"),
            kernel_init=out_kernel_init or kernel_init,
        )
        norm = functools.partial(
            head_norm, normalize_qk, head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query_norm, self.key_norm = norm(), norm()
        self.dropout = output_dropout(dropout_rate, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Float[Array, "B T D"]:
        """Attends from every token to those of its sequence up to itself; arguments as in `NSAAttention`."""
        check_inputs(x, self.in_features, positions=positions, segment_ids=segment_ids)
        if positions is None:
            positions = token_positions(x, segment_ids)
        query, key, value = self._project(x, positions)
        if self.window is not None:
            out, _ = attention.window_attention(
                query,
                key,
                value,
                config=self.window,
                segment_ids=segment_ids,
                scale=self.scale,
                implementation=self.implementation,
            )
        elif segment_ids is None:
            implementation = choose_implementation(query)
            out = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, scale=self.scale, implementation=implementation
            )
        else:
            same_sequence = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
            out = jax.nn.dot_product_attention(
                query, key, value, mask=same_sequence, is_causal=True, scale=self.scale
            )
            # Padding attends to padding here, so that no row is empty; it shows nothing of it.
            out = jnp.where((segment_ids != 0)[:, :, None, None], out, 0)
        return self.dropout(self.out_proj(out), deterministic=deterministic, rngs=rngs)

    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Array, Array, Array]:
        query = turn(self.rotary, self.query_norm(self.query_proj(x)), positions)
        return query, turn(self.rotary, self.key_norm(self.key_proj(x)), positions), self.value_proj(x)


def choose_implementation(query: Array | jax.ShapeDtypeStruct) -> Literal["cudnn"] | None:
    """What `jax.nn.dot_product_attention` runs by: cuDNN on a GPU that can, else None: XLA stores `[T, T]`.

    Args:
      query: `[B, T, N, H]`; cuDNN takes 16-bit floats, dims of eights up to 128 and even lengths.
    """
    length, dim = query.shape[1], query.shape[3]
    fits = query.dtype.itemsize == 2 and dim % 8 == 0 and dim <= 128 and length % 2 == 0
    return "cudnn" if fits and default_platform() == "cuda" else None
