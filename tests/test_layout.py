"""Index arithmetic against loops over the tokens of a row."""

import brute_force
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADJOINING, CASES, MANY_FORCED, ONLY_FORCED, OVERLAPPING, Case

from nsa_jax import layout
from nsa_jax.config import NSAConfig

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
    lengths = np.arange(4 * size)
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
    """With indices from 0, the printed sum lies one selection block less one stride too early."""
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


@pytest.mark.parametrize("config", [OVERLAPPING, ADJOINING, MANY_FORCED], ids=["overlap", "adjoin", "forced"])
def test_queries_of_random_packed_rows_see_what_the_loops_say(config):
    case = random_rows(config, seed=0)
    placed = layout.query_layout(config, case.query_positions, case.segment_ids)
    positions, windows = np.asarray(placed.position), np.stack(placed.window_range(config), -1)
    compressed = np.stack(placed.compression_range(config), -1)
    for row, position in np.ndindex(case.batch, case.num_keys):
        seen = brute_force.sight(case, row, position)

        assert list(range(*windows[row, position])) == seen.window
        assert list(range(*compressed[row, position])) == seen.compressed
        assert (positions[row, position] == -1) == (not seen.window)


@pytest.mark.parametrize("config", [OVERLAPPING, ADJOINING, MANY_FORCED], ids=["overlap", "adjoin", "forced"])
def test_compression_blocks_of_random_packed_rows_lie_in_sequence_order(config):
    case = random_rows(config, seed=1)
    size, stride = config.compression_block_size, config.compression_stride
    starts, exists = (np.asarray(x) for x in layout.compression_block_starts(case.segment_ids, config))
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
    placed = layout.query_layout(OVERLAPPING, positions, ids)

    assert layout.sequence_starts(ids).tolist() == [[0, 0, 2, 2, 4, 5, 6, 6, 6]]
    assert placed.position.tolist() == [[-1, -1, 0, 1, 0, -1, 0, 1, 2]]


def test_padding_queries_have_empty_ranges():
    for ids in (None, np.ones((1, 20), np.int32)):
        placed = layout.query_layout(OVERLAPPING, np.array([[-1, -7, 19]]), ids)

        assert placed.position.tolist() == [[-1, -1, 19]]
        for start, end in (placed.window_range(OVERLAPPING), placed.compression_range(OVERLAPPING)):
            assert (start == end).tolist() == [[True, True, False]]


def test_default_positions_are_the_last_of_the_row():
    assert layout.default_query_positions(2, 3, 10).tolist() == [[7, 8, 9]] * 2
    assert layout.default_query_positions(1, 4, 4).tolist() == [[0, 1, 2, 3]]


@every_config
def test_forced_blocks_are_the_first_and_the_ones_that_end_with_the_query(config):
    for position in range(0, 8 * config.selection_block_size, max(config.selection_block_size // 3, 1)):
        own = position // config.selection_block_size
        forced = {*range(config.num_initial_blocks), *range(own - config.num_local_blocks + 1, own + 1)}
        for block in range(own + 1):  # later ones are no candidates
            assert layout.is_forced(block, position, config) == (block in forced)
