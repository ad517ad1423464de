"""The whole operation: three branches, or some of them, and their gated sum."""

from typing import Any, Literal, overload

import jax.numpy as jnp

from nsa_jax import arguments, dispatch, keywords, layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.attention.compressed import compressed_attention
from nsa_jax.attention.selected import attend_selected
from nsa_jax.attention.selection import select_blocks
from nsa_jax.attention.window import window_attention
from nsa_jax.config import BRANCHES, NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs
from nsa_jax.option_checks import check_flag
from nsa_jax.sharding.explicit import alike


@overload
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"] | None,
    value_cmp: Float[Array, "B C K V"] | None,
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"] | None,
    value_win: Float[Array, "B W K V"] | None,
    gates: Float[Array, "B T N branches"] | None,
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key_win: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_probabilities: Literal[False] = False,
) -> Float[Array, "B T N V"]: ...


@overload
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"] | None,
    value_cmp: Float[Array, "B C K V"] | None,
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"] | None,
    value_win: Float[Array, "B W K V"] | None,
    gates: Float[Array, "B T N branches"] | None,
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key_win: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_probabilities: Literal[True],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T K R"]]: ...


@keywords.known
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"] | None,
    value_cmp: Float[Array, "B C K V"] | None,
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B W K H"] | None,
    value_win: Float[Array, "B W K V"] | None,
    gates: Float[Array, "B T N branches"] | None,
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key_win: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
    implementation: Implementation | None = None,
    return_probabilities: bool = False,
) -> Any:
    """Native Sparse Attention: attends by all three branches and adds their outputs by gates (Eq. 5).

    Computes what `compressed_attention`, `select_blocks`, `selected_attention`, `window_attention` and
    `gated_sum` compute one after the other. The other arguments are those of `compressed_attention`; by
    default the queries are the last `T` of the `S` tokens. The compressed and the window branch may be left
    out: without keys and values a branch costs nothing.

    Args:
      query: rotated queries, the same for all branches.
      key_cmp: compressed keys, each rotated at the position of its block's first token. `C` is
        `(S - l)//d + 1`, or 0 if `S < l`. None for no compressed branch; `block_indices` must then be given.
      value_cmp: compressed values, None where `key_cmp` is.
      key_slc: keys of the selected branch, each rotated at its own position.
      value_slc: values of the selected branch.
      key_win: keys of the window branch, each rotated at its own position. `W` is `S` unless `first_key_win`
        says otherwise. None for no window branch.
      value_win: values of the window branch, None where `key_win` is.
      gates: one gate per token, query head and branch, in the order cmp, slc, win, without those that are
        left out; of any float dtype. None if the selected branch is alone: its output is the result.
      config: block structure.
      block_indices: a selection to use, for example that of another implementation, see
        `selected_attention`; chosen by `select_blocks` if None.
      first_key_win: row index of the first window key, see `first_key` of `window_attention`.
      return_probabilities: whether to return what `selected_probabilities` does for these blocks, too. The
        forward pass of the selected branch knows it, so on a GPU it adds up to a quarter to that pass, where
        the function runs one of its own. `block_indices` must be given.

    Returns:
      The output, in the query's dtype; 0 for a padding query with finite gates. With `return_probabilities`
      the pair of output and probabilities `[B, T, K, R]`, without a gradient for these.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`. ValueError also if
        probabilities are asked for without `block_indices`.

    Gradients:
      With respect to every floating-point array. No gradient flows through the selection, see
      `select_blocks`.

    Examples:
      Keys and values shared by the selected and the window branch:

      >>> out = native_sparse_attention(q, k_cmp, v_cmp, k, v, k, v, gates, config=NSAConfig())
    """
    arrays: dict[str, Any] = dict(
        query=query, key_cmp=key_cmp, value_cmp=value_cmp, key_slc=key_slc, value_slc=value_slc,
        key_win=key_win, value_win=value_win, gates=gates,
    )  # fmt: skip
    check_flag(return_probabilities=return_probabilities)
    if return_probabilities and block_indices is None:
        raise ValueError(
            "return_probabilities needs block_indices, got None. Pass those of select_blocks or your own."
        )
    present = _present(key_cmp, value_cmp, key_win, value_win)
    call = arguments.check(
        native_sparse_attention,
        dict(**arrays, block_indices=block_indices),
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
        first_key_win=first_key_win,
    )
    arguments.check_gates(gates, present)
    if len(present) < len(BRANCHES):
        where: dict[str, Any] = dict(
            config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale,
            implementation=implementation,
        )  # fmt: skip
        outs = []
        if key_cmp is not None and value_cmp is not None:
            cmp = compressed_attention(query, key_cmp, value_cmp, **where)
            outs.append(cmp.out)
            if block_indices is None:
                block_indices = select_blocks(query, key_cmp, lse_cmp=cmp.lse, **where)
        arguments.check_some_choice(block_indices, present)
        assert block_indices is not None
        slc, probabilities = attend_selected(
            query, key_slc, value_slc, block_indices, with_probabilities=return_probabilities, **where
        )
        outs.append(slc.out)
        if key_win is not None and value_win is not None:
            outs.append(window_attention(query, key_win, value_win, first_key=first_key_win, **where).out)
        out = outs[0] if gates is None else _sum_of_two(outs[0], outs[1], gates)
        return (out, probabilities) if return_probabilities else out
    if block_indices is not None:
        block_indices = layout.distinct_blocks(block_indices, key_slc.shape[1], config)
    operands = dict(
        **arrays, block_indices=block_indices, **call._asdict(), with_probabilities=return_probabilities
    )
    return dispatch.run("native_sparse_attention", implementation, arrays.values(), operands, config=config)


def _present(
    key_cmp: Array | None, value_cmp: Array | None, key_win: Array | None, value_win: Array | None
) -> tuple[str, ...]:
    """The branches that have keys and values. Raises ValueError if one has only one of both."""
    pairs = dict(cmp=(key_cmp, value_cmp), slc=(0, 0), win=(key_win, value_win))
    for name, (key, value) in pairs.items():
        if (key is None) != (value is None):
            raise ValueError(
                f"a branch must have keys and values, or neither, got one of key_{name} and value_{name}. "
                "Pass both, or None for both."
            )
    return tuple(name for name in BRANCHES if pairs[name][0] is not None)


def _sum_of_two(
    first: Float[Array, "B T N V"], second: Float[Array, "B T N V"], gates: Float[Array, "B T N 2"]
) -> Float[Array, "B T N V"]:
    """`gated_sum` of two branches, which XLA makes one kernel of."""
    first, second, gates = alike(first=first, second=second, gates=gates)
    accumulate = jnp.promote_types(first.dtype, jnp.float32)
    weights = gates.astype(accumulate)
    total = weights[..., :1] * first.astype(accumulate) + weights[..., 1:] * second.astype(accumulate)
    return total.astype(first.dtype)
