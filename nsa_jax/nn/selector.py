"""The selector of a layer: what chooses the blocks that each query attends by the selected branch."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.config import Branch, NSAConfig
from nsa_jax.nn.indexer import Indexer, IndexerConfig

SELECTORS = ("importance", "given")
SELECTOR_CALL = "selector(in_features, num_kv_heads, config, rngs=rngs)"


@runtime_checkable
class Selector(Protocol):
    """What a layer asks of its selector. A module or any other object may be one.

    A selector sees tokens once, in `project`. What it returns for them as keys is written to the cache like
    the keys of a branch, so that a later step can choose by it; what it returns for queries lives for one
    call. Both are trees of arrays whose first axes are batch and tokens, and may be empty: `()`.

    `choose` gets the same in training, in a prompt and in a decode step; only `where` differs. So a selector
    whose choice depends on its arguments alone selects the same blocks in all three.

    A selector that is to learn from a selection loss (`distil` of a layer) also has a method `scores`. It is
    called like `choose`, and returns a score for each block `[B, T, K, M]`, `-inf` for those that begin after
    the query. The softmax of the scores are the shares that the selector gives to the blocks. If the scores
    of a few blocks take less work, it may also have `chosen_scores`, called as `chosen_scores(queries, keys,
    at, block_indices, **where)` where the target is the attention inside the chosen blocks: it returns one
    score for each slot, `[B, T, K, R]`, `-inf` for a slot with -1.

    Examples:
      The most recent blocks:

      >>> class Recent:
      ...     def __init__(self, in_features, num_kv_heads, config, *, rngs):
      ...         self.num_kv_heads = num_kv_heads
      ...     def project(self, x, query, key_slc, positions):
      ...         return (), ()
      ...     def choose(self, queries, keys, at, *, config, **where):
      ...         size, slots = config.selection_block_size, config.num_selected_blocks
      ...         first = jnp.maximum(at // size - slots + 1, 0)
      ...         blocks = first[..., None] + jnp.arange(slots)
      ...         blocks = jnp.where(blocks * size <= at[..., None], blocks, -1)
      ...         return jnp.repeat(blocks[:, :, None], self.num_kv_heads, axis=2)
      >>> layer = NSAAttention(8, 512, num_kv_heads=2, selector=Recent, rngs=nnx.Rngs(0))
    """

    def project(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T N H"],
        key_slc: Float[Array, "B T K H"],
        positions: Int[Array, "B T"],
    ) -> tuple[Any, Any]:
        """Computes what choosing needs of new tokens.

        Args:
          x: layer input.
          query: rotated queries of the layer.
          key_slc: rotated keys of the selected branch.
          positions: rotary position of each token.

        Returns:
          Two trees of arrays `[B, T, ...]`: what to ask with, and what to keep of each token as a key.
          `x`, `query` and `key_slc` get no gradient from them.
        """
        ...

    def choose(self, queries: Any, keys: Any, at: Int32[Array, "B T"], **where: Any) -> Int[Array, "B T K R"]:
        """Chooses the blocks of each query.

        Args:
          queries: the first result of `project` for the `T` queries.
          keys: the second result for the `S` tokens of each row, `[B, S, ...]`. In a cache, slots from the
            length of a row on hold zeros, or tokens that are not its own.
          at: index of each query in its sequence; -1 for padding.
          **where: `config`, `query_positions`, `segment_ids` and `implementation`, as operations such as
            `nsa_jax.select_by_index` take them. `segment_ids` is None unless rows are packed.

        Returns:
          Block numbers, counted from the first token of the query's sequence, ascending, -1 in unused slots
          at the end; at most `num_selected_blocks` of them. A block twice counts once; one out of sight is
          not attended.
        """
        ...


type MakeSelector = Callable[..., Selector]
SelectorConfig = IndexerConfig  # options of the selectors that come with the library: a checkpoint keeps them
type SelectorOption = Literal["importance", "given"] | SelectorConfig | MakeSelector


def make_selector(
    selector: IndexerConfig | MakeSelector,
    in_features: int,
    num_kv_heads: int,
    config: NSAConfig,
    *,
    rngs: nnx.Rngs,
    **of_layer: Any,
) -> Selector:
    """Makes the selector of a layer.

    Args:
      selector: the option of the layer, not a name.
      in_features, num_kv_heads, config, rngs: what a selector is made with.
      **of_layer: the other options of the layer that an `Indexer` shares.

    Raises:
      TypeError: what was made has no `project` or `choose`, or its `project` takes other arguments.
    """
    if isinstance(selector, IndexerConfig):
        return Indexer(in_features, num_kv_heads, config, selector, rngs=rngs, **of_layer)
    made = selector(in_features, num_kv_heads, config, rngs=rngs)
    if not isinstance(made, Selector):
        raise TypeError(
            f"{SELECTOR_CALL} must make an object with the methods project and choose, got "
            f"{type(made).__name__}. Give it both, as nsa_jax.nn.Selector describes."
        )
    try:
        inspect.signature(made.project).bind(None, None, None, None)
    except TypeError:
        raise TypeError(
            "project of a selector must take (x, query, key_slc, positions), got "
            f"{inspect.signature(made.project)} of {type(made).__name__}. Add what is missing: the layer "
            "passes its keys, too."
        ) from None
    return made


def check_selector(selector: Any, branches: tuple[Branch, ...]) -> None:
    """Raises unless a layer with these branches can have this selector.

    Raises:
      TypeError: `selector` is neither a name, nor an `IndexerConfig`, nor can be called as `make_selector`
        does.
      ValueError: the name is unknown, or importance is asked of a layer without a compressed branch.
    """
    if isinstance(selector, str):
        if selector not in SELECTORS:
            raise ValueError(
                f"selector must be one of {SELECTORS}, an IndexerConfig or a function that makes one, got "
                f"{selector!r}. Check the spelling."
            )
        if selector == "importance" and "cmp" not in branches:
            raise ValueError(
                "selection by importance needs the compressed branch, got selector='importance' and "
                f'branches={branches}. Pass selector=IndexerConfig(), or add "cmp".'
            )
        return
    if isinstance(selector, IndexerConfig):
        return
    try:
        inspect.signature(selector).bind(None, None, None, rngs=None)
    except (TypeError, ValueError):
        given = getattr(selector, "__name__", type(selector).__name__)
        raise TypeError(
            f"selector must be a name, an IndexerConfig or a function to be called as {SELECTOR_CALL}, got "
            f"{given}. Pass a class such as nsa_jax.nn.Selector describes."
        ) from None


def kept_of(project: Callable[..., Any], tokens: tuple[jax.ShapeDtypeStruct, ...], length: int) -> Any:
    """Shapes of what a selector keeps of `length` tokens in each row, if `project` takes these tokens."""
    _, keys = jax.eval_shape(lambda *arrays: project(*arrays), *tokens)
    return jax.tree.map(lambda k: jax.ShapeDtypeStruct((k.shape[0], length, *k.shape[2:]), k.dtype), keys)


def choose(
    selector: Selector, queries: Any, keys: Any, at: Int32[Array, "B T"], num_kv_heads: int, **where: Any
) -> Int[Array, "B T K R"]:
    """Calls `choose` of a selector, and fills up the slots of what it returns.

    Raises:
      TypeError: what it returns are not integers.
      ValueError: their shape is not that of a choice.
    """
    blocks = selector.choose(queries, keys, at, **where)
    shape, dtype = jnp.shape(blocks), jnp.result_type(blocks)
    *expected, slots = (*at.shape, num_kv_heads, where["config"].num_selected_blocks)
    if shape[:-1] != tuple(expected) or shape[-1] > slots:
        raise ValueError(
            f"a selector must choose at most {slots} blocks for each query and KV head, [B, T, K, R] = "
            f"{[*expected, slots]}, got shape {shape}. Give each KV head its own slots, -1 where unused."
        )
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"a selector must choose block numbers, got {dtype}. Cast them to int32.")
    return jnp.pad(blocks, ((0, 0),) * 3 + ((0, slots - shape[-1]),), constant_values=-1)


def check_made(
    selector: Selector, tokens: tuple[jax.ShapeDtypeStruct, ...], num_kv_heads: int, config: NSAConfig
) -> None:
    """Traces a selector once with what its `project` takes, so that its faults are known with the layer.

    Raises:
      TypeError, ValueError: as `choose`, or what `project` returns are not two trees of arrays with batch and
        tokens.
    """

    def trace(*tokens: Array) -> Array:
        at = tokens[-1]
        projected = selector.project(*tokens)
        if not isinstance(projected, tuple) or len(projected) != 2:
            raise TypeError(
                "project of a selector must return a pair, for queries and to keep, got "
                f"{type(projected).__name__}. Give (), () for nothing."
            )
        for leaf in jax.tree.leaves(projected):
            if jnp.shape(leaf)[:2] != at.shape:
                raise ValueError(
                    f"project of a selector must return arrays [B, T, ...], got shape {jnp.shape(leaf)} for "
                    f"{at.shape[0]} rows of {at.shape[1]} tokens. Make batch and tokens the first axes."
                )
        where: dict[str, Any] = dict(
            config=config, query_positions=None, segment_ids=None, implementation=None
        )
        return choose(selector, *projected, at, num_kv_heads, **where)

    jax.eval_shape(trace, *tokens)
