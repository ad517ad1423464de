"""What parity allows and what it does not: error budgets, and selections where they are determined."""

import math

import pytest

torch = pytest.importorskip("torch", reason="parity needs the extra `torch`")

from nsa_jax.config import NSAConfig  # noqa: E402
from parity import blocks, cases, ranges  # noqa: E402
from parity.budget import Row, allowance, distance, farther, judge  # noqa: E402

CONFIG = NSAConfig(
    compression_block_size=2,
    compression_stride=2,
    selection_block_size=2,
    num_selected_blocks=4,
    window_size=3,
)


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("found", "reference", "expected"),
    [
        (wide(1, 2.5), wide(1, 2), 0.5),
        (wide(-math.inf, 1), wide(-math.inf, 1), 0),
        (wide(math.inf, 1), wide(-math.inf, 1), math.inf),
        (wide(0, 1), wide(-math.inf, 1), math.inf),
        (wide(-math.inf, 1), wide(0, 1), math.inf),
        (wide(), wide(), 0),
        (wide(1), wide(1, 1), math.inf),
    ],
)
def test_distance(found, reference, expected):
    assert distance(found, reference) == expected


def test_budget_is_the_formula_of_the_design():
    reference = wide(4, -8, -math.inf)
    same = torch.tensor([4.5, -8, -math.inf], dtype=torch.bfloat16)
    assert allowance(same, reference) == 2 * 0.5 + 8 * 2**-7 * 8
    assert allowance(same, reference, terms=16) == 2 * 0.5 + 8 * 2**-7 * 16
    assert allowance(same, reference, eps=2**-23) == 2 * 0.5 + 8 * 2**-23 * 8


def test_farther_is_elementwise():
    assert farther(wide(1, 5), wide(3, 4), wide(2.5, 4)).tolist() == [1, 5]
    assert farther(wide(math.nan), wide(1), wide(1)).isnan().all()


@pytest.mark.parametrize("error", [math.nan, math.inf, 1.1])
def test_row_fails(error):
    assert not Row("", "", "", error, 1.0).passed


def test_judge_rejects_what_only_looks_near():
    same = reference = wide(1, 2)
    assert judge("", "", "", same, same, reference).passed
    assert "float32 for torch.float64" in judge("", "", "", same.float(), same, reference).note
    assert not judge("", "", "", same.float(), same, reference).passed
    assert not judge("", "", "", same[:1], same, reference).passed
    assert not judge("", "", "", wide(1, math.nan), same, reference).passed


def test_the_mean_error_of_the_selected_branch_in_16_bit_is_bounded():
    """Given an output that is a little off everywhere, within the budget of its largest error."""
    reference = torch.ones(100, dtype=torch.float64)
    same = reference.bfloat16()
    off = same + 2**-7
    rows = [judge("", "", name, off, same, reference) for name in ("slc out", "win out")]

    assert [row.error <= row.budget for row in rows] == [True, True]
    assert [row.mean for row in rows] == [2**-7, 2**-7]
    assert [row.passed for row in rows] == [False, True]
    assert judge("", "", "slc out", off.float(), same.float(), reference).mean_budget == math.inf


# One row of 12 tokens, query at its end: blocks 0 .. 5, forced 0, 4, 5; one more may be chosen.
SEGMENTS = torch.ones((1, 12), dtype=torch.long)
AT_THE_END = torch.tensor([[11]])


def selection(*scores, same=None):
    scores = wide(*scores)[None, None, None]
    return blocks.Selection.of(scores, scores if same is None else same, SEGMENTS, AT_THE_END, CONFIG)


def slots(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)[None, None, None]


def test_gap_is_between_the_last_chosen_and_the_first_rejected():
    scores = wide(9, 1, 4, 3, 9, 9)[None, None, None]
    chosen = slots(0, 2, 4, 5).long()
    assert blocks.score_gap(scores, chosen, SEGMENTS, AT_THE_END, CONFIG).item() == 1
    early = torch.tensor([[7]])
    no_choice = blocks.score_gap(scores, slots(0, 1, 2, 3).long(), SEGMENTS, early, CONFIG)
    assert no_choice.item() == math.inf


def test_close_scores_leave_the_selection_open_and_distant_ones_do_not():
    assert selection(9, 1, 4, 3, 9, 9).determined.all()
    assert not selection(9, 1, 4, 4 - 1e-6, 9, 9).determined.any()


def test_judge_blocks_counts_what_differs_where_it_may_not():
    clear, close = selection(9, 1, 4, 3, 9, 9), selection(9, 1, 4, 4 - 1e-6, 9, 9)
    other = slots(0, 3, 4, 5)
    assert [row.error for row in clear.judge("", "", slots(0, 2, 4, 5))] == [0, 0, 0]
    assert [row.error for row in clear.judge("", "", other)] == [1, 0, 0]
    assert [row.error for row in close.judge("", "", other)] == [0, 0, 1]
    assert [row.passed for row in close.judge("", "", other)] == [True, True, False]
    assert not clear.judge("", "", slots(0, 2, 4))[0].passed


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 4, 2, 5),
        (0, 2, 2, 5),
        (0, 4, 5, -1),
        (-1, 0, 4, 5),
        (1, 2, 4, 5),
        (0, 1, 2, 4),
        (0, 4, 5, 6),
        (0, 2, 5, 99),
        (-2, 2, 4, 5),
    ],
    ids=["unsorted", "twice", "too_few", "front", "no_initial", "no_local", "future", "beyond", "negative"],
)
def test_ill_formed_blocks_fail_even_where_scores_are_close(numbers):
    close = selection(9, 1, 4, 4 - 1e-6, 9, 9)
    assert [row.error for row in close.judge("", "", slots(*numbers))][1] == 1


def test_comparable_blanks_queries_with_an_open_selection():
    both = torch.tensor([[[True, True], [True, False]]])
    chosen = blocks.Selection(torch.zeros(1, 2, 2, 4), both, SEGMENTS, AT_THE_END, CONFIG)
    assert chosen.comparable(torch.ones(1, 2, 3, 1)).flatten().tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("name", ["ranges", "ranges_of_one_row", "ranges_for_all_kv_heads"])
def test_drawn_ranges_mean_the_drawn_blocks(name):
    case = cases.CASES[name]
    drawn, block_indices = ranges.draw_ranges(case)
    drawn = drawn[None] if case.ranges == "TKn2" else drawn
    drawn = drawn[:, :, None] if case.ranges == "BTn2" else drawn
    size = case.config.selection_block_size
    several = 0
    for row, t, head in torch.cartesian_prod(*map(torch.arange, drawn.shape[:3])).tolist():
        tokens = [s for start, end in drawn[row, t, head].tolist() for s in range(start, end)]
        chosen = [block for block in block_indices[row, t, head].tolist() if block >= 0]
        assert sorted(tokens) == [s for s in range(t + 1) if s // size in chosen]
        several += any(end - start > size for start, end in drawn[row, t, head].tolist())
    assert several > 0
