"""Scores the selection blocks by importance and chooses the best (Eq. 8-11), for one chunk of queries."""

import jax
import jax.numpy as jnp

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.xla import chunks as cutting
from nsa_jax.kernels.xla.chunks import Look, TileSizes
from nsa_jax.kernels.xla.masked import CAREFUL_TILE, accumulator, all_logits, are_few, few_logits
from nsa_jax.layout import Placement


def choose_blocks(
    rows: Float[Array, "B K rows H"],
    key_cmp: Float[Array, "B C K H"],
    lse_cmp: Float[Array, "B K rows"],
    here: Placement,
    scale: float,
    sizes: TileSizes,
) -> Int32[Array, "B tokens K R"]:
    """The blocks of the queries of one chunk, as `nsa_jax.select_blocks` returns them.

    Probabilities are stored for one chunk at a time only.
    """
    assert here.first_keys.cmp.known == 0  # the choice needs the scores of all blocks, not of a part
    config, num_compressed = here.config, key_cmp.shape[1]
    batch, num_kv_heads, _, _ = rows.shape
    tokens = here.position.shape[1]
    accumulate = accumulator(rows)
    num_blocks = max(layout.max_selection_blocks(num_compressed, config), 1)
    look = Look(*here.compression_range(num_compressed))
    normaliser = jnp.where(lse_cmp == -jnp.inf, jnp.inf, lse_cmp.astype(accumulate))[..., None]

    def add_up(multiply, sizes, wanted=None):
        def score_keys(first, probabilities):
            visible, (k,) = look.read(first, sizes, 1, rows.dtype, key_cmp)
            weights = jnp.exp(multiply(rows, k) * scale - normaliser)
            part = weights.reshape(batch, num_kv_heads, tokens, -1, sizes.tile).sum(axis=3)
            part = jnp.where(visible, part, 0)
            return part if sizes.one else cutting.add_tile(probabilities, first, part, axis=3)

        nothing = cutting.zeros_beside(rows, (batch, num_kv_heads, tokens, num_compressed), accumulate)
        return cutting.fold_tiles(look, sizes, num_compressed, score_keys, nothing, wanted)

    if num_compressed == 0:
        probabilities = cutting.zeros_beside(rows, (batch, num_kv_heads, tokens, 0), accumulate)
    elif are_few(rows):
        probabilities = add_up(few_logits, sizes)
        # A key that is not finite spoils the scores of other heads. That is rare; score again, with care.
        spoilt = ~jnp.isfinite(probabilities).all()
        careful = TileSizes(min(CAREFUL_TILE, num_compressed), False)
        probabilities = jnp.where(spoilt, add_up(all_logits, careful, spoilt), probabilities)
    else:
        probabilities = add_up(all_logits, sizes)
    if here.packed:
        # Block numbers count from the sequence's first block, so shift that block to column 0.
        column = jnp.arange(num_compressed, dtype=jnp.int32)[None, None, None]
        column += here.compression_start[:, None, :, None]
        probabilities = jnp.take_along_axis(probabilities, column, axis=3, mode="fill", fill_value=0)
    scores = collect(probabilities, num_blocks, config)
    return _best(scores, here.position[:, None, :, None], config).swapaxes(1, 2)


def best_of_any(
    scores: Float[Array, "B T K M"], position: Int32[Array, "B T"], config: NSAConfig
) -> Int32[Array, "B T K R"]:
    """The best blocks by scores that may be negative, infinite or NaN."""
    if scores.dtype.itemsize < 4:
        scores = scores.astype(jnp.float32)
    most = jnp.finfo(scores.dtype).max
    finite = jnp.clip(jnp.where(jnp.isnan(scores), -most, scores), -most, most)
    finite = jnp.where(finite == 0, 0, finite)  # `top_k` ranks -0 below 0
    return _best(finite, position[:, :, None, None], config)


def collect(
    probabilities: Float[Array, "B K T C"], num_blocks: int, config: NSAConfig
) -> Float[Array, "B K T M"]:
    """Score of each selection block: the weighted sum over the compressed blocks that overlap it (Eq. 9)."""
    stride = config.selection_block_size // config.compression_stride
    weights = layout.overlap_weights(config)
    before, width = -weights[0][0], (num_blocks - 1) * stride + 1
    after = before + weights[-1][0] + width - before - probabilities.shape[-1]
    padded = jnp.pad(probabilities, ((0, 0),) * 3 + ((before, max(after, 0)),))
    parts = (
        weight * jax.lax.slice_in_dim(padded, offset + before, offset + before + width, stride, axis=3)
        for offset, weight in weights
    )
    return sum(parts, start=jnp.zeros((), padded.dtype))


def _best(
    scores: Float[Array, "B #K #T M"], position: Int32[Array, "B #K #T 1"], config: NSAConfig
) -> Int32[Array, "B #K #T R"]:
    """The forced blocks and those with the best scores, ascending, then -1. Ties go to the lower index."""
    block = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None, None]
    candidate = block * config.selection_block_size <= position
    ranked = jnp.where(layout.is_forced(block, position, config), jnp.inf, scores)
    ranked = jnp.where(candidate, ranked, -jnp.inf)
    slots = min(config.num_selected_blocks, scores.shape[-1])
    best, chosen = jax.lax.top_k(ranked, slots)
    unused = jnp.iinfo(jnp.int32).max
    chosen = jnp.sort(jnp.where(best > -jnp.inf, chosen.astype(jnp.int32), unused), axis=-1)
    chosen = jnp.where(chosen == unused, -1, chosen)
    return jnp.pad(chosen, ((0, 0),) * 3 + ((0, config.num_selected_blocks - slots),), constant_values=-1)
