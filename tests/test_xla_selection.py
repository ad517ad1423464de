"""Which blocks win: exact ties, log-sum-exps that are passed in, and what a selection looks like."""

import functools

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, PACKED_ROWS, PLAIN
from programs import by_brute_force, cached, disagreements, evaluate, in_tiles

from nsa_jax import attention
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.xla.sizes import Sizes


def equal_keys(case, key):
    """Operands whose compressed keys are all `key`, so that all blocks of one overlap tie."""
    operands = case.draw()
    return operands._replace(key_cmp=np.broadcast_to(key, operands.key_cmp.shape).copy())


@pytest.mark.parametrize("key", ["zero", "small_integers", "any_floats"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties_go_to_the_lower_block(dtype, key):
    rng = np.random.default_rng(0)
    value = {"zero": 0, "small_integers": rng.integers(-3, 4, 8), "any_floats": rng.standard_normal(8)}[key]
    operands = equal_keys(PLAIN, value)
    expected = brute_force.evaluate(PLAIN, operands)["blocks"]
    late = PLAIN.query_positions >= 40

    # Blocks 0 (initial) and the two local ones are forced; of the others, all alike, the first must win.
    assert (expected[late][..., 1] == 1).all()
    for module in ("reference", "xla") if dtype == "float64" else ("xla",):
        assert evaluate(module, PLAIN, dtype, operands=operands)["blocks"].tolist() == expected.tolist()


def test_ties_of_packed_rows_go_to_the_lower_block_of_their_sequence():
    operands = equal_keys(PACKED_ROWS, 1)
    expected = brute_force.evaluate(PACKED_ROWS, operands)["blocks"]
    for module in ("reference", "xla"):
        found = evaluate(module, PACKED_ROWS, operands=operands)["blocks"]
        assert found.tolist() == expected.tolist()


def test_ties_among_many_blocks_do_not_depend_on_where_a_tile_ends():
    """Long enough that products and exponentials run in vectors with a remainder."""
    config = NSAConfig(num_selected_blocks=8)
    rng = np.random.default_rng(1)
    query = rng.standard_normal((1, 9, 4, 64)).astype(np.float32)
    key = np.broadcast_to(rng.standard_normal(64).astype(np.float32), (1, 187, 2, 64))
    positions = np.array([[2999, 2990, 2943, 1536, 1535, 1500, 1022, 600, 63]], np.int32)
    settings = dict(config=config, segment_ids=None, scale=None, implementation="xla")
    default_tiles, odd_tiles = (
        jax.jit(functools.partial(in_tiles(sizes).select_blocks, **settings))
        for sizes in (Sizes(), Sizes(query_chunk=7, key_tile=5))
    )
    found = np.asarray(default_tiles(query, key, query_positions=positions))
    expected = [sorted({0, *range(1, 6), p // 64 - 1, p // 64} - {-1}) for p in positions[0].tolist()]

    for t, blocks in enumerate(expected):
        kept = blocks if len(blocks) == 8 else [j for j in range(8) if j * 64 <= positions[0, t]]
        assert found[0, t].tolist() == [kept + [-1] * (8 - len(kept))] * 2
    assert found.tolist() == odd_tiles(query, key, query_positions=positions).tolist()


def test_selection_is_the_same_with_the_log_sum_exp_handed_in():
    case = PACKED_ROWS
    operands = case.draw()
    with jax.enable_x64(True):
        arguments = dict(query_positions=case.query_positions, segment_ids=case.segment_ids)
        select = jax.jit(functools.partial(attention.select_blocks, config=case.config))
        lse = jnp.asarray(cached("reference", case.name)["lse_cmp"])
        found = select(operands.query, operands.key_cmp, lse_cmp=lse, **arguments)

    assert found.tolist() == cached("xla", case.name)["blocks"].tolist()


def test_one_head_can_decide_for_all_heads_of_its_kv_head():
    """Importance adds the probabilities of the heads; it is not that of their mean query."""
    case = PLAIN
    operands = case.draw()
    operands.query[:, :, 0] *= 40  # certain of one block; head 1 of the same KV head stays undecided
    expected = brute_force.evaluate(case, operands)["blocks"]

    assert evaluate("xla", case, operands=operands)["blocks"].tolist() == expected.tolist()
    assert (expected[:, :, 0] != cached("xla", "plain")["blocks"][:, :, 0]).any()


@pytest.mark.parametrize("name", ["plain", "packed_rows", "everything_covered", "last_queries_of_the_row"])
def test_blocks_said_twice_count_once_wherever_they_stand(name):
    """In outputs and gradients, whether the implementation uses lists of blocks or masks."""
    case, blocks = BY_NAME[name], by_brute_force(name)["blocks"].copy()
    blocks[..., 2] = blocks[..., 0]
    twice = np.concatenate([blocks[..., 1:], blocks[..., :1]], axis=-1)  # not ascending either
    once = np.where(np.arange(blocks.shape[-1]) == 2, -1, blocks)

    for module in ("xla", "reference") if name == "plain" else ("xla",):
        found, expected = (evaluate(module, case, block_indices=x) for x in (twice, once))
        assert disagreements(found, expected) == {}, module


@pytest.mark.parametrize("name", ["plain", "everything_covered"])
def test_blocks_that_do_not_exist_are_none(name):
    """Bug: their first token did not fit into 32 bits, and was one that exists."""
    case, blocks = BY_NAME[name], by_brute_force(name)["blocks"].copy()
    blocks[..., 2] = -1
    beyond = np.where(np.arange(blocks.shape[-1]) == 2, 2**32 // case.config.selection_block_size, blocks)

    found = evaluate("xla", case, block_indices=beyond)

    assert disagreements(found, evaluate("xla", case, block_indices=blocks)) == {}
