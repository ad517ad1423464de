"""Chooses the implementation that runs an operation, and can say why.

`implementation=None` takes the implementation that `use_implementation` forces, or else the first of
`PREFERENCE` that supports the call. An implementation asked for by name runs or raises; it never falls back
to another.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args, runtime_checkable

import jax
import numpy as np

from nsa_jax import traced_elsewhere
from nsa_jax.array_typing import Array, Attended
from nsa_jax.call_log import log_choice, warn_of_fallback
from nsa_jax.compression import Compress
from nsa_jax.config import NSAConfig, check_config
from nsa_jax.kernels.mosaic_gpu import support as mosaic_gpu
from nsa_jax.kernels.triton import support as triton
from nsa_jax.kernels.xla import support as xla
from nsa_jax.layout import DenseCache, NSACache, Placement, TokenKeysValues
from nsa_jax.option_checks import check_choice
from nsa_jax.sharding.explicit import BY_INDEX, BY_TOKENS, Sharing, per_shard
from nsa_jax.sharding.steps import DENSE_STEP, STEP

# A type checker reads no table: this and `_IMPLEMENTED` are the two lists of the implementations.
type Implementation = Literal["xla", "triton", "mosaic_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation.__value__)


class Support(Protocol):
    """What a module that speaks for an implementation offers; it imports nothing that may be missing."""

    def unsupported_reason(
        self, operation: str, *arrays: Array | jax.ShapeDtypeStruct, config: NSAConfig | None, platform: str
    ) -> str | None:  # fmt: skip
        """Why the implementation cannot run a call; None if it can."""
        ...

    def slower_reason(self, operation: str, *arrays: Array | jax.ShapeDtypeStruct) -> str | None:
        """Why the next implementation is the better choice for a call that both can run; else None."""
        ...


class _Implemented(NamedTuple):
    operations: str  # module with the functions that `Operations` describes, imported when one runs
    support: Support


# In the order in which `implementation=None` tries them. The last one runs everything everywhere.
_IMPLEMENTED: dict[str, _Implemented] = {
    "mosaic_gpu": _Implemented("nsa_jax.kernels.mosaic_gpu.operations", mosaic_gpu),
    "triton": _Implemented("nsa_jax.kernels.triton.operations", triton),
    "xla": _Implemented("nsa_jax.kernels.xla", xla),
}
PREFERENCE = tuple(_IMPLEMENTED)
EVERYWHERE = cast(Implementation, PREFERENCE[-1])  # plain JAX
PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")  # as JAX calls them; "gpu" means "cuda" here
_forced = jax.make_user_context(default_value=None)


@runtime_checkable
class Operations(Protocol):
    """What each implementation offers: the operations of `nsa_jax.attention`, and the decode steps.

    Their arguments are validated and all defaults filled in; the placement says where the queries stand.
    """

    def compressed_attention(
        self, query: Array, key_cmp: Array, value_cmp: Array, placement: Placement, scale: float
    ) -> Attended:
        """The compressed branch (Eq. 7)."""
        ...

    def select_blocks(
        self, query: Array, key_cmp: Array, lse_cmp: Array | None, placement: Placement, scale: float
    ) -> Array:
        """The blocks that each query attends (Eq. 8-11)."""
        ...

    def block_scores(
        self, query_index: Array, key_index: Array, weights: Array | None, block_indices: Array | None,
        placement: Placement, scale: float,
    ) -> Array:  # fmt: skip
        """The scores that an indexer gives to the blocks, or to those that are named."""
        ...

    def select_by_index(
        self, query_index: Array, key_index: Array, weights: Array | None, placement: Placement, scale: float
    ) -> Array:
        """The blocks that each query attends, by the scores of an indexer."""
        ...

    def top_blocks(self, scores: Array, placement: Placement) -> Array:
        """The blocks that each query attends, by scores that are given."""
        ...

    def selected_attention(
        self, query: Array, key_slc: Array, value_slc: Array, block_indices: Array, placement: Placement,
        scale: float, with_probabilities: bool = False,
    ) -> Attended | tuple[Attended, Array]:  # fmt: skip
        """The selected branch (Eq. 12), and if asked what it gives to each selected block."""
        ...

    def window_attention(
        self, query: Array, key_win: Array, value_win: Array, placement: Placement, scale: float
    ) -> Attended:
        """The window branch (section 3.3.3)."""
        ...

    def block_probabilities(
        self, query: Array, key: Array, lse: Array | None, placement: Placement, scale: float, reduce: str
    ) -> Array:
        """What dense causal attention gives to each selection block."""
        ...

    def selected_probabilities(
        self, query: Array, key_slc: Array, block_indices: Array, lse: Array | None, placement: Placement,
        scale: float, reduce: str,
    ) -> Array:  # fmt: skip
        """What the selected branch gives to each selected block."""
        ...

    def importance_scores(
        self, query: Array, key_cmp: Array, lse_cmp: Array | None, placement: Placement, scale: float
    ) -> Array:
        """The logarithm of each block's importance (Eq. 8-10), with a gradient."""
        ...

    def gated_sum(self, out_cmp: Array, out_slc: Array, out_win: Array, gates: Array) -> Array:
        """The sum of the branches (Eq. 5)."""
        ...

    def native_sparse_attention(
        self, query: Array, key_cmp: Array, value_cmp: Array, key_slc: Array, value_slc: Array,
        key_win: Array, value_win: Array, gates: Array, block_indices: Array | None, placement: Placement,
        scale: float, with_probabilities: bool = False,
    ) -> Array | tuple[Array, Array]:  # fmt: skip
        """All three branches and their sum; if asked, with blocks given, also as `selected_attention`."""
        ...

    def decode_step(
        self, cache: NSACache, query: Array, tokens: TokenKeysValues, gates: Array | None,
        num_tokens: Array | None, block_indices: Array | None, compress: Compress | None, config: NSAConfig,
        scale: float,
    ) -> tuple[Array, NSACache]:  # fmt: skip
        """Appends a few tokens to a cache and attends from them: `nsa_jax.cache.decode_step`."""
        ...

    def dense_decode_step(
        self, cache: DenseCache, query: Array, key: Array, value: Array, num_tokens: Array | None,
        window_size: int | None, scale: float,
    ) -> tuple[Array, DenseCache]:  # fmt: skip
        """A decode step of a dense or window layer: `nsa_jax.cache.dense_decode_step`."""
        ...


class _Operation(NamedTuple):
    sharing: Sharing  # what it declares of its operands where several devices share them
    of: Callable[[Operations], Callable[..., Any]]  # where an implementation has it
    ranks: tuple[int, ...] = ()  # axes of its first arrays; all others have 4
    has_kernels: bool = True  # whether an implementation other than plain JAX has it


_OPERATIONS = {
    "compressed_attention": _Operation(BY_TOKENS, lambda offered: offered.compressed_attention),
    "select_blocks": _Operation(BY_TOKENS, lambda offered: offered.select_blocks),
    "block_scores": _Operation(BY_INDEX, lambda offered: offered.block_scores, (5,)),
    "select_by_index": _Operation(BY_INDEX, lambda offered: offered.select_by_index, (5,)),
    "top_blocks": _Operation(BY_TOKENS, lambda offered: offered.top_blocks),
    "selected_attention": _Operation(BY_TOKENS, lambda offered: offered.selected_attention),
    "window_attention": _Operation(BY_TOKENS, lambda offered: offered.window_attention),
    "block_probabilities": _Operation(BY_TOKENS, lambda offered: offered.block_probabilities),
    "selected_probabilities": _Operation(BY_TOKENS, lambda offered: offered.selected_probabilities),
    "importance_scores": _Operation(BY_TOKENS, lambda offered: offered.importance_scores, has_kernels=False),
    "gated_sum": _Operation(BY_TOKENS, lambda offered: offered.gated_sum),
    "native_sparse_attention": _Operation(BY_TOKENS, lambda offered: offered.native_sparse_attention),
    "decode_step": _Operation(STEP, lambda offered: offered.decode_step),
    "dense_decode_step": _Operation(DENSE_STEP, lambda offered: offered.dense_decode_step),
}
OPERATIONS = tuple(_OPERATIONS)


class Choice(NamedTuple):
    """The implementation that was chosen, and why.

    Attributes:
      implementation: name of the implementation.
      reason: why it was chosen, in one sentence.
      refused: `(name, reason)` of each implementation that cannot run the call or would be slower; empty if
        one was asked for by name or forced.
    """

    implementation: str
    reason: str
    refused: tuple[tuple[str, str], ...]


def unsupported_reason(
    operation: str,
    implementation: str,
    *arrays: Array | jax.ShapeDtypeStruct,
    config: NSAConfig | None = None,
    platform: str | None = None,
) -> str | None:
    """Says why an implementation cannot run an operation, or returns None if it can.

    Errors, skipped tests, documentation and benchmark rows all take this text from here. The other arguments
    are those of `choose`.

    Args:
      operation: name of the operation, one of `nsa_jax.dispatch.OPERATIONS`, for example
        "selected_attention".
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS`.

    Returns:
      The reason, with what to do about it, or None.

    Raises:
      TypeError, ValueError: as in `choose`.

    Examples:
      >>> nsa_jax.unsupported_reason("gated_sum", "xla") is None
      True
    """
    check_choice(OPERATIONS, operation=operation)
    if implementation is None:
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS}, got None. Call choose for the best one."
        )
    check_implementation(implementation)
    if platform is not None and (not isinstance(platform, str) or platform not in PLATFORMS):
        raise ValueError(
            f"platform must be None or one of {PLATFORMS}, got {platform!r}. Check the spelling."
        )
    if config is not None:
        check_config(config)
    _check_operands(operation, arrays)
    where = default_platform() if platform is None else _cuda_for_gpu(platform)
    return _IMPLEMENTED[implementation].support.unsupported_reason(
        operation, *arrays, config=config, platform=where
    )


def slower_reason(operation: str, implementation: str, *arrays: Array | jax.ShapeDtypeStruct) -> str | None:
    """Says why `choose` leaves out an implementation that can run a call, or returns None if it does not.

    Args:
      operation, implementation, arrays: as in `unsupported_reason`.
    """
    return _IMPLEMENTED[implementation].support.slower_reason(operation, *arrays)


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless there is such an implementation; whether it can run, each call finds out."""
    if implementation is not None and (
        not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS
    ):
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}. Check the "
            "spelling."
        )


def _check_operands(operation: str, arrays: tuple[Any, ...]) -> None:
    """Raises TypeError or ValueError unless the arrays have the kind and the ranks of the operands."""
    ranks = _OPERATIONS[operation].ranks
    for array, rank in zip(arrays, (*ranks, *(4,) * len(arrays)), strict=False):
        if not isinstance(array, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"an operand of {operation} must be an array or a jax.ShapeDtypeStruct, got "
                f"{type(array).__name__}. Pass arrays alone by position."
            )
        if len(array.shape) != rank:
            raise ValueError(
                f"an operand of {operation} must have {rank} axes, got shape {tuple(array.shape)}. Reshape "
                "it."
            )


def choose(
    operation: str,
    *arrays: Array | jax.ShapeDtypeStruct,
    config: NSAConfig | None = None,
    platform: str | None = None,
    implementation: str | None = None,
) -> Choice:
    """Decides which implementation runs an operation, and says why. It runs nothing.

    It does not compare NSA with dense attention. From which length on NSA is the faster one, by head counts,
    is in `docs/results.md`, *Models that people own*.

    The first of these decides:

    1. the implementation that the caller asks for by name;
    2. the implementation that `use_implementation` forces;
    3. the first of `nsa_jax.dispatch.PREFERENCE` for which `unsupported_reason` and `slower_reason` find no
       reason.

    The operations and their arrays:

    * `"compressed_attention"`: query, key_cmp, value_cmp;
    * `"select_blocks"`: query, key_cmp;
    * `"block_scores"`, `"select_by_index"`: query_index, key_index and, if there are any, weights and, of
      the first, block_indices;
    * `"top_blocks"`: scores;
    * `"selected_attention"`: query, key_slc, value_slc, block_indices;
    * `"window_attention"`: query, key_win, value_win;
    * `"block_probabilities"`: query, key;
    * `"selected_probabilities"`: query, key_slc, block_indices;
    * `"importance_scores"`: query, key_cmp;
    * `"gated_sum"`: out_cmp, out_slc, out_win, gates;
    * `"native_sparse_attention"`: query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates;
    * `"decode_step"`: query, and key_cmp and value_cmp of the cache; without a compressed branch query,
      key_slc and value_slc of the cache, and block_indices;
    * `"dense_decode_step"`: query, and key and value of the cache.

    Args:
      operation: name of the operation.
      *arrays: its arrays or their `jax.ShapeDtypeStruct`s, in this order, as far as they are known.
      config: block structure, if it is known.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; None for the platform of the default device.
      implementation: the implementation that the caller asks for by name, or None.

    Returns:
      `Choice(implementation, reason, refused)`.

    Raises:
      NotImplementedError: the implementation asked for by name, or forced, cannot run the call.
      TypeError: an array or `config` is of the wrong kind.
      ValueError: the operation, the implementation or the platform is unknown, or an array has another number
        of axes than the operation takes.

    Examples:
      >>> nsa_jax.choose("gated_sum", platform="cpu").implementation
      'xla'
    """

    def reason_against(name: str) -> str | None:
        settings: dict[str, Any] = dict(config=config, platform=platform)
        return unsupported_reason(operation, name, *arrays, **settings)

    check_implementation(implementation)
    named = implementation if implementation is not None else _forced.value
    if named is not None:
        if reason := reason_against(named):
            raise NotImplementedError(f"{operation} cannot run as {named}: {reason}")
        by = "named by the caller" if implementation is not None else "forced by use_implementation"
        return Choice(named, f"{named} was {by}.", ())
    refused = [(name, reason) for name in IMPLEMENTATIONS if (reason := reason_against(name))]
    runs = [name for name in PREFERENCE if name not in dict(refused)]
    refused += [(name, slower) for name in runs if (slower := slower_reason(operation, name, *arrays))]
    for name in PREFERENCE:
        if name not in dict(refused):
            reason = f"{name} is the first of {PREFERENCE} that is good for this call."
            if _falls_back(operation, name, platform):
                reason = f"{name} is all that is left on this GPU, and many times as slow as the kernels."
            return Choice(name, reason, tuple(refused))
    raise NotImplementedError(
        f"{operation} needs an implementation that can run here, got {dict(refused)}. Use the CPU platform."
    )


def _falls_back(operation: str, implementation: str, platform: str | None) -> bool:
    """Whether a choice that nobody asked for takes plain JAX on a GPU that there are kernels for."""
    where = default_platform() if platform is None else _cuda_for_gpu(platform)
    return implementation == EVERYWHERE and where == "cuda" and _OPERATIONS[operation].has_kernels


def use_implementation(implementation: Implementation | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `implementation=None` means the given implementation.

    It also reaches functions that `jax.jit` has already traced: they are traced again inside the context.

    Args:
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS`; None lifts the rule of an outer context.

    Returns:
      A context manager.

    Raises:
      ValueError: the implementation is unknown.

    Examples:
      >>> with nsa_jax.use_implementation("xla"):
      ...     out = jitted(query, key, value)
    """
    check_implementation(implementation)
    return _forced(implementation)


def run(
    operation: str,
    implementation: str | None,
    arrays: Iterable[Array],
    operands: Mapping[str, Any],
    *,
    config: NSAConfig | None = None,
) -> Any:
    """Runs an operation by the implementation that `choose` chooses, where its operands lie.

    What is lowered inside carries the names of the implementation and of the operation, for profiles. The
    choice is logged, with a warning where it is `xla` on a GPU and nobody asked for that: see
    `nsa_jax.call_log`, and `nsa_jax.traced_elsewhere` for a program that is lowered for a GPU later.

    Args:
      operation, implementation, arrays, config: as in `choose`.
      operands: the arguments of the operation by name, see `Operations`.
    """
    settings: dict[str, Any] = dict(config=config, implementation=implementation)
    choice = choose(operation, *arrays, **settings)
    log_choice(operation, *choice)
    chosen = choice.implementation
    if implementation is None and _forced.value is None and chosen == EVERYWHERE:
        if _falls_back(operation, chosen, None):
            warn_of_fallback(operation, dict(choice.refused)[PREFERENCE[-2]])
        elif _OPERATIONS[operation].has_kernels:
            operands = traced_elsewhere.mark(operation, dict(operands))
    with jax.named_scope(f"nsa_jax.{chosen}.{operation}"):
        sharing, of, *_ = _OPERATIONS[operation]
        return per_shard(of(_offered(chosen)), sharing, **operands)


def _offered(implementation: str) -> Operations:
    """The operations of an implementation. Modules that import Triton are imported only when they run."""
    return cast(Operations, importlib.import_module(_IMPLEMENTED[implementation].operations))


def default_platform() -> str:
    """Platform that a call runs on by default: that of the mesh, of the default device or of the backend."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    default = jax.config.jax_default_device
    if abstract is not None:
        platform = abstract.platform
    elif default is not None:
        platform = default if isinstance(default, str) else default.platform
    else:
        platform = jax.default_backend()
    return _cuda_for_gpu(platform)


def _cuda_for_gpu(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform
