"""What attention gives to selection blocks: the targets from which a selection learns."""

from typing import Literal

from jax import lax

from nsa_jax import arguments, dispatch, keywords, layout
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.dispatch import Implementation
from nsa_jax.layout import Runs
from nsa_jax.option_checks import check_choice

REDUCTIONS = ("sum", "max")


@keywords.known
def block_probabilities(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    config: NSAConfig,
    lse: Float[Array, "B T N"] | None = None,
    reduce: Literal["sum", "max"] = "sum",
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K M"]:
    """Computes the probability that dense causal attention gives to each selection block.

    The probability of a block is the sum of `exp(scale q.k - lse)` over its tokens at or before the query. It
    is formed for each query head and then summed, or maximised, over the query heads of a KV head. Block `j`
    covers tokens `[j l', (j + 1) l')` of the query's sequence. With "sum", the blocks of a query that sees a
    key sum to `G`, the query heads of a KV head.

    The result has `T K M` numbers: for long rows, call it for a chunk of queries at a time, with
    `query_positions=Runs(...)`, and use up each chunk before the next one (`selection_loss`). The other
    arguments are those of `selected_attention`.

    Args:
      query: rotated queries.
      key: keys of the dense attention, each rotated at its own position.
      config: block structure; only `selection_block_size` matters here.
      lse: natural log-sum-exp of the dense attention of each query, which its forward pass has. None computes
        it first, from the same arrays, in a second pass over the keys.
      reduce: "sum" or "max" over the query heads of a KV head.

    Returns:
      Probabilities `[B, T, K, M]` in float32 (float64 for float64 inputs), where `M = ceil(S / l')`. They are
      0 for blocks that begin after the query, for blocks that its sequence does not have, and for padding
      queries.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Numerics:
      Logits, exponentials and sums are float32 (float64 for float64 inputs). A query that sees NaN or
      infinity gets NaN in blocks that it sees, and in no others.

    Gradients:
      None: this is a target, and no gradient flows through it.
    """
    check_choice(REDUCTIONS, reduce=reduce)
    arrays = dict(query=query, key=key, lse=lse)
    call = arguments.check(
        block_probabilities,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    operands = dict(**lax.stop_gradient(arrays), **call._asdict(), reduce=reduce)
    return dispatch.run("block_probabilities", implementation, (query, key), operands, config=config)


@keywords.known
def selected_probabilities(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    lse: Float[Array, "B T N"] | None = None,
    reduce: Literal["sum", "max"] = "sum",
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T K R"]:
    """Computes the probability that the selected branch gives to each block that it selected.

    As `block_probabilities`, for the blocks in the slots alone. The other arguments are those of
    `selected_attention`.

    Args:
      query: rotated queries.
      key_slc: keys of the selected branch.
      block_indices: the selected blocks, as `selected_attention` takes them.
      config: block structure.
      lse: `selected_attention(...).lse` for the same arguments. None computes it from the selected blocks.
      reduce: "sum" or "max" over the query heads of a KV head.

    Returns:
      Probabilities `[B, T, K, R]` in float32 (float64 for float64 inputs), one for each slot. An unused slot
      has 0, and so has a slot that repeats the block of an earlier one.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `compressed_attention`.

    Numerics:
      As in `block_probabilities`.

    Gradients:
      None: this is a target, and no gradient flows through it.
    """
    check_choice(REDUCTIONS, reduce=reduce)
    arrays = dict(query=query, key_slc=key_slc, block_indices=block_indices, lse=lse)
    call = arguments.check(
        selected_probabilities,
        arrays,
        config=config,
        query_positions=query_positions,
        segment_ids=segment_ids,
        scale=scale,
    )
    arrays["block_indices"] = layout.distinct_blocks(block_indices, key_slc.shape[1], config)
    operands = dict(**lax.stop_gradient(arrays), **call._asdict(), reduce=reduce)
    found = (query, key_slc, block_indices)
    return dispatch.run("selected_probabilities", implementation, found, operands, config=config)
