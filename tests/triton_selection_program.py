"""Block selection of the Triton kernels in the interpreter, against brute force.

Run it as a program: `python tests/triton_selection_program.py [check ...]`.
"""

from triton_interpreter import interpreted  # isort: skip

import dataclasses
import sys
import time
from collections.abc import Iterator

import brute_force
import cases
import jax
import numpy as np

from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import selection
from nsa_jax.kernels.triton.sizes.selection import SelectionSizes
from nsa_jax.layout import place

SMALL = SelectionSizes(tokens=32, columns=32)
ONE_CHUNK_PER_TILE = SMALL._replace(buffer_bytes=1)
STREAMED = SMALL._replace(best_columns=8)
MORE_ROWS = SMALL._replace(column_tiles=2)

# l, d, l': two, one and four strides a compressed key; r = 4, 2, 1, 8 and 3.
PAPER_RATIO = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=7,
    window_size=4,
)
ADJOINING = dataclasses.replace(PAPER_RATIO, compression_stride=4, num_selected_blocks=3)
LONG_KEYS = dataclasses.replace(PAPER_RATIO, compression_block_size=8, num_local_blocks=1)
ONE_KEY = dataclasses.replace(
    PAPER_RATIO, compression_block_size=4, compression_stride=4, selection_block_size=4
)
FINE = dataclasses.replace(PAPER_RATIO, compression_block_size=6, compression_stride=1, num_local_blocks=3)
FREE = dataclasses.replace(PAPER_RATIO, num_initial_blocks=0, num_local_blocks=1)
MANY = dataclasses.replace(PAPER_RATIO, num_selected_blocks=16)
MORE = dataclasses.replace(PAPER_RATIO, num_selected_blocks=32)
FORCED_ONLY = dataclasses.replace(PAPER_RATIO, num_selected_blocks=3)


def _select(case: cases.Case, operands: cases.Operands, *all_sizes: SelectionSizes, lse=None) -> Iterator:
    """For each of the sizes: blocks of the kernels, those by brute force and their scores, `[B, T, K, _]`."""
    query, key = (np.asarray(x, np.float32) for x in (operands.query, operands.key_cmp))
    rounded = operands._replace(query=np.asarray(query, np.float64), key_cmp=np.asarray(key, np.float64))
    expected = brute_force.evaluate(case, rounded)
    lse = np.asarray(expected["lse_cmp"], np.float32) if lse is None else lse

    def choose(query, key, lse, positions, segment_ids, sizes):
        placed = place(
            case.config, batch=case.batch, num_queries=query.shape[1], num_keys=case.num_keys,
            query_positions=positions, segment_ids=segment_ids,
        )  # fmt: skip
        return selection.choose_blocks(query, key, lse, placed, case.key_dim**-0.5, sizes=sizes)

    for sizes in all_sizes:
        with interpreted():
            run = jax.jit(choose, static_argnames="sizes")
            found = np.asarray(run(query, key, lse, case.query_positions, case.segment_ids, sizes=sizes))
        yield found, expected["blocks"], expected["importance"]


def _agree(found, expected, scores, most_swapped: float = 0.02) -> None:
    """Asserts equal choices, except that blocks whose scores are equal up to rounding may be swapped."""
    assert found.shape == expected.shape
    differ = (found != expected).any(-1)
    swapped = 0
    for row in np.argwhere(differ):
        mine, theirs = found[tuple(row)], expected[tuple(row)]
        kept = mine[mine >= 0]
        assert (np.diff(kept) > 0).all() and (mine[kept.size :] == -1).all(), (row, mine, theirs)  # noqa: PT018
        extra, missing = np.setdiff1d(mine, theirs), np.setdiff1d(theirs, mine)
        assert extra.size == missing.size > 0, (row, mine, theirs)
        score = scores[tuple(row)]
        gap = np.abs(np.sort(score[extra]) - np.sort(score[missing])).max()
        assert gap <= 1e-6 * max(score.max(), 1e-30), (row, mine, theirs, gap)
        swapped += 1
    assert swapped <= most_swapped * differ.size, f"{swapped} of {differ.size} rows differ"


def _check(case: cases.Case, *all_sizes: SelectionSizes) -> None:
    for found in _select(case, case.draw(), *all_sizes or (SMALL,)):
        _agree(*found)


def _plain(name: str, config: NSAConfig, **changes) -> cases.Case:
    values = dict(batch=1, num_keys=99, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, config=config)
    return cases.Case(name=name, **(values | changes))


def check_random_scores():
    for name in (
        "PAPER_RATIO", "ADJOINING", "LONG_KEYS", "ONE_KEY", "FINE", "FREE", "MANY", "MORE", "FORCED_ONLY",
    ):  # fmt: skip
        _check(_plain(f"selection of {name}", globals()[name], num_queries=19))


def check_odd_configs_of_the_suite():
    for config in (cases.OVERLAPPING, cases.ADJOINING, cases.MANY_FORCED, cases.ONLY_FORCED):
        _check(_plain(f"selection of {config}", config, num_keys=90, num_queries=19), ONE_CHUNK_PER_TILE)


def check_heads_and_dims():
    for heads, kv_heads, dim in ((1, 1, 16), (2, 2, 32), (6, 1, 48), (32, 2, 16)):
        sizes = dict(num_heads=heads, num_kv_heads=kv_heads, key_dim=dim, num_queries=17)
        _check(_plain("selection heads", FREE, **sizes))


def check_chunks_and_tiles():
    case = _plain("selection chunks", PAPER_RATIO, batch=3, num_heads=2, num_kv_heads=1, num_queries=35)
    two_rows = SMALL._replace(buffer_bytes=2 * 35 * 32 * 4)
    _check(case, ONE_CHUNK_PER_TILE, two_rows, MORE_ROWS._replace(buffer_bytes=1, best_columns=4, tokens=32))
    _check(dataclasses.replace(case, batch=1), STREAMED, MORE_ROWS, SMALL._replace(columns=64))


def check_paper_config():
    rng = np.random.default_rng(3)
    positions = tuple(rng.integers(-1, 5000, 20).tolist()) + (4999, 1024, 1023, 1087, 63, 0)  # noqa: RUF005
    case = cases.Case(
        name="selection paper", config=NSAConfig(), batch=1, num_keys=5000, num_heads=6, num_kv_heads=1,
        key_dim=16, value_dim=16, positions=positions,
    )  # fmt: skip
    _check(case, SelectionSizes(), SelectionSizes(best_columns=32, column_tiles=3, buffer_bytes=1))


def check_packed_rows():
    for config in (cases.OVERLAPPING, ADJOINING):
        config = dataclasses.replace(config, num_selected_blocks=3, num_local_blocks=1)
        case = dataclasses.replace(
            cases.PACKED_ROWS, config=config, name=f"selection packed {config}", key_dim=16, value_dim=16
        )
        _check(dataclasses.replace(case, num_kv_heads=1), ONE_CHUNK_PER_TILE._replace(tokens=64))
        _check(dataclasses.replace(case, positions=cases.BY_NAME["packed_rows_queried_anywhere"].positions))


def check_few_tokens():
    _check(_plain("selection last queries", PAPER_RATIO, num_queries=5))
    _check(_plain("selection one query", PAPER_RATIO, num_queries=1))
    _check(_plain("selection one token", PAPER_RATIO, num_keys=1))
    _check(_plain("selection without compressed keys", PAPER_RATIO, num_keys=3))
    _check(_plain("selection one compressed key", PAPER_RATIO, num_keys=5))


def check_ties():
    """Equal keys: the scores of all whole blocks have the same bits, so the lower block must win."""
    for config, runs in ((PAPER_RATIO, None), (cases.OVERLAPPING, cases.PACKED)):
        config = dataclasses.replace(config, num_selected_blocks=5)
        batch, num_queries = (1, 40) if runs is None else (2, None)
        case = _plain(
            "selection ties",
            config,
            num_keys=75,
            num_queries=num_queries,
            runs=runs,
            batch=batch,
            num_heads=2,
            num_kv_heads=1,
        )
        operands = case.draw()
        # Quarters, so that products are exact: a BLAS may add up the columns of one product in other orders.
        query, keys = (np.round(4 * x) / 4 for x in (operands.query, operands.key_cmp[:1, :1, :1]))
        tied = operands._replace(query=query, key_cmp=np.broadcast_to(keys, operands.key_cmp.shape))
        for found, expected, _ in _select(case, tied, SMALL, STREAMED):
            assert (found == expected).all(), (config, runs)


def check_ties_of_sums():
    """Block 0, free here, and the last whole block hold 7 of 8 parts each, added in different orders.

    Exact where each part is a power of two: keys of 0 of which a query sees 32 or 64. The others' parts are
    rounded, so their sums may differ in the last bit: there a swap of blocks within rounding is allowed.
    """
    config = dataclasses.replace(FREE, num_selected_blocks=5)
    case = _plain("selection ties of sums", config, num_keys=131, num_heads=1, num_kv_heads=1)
    exact = dataclasses.replace(case, positions=(65, 66, 129, 130))
    operands = exact.draw()
    tied = operands._replace(key_cmp=np.zeros_like(operands.key_cmp))
    for found, expected, _ in _select(exact, tied, SMALL, STREAMED, lse=np.zeros((1, 4, 1), np.float32)):
        assert (found == expected).all()  # each part is 1
    rounded = dataclasses.replace(case, positions=tuple(range(56, 91)))
    operands = rounded.draw()
    tied = operands._replace(key_cmp=np.zeros_like(operands.key_cmp))
    (found,) = _select(rounded, tied, SMALL)
    _agree(*found, most_swapped=1.0)


def check_scores_of_zero_are_chosen():
    """One key takes all: the other blocks tie at exactly 0 and the first of them fill the slots."""
    case = _plain("selection zero", PAPER_RATIO, num_heads=2, num_kv_heads=1)
    operands = case.draw()
    operands.query[..., 0] = 100
    operands.key_cmp[..., 0] = -100
    operands.key_cmp[:, 17, :, 0] = 100
    ((found, expected, scores),) = _select(case, operands, SMALL)
    assert (scores[:, -1] == 0).sum() > case.config.num_selected_blocks
    assert (found == expected).all()


def check_not_a_number_is_harmless():
    case = _plain("selection nan", PAPER_RATIO, num_heads=2, num_kv_heads=1)
    operands = case.draw()
    operands.query[:, 70:90] = np.nan
    ((found, _, _),) = _select(case, operands, SMALL)
    highest = (case.query_positions // case.config.selection_block_size)[:, :, None, None]
    assert (found >= -1).all()
    assert (found <= highest).all()


def check_rows_without_a_normaliser():
    """Where lse is -inf nothing counts: ties at 0, the first blocks win."""
    case = _plain("selection empty", PAPER_RATIO, num_queries=3)
    lse = np.full((case.batch, 3, case.num_heads), -np.inf, np.float32)
    ((found, _, _),) = _select(case, case.draw(), SMALL, lse=lse)
    assert found[0, -1, 0].tolist() == [0, 1, 2, 3, 4, 11, 12]


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_") and (len(sys.argv) < 2 or name in sys.argv[1:]):
            begun = time.time()
            check()
            print(f"{name}: ok in {time.time() - begun:.1f} s", flush=True)
