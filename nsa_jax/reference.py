"""The reference: Native Sparse Attention in its plainest form, for tests and `parity` only.

It stores whole `[T, S]` masks and gives every query its own copy of the keys that it sees, so that hidden
keys have no effect, not even if they are NaN. It works in any float dtype up to float64, and automatic
differentiation gives its gradients. `nsa_jax.dispatch` never chooses it. Every function has the arguments,
results and conventions of the function of the same name in `nsa_jax.attention`, which documents them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Attended, Bool, Float, Int, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.layout import FirstKeys, Index, Placement, Runs


def compressed_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Attended:
    """Attention over the visible compressed blocks (Eq. 7)."""
    num_compressed = key_cmp.shape[1]
    placed = _place_compressed(query, num_compressed, config, query_positions, segment_ids)
    visible = _in_range(placed.compression_range(num_compressed), num_compressed)
    return _attend(query, key_cmp, value_cmp, visible[:, :, None], scale)


def importance(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T K M"]:
    """Importance of each selection block (Eq. 8-10), summed over the query heads of a KV head."""
    num_compressed = key_cmp.shape[1]
    placed = _place_compressed(query, num_compressed, config, query_positions, segment_ids)
    start, end = placed.compression_range(num_compressed)
    visible = _in_range((start, end), num_compressed)[:, :, None]
    probabilities = _softmax(_logits(query, _seen(key_cmp, visible), scale), visible)[0]
    batch, num_queries, num_kv_heads = probabilities.shape[:3]
    per_block = probabilities.sum(axis=3)
    num_blocks = max(layout.max_selection_blocks(num_compressed, config), 1)
    scores = []
    for block in range(num_blocks):
        score = jnp.zeros((batch, num_queries, num_kv_heads), per_block.dtype)
        for offset, weight in layout.overlap_weights(config):
            local = block * (config.selection_block_size // config.compression_stride) + offset
            row = start + local
            inside = (local >= 0) & (row < end)
            if num_compressed:
                index = jnp.clip(row, 0, num_compressed - 1)[:, :, None, None]
                gathered = jnp.take_along_axis(per_block, index, axis=3)[..., 0]
                score = score + weight * jnp.where(inside[:, :, None], gathered, 0)
        scores.append(score)
    return jnp.stack(scores, axis=-1)


def importance_scores(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    lse_cmp: Float[Array, "B T N"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T K M"]:
    """Logarithm of the importance; -inf for blocks out of sight, at least log(tiny) for all others."""
    del lse_cmp  # computed anew, as in `select_blocks`
    found = importance(
        query, key_cmp, config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale
    )
    placed = _place_compressed(query, key_cmp.shape[1], config, query_positions, segment_ids)
    first = jnp.arange(found.shape[-1], dtype=jnp.int32) * config.selection_block_size
    lowest = jnp.finfo(found.dtype).tiny
    low = found < lowest
    scores = jnp.where(low, jnp.log(lowest), jnp.log(jnp.where(low, 1, found)))
    return jnp.where(first <= placed.position[:, :, None, None], scores, -jnp.inf)


def select_blocks(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    *,
    config: NSAConfig,
    lse_cmp: Float[Array, "B T N"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends (Eq. 11), by a stable sort by score with the forced blocks first."""
    del lse_cmp  # computed anew, so that the reference does not depend on what it is to check
    arguments: dict[str, Any] = dict(
        config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale
    )
    scores = importance(query, key_cmp, **arguments)
    return _best(scores, _place_compressed(query, key_cmp.shape[1], config, query_positions, segment_ids))


def _best(scores: Float[Array, "B T K M"], placed: Placement) -> Int32[Array, "B T K R"]:
    """The forced blocks and those with the best scores; NaN is the lowest, and infinity a finite number."""
    config, position = placed.config, placed.position[:, :, None, None]
    scores = jax.lax.stop_gradient(scores).astype(jnp.promote_types(scores.dtype, jnp.float32))
    scores = jnp.nan_to_num(jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None, None]
    forced = layout.is_forced(block, position, config)
    candidate = block * config.selection_block_size <= position
    ranked = jnp.where(candidate, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    chosen = jnp.argsort(-ranked, axis=-1, stable=True)[..., : config.num_selected_blocks].astype(jnp.int32)
    unused = jnp.iinfo(jnp.int32).max
    chosen = jnp.where(jnp.take_along_axis(ranked, chosen, axis=-1) > -jnp.inf, chosen, unused)
    missing = config.num_selected_blocks - chosen.shape[-1]
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, max(missing, 0))), constant_values=unused)
    chosen = jnp.sort(chosen, axis=-1)
    return jnp.where(chosen == unused, -1, chosen)


def block_scores(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    *,
    weights: Float[Array, "B T K J"] | None = None,
    block_indices: Int[Array, "B T K R"] | None = None,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T K M"] | Float[Array, "B T K R"]:
    """Scores of the blocks by an indexer, or of those in the slots: of each its first best token's."""
    num_keys, dim = key_index.shape[1], key_index.shape[3]
    placed = _place(query_index, num_keys, config, query_positions, segment_ids)
    key_position = jnp.arange(num_keys, dtype=jnp.int32)[None, None] - placed.sequence_start[:, :, None]
    visible = (key_position >= 0) & (key_position <= placed.position[:, :, None])
    accumulate = jnp.promote_types(query_index.dtype, jnp.float32)
    keys = jnp.broadcast_to(key_index, (*key_index.shape[:2], query_index.shape[2], dim))
    seen = jnp.where(visible[..., None, None], keys[:, None], 0)
    products = jnp.einsum(
        "btkje,btske->btksj", query_index, seen, precision="highest", preferred_element_type=accumulate
    ) * (dim**-0.5 if scale is None else scale)
    if weights is None:
        scores = _first_largest(products)
    else:
        scores = (jax.nn.relu(products) * weights.astype(accumulate)[:, :, :, None]).sum(-1)
    of_blocks = []
    for block in range(layout.num_selection_blocks(num_keys, config)):
        inside = visible & (key_position // config.selection_block_size == block)
        of_blocks.append(_first_largest(jnp.where(inside[:, :, None], scores, -jnp.inf)))
    found = jnp.stack(of_blocks, axis=-1)
    if block_indices is None:
        return found
    return layout.of_slots(found, layout.distinct_blocks(block_indices, num_keys, config))


def _first_largest(x: Float[Array, "*rows X"]) -> Float[Array, "*rows"]:
    """The largest number, from the first place that has it; NaN counts as -inf."""
    numbers = jnp.where(jnp.isnan(x), -jnp.inf, x)
    return jnp.take_along_axis(numbers, jnp.argmax(numbers, axis=-1, keepdims=True), axis=-1)[..., 0]


def select_by_index(
    query_index: Float[Array, "B T K J E"],
    key_index: Float[Array, "B S I E"],
    *,
    weights: Float[Array, "B T K J"] | None = None,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends, by the scores of an indexer."""
    arguments: dict[str, Any] = dict(
        config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale
    )
    scores = block_scores(query_index, key_index, weights=weights, **arguments)
    placed = _place(query_index, key_index.shape[1], config, query_positions, segment_ids)
    return _best(scores, placed)


def top_blocks(
    scores: Float[Array, "B T K M"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
) -> Int32[Array, "B T K R"]:
    """The blocks that each query attends, by scores that are given."""
    longest = scores.shape[-1] * config.selection_block_size
    num_keys = scores.shape[1] if query_positions is None else longest
    return _best(scores, _place(scores, num_keys, config, query_positions, segment_ids))


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
) -> Attended:
    """Attention over the tokens `s <= t` of the selected blocks (Eq. 12)."""
    num_keys = key_slc.shape[1]
    placed = _place(query, num_keys, config, query_positions, segment_ids)
    block, causal = _blocks_of_keys(placed, num_keys)
    selected = (block[:, :, None, None] == block_indices[..., None]).any(axis=3)
    return _attend(query, key_slc, value_slc, selected & causal[:, :, None], scale)


def block_probabilities(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    config: NSAConfig,
    lse: Float[Array, "B T N"] | None = None,
    reduce: str = "sum",
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T K M"]:
    """What dense causal attention gives to each selection block."""
    placed = _place(query, key.shape[1], config, query_positions, segment_ids)
    block, causal = _blocks_of_keys(placed, key.shape[1])
    weights = _weights(query, key, causal[:, :, None], scale, lse)
    number = jnp.arange(layout.num_selection_blocks(key.shape[1], config), dtype=jnp.int32)
    inside = block[:, :, None, None, None] == number[:, None]
    return _of_blocks(weights, inside, reduce)


def selected_probabilities(
    query: Float[Array, "B T N H"],
    key_slc: Float[Array, "B S K H"],
    block_indices: Int[Array, "B T K R"],
    *,
    config: NSAConfig,
    lse: Float[Array, "B T N"] | None = None,
    reduce: str = "sum",
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T K R"]:
    """What the selected branch gives to the block of each slot."""
    placed = _place(query, key_slc.shape[1], config, query_positions, segment_ids)
    block, causal = _blocks_of_keys(placed, key_slc.shape[1])
    slots = layout.distinct_blocks(block_indices, key_slc.shape[1], config)[..., None]
    inside = (slots >= 0) & (block[:, :, None, None] == slots) & causal[:, :, None, None]
    weights = _weights(query, key_slc, inside.any(axis=3), scale, lse)
    return _of_blocks(weights, inside[:, :, :, None], reduce)


def selection_loss(scores: Float[Array, "B T K M"], target: Float[Array, "B T K M"]) -> Float[Array, "B T K"]:
    """KL divergence of the softmax of the scores from the target, over the blocks that are in sight."""
    seen = scores != -jnp.inf
    mass = jnp.where(seen, jax.lax.stop_gradient(target), 0)
    total = mass.sum(axis=-1, keepdims=True)
    share = mass / jnp.where(total == 0, 1, total)
    known = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    log_softmax = jax.nn.log_softmax(known, where=seen, axis=-1)
    log_softmax = jnp.where(seen, log_softmax, 0)
    return (jax.scipy.special.xlogy(share, share) - share * log_softmax).sum(axis=-1)


def window_attention(
    query: Float[Array, "B T N H"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    *,
    config: NSAConfig,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
) -> Attended:
    """Attention over the last `w` tokens, the query's own included (section 3.3.3)."""
    num_keys = key_win.shape[1]
    stretched = isinstance(query_positions, Runs) and query_positions.halo is not None
    length = jnp.iinfo(jnp.int32).max if stretched else num_keys
    placed = _place(query, length, config, query_positions, segment_ids, first_key)
    visible = _in_range(placed.window_range(num_keys), num_keys)
    return _attend(query, key_win, value_win, visible[:, :, None], scale)


def gated_sum(
    out_cmp: Float[Array, "B T N V"],
    out_slc: Float[Array, "B T N V"],
    out_win: Float[Array, "B T N V"],
    gates: Float[Array, "B T N 3"],
) -> Float[Array, "B T N V"]:
    """`g_cmp * o_cmp + g_slc * o_slc + g_win * o_win` (Eq. 5)."""
    branches = jnp.stack([out_cmp, out_slc, out_win], axis=-1)
    accumulate = jnp.promote_types(branches.dtype, jnp.float32)
    return (
        (branches.astype(accumulate) * gates.astype(accumulate)[..., None, :]).sum(-1).astype(out_cmp.dtype)
    )


def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key_cmp: Float[Array, "B C K H"],
    value_cmp: Float[Array, "B C K V"],
    key_slc: Float[Array, "B S K H"],
    value_slc: Float[Array, "B S K V"],
    key_win: Float[Array, "B S K H"],
    value_win: Float[Array, "B S K V"],
    gates: Float[Array, "B T N 3"],
    *,
    config: NSAConfig,
    block_indices: Int[Array, "B T K R"] | None = None,
    query_positions: Int[Array, "B T"] | Runs | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    first_key_win: int | Int[Array, ""] | Int[Array, " B"] = 0,
    scale: float | None = None,
) -> Float[Array, "B T N V"]:
    """The three branches and their gated sum (Eq. 5)."""
    if query_positions is None:
        query_positions = layout.default_runs(query.shape[1], key_slc.shape[1])
    arguments: dict[str, Any] = dict(
        config=config, query_positions=query_positions, segment_ids=segment_ids, scale=scale
    )
    # Compressed keys alone do not tell where the row ends, and so which positions are padding.
    positions = query_positions
    if isinstance(positions, Runs):
        positions = layout.positions_of(positions, query.shape[0])
    in_row = arguments | dict(query_positions=jnp.where(positions < key_slc.shape[1], positions, -1))
    out_cmp, _ = compressed_attention(query, key_cmp, value_cmp, **in_row)
    if block_indices is None:
        block_indices = select_blocks(query, key_cmp, **in_row)
    out_slc, _ = selected_attention(query, key_slc, value_slc, block_indices, **arguments)
    out_win, _ = window_attention(query, key_win, value_win, first_key=first_key_win, **arguments)
    return gated_sum(out_cmp, out_slc, out_win, gates)


def _place(query, num_keys, config, query_positions, segment_ids, first_key=0) -> Placement:
    """Places queries in rows of `num_keys` tokens, or as many as `segment_ids` has."""
    return layout.place(
        config,
        batch=query.shape[0],
        num_queries=query.shape[1],
        num_keys=first_key + num_keys if segment_ids is None else segment_ids.shape[1],
        query_positions=query_positions,
        segment_ids=segment_ids,
        first_keys=FirstKeys(win=Index(first_key)),
    )


def _place_compressed(query, num_compressed, config, query_positions, segment_ids) -> Placement:
    """Places queries if only compressed keys are known: by default all tokens are queries."""
    longest = layout.longest_length(num_compressed, config)
    num_keys = query.shape[1] if query_positions is None else longest
    return _place(query, num_keys, config, query_positions, segment_ids)


def _in_range(start_end: tuple[Int[Array, "B T"], Int[Array, "B T"]], num_keys: int) -> Bool[Array, "B T S"]:
    start, end = start_end
    key = jnp.arange(num_keys, dtype=jnp.int32)[None, None]
    return (key >= start[:, :, None]) & (key < end[:, :, None])


def _blocks_of_keys(placed: Placement, num_keys: int) -> tuple[Int[Array, "B T S"], Bool[Array, "B T S"]]:
    """The selection block of each key, in the sequence of each query, and whether the query may see it."""
    key_position = jnp.arange(num_keys, dtype=jnp.int32)[None, None] - placed.sequence_start[:, :, None]
    causal = (key_position >= 0) & (key_position <= placed.position[:, :, None])
    return key_position // placed.config.selection_block_size, causal


def _weights(query, key, visible: Bool[Array, "B T #K S"], scale, lse) -> Float[Array, "B T K G S"]:
    """Probabilities of the keys under a log-sum-exp that is given, or under their own."""
    logits = _logits(query, _seen(key, visible), scale)
    if lse is None:
        return _softmax(logits, visible)[0]
    lse = lse.astype(logits.dtype).reshape(*logits.shape[:4], 1)
    visible = visible[:, :, :, None] & (lse != -jnp.inf)
    return jnp.where(visible, jnp.exp(jnp.where(visible, logits - lse, 0)), 0)


def _of_blocks(
    weights: Float[Array, "B T K G S"], inside: Bool[Array, "B T #K #G M S"], reduce: str
) -> Float[Array, "B T K M"]:
    """Sums over the keys of each block, then the sum or the largest over the heads of a KV head."""
    sums = jnp.where(inside, weights[..., None, :], 0).sum(axis=-1)
    return sums.sum(axis=3) if reduce == "sum" else sums.max(axis=3)


def _seen(x: Float[Array, "B S K X"], visible: Bool[Array, "B T #K S"]) -> Float[Array, "B T K S X"]:
    """A copy of keys or values for every query, with 0 where it does not see them."""
    return jnp.where(visible[..., None], x.swapaxes(1, 2)[:, None], 0)


def _logits(query, key: Float[Array, "B T K S H"], scale) -> Float[Array, "B T K G S"]:
    batch, num_queries, _, key_dim = query.shape
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, num_queries, key.shape[2], -1, key_dim)
    logits = jnp.einsum(
        "btkgh,btksh->btkgs", grouped, key, precision="highest", preferred_element_type=accumulate
    )
    return logits * (key_dim**-0.5 if scale is None else scale)


def _softmax(logits: Float[Array, "B T K G S"], visible: Bool[Array, "B T #K S"]) -> tuple[Array, Array]:
    """Softmax over the visible keys and its log-sum-exp; 0 and -inf for a row that sees no key."""
    visible = visible[:, :, :, None]
    seen = visible.any(axis=-1, keepdims=True)
    # Hidden logits are replaced before any arithmetic, so that neither inf nor its gradient passes a mask.
    masked = jnp.where(visible, logits, -jnp.inf)
    largest = jax.lax.stop_gradient(
        jnp.max(jnp.where(seen, masked, 0), axis=-1, keepdims=True, initial=-jnp.inf)
    )
    largest = jnp.where(seen, largest, 0)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, logits - largest, 0)), 0)
    total = jnp.where(seen, weights.sum(axis=-1, keepdims=True), 1)
    lse = jnp.where(seen, jnp.log(total) + largest, -jnp.inf)
    return weights / total, lse[..., 0]


def _attend(query, key, value, visible, scale) -> Attended:
    batch, num_queries, num_heads, _ = query.shape
    probabilities, lse = _softmax(_logits(query, _seen(key, visible), scale), visible)
    value = _seen(value, visible).astype(probabilities.dtype)
    out = jnp.einsum("btkgs,btksv->btkgv", probabilities, value, precision="highest")
    shape = (batch, num_queries, num_heads)
    return Attended(out.reshape(*shape, -1).astype(query.dtype), lse.reshape(shape))
