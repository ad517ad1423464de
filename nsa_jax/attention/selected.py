"""The selected branch."""

from nsa_jax import arguments, dispatch, keywords, layout
from nsa_jax.array_typing import Array, Attended, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs


@keywords.known
def selected_attention(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Attended:
    """Attends to those tokens of the selected blocks that are at or before the query (Eq. 12).

    Block `j` covers tokens `[j l', (j + 1) l')` of the query's sequence. All query heads of a KV head share
    one selection. The other arguments are those of `compressed_attention`; by default the queries are the
    last `T` of the `S` tokens.

    Args:
      query: rotated queries.
      key_slc: keys of this branch, each rotated at its own position.
      value_slc: values of this branch.
      block_indices: numbers of the selected blocks, counted from the first token of the query's sequence,
        from `select_blocks` or `block_indices_from_ranges`. `R` is `num_selected_blocks`. Each selection is
        ascending, with -1 in the unused slots at its end. A block that is named twice counts once.
      config: block structure.

    Returns:
      `Attended(out, lse)`, as in `compressed_attention`. A query whose slots are all -1 has `out` 0 and `lse`
      `-inf`.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Gradients:
      With respect to `query`, `key_slc` and `value_slc`. The cotangent of `lse` counts, too.
    """
    return attend_selected(
        query, key_slc, value_slc, block_indices, config=config, query_positions=query_positions,
        segment_ids=segment_ids, scale=scale, implementation=implementation,
    )[0]  # fmt: skip


def attend_selected(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None,
    segment_ids: Int[Array, "B S"] | None,
    scale: float | None,
    implementation: Implementation | None,
    with_probabilities: bool = False,
) -> tuple[Attended, Float[Array, "B T K R"] | None]:
    """`selected_attention`, and the probabilities as `native_sparse_attention` returns them, or None."""
    arrays = dict(query=query, key_slc=key_slc, value_slc=value_slc, block_indices=block_indices)
    call = arguments.check(
        selected_attention,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    arrays["block_indices"] = layout.distinct_blocks(block_indices, key_slc.shape[1], config)
    operands = dict(**arrays, **call._asdict(), with_probabilities=with_probabilities)
    found = dispatch.run("selected_attention", implementation, arrays.values(), operands, config=config)
    return found if with_probabilities else (found, None)
