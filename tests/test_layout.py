"""Index arithmetic against loops over the tokens of a row."""

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADJOINING, CASES, MANY_FORCED, ONLY_FORCED, OVERLAPPING, Case

from nsa_jax import layout
from nsa_jax.config import NSAConfig
from nsa_jax.layout import FirstKeys, Index, Run, Runs

CONFIGS = {
    "paper": NSAConfig(),
    "overlapping": OVERLAPPING,
    "adjoining": ADJOINING,
    "many_forced": MANY_FORCED,
    "only_forced": ONLY_FORCED,
    "all_ones": NSAConfig(
        compression_block_size=1, compression_stride=1, selection_block_size=1, num_selected_blocks=3
    ),
    "stride_of_a_quarter": NSAConfig(
        compression_block_size=32, compression_stride=8, selection_block_size=40
    ),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def random_rows(config, seed):
    """25 rows of runs of random lengths, a third of them padding, ids in no order."""
    rng, length, rows = np.random.default_rng(seed), 70, []
    for _ in range(25):
        ids, runs, left = rng.permutation(np.arange(1, 1 + length)).tolist(), [], length
        while left:
            tokens = min(int(rng.geometric(1 / 12)), left)
            runs.append((0 if rng.random() < 1 / 3 else ids.pop(), tokens))
            left -= tokens
        rows.append(tuple(runs))
    return Case(name="random", config=config, batch=len(rows), num_keys=length, runs=tuple(rows))


@every_config
def test_compression_blocks_are_the_complete_ones(config):
    size, stride = config.compression_block_size, config.compression_stride
    for length in range(4 * size):
        complete = [first for first in range(0, length, stride) if first + size <= length]

        assert layout.num_compression_blocks(length, config) == len(complete)
        assert isinstance(layout.num_compression_blocks(length, config), int)
    lengths = np.arange(128)  # of one shape, for which the operations are compiled once
    expected = [layout.num_compression_blocks(int(length), config) for length in lengths]
    assert layout.num_compression_blocks(jnp.asarray(lengths), config).tolist() == expected


@every_config
def test_selection_blocks_cover_every_token(config):
    for length in range(4 * config.selection_block_size):
        blocks = {token // config.selection_block_size for token in range(length)}

        assert layout.num_selection_blocks(length, config) == len(blocks)


@every_config
def test_most_selection_blocks_is_that_of_the_longest_sequence_with_so_many_compressed(config):
    most = {}
    for length in range(1, 6 * config.selection_block_size):
        compressed = layout.num_compression_blocks(length, config)
        most[compressed] = max(most.get(compressed, 0), layout.num_selection_blocks(length, config))
    del most[max(most)]  # longer sequences may have as many

    assert {c: max(layout.max_selection_blocks(c, config), 1) for c in most} == most


@every_config
def test_overlap_weights_count_shared_tokens_in_strides(config):
    ratio = config.selection_block_size // config.compression_stride
    weights = dict(layout.overlap_weights(config))
    for block in range(4):
        for compressed in range(5 * ratio):
            shared = brute_force.overlap(config, compressed, block)

            assert weights.get(compressed - block * ratio, 0) == shared


def test_overlap_weights_of_the_paper():
    assert layout.overlap_weights(NSAConfig()) == ((-1, 1), (0, 2), (1, 2), (2, 2), (3, 1))


@every_config
def test_equation_9_as_printed_is_ours_if_its_indices_count_from_one(config):
    """With indices from 0, the printed sum is too early by a selection block less one stride."""
    ratio = config.selection_block_size // config.compression_stride
    overlap = config.compression_block_size // config.compression_stride

    def printed(j):
        indices = [ratio * j - m - n for m in range(ratio) for n in range(overlap)]
        return {i: indices.count(i) for i in indices}

    def ours(j):
        return {ratio * j + offset: weight for offset, weight in layout.overlap_weights(config)}

    for j in range(4):
        assert printed(j + 1) == {i + 1: weight for i, weight in ours(j).items()}
        assert printed(j) == {i - (ratio - 1): weight for i, weight in ours(j).items()}


@pytest.mark.parametrize("case", [case for case in CASES if case.runs], ids=lambda case: case.name)
def test_sequences_of_packed_rows(case):
    starts = np.asarray(layout.sequence_starts(case.segment_ids))
    positions = np.asarray(layout.sequence_positions(case.segment_ids))
    for row in range(case.batch):
        for tokens in brute_force.sequences(case, row):
            assert starts[row, tokens].tolist() == [tokens[0]] * len(tokens)
            assert positions[row, tokens].tolist() == list(range(len(tokens)))


def place(case, **changes):
    settings = dict(
        batch=case.batch,
        num_queries=case.query_positions.shape[1],
        num_keys=case.num_keys,
        query_positions=jnp.asarray(case.query_positions),
        segment_ids=case.segment_ids,
    )
    return layout.place(case.config, **settings | changes)


def ranges(placed, num_keys, num_compressed):
    """First and one-past-last key of window and compressed branch, [B, T, 2] each."""
    found = placed.window_range(num_keys), placed.compression_range(num_compressed)
    return tuple(np.stack(limits, -1) for limits in found)


@pytest.mark.parametrize("config", [OVERLAPPING, ADJOINING, MANY_FORCED], ids=["overlap", "adjoin", "forced"])
def test_queries_of_random_packed_rows_see_what_the_loops_say(config):
    case = random_rows(config, seed=0)

    @jax.jit
    def see():
        placed, num_keys = place(case), case.num_keys
        limits = placed.window_range(num_keys), placed.compression_range(case.num_compressed)
        return placed.position, placed.selection_start(), placed.selection_end(num_keys), limits

    positions, start, end, limits = jax.tree.map(np.asarray, see())
    windows, compressed = (np.stack(each, -1) for each in limits)
    for row, position in np.ndindex(case.batch, case.num_keys):
        seen = brute_force.sight(case, row, position)

        assert list(range(*windows[row, position])) == seen.window
        assert list(range(*compressed[row, position])) == seen.compressed
        assert (positions[row, position] == -1) == (not seen.window)
        assert end[row, position] == (position + 1 if seen.window else 0)
        assert not seen.window or position - start[row, position] == positions[row, position]


@pytest.mark.parametrize("config", [OVERLAPPING, ADJOINING, MANY_FORCED], ids=["overlap", "adjoin", "forced"])
def test_compression_blocks_of_random_packed_rows_lie_in_sequence_order(config):
    case = random_rows(config, seed=1)
    size, stride = config.compression_block_size, config.compression_stride
    find = jax.jit(layout.compression_block_starts, static_argnums=1)
    starts, exists = map(np.asarray, find(case.segment_ids, config))
    for row in range(case.batch):
        expected = [
            tokens[first]
            for tokens in brute_force.sequences(case, row)
            for first in range(0, len(tokens) - size + 1, stride)
        ]
        unused = case.num_compressed - len(expected)

        assert starts[row].tolist() == expected + [0] * unused
        assert exists[row].tolist() == [True] * len(expected) + [False] * unused


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32"])
def test_ids_may_have_any_integer_dtype(dtype):
    ids = np.array([[0, 0, 255, 255, 1, 0, 7, 7, 7]], dtype)
    positions = np.arange(9, dtype=np.int32)[None]

    @jax.jit
    def find(ids):
        where = dict(query_positions=positions, segment_ids=ids)
        placed = layout.place(OVERLAPPING, batch=1, num_queries=9, num_keys=9, **where)
        return layout.sequence_starts(ids), placed.position

    starts, position = find(ids)
    assert starts.tolist() == [[0, 0, 2, 2, 4, 5, 6, 6, 6]]
    assert position.tolist() == [[-1, -1, 0, 1, 0, -1, 0, 1, 2]]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_padding_and_positions_that_the_row_does_not_have_see_nothing(packed):
    positions = jnp.asarray([[-1, -7, 19, 20, 2**31 - 1]])
    ids = np.ones((1, 20), np.int32) if packed else None
    placed = layout.place(
        OVERLAPPING, batch=1, num_queries=5, num_keys=20, query_positions=positions, segment_ids=ids
    )

    assert placed.position.tolist() == [[-1, -1, 19, -1, -1]]
    assert placed.selection_end(20).tolist() == [[0, 0, 20, 0, 0]]
    for limits in ranges(placed, 20, 9):
        assert (limits[..., 0] == limits[..., 1]).tolist() == [[True, True, False, True, True]]


def as_positions(runs, batch):
    return np.asarray(layout.positions_of(runs, batch))


def test_default_positions_are_the_last_of_the_row():
    assert as_positions(layout.default_runs(3, 10), 2).tolist() == [[7, 8, 9]] * 2
    assert as_positions(layout.default_runs(4, 4), 1).tolist() == [[0, 1, 2, 3]]


RUNS = {
    "one": Runs((Run(7, 5),)),
    "all": Runs((Run(30, 0),)),
    "traced": Runs((Run(7, jnp.int32(5)),)),
    "ragged": Runs((Run(7, jnp.asarray([0, 23])),)),
    "two": Runs((Run(4, 6), Run(3, 21))),
    "two ragged": Runs((Run(4, jnp.asarray([4, 0])), Run(3, jnp.int32(20))), divisor=4),
    "some real": Runs((Run(7, jnp.asarray([3, 9])),), num_queries=jnp.asarray([0, 4])),
    "some of two real": Runs((Run(4, 6), Run(3, 20)), num_queries=jnp.asarray([2, 6])),
    "beyond the row": Runs((Run(7, 27),)),
    "before the row": Runs((Run(7, -3),)),
    "ragged beyond": Runs((Run(7, jnp.asarray([28, -2])),), num_queries=jnp.asarray([7, 6])),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_runs_are_the_positions_that_they_stand_for(runs, packed):
    positions = as_positions(runs, 2)
    ids = np.repeat([[3, 1], [4, 0]], 15, axis=1) if packed else None
    settings = dict(batch=2, num_queries=positions.shape[1], num_keys=30, segment_ids=ids)
    by_runs = layout.place(OVERLAPPING, query_positions=runs, **settings)
    by_array = layout.place(OVERLAPPING, query_positions=jnp.asarray(positions), **settings)

    for ours, theirs in zip(ranges(by_runs, 30, 14), ranges(by_array, 30, 14), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert by_runs.position.tolist() == by_array.position.tolist()
    assert by_array.run_lengths == ()
    assert by_runs.run_lengths == tuple(run.length for run in runs.runs)
    before = 0
    for i, run in enumerate(runs.runs):
        firsts = np.broadcast_to(run.first, 2)
        assert by_runs.run_firsts[i].of_rows(2).tolist() == firsts.tolist()
        within = np.arange(run.length)
        real = (positions[:, before : before + run.length] >= 0) | (firsts[:, None] + within < 0)
        real &= firsts[:, None] + within < 30
        counts = real.sum(axis=1) if by_runs.run_queries is not None else np.full(2, run.length)
        assert counts.tolist() == real.sum(axis=1).tolist(), run
        if by_runs.run_queries is not None:
            assert by_runs.run_queries[:, i].tolist() == counts.tolist()
        before += run.length


def test_what_is_known_of_the_queries_while_tracing():
    jax.eval_shape(assert_what_is_known)


def assert_what_is_known():
    def place(query_positions=None, num_queries=8, segment_ids=None, num_keys=32):
        return layout.place(
            NSAConfig(selection_block_size=16, compression_block_size=16), batch=1, num_queries=num_queries,
            num_keys=num_keys, query_positions=query_positions, segment_ids=segment_ids,
        )  # fmt: skip

    one = jnp.ones((1, 32), jnp.int32)
    assert place().first_position == 24  # T < S
    assert place(num_queries=32).first_position == 0
    assert place(segment_ids=one).first_position is None  # packed rows: the sequence may begin anywhere
    assert place(segment_ids=one).run_firsts[0].known == 24
    assert place(jnp.arange(8, dtype=jnp.int32)[None]).first_position is None
    assert place(Runs((Run(8, jnp.int32(4)),))).first_position is None
    assert place(Runs((Run(4, 0), Run(4, 8)))).first_position is None
    assert place(Runs((Run(8, 0),), num_queries=jnp.asarray([3]))).first_position is None
    assert place(Runs((Run(8, 28),))).first_position is None  # half of the queries are beyond the row
    assert place(Runs((Run(8, 4),))).first_position == 4
    assert place(Runs((Run(8, np.int64(4)),))).first_position == 4

    def tokens(*arguments, **more):  # of the largest tile, of 1, 2, 4 .. 64, that lies in one block
        placed = place(*arguments, **more)
        return max((2**i for i in range(7) if placed.tile_in_one_block(2**i)), default=0)

    assert tokens() == 8
    assert tokens(num_queries=32) == 16  # a block
    assert tokens(segment_ids=one) == 0
    assert tokens(jnp.arange(8, dtype=jnp.int32)[None]) == 0
    assert tokens(Runs((Run(8, 5),))) == 1
    assert tokens(Runs((Run(8, jnp.int32(4)),))) == 1
    assert tokens(Runs((Run(8, jnp.int32(4)),), divisor=4)) == 4
    assert tokens(Runs((Run(4, 8), Run(4, 16)))) == 4  # the second run begins with the fifth query
    assert tokens(Runs((Run(4, jnp.int32(8)), Run(4, jnp.int32(16))), divisor=8)) == 4


@pytest.mark.parametrize("first", [0, 9, -5, [3, -4]], ids=str)
def test_arrays_that_hold_a_part_of_the_row(first):
    """Keys that an array does not hold are not seen; the others are found at their place in it."""
    num_keys, num_compressed, held = 30, 14, 11
    first = first if isinstance(first, int) else jnp.asarray(first)
    index = Index(first)
    settings = dict(batch=2, num_queries=num_keys, num_keys=num_keys)
    whole = layout.place(OVERLAPPING, **settings)
    part = layout.place(OVERLAPPING, **settings, first_keys=FirstKeys(cmp=index, slc=index, win=index))
    begins = index.of_rows(2)[:, None, None]

    assert part.first_position == 0
    for ours, all_of_them in zip(
        ranges(part, held, held), ranges(whole, num_keys, num_compressed), strict=True
    ):
        clipped = np.clip(all_of_them - begins, 0, held)
        for b, t in np.ndindex(2, num_keys):
            assert list(range(*ours[b, t])) == list(range(*clipped[b, t]))
    assert (part.selection_start() == whole.sequence_start - begins[..., 0]).all()
    assert (
        part.selection_end(held) == np.clip(whole.selection_end(num_keys) - begins[..., 0], 0, held)
    ).all()


def test_a_placement_keeps_what_it_knows_under_jit_and_vmap():
    placed = layout.place(OVERLAPPING, batch=3, num_queries=4, num_keys=9)
    kept = jax.jit(lambda placed: placed)(placed)

    assert kept.first_position == 5
    assert kept.first_keys == placed.first_keys
    assert jax.tree.structure(kept) == jax.tree.structure(placed)
    assert {x.shape[0] for x in jax.tree.leaves(placed)} == {3}
    ragged = layout.place(
        OVERLAPPING, batch=3, num_queries=4, num_keys=9,
        query_positions=Runs((Run(4, jnp.int32(2)),), num_queries=jnp.asarray([4, 3, 0])),
        first_keys=FirstKeys(win=Index(jnp.int32(-2))),
    )  # fmt: skip
    assert {x.shape[0] for x in jax.tree.leaves(ragged)} == {3}


def test_blocks_said_twice_count_once():
    blocks = jnp.asarray([[[[0, 3, 3, -1]], [[2, 0, 2, 0]]]], jnp.int8)

    found = layout.distinct_blocks(blocks, 4 * OVERLAPPING.selection_block_size, OVERLAPPING)

    assert found.tolist() == [[[[0, 3, -1, -1]], [[2, 0, -1, -1]]]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_blocks_beyond_the_row_are_none(dtype):
    """Bug: the first token of block 2^32 / l' was token 0 in 32 bits, so such a slot attended to block 0."""
    wrapping = 2**32 // OVERLAPPING.selection_block_size
    beyond = wrapping if np.dtype(dtype).itemsize == 4 else 100
    unused = -1 if np.dtype(dtype).kind == "i" else np.iinfo(dtype).max
    blocks = jnp.asarray(np.array([[[[0, beyond, 2, 3, unused]]]], dtype))

    for num_keys, last in (
        (4 * OVERLAPPING.selection_block_size, 3),
        (3 * OVERLAPPING.selection_block_size, -1),
    ):
        found = layout.distinct_blocks(blocks, num_keys, OVERLAPPING)
        assert found.dtype == np.int32
        assert found.tolist() == [[[[0, -1, 2, last, -1]]]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64])
def test_blocks_of_numpy_meet_a_number_of_keys_that_is_a_symbol(dtype):
    """Bug: NumPy cannot compare with such a number, so `jax.export` failed with a TypeError."""
    blocks = np.array([[[[0, 2, 2, 3]], [[1, 3, 100, 0]]]], dtype)
    if dtype is np.int64:  # in 32 bits two of these would be blocks 0 and 2
        blocks[0, 1, 0, 1:] = 2**32, -(2**32) + 2, 100
    (length,) = jax.export.symbolic_shape("length")
    run = jax.jit(lambda key: layout.distinct_blocks(blocks, key.shape[0], OVERLAPPING))
    exported = jax.export.export(run)(jax.ShapeDtypeStruct((length,), jnp.float32))

    for num_blocks in (3, 4):
        key = np.zeros(num_blocks * OVERLAPPING.selection_block_size, np.float32)

        found = exported.call(key)

        last = 3 if num_blocks == 4 else -1
        own = [1, -1, -1, -1] if dtype is np.int64 else [1, last, -1, 0]
        assert found.tolist() == [[[[0, 2, -1, last]], [own]]]
        assert (found == layout.distinct_blocks(blocks, key.size, OVERLAPPING)).all()


@every_config
def test_forced_blocks_are_the_first_and_the_ones_that_end_with_the_query(config):
    for position in range(0, 8 * config.selection_block_size, max(config.selection_block_size // 3, 1)):
        own = position // config.selection_block_size
        forced = {*range(config.num_initial_blocks), *range(own - config.num_local_blocks + 1, own + 1)}
        for block in range(own + 1):  # later ones are no candidates
            assert layout.is_forced(block, position, config) == (block in forced)


def test_runs_keep_what_is_known_of_them_as_an_argument_of_jit():
    runs = Runs((Run(4, 2), Run(3, jnp.int32(9))), divisor=2, num_queries=jnp.asarray([5]))

    seen = []

    @jax.jit
    def positions(runs):
        seen.append(runs)
        return layout.positions_of(runs, 1)

    np.testing.assert_array_equal(positions(runs), [[2, 3, 4, 5, 9, -1, -1]])
    assert [run.length for run in seen[0].runs] == [4, 3]
    assert seen[0].runs[0].first == 2
    assert isinstance(seen[0].runs[1].first, jax.core.Tracer)
    assert seen[0].divisor == 2
    np.testing.assert_array_equal(layout.positions_of(jax.tree.map(lambda x: x, runs), 1), positions(runs))


def test_each_run_has_its_halo_and_then_its_tokens():
    runs = Runs((Run(5, 0), Run(4, 20), Run(3, 40)), halo=7)

    placed = layout.place(OVERLAPPING, batch=1, num_queries=12, num_keys=60, query_positions=runs)

    assert placed.stretches() == (7, 7 + 5 + 7, 7 + 5 + 7 + 4 + 7)
