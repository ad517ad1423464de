"""A prefill or a step on a cache equals the rows of one full forward, wherever the prompt was cut."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL, Layer, decode_step, jit, prefill

from nsa_jax import layout, reference
from nsa_jax.cache import rewind
from nsa_jax.config import NSAConfig

LENGTH = 61  # 7 full selection blocks and a partial one; a query attends to at most 4 of them
# Where something changes: t < l, t = k d - 1, t = w +- 1, both sides of a selection block, the end.
STEPS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 59, 60)
CHUNKS = (7, 64)


@pytest.fixture(scope="module")
def layer():
    return Layer.make(length=LENGTH)


def test_selection_of_the_layer_is_not_a_matter_of_rounding(layer):
    """Every choice has a score gap larger than rounding, so equal outputs mean equal block sets."""

    @jit
    def importance(query, tokens, gates):
        query, key_cmp, *_ = Layer(SMALL, query, tokens, gates).operands()
        return reference.importance(query, key_cmp, config=SMALL)

    scores = np.asarray(importance(*layer.arrays))
    block = np.arange(scores.shape[-1])
    position = np.arange(LENGTH)[:, None, None]
    forced = np.asarray(layout.is_forced(block, position, SMALL))
    free = ~forced & (block * SMALL.selection_block_size <= position)
    chosen = SMALL.num_selected_blocks - SMALL.num_initial_blocks - SMALL.num_local_blocks
    ranked = -np.sort(-np.where(free, scores, -np.inf), axis=-1)
    has_choice = np.broadcast_to(free.sum(-1) > chosen, ranked.shape[:-1])
    gap = ranked[has_choice][:, chosen - 1] - ranked[has_choice][:, chosen]

    assert gap.size > 50
    assert gap.min() > 64 * np.finfo(np.float32).eps


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_in_chunks_equals_full_forward(layer, chunk):
    out, cache = layer.prefill_in_chunks(layer.empty(LENGTH), LENGTH, chunk)

    layer.agree(out, np.s_[:])
    assert cache.lengths.tolist() == [LENGTH, LENGTH]
    assert not cache.overflowed.any()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_step_after_prefill_equals_row_of_full_forward(layer, chunk):
    for t in STEPS:
        _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), t, chunk)
        out, cache = layer.decode_step(cache, *layer.slice(t, 1))

        layer.agree(out, np.s_[:, t : t + 1])
        assert cache.lengths.tolist() == [t + 1, t + 1]


def test_tokens_that_are_taken_back_leave_nothing_behind(layer):
    """Steps of up to 4 tokens, of which the last 0 to 3 are NaN and taken back again."""
    done, rng = np.array([9, 2]), np.random.default_rng(0)
    _, held = layer.prefill_in_chunks(layer.empty(LENGTH), done, 7)
    taken_back = 0
    while done.min() < 50:
        number = np.minimum(rng.integers(0, 5, 2), LENGTH - done).astype(np.int32)
        back = np.minimum(rng.integers(0, 4, 2), number).astype(np.int32)
        good = number - back
        spoilt = np.where(np.arange(4) < good[:, None], 0, np.nan).astype(np.float32)[..., None, None]
        new = jax.tree.map(functools.partial(np.add, spoilt), layer.slice(done, 4))

        out, held = layer.decode_step(held, *new, num_tokens=number)
        held = rewind(held, back)

        for row, (first, count) in enumerate(zip(done, good, strict=True)):
            layer.agree(out[row, :count], np.s_[row, first : first + count])
        done, taken_back = done + good, taken_back + back.sum()
        assert held.lengths.tolist() == done.tolist()
    assert taken_back > 20


def test_an_exported_program_makes_a_cache_for_any_number_of_rows(layer):
    """It makes an empty cache, appends a prompt and takes a step."""
    arrays = layer.slice(0, 33)
    (batch,) = jax.export.symbolic_shape("batch")
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), arrays)

    @jit
    def write(query, tokens, gates):
        every = Layer(layer.config, query, tokens, gates)
        prompt, new = (every.map(lambda x, part=part: x[:, part]).arrays for part in (np.s_[:32], np.s_[32:]))
        out, held = prefill(every.empty(LENGTH), *prompt, config=layer.config)
        return out, decode_step(held, *new, config=layer.config)[0]

    exported = jax.export.export(write)(*rows)

    assert exported.in_avals[0].shape[0] is batch
    of_one = exported.call(*jax.tree.map(lambda x: x[1:], arrays))
    layer.agree(np.concatenate(of_one, axis=1), np.s_[1:, :33])


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_steps_from_the_first_token_equal_full_forward(layer, tokens_per_step):
    """4 tokens are the step capacity: with one ring slot less, the first of them would lack a key."""
    cache = layer.empty(LENGTH)
    for start in range(0, LENGTH, tokens_per_step):
        real = min(tokens_per_step, LENGTH - start)
        number = {} if tokens_per_step == 1 else dict(num_tokens=np.full(2, real))
        out, cache = layer.decode_step(cache, *layer.slice(start, tokens_per_step), **number)
        layer.agree(out[:, :real], np.s_[:, start : start + real])


def test_blocks_that_are_given_are_attended_to():
    """Any number of blocks of the past, in prefill and steps, against the full forward with the same ones."""
    made, rng = Layer.make(length=29, dtype=np.float64), np.random.default_rng(3)
    blocks = np.full((2, 29, 2, SMALL.num_selected_blocks), -1)
    for place in np.ndindex(blocks.shape[:3]):
        past = place[1] // SMALL.selection_block_size + 1
        number = rng.integers(min(past, SMALL.num_selected_blocks) + 1)
        blocks[place][:number] = np.sort(rng.choice(past, number, replace=False))
    given = dataclasses.replace(made, blocks=blocks)
    none = dataclasses.replace(made, blocks=np.full_like(blocks, -1))
    with jax.enable_x64(True):
        assert np.abs(given.full - none.full).max() > 0.1

        start, held = np.zeros(2, int), given.empty(29)
        for counts in ([13, 20], [1, 1], [4, 0], [2, 4]):
            new = np.arange(20 if max(counts) == 20 else 4)
            step = given.prefill if len(new) == 20 else given.decode_step
            chosen = np.stack([np.take(blocks[row], start[row] + new, 0, mode="clip") for row in range(2)])
            options = dict(num_tokens=np.array(counts), block_indices=chosen)
            out, held = step(held, *given.slice(start, len(new)), **options)
            for row, count in enumerate(counts):
                expected = given.full[row, start[row] : start[row] + count]
                np.testing.assert_allclose(out[row, :count], expected, rtol=0, atol=1e-12)
                assert not out[row, count:].any()
            start += counts
    assert held.lengths.tolist() == [20, 25]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_ragged_rows_equal_their_own_full_forward(layer, chunk):
    """Prompts of different lengths, padded right; then rows gain different numbers of tokens in one step."""
    lengths = np.array([5, 38])
    out, cache = layer.prefill_in_chunks(layer.empty(LENGTH), lengths, chunk)
    assert not out[0, 5:].any()
    layer.agree(out[0, :5], np.s_[0, :5])
    layer.agree(out[1], np.s_[1, :38])

    for counts in ([1, 4], [0, 3], [4, 0], [2, 1]):
        out, cache = layer.decode_step(cache, *layer.slice(lengths, 4), num_tokens=np.array(counts))
        for row, count in enumerate(counts):
            layer.agree(out[row, :count], np.s_[row, lengths[row] : lengths[row] + count])
            assert not out[row, count:].any()
        lengths = lengths + counts
        assert cache.lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("factor", [-3, np.nan], ids=["other_numbers", "nan"])
def test_row_is_independent_of_the_others(layer, factor):
    """The tokens and the length of a neighbour do not change one bit of a row."""
    other = layer.map(lambda x: np.asarray(x) * np.array([1, factor], x.dtype)[:, None, None, None])
    _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), 20, 7)
    _, other_cache = other.prefill_in_chunks(layer.empty(LENGTH), [20, 11], 7)

    out, _ = layer.decode_step(cache, *layer.slice(20, 1))
    other_out, _ = layer.decode_step(other_cache, *other.slice(20, 1))

    assert (out[0] == other_out[0]).all()


def test_nothing_unwritten_is_read(layer):
    """Slots beyond the lengths hold huge numbers, which no output may show."""
    poisoned = jax.tree.map(lambda x: np.full_like(x, 1e30) if x.ndim == 4 else x, layer.empty(LENGTH))
    expected, cache = layer.prefill_in_chunks(layer.empty(LENGTH), 9, 7)
    out, poisoned = layer.prefill_in_chunks(poisoned, 9, 7)
    assert (out == expected).all()

    for t in range(9, 20):
        expected, cache = layer.decode_step(cache, *layer.slice(t, 1))
        out, poisoned = layer.decode_step(poisoned, *layer.slice(t, 1))
        assert (out == expected).all()


# NaN and infinity in unseen slots change nothing; in a token they reach the queries that see it.
every_number = pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)


def decoded(layer, held):
    """A prompt in chunks of 7, then steps: the outputs of all tokens, as a full forward gives them."""
    out, held = layer.prefill_in_chunks(held, 9, 7)
    outputs = [out]
    for t in range(9, LENGTH):
        out, held = layer.decode_step(held, *layer.slice(t, 1))
        outputs.append(out)
    return np.concatenate(outputs, axis=1)


@every_number
def test_unused_slots_may_hold_anything(layer, number):
    held = jax.tree.map(lambda x: np.full_like(x, number) if x.ndim == 4 else x, layer.empty(LENGTH))

    layer.agree(decoded(layer, held), np.s_[:])


@every_number
def test_other_rows_and_heads_may_hold_anything(layer, number):
    """All of row 0 is spoilt, and KV head 0 of row 1."""

    def spoil(x):
        x = np.array(x)
        x[0], x[1, :, : x.shape[2] // 2] = number, number
        return x

    out = decoded(layer.map(spoil), layer.empty(LENGTH))

    layer.agree(out[1, :, 2:], np.s_[1, :, 2:])
    assert not np.isfinite(out[1, :, :2]).any()


@every_number
def test_padding_of_a_step_may_hold_anything(layer, number):
    """Neither the real tokens of a chunk nor any later step sees the padding after them."""
    held, lengths = layer.empty(LENGTH), np.array([0, 0])
    steps = [(layer.prefill, [5, 3]), (layer.decode_step, [1, 3]), (layer.decode_step, [0, 4])]
    for step, counts in [*steps, (layer.prefill, [4, 2]), (layer.decode_step, [4, 4])]:
        padding = (np.arange(7) >= np.array(counts)[:, None])[..., None, None]
        operands = layer.slice(lengths, 7 if step == layer.prefill else 4)
        operands = jax.tree.map(lambda x, p=padding: np.where(p[:, : x.shape[1]], number, x), operands)
        out, held = step(held, *operands, num_tokens=np.array(counts))
        for row, count in enumerate(counts):
            layer.agree(out[row, :count], np.s_[row, lengths[row] : lengths[row] + count])
        lengths = lengths + counts


@pytest.mark.parametrize(
    "name", ["query", "key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win"]
)
def test_nan_in_a_token_reaches_the_queries_that_see_it(layer, name):
    """NaN in row 1, KV head 0, at token 5, which leaves the window at token 13: as in the full forward."""

    def spoil(x):
        x = np.array(x)
        x[1, 5, : x.shape[2] // 2] = np.nan
        return x

    if name == "query":
        spoilt = dataclasses.replace(layer, query=spoil(layer.query))
    else:
        tokens = layer.tokens._replace(**{name: spoil(getattr(layer.tokens, name))})
        spoilt = dataclasses.replace(layer, tokens=tokens)
    out = decoded(spoilt, layer.empty(LENGTH))

    assert np.isnan(out).any()
    assert (np.isnan(out) == np.isnan(spoilt.full)).all()
    clean = ~np.isnan(out)
    layer.agree(np.where(clean, out, layer.exact), np.s_[:])


def test_finished_row_writes_nothing(layer):
    _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), 17, 64)

    out, after = layer.decode_step(cache, *layer.slice(17, 4), num_tokens=np.array([0, 4]))

    assert not out[0].any()
    assert_row_kept(cache, after, row=0)
    assert after.lengths.tolist() == [17, 21]


def test_step_on_full_row_writes_nothing_and_flags_it(layer):
    """Under jit; the other row goes on, and the flag stays when the row is finished."""
    _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), [LENGTH, 10], 64)

    out, after = layer.decode_step(cache, *layer.slice(10, 1))
    _, later = layer.decode_step(after, *layer.slice(11, 4), num_tokens=np.array([0, 4]))

    assert not out[0].any()
    layer.agree(out[1], np.s_[1, 10:11])
    assert_row_kept(cache, after._replace(overflowed=cache.overflowed), row=0)
    assert after.lengths.tolist() == [LENGTH, 11]
    assert after.overflowed.tolist() == later.overflowed.tolist() == [True, False]


def test_step_that_fits_only_in_part_is_refused_whole(layer):
    _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), [LENGTH - 2, LENGTH - 2], 64)

    out, after = layer.decode_step(cache, *layer.slice(0, 4), num_tokens=np.array([3, 2]))

    assert not out[0].any()
    assert_row_kept(cache, after._replace(overflowed=cache.overflowed), row=0)
    assert after.lengths.tolist() == [LENGTH - 2, LENGTH]
    assert after.overflowed.tolist() == [True, False]


def test_chunk_that_overflows_under_jit_writes_nothing_and_flags_it(layer):
    _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), [55, 20], 64)

    out, after = layer.prefill(cache, *layer.slice(20, 7), num_tokens=np.array([7, 7]))

    assert not out[0].any()
    layer.agree(out[1], np.s_[1, 20:27])
    assert_row_kept(cache, after._replace(overflowed=cache.overflowed), row=0)
    assert after.overflowed.tolist() == [True, False]


@pytest.mark.parametrize("step", ["prefill", "decode_step"])
def test_numbers_of_tokens_out_of_range_are_cut_under_jit(layer, step):
    """Numbers above T count as T and negative ones as 0, so nothing is written that was not given."""
    _, cache = layer.prefill_in_chunks(layer.empty(LENGTH), [9, 17], 64)
    most = 7 if step == "prefill" else 4
    step, operands = getattr(layer, step), layer.slice([9, 17], most)

    out, after = step(cache, *operands, num_tokens=np.array([99, -5]))
    expected, expected_after = step(cache, *operands, num_tokens=np.array([most, 0]))

    assert (out == expected).all()
    for found, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert after.lengths.tolist() == [9 + most, 17]
    assert not after.overflowed.any()


def test_capacity_shorter_than_a_compression_block(layer):
    """No block can ever become complete: the compressed arrays are empty."""
    cache = layer.empty(3)
    assert cache.key_cmp.shape[1] == 0

    for t in range(3):
        out, cache = layer.decode_step(cache, *layer.slice(t, 1))
        layer.agree(out, np.s_[:, t : t + 1])


def test_a_cache_of_numpy_arrays(layer):
    """As one that was stored and read again. It is no argument of the program, and is updated all the same.

    XLA may fold constants, so the compressor may round differently; its keys lie in -1 .. 1.
    """
    held = jax.tree.map(np.asarray, layer.filled([9, 12], LENGTH))
    operands = layer.slice([9, 12], 1)
    _, expected = layer.decode_step(held, *operands)

    after = jit(lambda: decode_step(held, *operands, config=SMALL).cache)()

    for written, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(written, wanted, rtol=0, atol=8 * np.finfo(np.float32).eps)


def test_paper_configuration():
    """With the defaults, past the window and the selected blocks: prompt chunks, with steps after each."""
    sizes = dict(batch=1, length=1100, num_heads=2, num_kv_heads=1, dtype=np.float64)
    layer, found, done = Layer.make(NSAConfig(), seed=1, **sizes), [], 0
    with jax.enable_x64(True):
        cache = layer.empty(1100)
        for first, steps in ((30, 2), (511, 3), (1098, 2)):
            real = first - done
            out, cache = layer.prefill(cache, *layer.slice(done, 600), num_tokens=np.array([real]))
            found.append(out[:, :real])
            for t in range(first, first + steps):
                out, cache = layer.decode_step(cache, *layer.slice(t, 1))
                found.append(out)
            done = first + steps
        np.testing.assert_allclose(np.concatenate(found, axis=1), layer.full, rtol=0, atol=1e-12)


def test_bfloat16_within_the_budget_of_bfloat16():
    """A prompt is within it by test_parity."""
    layer = Layer.make(length=LENGTH, dtype=jnp.bfloat16)
    cache = layer.empty(LENGTH)
    for start in range(0, 32, 4):
        out, cache = layer.decode_step(cache, *layer.slice(start, 4))
        layer.agree(out, np.s_[:, start : start + 4])


def assert_row_kept(before, after, row):
    for field, old in before._asdict().items():
        assert old is None or np.array_equal(*(np.asarray(x)[row] for x in (old, getattr(after, field)))), (
            field
        )
