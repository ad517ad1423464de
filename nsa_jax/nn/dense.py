"""The layers that NSA is compared with: full causal attention, and a sliding window only."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax import arguments, attention, keywords
from nsa_jax.array_typing import Array, DType, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import EVERYWHERE, Implementation, check_implementation, default_platform
from nsa_jax.nn.checks import (
    check_dropout_call,
    check_inputs,
    check_parameters,
    head_width,
)
from nsa_jax.nn.joined import projected_together
from nsa_jax.nn.projections import (
    NORM_EPSILON,
    Sharding,
    head_norm,
    output_dropout,
    projection,
    token_positions,
)
from nsa_jax.nn.rope_scaling import RopeScaling
from nsa_jax.nn.rotary import DEFAULT_BASE, RotaryFunction, rotary_function, turn
from nsa_jax.nn.steps import DenseCacheSteps
from nsa_jax.option_checks import check_flag, check_positive
from nsa_jax.sharding.explicit import BY_TOKENS, per_shard


class DenseAttention(DenseCacheSteps):
    """Causal self-attention with rotary embedding and grouped queries, for comparison with `NSAAttention`.

    Without `window_size` it is full attention by `jax.nn.dot_product_attention`, which uses cuDNN where it
    can. It lets NaN and infinity of later tokens into other outputs, which nothing else here does. For packed
    rows it would store the logits of all pairs of tokens, and in float64 its softmax is in float32; both are
    left to `nsa_jax.window_attention`. With `window_size`, a query sees that many of the most recent tokens,
    its own included, by `nsa_jax.window_attention` always. Both have the same parameters: `query_proj`,
    `key_proj`, `value_proj` and `out_proj`, with `normalize_qk` also `query_norm` and `key_norm`.

    Args:
      num_heads: number of query heads, a multiple of `num_kv_heads`.
      in_features: width of the layer's input and output.
      num_kv_heads: number of KV heads.
      head_dim: width of queries, keys and values, `in_features // num_heads` by default.
      window_size: tokens that a query sees, its own included; None for all.
      use_bias: whether the projections have biases.
      out_bias: whether the output projection has one, by default what `use_bias` says.
      normalize_qk: whether queries and keys pass an RMSNorm over the head dim before they are rotated.
      norm_epsilon: added to the mean square in these norms; above 0.
      scale: factor of the logits, `head_dim**-0.5` by default.
      dropout_rate: share of the outputs that training drops, see `NSAAttention`.
      rope_base: base of the rotary embedding, see `rotate`.
      rope_scaling: a scaling of the rotary frequencies, see `NSAAttention`.
      rotary: your own rotary function instead of `rope_base` and `rope_scaling`, see `NSAAttention`.
      dtype: dtype of the computation; by default the promoted dtype of inputs and parameters, as in
        `nnx.Linear`.
      param_dtype: dtype of the parameters.
      precision: precision of the products, see `jax.lax.Precision`.
      kernel_init: initializer of the kernels of the projections.
      out_kernel_init: initializer of the kernel of the output projection, `kernel_init` by default.
      bias_init: initializer of the biases of the projections.
      sharding: mesh axes of named dimensions, see `NSAAttention`.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None, see `NSAAttention`. It chooses
        what attends with a window, in packed rows or through a cache; full attention of other rows does not
        use it.
      rngs: source of the initial parameters, and of dropout: its stream `dropout`, or the default one.

    Raises:
      TypeError: an option is of the wrong kind, or cannot be called as described.
      ValueError: head counts or widths do not divide; a number is out of range; `rngs` has no stream for a
        dropout that is asked for; `dtype`, `param_dtype`, `precision`, `implementation` or a name in
        `sharding` is unknown, or the mesh in context cannot shard a parameter as asked; or `rotary` is given
        together with `rope_base` or `rope_scaling`.
    """

    @keywords.known
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int,
        head_dim: int | None = None,
        window_size: int | None = None,
        use_bias: bool = False,
        out_bias: bool | None = None,
        normalize_qk: bool = False,
        norm_epsilon: float = NORM_EPSILON,
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
        num_heads, in_features, num_kv_heads = int(num_heads), int(in_features), int(num_kv_heads)
        check_implementation(implementation)
        out_bias = use_bias if out_bias is None else out_bias
        check_flag(use_bias=use_bias, out_bias=out_bias, normalize_qk=normalize_qk)
        check_positive(norm_epsilon=norm_epsilon)
        check_parameters(
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
            kernel_init=kernel_init,
            out_kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            bias_init=bias_init,
        )
        self.num_kv_heads, self.in_features, self.head_dim = num_kv_heads, in_features, head_dim
        self.dtype, self.implementation = dtype, implementation
        self.scale = arguments.resolve_scale(scale, head_dim, param_dtype if dtype is None else dtype)
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
            use_bias=out_bias,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
        )
        norm = functools.partial(
            head_norm,
            normalize_qk,
            head_dim,
            epsilon=norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
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
        """Attends from every token to the tokens of its sequence up to and including itself.

        Args:
          x: layer input.
          positions: rotary position of each token, by default its index in its sequence.
          segment_ids: sequence of each token of packed rows: each non-zero id is one contiguous run,
            0 = padding.
          deterministic: whether dropout is off; by default what `train()` or `eval()` has set.
          rngs: source of the random numbers for dropout, by default the layer's own.

        Returns:
          The layer output; for a padding token 0, or the bias of the output projection.

        Raises:
          TypeError: `x` does not hold floats, an index array does not hold integers, or `deterministic` or
            `rngs` is of the wrong kind.
          ValueError: `x` does not have three axes and the width `in_features`, or the shape of an argument
            does not fit `x`.
        """
        check_dropout_call(deterministic, rngs)
        check_inputs(x, self.in_features, positions=positions, segment_ids=segment_ids)
        if positions is None:
            positions = token_positions(x, segment_ids)
        query, key, value = self._project(x, positions)
        window, implementation = self.window, self.implementation
        is_wide = query.dtype == jnp.float64
        if window is None and (is_wide or segment_ids is not None):
            window = NSAConfig(window_size=x.shape[1])
            implementation = EVERYWHERE if is_wide else implementation
        if window is not None:
            out, _ = attention.window_attention(
                query,
                key,
                value,
                config=window,
                segment_ids=segment_ids,
                scale=self.scale,
                implementation=implementation,
            )
        else:
            operands = dict(query=query, key=key, value=value, scale=self.scale)
            out = per_shard(_attend, BY_TOKENS, **operands)
        return self.dropout(self.out_proj(out), deterministic=deterministic, rngs=rngs)

    def _project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Array, Array, Array]:
        made = projected_together(self, x, self.input_projections)
        query = turn(self.rotary, self.query_norm(made["query_proj"]), positions)
        return query, turn(self.rotary, self.key_norm(made["key_proj"]), positions), made["value_proj"]

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections of the layer input."""
        return "query_proj", "key_proj", "value_proj"


def _attend(query: Array, key: Array, value: Array, scale: float) -> Float[Array, "B T N V"]:
    implementation = choose_implementation(query)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, scale=scale, implementation=implementation
    )


def choose_implementation(query: Array | jax.ShapeDtypeStruct) -> Literal["cudnn"] | None:
    """Chooses the `implementation` argument of `jax.nn.dot_product_attention`.

    Args:
      query: queries `[B, T, N, H]`. cuDNN takes 16-bit floats, head dims that are multiples of 8 up to 128,
        and even lengths.

    Returns:
      "cudnn" on a GPU if it takes these queries, else None: then XLA computes the attention and stores the
      logits `[T, T]`.
    """
    length, dim = query.shape[1], query.shape[3]
    fits = query.dtype.itemsize == 2 and dim % 8 == 0 and dim <= 128 and length % 2 == 0
    return "cudnn" if fits and default_platform() == "cuda" else None
