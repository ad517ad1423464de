"""The oracle against brute-force loops and closed forms, in float64."""

import functools
import math

import brute_force
import jax
import numpy as np
import pytest
from cases import BY_NAME, PACKED_ROWS, PLAIN
from programs import BRANCHES, by_brute_force, cached, disagreements, evaluate, importance

from nsa_jax import layout, reference

every_case = pytest.mark.parametrize("name", BY_NAME)


@every_case
def test_outputs_and_selection_equal_the_loops(name):
    found, expected = cached("reference", name), by_brute_force(name)

    assert found["blocks"].tolist() == expected["blocks"].tolist()
    assert disagreements(found, expected) == {}


@pytest.mark.parametrize(
    "name",
    ["plain", "packed_rows_queried_anywhere", "one_head_per_kv_head_odd_dims"],
)
def test_importance_equals_the_loops(name):
    case, expected = BY_NAME[name], by_brute_force(name)["importance"]
    found = importance(case, case.draw())
    blocks = min(found.shape[-1], expected.shape[-1])

    assert np.abs(found[..., :blocks] - expected[..., :blocks]).max() < 1e-12
    assert not found[..., blocks:].any()
    assert not expected[..., blocks:].any()


def test_importance_is_the_probability_times_the_strides_of_a_block():
    """A complete block counts each of its strides once for each head, wherever selection blocks are cut."""
    case = PLAIN
    scores = importance(case, case.draw())
    heads = case.num_heads // case.num_kv_heads
    strides = case.config.compression_block_size // case.config.compression_stride
    sees_a_block = case.query_positions[:, :, None] >= case.config.compression_block_size - 1

    assert np.abs(scores.sum(-1) - np.where(sees_a_block, heads * strides, 0)).max() < 1e-12


def test_cases_leave_blocks_out():
    """If all candidates fit, any importance selects the same blocks; so in these cases some do not fit."""
    for name in ("plain", "packed_rows", "window_of_one_many_forced", "adjoining_blocks_dims_of_one"):
        case, blocks = BY_NAME[name], by_brute_force(name)["blocks"]
        full = (blocks >= 0).all(-1)
        left_out = blocks.max(-1) >= case.config.num_selected_blocks

        assert (full & left_out).sum() >= 40, name
        assert len({tuple(row) for row in blocks[full & left_out].tolist()}) >= 15, name


def test_equal_keys_average_the_visible_values():
    case = PLAIN
    config, operands = case.config, case.draw()
    equal = operands._replace(**{f"key_{x}": np.ones_like(getattr(operands, f"key_{x}")) for x in BRANCHES})
    found = evaluate("reference", case, operands=equal)
    logit = operands.query.sum(-1) / math.sqrt(case.key_dim)
    value = np.repeat(operands.value_win, case.num_heads // case.num_kv_heads, axis=2)
    for t in range(case.num_keys):
        window = value[:, max(0, t - config.window_size + 1) : t + 1]
        complete = max((t + 1 - config.compression_block_size) // config.compression_stride + 1, 0)

        assert np.abs(found["out_win"][:, t] - window.mean(1)).max() < 1e-14
        assert np.abs(found["lse_win"][:, t] - logit[:, t] - math.log(window.shape[1])).max() < 1e-14
        expected = logit[:, t] + (math.log(complete) if complete else -math.inf)
        assert np.allclose(found["lse_cmp"][:, t], expected, rtol=0, atol=1e-14)


def test_one_far_larger_logit_takes_all():
    """It is far beyond the range of exp, so a softmax that does not subtract the maximum gives NaN."""
    case = PLAIN
    operands = case.draw()
    operands.key_win[:, 40] = 1e4 * operands.query[:, 45, :: case.num_heads // case.num_kv_heads]
    found = evaluate("reference", case, operands=operands)

    assert np.isfinite(found["out_win"]).all()
    heads = slice(None, None, case.num_heads // case.num_kv_heads)
    assert np.abs(found["out_win"][:, 45, heads] - operands.value_win[:, 40]).max() < 1e-12
    assert disagreements(found, brute_force.evaluate(case, operands), only=("out_win", "lse_win")) == {}


def test_selection_that_repeats_forgets_or_runs_ahead_attends_each_past_token_once():
    """The oracle takes block indices that break the rules of `nsa_jax.attention`."""
    case = PLAIN
    blocks = by_brute_force("plain")["blocks"].copy()
    blocks[:, 30:, :, 1] = blocks[:, 30:, :, 0]
    blocks[:, 40:, :, 2] = 9  # begins at 54
    found = evaluate("reference", case, block_indices=blocks)
    unique = np.full_like(blocks, -1)
    for index in np.ndindex(blocks.shape[:3]):
        kept = sorted({j for j in blocks[index].tolist() if j >= 0})
        unique[(*index, slice(len(kept)))] = kept

    assert (
        disagreements(found, brute_force.evaluate(case, case.draw(), unique), only=("out_slc", "lse_slc"))
        == {}
    )


def test_a_position_that_the_row_does_not_have_is_padding():
    """Its compressed keys alone could be those of a longer row."""
    query, *compressed, key_slc, value_slc, key_win, value_win, gates = PLAIN.draw()
    length = layout.longest_length(compressed[0].shape[1], PLAIN.config) - 1
    in_row = [x[:, :length] for x in (key_slc, value_slc, key_win, value_win)]

    attend = jax.jit(functools.partial(reference.native_sparse_attention, config=PLAIN.config))
    out = attend(
        query, *compressed, *in_row, gates, query_positions=np.full(query.shape[:2], length, np.int32)
    )

    assert not np.any(out)


def test_padding_keys_get_no_gradient():
    found, padding = cached("reference", PACKED_ROWS.name), PACKED_ROWS.segment_ids == 0
    for name in ("d_key_slc", "d_value_slc", "d_key_win", "d_value_win"):
        assert not found[name][padding].any()
        assert found[name][~padding].any()
