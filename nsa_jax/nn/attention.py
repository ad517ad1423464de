"""The NSA layer: projections for each branch, rotary embedding, compression, gates, and the branches."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, overload

import jax.numpy as jnp
from flax import nnx

from nsa_jax import arguments, attention, keywords
from nsa_jax.array_typing import Array, DType, Float, Int
from nsa_jax.cache import TokenKeysValues
from nsa_jax.config import BRANCHES, Branch, NSAConfig, check_branches, check_config
from nsa_jax.dispatch import Implementation, check_implementation
from nsa_jax.nn.checks import (
    check_dropout_call,
    check_inputs,
    check_parameters,
    head_width,
)
from nsa_jax.nn.compressor import CompressionMode, Compressor
from nsa_jax.nn.context import ContextAxis
from nsa_jax.nn.distillation import Target
from nsa_jax.nn.gate import Gate
from nsa_jax.nn.joined import beside, projected_together
from nsa_jax.nn.operands import Operands, Selection
from nsa_jax.nn.parts import (
    MakeCompressor,
    MakeGate,
    check_parts,
    check_weights,
    make_compressor,
    make_gate,
    weigh,
)
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
from nsa_jax.nn.selector import SelectorOption, check_made, check_selector, make_selector
from nsa_jax.nn.steps import NSACacheSteps
from nsa_jax.option_checks import check_flag, check_int, check_positive
from nsa_jax.parallel import Order, context_attention, context_selection
from nsa_jax.sharding.explicit import alike


class NSAAttention(NSACacheSteps):
    """Causal self-attention layer with Native Sparse Attention, a replacement for `nnx.MultiHeadAttention`.

    It follows section 3 of arXiv:2502.11089. Each branch has its own keys and values (section 3.3.3). Queries
    and the keys of the selected and window branches are rotated at their position. Compressed keys are
    compressed before rotation and then rotated at the position of their block's first token.

    Names of the parameters, as checkpoints and `nsa_jax.nn.weights` use them:

    * `query_proj`, `key_{cmp,slc,win}_proj`, `value_{cmp,slc,win}_proj` and `out_proj`, each with a `kernel`
      (and a `bias`), laid out as in `nnx.LinearGeneral`;
    * `compressor_key`, `compressor_value` and `gate`, see `Compressor` and `Gate`;
    * with `normalize_qk` also `query_norm` and `key_{cmp,slc,win}_norm`, each with a `scale`;
    * with `share_keys_values`, `key_proj`, `value_proj` and `key_norm` take the place of those per branch;
    * `selector`, if it has parameters, see `Indexer`. A branch that is absent has none of its own.

    Args:
      num_heads: number of query heads, a multiple of `num_kv_heads`.
      in_features: width of the layer's input and output.
      num_kv_heads: number of KV heads. Each serves `num_heads // num_kv_heads` query heads, which share one
        selection.
      head_dim: width of queries and keys, `in_features // num_heads` by default.
      value_dim: width of values, `head_dim` by default.
      config: block structure.
      branches: branches of the layer, "slc" among them: `("slc",)` for block-sparse attention alone, as in
        MSA, `("slc", "win")`, and so on. What is absent costs no parameters, no cache and no time. There are
        gates where there are several branches.
      selector: chooses the blocks. "importance": by the probabilities of the compressed branch (Eq. 8-11).
        An `IndexerConfig`: by an `Indexer`. "given": nothing does, so every call needs `block_indices`. Or
        makes your own: called as `selector(in_features, num_kv_heads, config, rngs=rngs)`, it returns a
        `Selector`, which must then be given its dtype, precision and sharding itself.
      share_keys_values: whether all branches share one pair of key and value projections instead of having
        three pairs. A cache then stores keys and values once and has no window ring.
      compression: "mlp" or "mean", see `Compressor`.
      compressor: makes your own compressors. It is called as `compressor(head_dim, config, rngs=rngs)`, like
        the class `Compressor`: once for the keys, and once with `value_dim` for the values. It returns a
        module or a function that maps the un-rotated tokens of blocks, `[B, m, l, K, H]`, to `[B, m, K, H]`,
        each block independently. This is also called for windows that are not blocks, some of them all zeros;
        the results are dropped, but the gradients must be finite there.
      gate: makes your own gate. It is called as `gate(in_features, num_heads, rngs=rngs)`, like the class
        `Gate`. It returns a module or a function that maps the layer input `[B, T, D]` to the weights of the
        branches cmp, slc and win, `[B, T, N, 3]`, each token independently; of two branches, `[B, T, N, 2]`.
      initial_gates: what the gates are at first, for example `(0.02, 0.96, 0.02)`, see `Gate`.
      use_bias: whether the projections have biases.
      out_bias: whether the output projection has one, by default what `use_bias` says.
      normalize_qk: whether queries and keys pass an RMSNorm over the head dim, separately for each token and
        head. Rotation and compression come after it.
      norm_epsilon: added to the mean square in these norms; above 0.
      scale: factor of the logits, `head_dim**-0.5` by default.
      dropout_rate: share of the outputs that training drops, from 0 to below 1, see `nnx.Dropout`. The
        methods `train()` and `eval()` of the module switch it on and off. `prefill` and `decode_step` drop
        nothing.
      rope_base: base of the rotary embedding, see `rotate`.
      rope_scaling: a `LinearScaling`, `Llama3Scaling` or `YarnScaling` of the rotary frequencies.
      rotary: your own function `(heads [B, T, heads, H], positions [B, T]) -> heads` instead of `rope_base`
        and `rope_scaling`, for example `lambda heads, positions: heads` for no rotation. It is applied to
        queries, keys and compressed keys.
      dtype: dtype of the computation; by default the promoted dtype of inputs and parameters, as in
        `nnx.Linear`.
      param_dtype: dtype of the parameters.
      precision: precision of the products, see `jax.lax.Precision`.
      kernel_init: initializer of the kernels of the projections. Compressors and gate have their own.
      out_kernel_init: initializer of the kernel of the output projection, `kernel_init` by default.
      bias_init: initializer of the biases of the projections.
      sharding: mesh axes of the dimensions "model", "heads" and "kv_heads", for example
        `{"heads": "tensor", "kv_heads": "tensor"}`. It becomes the `out_sharding` metadata of the kernels and
        biases of projections and gate; compressors and norms get none. Creating the layer then needs a
        mesh in context (`jax.set_mesh`).
      context_axis: mesh axis over which the tokens of a row are spread. The layer then attends inside a
        `jax.shard_map` of its own over this axis of the mesh in context (`jax.set_mesh`), and its calls and
        `inspect` need such a mesh. `prefill` and `decode_step` take whole rows, as without it. Your own
        compressors and `rotary` must then be modules if they hold JAX arrays, and must not change their
        variables in a call.
      context_order: order of the tokens on the devices, "zigzag" (see `nsa_jax.parallel.to_zigzag`) or
        "contiguous".
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS`, or None for the best that can run the call,
        see `nsa_jax.choose`.
      rngs: source of the initial parameters, and of dropout: its stream `dropout`, or the default one.

    Raises:
      TypeError: an option is of the wrong kind, or cannot be called as described.
      ValueError: head counts or widths do not divide; a number is out of range; `rngs` has no stream for a
        dropout that is asked for; `branches`, `selector`, `compression`, `dtype`, `param_dtype`, `precision`,
        `context_order`, `implementation` or a name in `sharding` is unknown, or the mesh in context cannot
        shard a parameter as asked; `rotary` or `compressor` is given together with the options that it
        replaces; an option is for a branch that is absent; or a selector does not choose as `Selector`
        describes.
      NotImplementedError: there is a `context_axis`, and not all branches or a selector other than
        "importance".

    Examples:
      >>> layer = NSAAttention(8, 512, num_kv_heads=2, rngs=nnx.Rngs(0))
      >>> y = layer(x)  # x and y are [B, T, 512]

      With a wider compressor (your own compressor must be given its dtype, precision and sharding itself):

      >>> wide = functools.partial(Compressor, hidden_dim=512)
      >>> layer = NSAAttention(8, 512, num_kv_heads=2, compressor=wide, rngs=nnx.Rngs(0))
    """

    @keywords.known
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        config: NSAConfig = NSAConfig(),  # noqa: B008 (frozen)
        branches: Sequence[Branch] = BRANCHES,
        selector: SelectorOption = "importance",
        share_keys_values: bool = False,
        compression: CompressionMode = "mlp",
        compressor: MakeCompressor | None = None,
        gate: MakeGate | None = None,
        initial_gates: Sequence[float] | None = None,
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
        context_axis: str | None = None,
        context_order: Order = "zigzag",
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        head_dim = head_width(num_heads, in_features, num_kv_heads, head_dim)
        num_heads, in_features, num_kv_heads = int(num_heads), int(in_features), int(num_kv_heads)
        value_dim = head_dim if value_dim is None else value_dim
        check_int(low=1, value_dim=value_dim)
        check_config(config)
        check_implementation(implementation)
        out_bias = use_bias if out_bias is None else out_bias
        check_flag(
            share_keys_values=share_keys_values,
            use_bias=use_bias,
            out_bias=out_bias,
            normalize_qk=normalize_qk,
        )
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
        self.branches = check_branches(branches)
        check_selector(selector, self.branches)
        if context_axis is not None and (len(self.branches), selector) != (len(BRANCHES), "importance"):
            raise NotImplementedError(
                "a layer with a context_axis needs all branches and selection by importance, got "
                f"branches={self.branches} and selector={selector!r}. Build it without the axis."
            )
        self.selects: str = selector if isinstance(selector, str) else "selector"
        self.num_heads, self.in_features, self.num_kv_heads = num_heads, in_features, num_kv_heads
        value_dim = int(value_dim)
        self.head_dim, self.value_dim, self.share_keys_values = head_dim, value_dim, share_keys_values
        self.config, self.implementation, self.dtype = config, implementation, dtype
        self.context = ContextAxis.given(context_axis, context_order)
        self.scale = arguments.resolve_scale(scale, head_dim, param_dtype if dtype is None else dtype)
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
            head_norm,
            normalize_qk,
            head_dim,
            epsilon=norm_epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        into_kv_heads = functools.partial(project, in_features, dimensions=("model", "kv_heads", None))
        self.query_proj = project(in_features, (num_heads, head_dim), dimensions=("model", "heads", None))
        self.query_norm = norm()
        for name in _pairs(self.branches, share_keys_values):
            setattr(self, f"key{name}_proj", into_kv_heads((num_kv_heads, head_dim)))
            setattr(self, f"value{name}_proj", into_kv_heads((num_kv_heads, value_dim)))
            setattr(self, f"key{name}_norm", norm())
        self.out_proj = project(
            (num_heads, value_dim),
            in_features,
            dimensions=("heads", None, "model"),
            use_bias=out_bias,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
        )
        check_parts(gate, initial_gates, compressor, compression, share_keys_values, self.branches)
        own_numbers: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, precision=precision)
        if "cmp" in self.branches:
            compressor = compressor or functools.partial(Compressor, mode=compression, **own_numbers)
            self.compressor_key = make_compressor(compressor, head_dim, config, rngs)
            self.compressor_value = make_compressor(compressor, value_dim, config, rngs)
        if len(self.branches) > 1:
            of_branches = functools.partial(
                Gate, num_branches=len(self.branches), initial_gates=initial_gates, sharding=sharding
            )
            gate = gate or functools.partial(of_branches, **own_numbers)
            self.gate = make_gate(gate, in_features, num_heads, rngs)
        if not isinstance(selector, str):
            self.selector = make_selector(
                selector, in_features, num_kv_heads, config, rngs=rngs, rotary=self.rotary, sharding=sharding,
                **own_numbers,
            )  # fmt: skip
            tokens = self._tokens_to_choose(1, 8, param_dtype if dtype is None else dtype)
            check_made(self.selector, tokens, num_kv_heads, config)
        self.dropout = output_dropout(dropout_rate, rngs)

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Int[Array, "B T K R"] | None = None,
        distil: None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Float[Array, "B T D"]: ...

    @overload
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Int[Array, "B T K R"] | None = None,
        distil: Target,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]: ...

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        block_indices: Int[Array, "B T K R"] | None = None,
        distil: Target | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Any:
        """Attends from every token to the tokens of its sequence up to and including itself.

        Args:
          x: layer input.
          positions: rotary position of each token, by default its index in its sequence, whatever the
            `context_order`. Positions only affect the rotation; causality, blocks and windows count tokens.
          segment_ids: sequence of each token of packed rows: each non-zero id is one contiguous run,
            0 = padding.
          block_indices: a selection to use instead of choosing one, in the form that `inspect` returns.
          distil: whether to return a selection loss, too: the KL divergence of the shares that the selector
            gives to blocks from those that attention gives to them, the mean over queries and KV heads, see
            `nsa_jax.selection_loss`. The attention is that of the layer's queries to its keys of the selected
            branch: "dense", to all tokens that a query sees, or "selected", to those in the blocks that it
            attends. Blocks that are always selected do not count. A selector without scores is refused here
            and not when the layer is made, because the call decides whether it is to learn.
          deterministic: whether dropout is off; by default what `train()` or `eval()` has set.
          rngs: source of the random numbers for dropout, by default the layer's own.

        Returns:
          The layer output `[B, T, D]`. For a padding token with finite input the attention output is 0, so
          the layer returns 0, or the bias of the output projection. With `distil`, the pair of output and
          loss, a scalar in float32.

        Raises:
          TypeError: `x` or an argument is not an array, `x` does not hold floats or an index array does not
            hold integers, or `deterministic` or `rngs` is of the wrong kind.
          ValueError: `x` does not have three axes and the width `in_features`, or the shape of an argument
            does not fit `x`. With a `context_axis` also: there is no mesh in context, it lacks the axis, or
            the tokens do not divide into chunks of allowed length, see `nsa_jax.parallel.context_attention`.
            Or `distil` is unknown, or the layer's selector has no scores that it could teach.
          NotImplementedError: a compressor or `rotary` of a layer with a `context_axis` changes its own
            variables, or `distil` is asked of such a layer.

        Gradients:
          No gradient flows through the selection, as in the paper. The compressors and projections of the
          compressed branch learn through the output of that branch. A selection loss has a gradient for the
          parameters of the selector alone; with "importance" for those of the compressor of keys.
        """
        check_dropout_call(deterministic, rngs)
        index_arrays = dict(positions=positions, segment_ids=segment_ids)
        loss = None
        if distil is not None:
            self._check_distil(distil)
        if self.context is None:
            operands, tokens = self._operands(x, **index_arrays)
            if block_indices is None and (self.selects != "importance" or distil is not None):
                block_indices = self._choose(x, operands, **index_arrays)
            settings: dict[str, Any] = dict(
                block_indices=block_indices, segment_ids=segment_ids, **self._operation_settings()
            )
            probabilities = None
            if distil == "selected":
                out, probabilities = attention.native_sparse_attention(
                    *operands, return_probabilities=True, **settings
                )
            else:
                out = attention.native_sparse_attention(*operands, **settings)
            if distil is not None:
                loss = self._selection_loss(x, operands, tokens, block_indices, probabilities, **index_arrays)
        else:
            query, tokens, gates = self._project_in_context(x, **index_arrays)
            out = self.context.run(
                context_attention,
                (query, *self._keys_values(tokens), gates),
                index_arrays | dict(block_indices=block_indices),
                (self.compressor_key, self.compressor_value),
                self.rotary,
                **self._operation_settings(),
            )
        out = self.dropout(self.out_proj(out), deterministic=deterministic, rngs=rngs)
        return out if loss is None else (out, loss)

    def operands(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Operands:
        """Computes the arguments of `nsa_jax.native_sparse_attention` for this input.

        Args:
          x: layer input.
          positions: rotary position of each token, see `__call__`.
          segment_ids: sequence of each token, see `__call__`.

        Returns:
          Rotated queries and keys, values, compressed keys and values, and gates.

        Raises:
          NotImplementedError: the layer has a `context_axis`: no device has the arguments of whole rows.
          ValueError: as in `__call__`.
        """
        return self._operands(x, positions=positions, segment_ids=segment_ids)[0]

    def _operands(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Operands, TokenKeysValues]:
        """`operands`, and what was projected of the tokens."""
        if self.context is not None:
            raise NotImplementedError(
                "operands are those of whole rows on one device, got a layer with context_axis="
                f"{self.context.name!r}. Build the layer without it."
            )
        check_inputs(x, self.in_features, positions=positions, segment_ids=segment_ids)
        if positions is None:
            positions = token_positions(x, segment_ids)
        query, tokens, gates = self._project(x, positions)
        if segment_ids is not None:  # may be of NumPy, beside tokens on a mesh
            x, segment_ids = alike(x=x, segment_ids=segment_ids)
        key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = self._keys_values(tokens)
        if "cmp" in self.branches:
            key_cmp, value_cmp = self._compress_rows(key_cmp, value_cmp, positions, segment_ids)
        operands = Operands(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates)
        return operands, tokens

    def inspect(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Selection:
        """Returns which blocks each query selects and how it weighs the branches.

        Args:
          x: layer input.
          positions: rotary position of each token, see `__call__`.
          segment_ids: sequence of each token, see `__call__`.

        Returns:
          `Selection(block_indices, gates)`. `__call__` accepts the `block_indices`.

        Raises:
          ValueError: as in `__call__`.
        """
        index_arrays = dict(positions=positions, segment_ids=segment_ids)
        if self.context is None:
            operands = self.operands(x, **index_arrays)
            return Selection(self._choose(x, operands, **index_arrays), operands.gates)
        query, tokens, gates = self._project_in_context(x, **index_arrays)
        block_indices = self.context.run(
            context_selection,
            (query, *self._keys_values(tokens)[:2]),
            index_arrays,
            (self.compressor_key, self.compressor_value),
            self.rotary,
            **self._operation_settings(),
        )
        return Selection(block_indices, gates)

    def _project_in_context(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Array, TokenKeysValues, Any]:
        """`_project` of tokens in the order of the context axis."""
        assert self.context is not None
        where = dict(positions=positions, segment_ids=segment_ids)
        check_inputs(x, self.in_features, context_axis=self.context.name, **where)
        return self._project(x, self.context.positions(x, segment_ids) if positions is None else positions)

    def _project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Array, TokenKeysValues, Any]:
        made = projected_together(self, x, self.input_projections)
        pairs = {name: self._pair(name, made) for name in _pairs(self.branches, self.share_keys_values)}
        fields: dict[str, Any] = dict.fromkeys(TokenKeysValues._fields)
        for branch in self.branches:
            if self.share_keys_values and branch == "win":
                continue  # those of the selected branch
            key, value = pairs["" if self.share_keys_values else f"_{branch}"]
            fields[f"key_{branch}"] = key if branch == "cmp" else turn(self.rotary, key, positions)
            fields[f"value_{branch}"] = value
        query = turn(self.rotary, self.query_norm(made["query_proj"]), positions)
        gates = None
        if len(self.branches) > 1:
            if "gate" in made:
                assert isinstance(self.gate, Gate)
                gates = self.gate.of_hidden(made["gate"])
                check_weights(gates, x, self.num_heads, self.branches)
            else:
                gates = weigh(self.gate, beside(self, x), self.num_heads, self.branches)
            gates = gates.astype(query.dtype)
        return query, TokenKeysValues(**fields), gates

    @property
    def input_projections(self) -> tuple[str, ...]:
        """Names of the projections of the layer input."""
        pairs = _pairs(self.branches, self.share_keys_values)
        return "query_proj", *(f"{kind}{name}_proj" for name in pairs for kind in ("key", "value"))

    def _pair(self, name: str, made: Mapping[str, Array]) -> tuple[Array, Array]:
        """Keys of a branch, normalised and not rotated, and its values."""
        return getattr(self, f"key{name}_norm")(made[f"key{name}_proj"]), made[f"value{name}_proj"]

    def _keys_values(self, tokens: TokenKeysValues) -> tuple[Any, ...]:
        """Keys and values of cmp, slc and win; the latter two may share theirs."""
        key_cmp, value_cmp, key_slc, value_slc, key_win, value_win = tokens
        if self.share_keys_values and "win" in self.branches:
            key_win, value_win = key_slc, value_slc
        return key_cmp, value_cmp, key_slc, value_slc, key_win, value_win


def _pairs(branches: tuple[Branch, ...], share_keys_values: bool) -> tuple[str, ...]:
    """Middle parts of the names of projections and norms of keys, as in `key_cmp_proj`."""
    return ("",) if share_keys_values else tuple(f"_{branch}" for branch in branches)
