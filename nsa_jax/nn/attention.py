"""The attention layer: projections per branch, rotary embedding, compression, gates, the three branches."""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from nsa_jax import arguments, attention
from nsa_jax.array_typing import Array, DType, Float, Int, Int32
from nsa_jax.cache import TokenKeysValues
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.nn.compressor import CompressionMode, Compressor, first_tokens, token_windows
from nsa_jax.nn.gate import Gate
from nsa_jax.nn.parts import MakeCompressor, MakeGate, check_parts, make_compressor, make_gate, weigh
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
from nsa_jax.nn.steps import CacheSteps

# The middle of the names of the projections and norms of keys and values.
BRANCHES = ("_cmp", "_slc", "_win")
SHARED = ("",)


class Selection(NamedTuple):
    """What a layer chose for each query: `block_indices` per KV head, `gates` in the order cmp, slc, win."""

    block_indices: Int32[Array, "B T K R"]
    gates: Float[Array, "B T N 3"]


class Operands(NamedTuple):
    """The arrays that `nsa_jax.attention.native_sparse_attention` takes, in its order."""

    query: Float[Array, "B T N H"]
    key_cmp: Float[Array, "B C K H"]
    value_cmp: Float[Array, "B C K V"]
    key_slc: Float[Array, "B T K H"]
    value_slc: Float[Array, "B T K V"]
    key_win: Float[Array, "B T K H"]
    value_win: Float[Array, "B T K V"]
    gates: Float[Array, "B T N 3"]


class NSAAttention(CacheSteps):
    """Causal self-attention layer with Native Sparse Attention, for the place of `nnx.MultiHeadAttention`.

    Section 3 of arXiv:2502.11089. Each branch has its own keys and values (section 3.3.3); queries and the
    keys of the selection and window branches are rotated at their position; compressed keys are compressed
    un-rotated and rotated afterwards at the position of their block's first token.

    Parameters, with which checkpoints are written: `query_proj`, `key_{cmp,slc,win}_proj`,
    `value_{cmp,slc,win}_proj` and `out_proj`, each with `kernel` (and `bias`), laid out as in
    `nnx.LinearGeneral`; `compressor_key`, `compressor_value` and `gate`. With `normalize_qk` also
    `query_norm` and `key_{cmp,slc,win}_norm`, each with `scale`. With `share_keys_values` there are
    `key_proj`, `value_proj` and `key_norm` instead, as in `DenseAttention`.

    Args:
      num_heads: query heads.
      in_features: width of the layer's input and output.
      num_kv_heads: KV heads; each serves `num_heads // num_kv_heads` query heads, which select together.
      head_dim: width of queries and keys, `in_features // num_heads` by default.
      value_dim: width of values, `head_dim` by default.
      config: block structure.
      share_keys_values: whether the branches share one pair of keys and values, instead of three pairs of
        projections. A cache then stores them once and has no window ring.
      compression: "mlp" or "mean", see `Compressor`.
      compressor: makes compressors of one's own: called as `compressor(head_dim, config, rngs=rngs)`, like
        the class `Compressor`, once for the keys and once for the values. What it makes, a module or a
        function, maps the un-rotated tokens of blocks `[B, m, l, K, H]` to `[B, m, K, H]`, each block by
        itself. It is also called for windows that are no block, zeros among them, and what it makes of those
        is dropped; its gradients must be finite there.
      gate: makes a gate of one's own: called as `gate(in_features, num_heads, rngs=rngs)`, like the class
        `Gate`. What it makes, a module or a function, maps the layer input `[B, T, D]` to `[B, T, N, 3]`, the
        weights of the branches cmp, slc, win; each token by itself.
      use_bias: whether the projections have biases.
      normalize_qk: whether queries and keys pass an RMSNorm over the head dim, each token and head for
        itself, before anything else: rotation and compression see normed heads.
      scale: factor of the logits, `head_dim**-0.5` by default.
      dropout_rate: share of the outputs that training drops, see `nnx.Dropout`; `train()` and `eval()` of
        `nnx` switch it on and off. `prefill` and `decode_step` drop nothing.
      rope_base: base of the rotary embedding, see `rotate`.
      rope_scaling: a `LinearScaling`, `Llama3Scaling` or `YarnScaling` of its frequencies.
      rotary: any function `(heads [B, T, heads, H], positions [B, T]) -> heads` in the place of the two, for
        example `lambda heads, positions: heads` for none. It rotates queries, keys and compressed keys.
      dtype: dtype of the computation; by default that of the promoted inputs and parameters, as in
        `nnx.Linear`.
      param_dtype: dtype of the parameters.
      precision: precision of the products, see `jax.lax.Precision`.
      kernel_init: initializer of the projections' kernels; compressors and gate have their own.
      out_kernel_init: initializer of the output projection's kernel, `kernel_init` by default.
      bias_init: initializer of the projections' biases.
      sharding: mesh axes of the dimensions "model", "heads" and "kv_heads", for example
        `{"heads": "tensor", "kv_heads": "tensor"}`: sets the `out_sharding` metadata of every kernel and
        bias. Needs a mesh context when the layer is created.
      implementation: which implementation attends, see `nsa_jax.attention`.
      rngs: source of the initial parameters.

    Raises:
      TypeError: an option is of the wrong kind, or cannot be called as said above.
      ValueError: head counts or widths do not divide, a number is out of range, unknown compression, unknown
        name in `sharding`; a `rotary` or `compressor` beside what it takes the place of.

    Example:
      >>> layer = NSAAttention(8, 512, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> y = layer(x)  # x [B, T, 512]
      >>> wide = functools.partial(Compressor, hidden_dim=512)  # it is told of no dtype, precision, sharding
      >>> layer = NSAAttention(8, 512, num_kv_heads=2, compressor=wide, rngs=nnx.Rngs(0))
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        config: NSAConfig = NSAConfig(),  # noqa: B008 (frozen)
        share_keys_values: bool = False,
        compression: CompressionMode = "mlp",
        compressor: MakeCompressor | None = None,
        gate: MakeGate | None = None,
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
        value_dim = head_dim if value_dim is None else value_dim
        self.num_heads, self.in_features, self.num_kv_heads = num_heads, in_features, num_kv_heads
        self.head_dim, self.value_dim, self.share_keys_values = head_dim, value_dim, share_keys_values
        self.config, self.implementation, self.dtype = config, implementation, dtype
        self.scale = arguments.resolve_scale(scale, head_dim)
        self.rotary = rotary_function(rope_base, rope_scaling, rotary)

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
        norm = functools.partial(
            head_norm, normalize_qk, head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        into_kv_heads = functools.partial(project, in_features, dimensions=("model", "kv_heads", None))
        self.query_proj = project(in_features, (num_heads, head_dim), dimensions=("model", "heads", None))
        self.query_norm = norm()
        for branch in SHARED if share_keys_values else BRANCHES:
            setattr(self, f"key{branch}_proj", into_kv_heads((num_kv_heads, head_dim)))
            setattr(self, f"value{branch}_proj", into_kv_heads((num_kv_heads, value_dim)))
            setattr(self, f"key{branch}_norm", norm())
        self.out_proj = project(
            (num_heads, value_dim),
            in_features,
            dimensions=("heads", None, "model"),
            kernel_init=out_kernel_init or kernel_init,
        )
        check_parts(gate, compressor, compression)
        own_numbers: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, precision=precision)
        compressor = compressor or functools.partial(Compressor, mode=compression, **own_numbers)
        self.compressor_key = make_compressor(compressor, head_dim, config, rngs)
        self.compressor_value = make_compressor(compressor, value_dim, config, rngs)
        gate = gate or functools.partial(Gate, **own_numbers, sharding=sharding)
        self.gate = make_gate(gate, in_features, num_heads, rngs)
        self.dropout = output_dropout(dropout_rate, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Int[Array, "B T K R"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Float[Array, "B T D"]:
        """Attends from every token to the tokens of its sequence up to itself.

        Args:
          x: the layer input.
          positions: rotary positions, by default the index of each token in its sequence. They turn queries
            and keys only; causality, blocks and windows count tokens.
          segment_ids: sequences of packed rows: each non-zero id one contiguous run, 0 = padding.
          block_indices: pins the selection, as `inspect` returns it, instead of choosing it.
          deterministic: whether nothing is dropped; by default as `train()` or `eval()` left it.
          rngs: source of dropout's random numbers, the layer's own by default.

        Returns:
          The layer output. A padding token gets what an attention output of zero gives: 0, or the output
          bias.

        Raises:
          ValueError: `x` is not of rank 3 and width `in_features`, or an argument's shape does not fit `x`.

        Gradients:
          None flows through the selection (the paper's choice): phi and the projections of the compressed
          branch learn through the compressed branch's output.
        """
        out = attention.native_sparse_attention(
            *self.operands(x, positions=positions, segment_ids=segment_ids),
            config=self.config,
            block_indices=block_indices,
            segment_ids=segment_ids,
            scale=self.scale,
            implementation=self.implementation,
        )
        return self.dropout(self.out_proj(out), deterministic=deterministic, rngs=rngs)

    def operands(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Operands:
        """What the functional API needs of this layer: rotated queries and keys, compressed blocks, gates."""
        check_inputs(x, self.in_features, positions=positions, segment_ids=segment_ids)
        if positions is None:
            positions = token_positions(x, segment_ids)
        query, tokens, gates = self._project(x, positions)
        key_cmp, value_cmp = self._compress(
            token_windows(tokens.key_cmp, self.config, segment_ids),
            token_windows(tokens.value_cmp, self.config, segment_ids),
            first_tokens(positions, self.config, segment_ids),
        )
        _, _, key_slc, value_slc, key_win, value_win = tokens
        if key_win is None or value_win is None:
            key_win, value_win = key_slc, value_slc
        return Operands(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates)

    def inspect(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Selection:
        """Which blocks each query selects and how it gates the branches; `__call__` can pin the former."""
        operands = self.operands(x, positions=positions, segment_ids=segment_ids)
        block_indices = attention.select_blocks(
            operands.query,
            operands.key_cmp,
            config=self.config,
            segment_ids=segment_ids,
            scale=self.scale,
            implementation=self.implementation,
        )
        return Selection(block_indices, operands.gates)

    def _project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Array, TokenKeysValues, Array]:
        if self.share_keys_values:
            key, value = self._pair(*SHARED, x)
            tokens = TokenKeysValues(key, value, turn(self.rotary, key, positions), value)
        else:
            (key_cmp, value_cmp), *others = (self._pair(branch, x) for branch in BRANCHES)
            rotated = ((turn(self.rotary, key, positions), value) for key, value in others)
            tokens = TokenKeysValues(key_cmp, value_cmp, *itertools.chain(*rotated))
        query = turn(self.rotary, self.query_norm(self.query_proj(x)), positions)
        return query, tokens, weigh(self.gate, x, self.num_heads).astype(query.dtype)

    def _pair(self, branch: str, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        """Keys of a branch, normed and not rotated, and its values."""
        key = getattr(self, f"key{branch}_norm")(getattr(self, f"key{branch}_proj")(x))
        return key, getattr(self, f"value{branch}_proj")(x)
