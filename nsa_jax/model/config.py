"""The configuration of a `Transformer`, which its checkpoint stores."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

from nsa_jax import arguments
from nsa_jax.config import BRANCHES, LONGEST, Branch, NSAConfig, check_branches, check_config
from nsa_jax.nn.checks import check_dropout_rate, head_width
from nsa_jax.nn.gate import check_initial_gates
from nsa_jax.nn.parts import MakeCompressor, MakeGate, check_parts
from nsa_jax.nn.projections import NORM_EPSILON
from nsa_jax.nn.rope_scaling import RopeScaling
from nsa_jax.nn.rotary import DEFAULT_BASE, RotaryFunction, rotary_function
from nsa_jax.nn.selector import SelectorOption, check_selector
from nsa_jax.option_checks import check_choice, check_dtype, check_flag, check_int, check_positive

type AttentionKind = Literal["nsa", "dense", "window"]

type Activation = Literal["silu", "gelu_tanh"]

_ATTENTION, _COMPRESSION = get_args(AttentionKind.__value__), ("mlp", "mean")
_ACTIVATIONS = get_args(Activation.__value__)
_FLAGS = (
    *("share_keys_values", "qkv_bias", "out_bias", "normalize_qk", "post_norms", "tie_embeddings"),
    "scan_layers",
)

# Fields that may hold a function, which a checkpoint cannot store.
FUNCTIONS = ("compressor", "gate", "rotary", "selector")

# Fields that hold one value for all layers, or a tuple with one for each.
_PER_LAYER = ("attention", "window_size", "rope_base", "rope_scaling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a `Transformer`: decides its parameters and what it computes.

    `attention`, `window_size`, `rope_base` and `rope_scaling` hold for all layers, or are a sequence with one
    value for each layer. `branches`, `selector`, `share_keys_values`, `compression`, `compressor`, `gate` and
    `initial_gates` only matter for layers of NSA. A model with its own `compressor`, `gate`, `selector` or
    `rotary` function cannot be saved, because a checkpoint cannot hold functions.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      num_layers: number of decoder layers.
      model_dim: width of the residual stream.
      num_heads: number of query heads, a multiple of `num_kv_heads`.
      num_kv_heads: number of KV heads.
      head_dim: width of queries and keys, `model_dim // num_heads` by default.
      mlp_dim: inner width of the MLP, by default 8/3 of `model_dim`, rounded up to a multiple of 8.
      activation: of the gate of the MLP: "silu", or "gelu_tanh", the approximation of GELU by a tanh.
      attention: "nsa", "dense" (full causal attention) or "window" (only the last `window_size` tokens); or
        one of them for each layer.
      window_size: tokens that a query of a "window" layer sees, its own included; or one number for each
        layer, None for layers of another kind. None stands for `nsa.window_size`.
      nsa: block structure.
      branches: branches of an NSA layer, see `nsa_jax.nn.NSAAttention`.
      selector: chooses the blocks: "importance", "given", an `nsa_jax.nn.IndexerConfig`, or makes your own,
        see `nsa_jax.nn.NSAAttention`.
      share_keys_values: whether the branches share keys and values, see `nsa_jax.nn.NSAAttention`.
      compression: "mlp" or "mean", see `nsa_jax.nn.Compressor`.
      compressor: makes your own compressors, see `nsa_jax.nn.NSAAttention`.
      gate: makes your own gate, see `nsa_jax.nn.NSAAttention`.
      initial_gates: what the gates are at first, see `nsa_jax.nn.Gate`.
      qkv_bias: whether the projections of queries, keys and values have biases.
      out_bias: whether the output projections of attention have biases.
      normalize_qk: whether queries and keys pass an RMSNorm over the head dim, see `nsa_jax.nn.NSAAttention`.
      post_norms: whether attention and MLP also end in an RMSNorm, before they are added to the residual
        stream, as in Gemma 3.
      norm_epsilon: added to the mean square in every RMSNorm but those of an indexer; above 0.
      scale: factor of the attention logits, `head_dim**-0.5` by default.
      dropout_rate: share of the outputs of each attention layer that training drops, from 0 to below 1. The
        methods `train()` and `eval()` of the model switch it on and off. `prefill` and `decode_step` drop
        nothing.
      rope_base: base of the rotary embedding, or one for each layer.
      rope_scaling: a `LinearScaling`, `Llama3Scaling` or `YarnScaling` from `nsa_jax.nn`, or None; or one of
        them for each layer.
      rotary: your own rotary function instead of `rope_base` and `rope_scaling`, see
        `nsa_jax.nn.NSAAttention`.
      tie_embeddings: whether the output projection is the transposed embedding.
      embedding_scale: factor of the embeddings where they enter the first layer, above 0, or None for 1. In
        the dtype of the computation.
      dtype: name of the dtype of the computation. Logits are float32 at least.
      param_dtype: name of the dtype of the parameters.
      remat: whether the backward pass recomputes each layer instead of storing its intermediate results;
        "attention": all but what the GPU kernels of attention gave, see `nsa_jax.remat.SAVED_NAMES`.
      scan_layers: whether a forward pass and its gradient scan neighbouring layers that are alike, which
        compiles a deep model as fast as a shallow one. They take a copy of the layers' parameters, and of
        their gradients. Needs a `dropout_rate` of 0, and parts of your own that change no variables.

    Raises:
      TypeError: an option is of the wrong kind, or cannot be called as described.
      ValueError: a value is out of range or unknown; a sequence does not have one value for each layer, or
        gives a `window_size` to a layer that is not "window"; head counts or widths do not divide; or
        `rotary` or `compressor` is given together with the options that it replaces.

    Examples:
      >>> sizes = dict(vocab_size=256, num_layers=3, model_dim=128, num_heads=4, num_kv_heads=1)
      >>> config = TransformerConfig(
      ...     **sizes, attention=("window", "window", "nsa"), window_size=64, rope_base=(1e4, 1e4, 1e6)
      ... )
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: Activation = "silu"
    attention: AttentionKind | Sequence[AttentionKind] = "nsa"
    window_size: int | Sequence[int | None] | None = None
    nsa: NSAConfig = NSAConfig()  # noqa: RUF009 (frozen)
    branches: Sequence[Branch] = BRANCHES
    selector: SelectorOption = "importance"
    share_keys_values: bool = False
    compression: Literal["mlp", "mean"] = "mlp"
    compressor: MakeCompressor | None = None
    gate: MakeGate | None = None
    initial_gates: Sequence[float] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    normalize_qk: bool = False
    post_norms: bool = False
    norm_epsilon: float = NORM_EPSILON
    scale: float | None = None
    dropout_rate: float = 0.0
    rope_base: float | Sequence[float] = DEFAULT_BASE
    rope_scaling: RopeScaling | Sequence[RopeScaling | None] | None = None
    rotary: RotaryFunction | None = None
    tie_embeddings: bool = True
    embedding_scale: float | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool | Literal["attention"] = False
    scan_layers: bool = False

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
        self._check_layers()
        check_choice(_COMPRESSION, compression=self.compression)
        check_choice(_ACTIVATIONS, activation=self.activation)
        branches = check_branches(self.branches)
        object.__setattr__(self, "branches", branches)
        check_parts(
            self.gate, self.initial_gates, self.compressor, self.compression, self.share_keys_values, branches
        )
        object.__setattr__(self, "initial_gates", check_initial_gates(self.initial_gates, len(branches)))
        check_positive(norm_epsilon=self.norm_epsilon)
        if self.embedding_scale is not None:
            check_positive(embedding_scale=self.embedding_scale)
        check_selector(self.selector, branches)
        check_flag(**{name: getattr(self, name) for name in _FLAGS})
        if self.scan_layers and self.dropout_rate:
            raise ValueError(
                f"dropout_rate must be 0 for scan_layers, got {self.dropout_rate}. Leave one of them out."
            )
        if not isinstance(self.remat, bool) and not (
            isinstance(self.remat, str) and self.remat == "attention"
        ):
            raise ValueError(
                f"remat must be True, False or 'attention', got {self.remat!r}. Choose one of them."
            )

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP: `mlp_dim` or its default."""
        return -(-8 * self.model_dim // 24) * 8 if self.mlp_dim is None else self.mlp_dim

    @property
    def head_width(self) -> int:
        """Width of queries and keys: `head_dim` or its default."""
        return self.head_dim or self.model_dim // self.num_heads

    @property
    def per_layer(self) -> tuple["TransformerConfig", ...]:
        """The configuration of each layer: this one, with the values of that layer for all layers."""
        return tuple(
            dataclasses.replace(
                self,
                attention=kind,
                window_size=window if kind == "window" else None,
                rope_base=base,
                rope_scaling=scaling,
            )
            for kind, window, base, scaling in zip(*map(self._by_layer, _PER_LAYER), strict=True)
        )

    def _check_layers(self) -> None:
        """Makes sequences tuples. Raises TypeError or ValueError unless their values suit the layers."""
        for name in _PER_LAYER:
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                continue
            object.__setattr__(self, name, tuple(value))
            if len(value) != self.num_layers:
                raise ValueError(
                    f"{name} must have one value for each layer, got {len(value)} for {self.num_layers} "
                    "layers. Pass as many values as layers, or a single one for all."
                )
        check_choice(_ATTENTION, **self._named("attention"))
        check_positive(**self._named("rope_base"))
        rotations = zip(self._by_layer("rope_base"), self._by_layer("rope_scaling"), strict=True)
        for base, scaling in rotations:
            rotary_function(base, scaling, self.rotary)
        self._check_windows()

    def _check_windows(self) -> None:
        """Raises TypeError or ValueError unless windows are ints, of "window" layers only."""
        given = {name: size for name, size in self._named("window_size").items() if size is not None}
        check_int(low=1, high=LONGEST, **given)
        sizes = tuple(None if size is None else int(size) for size in self._by_layer("window_size"))
        several = isinstance(self.window_size, tuple)
        object.__setattr__(self, "window_size", sizes if several else sizes[0])
        kinds = zip(self._by_layer("attention"), sizes, strict=True)
        windows = [kind == "window" for kind, size in kinds if size is not None]
        if windows and not (all(windows) if several else any(windows)):
            raise ValueError(
                'window_size must be None except for "window" layers, got '
                f"{self.window_size} for attention={self.attention!r}. Leave it out, or set nsa.window_size "
                "for the window branch of NSA."
            )

    def _by_layer(self, name: str) -> tuple[Any, ...]:
        """The value of a field for each layer."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * self.num_layers

    def _named(self, name: str) -> dict[str, Any]:
        """What was given for a field, by the names that errors use."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return {name: value}
        return {f"{name}[{layer}]": each for layer, each in enumerate(value)}
