"""How many keys a decode step reads: the counts of its masks against figures and loops, not formulas."""

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL, Layer, jit
from cases import Case

from nsa_jax import attention
from nsa_jax.cache import count_reads, expected_reads
from nsa_jax.config import NSAConfig

PAPER = NSAConfig()
DESIGN_FIGURES = {576: 1123, 1088: 1603, 2112: 1667, 4160: 1795}
LENGTHS = (33, 100, 577, 1100, *DESIGN_FIGURES)


def counted(length, config):
    """Keys that the last of `length` tokens sees in each branch, counted one by one."""
    seen = brute_force.sight(Case(name="row", config=config, num_keys=length), 0, length - 1)
    # The query's own block is always selected. All others lie wholly in the past, so any of them will do.
    *others, own = seen.blocks
    return len(seen.compressed), len(sum(others[: config.num_selected_blocks - 1], own)), len(seen.window)


@pytest.fixture(scope="module")
def reads():
    """Reads of a step of 2 tokens with the paper's config; rows end at LENGTHS, and one is finished."""
    rows = len(LENGTHS) + 1
    layer = Layer.make(PAPER, batch=rows, length=2, num_heads=2, num_kv_heads=1)
    after = layer.filled([*LENGTHS, 898], max(LENGTHS))
    counts = np.array([2] * len(LENGTHS) + [0], np.int32)
    found = jit(count_reads, static_argnames="config")(after, layer.query, config=PAPER, num_tokens=counts)
    return jax.tree.map(np.asarray, found)  # NumPy's slices: JAX would compile each


def test_counts_equal_brute_force(reads):
    for row, length in enumerate(LENGTHS):
        for t, so_far in enumerate((length - 1, length)):
            assert tuple(int(branch[row, t, 0]) for branch in reads) == counted(so_far, PAPER), (length, t)


@pytest.mark.parametrize("length", DESIGN_FIGURES)
def test_totals_equal_the_figures_of_the_design(reads, length):
    total = sum(int(branch[LENGTHS.index(length), 1, 0]) for branch in reads)

    assert total == DESIGN_FIGURES[length]


def test_finished_row_reads_nothing(reads):
    assert not any(branch[-1].any() for branch in reads)


def test_a_prompt_is_counted_like_its_tokens_one_by_one():
    layer = Layer.make(length=40)
    after = layer.filled([40, 40], 48)

    found = jit(lambda *step: count_reads(*step, config=SMALL))(after, layer.query)

    expected = np.array([counted(t + 1, SMALL) for t in range(40)])
    for branch, numbers in zip(found, expected.T, strict=True):
        np.testing.assert_array_equal(branch, np.broadcast_to(numbers[:, None], (2, 40, 2)))


def test_counts_follow_the_gather_and_not_a_formula(monkeypatch):
    """Where only one block is selected, the tokens of one block are reported."""
    select, layer = attention.select_blocks, Layer.make(length=38)

    def first_only(*args, **kwargs):
        return jnp.full_like(select(*args, **kwargs), -1).at[..., 0].set(0)

    monkeypatch.setattr(attention, "select_blocks", first_only)
    query, after = layer.slice(37, 1)[0], layer.filled([38, 38], 64)
    reads = jax.tree.map(np.asarray, jit(lambda *step: count_reads(*step, config=SMALL))(after, query))

    assert (reads.slc == layer.config.selection_block_size).all()
    assert (reads.win == layer.config.window_size).all()
    assert (reads.cmp == 18).all()  # blocks that end at or before token 37: (38 - 4) // 2 + 1


def test_expected_reads_is_the_formula_of_the_paper():
    """The formula counts 16 blocks where only 9 exist, so it is reported separately."""
    assert expected_reads(576, PAPER) == 1571
    assert expected_reads(31, PAPER) == 0 + 1024 + 31
    assert expected_reads(np.uint8(31), PAPER) == 0 + 1024 + 31
    assert [expected_reads(length, PAPER) for length in (1088, 2112, 4160)] == [1603, 1667, 1795]
    assert all(expected_reads(length, PAPER) >= sum(counted(length, PAPER)) for length in LENGTHS)
