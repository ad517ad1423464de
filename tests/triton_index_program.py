"""Selection by an indexer, and by given scores: the Triton kernels in the interpreter, against loops.

Run it as a program: `python tests/triton_index_program.py [check ...]`.
"""

from triton_interpreter import interpreted  # isort: skip

import dataclasses
import functools
import math
import sys
import time
from unittest import mock

import cases
import index_cases
import jax
import jax.numpy as jnp
import numpy as np
from index_cases import Indexed

from nsa_jax import attention
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import operations, selection
from nsa_jax.kernels.triton.selected import backward_key
from nsa_jax.kernels.triton.selection import chosen_scores
from nsa_jax.kernels.triton.selection.index_scores import flat_if_shared
from nsa_jax.kernels.triton.sizes.selection import IndexSizes, SelectionSizes
from nsa_jax.layout import Quantised, place

SMALL = IndexSizes(32, 32, 4, 2, held_heads=4)
KEYS_HELD = SMALL._replace(held_heads=1)  # of several heads
SMALL_CHUNKS = SMALL._replace(buffer_bytes=1, key_tiles=1)
STREAMED = IndexSizes(16, 16, 4, 2, key_tiles=2, best_columns=4)
FREE = NSAConfig(
    compression_block_size=4, compression_stride=2, selection_block_size=8, num_selected_blocks=5,
    window_size=4, num_initial_blocks=0, num_local_blocks=1,
)  # fmt: skip
FORCED = dataclasses.replace(FREE, num_initial_blocks=1, num_local_blocks=2)
ODD_BLOCKS = dataclasses.replace(FREE, selection_block_size=6)


def _plain(name: str, config: NSAConfig = FREE, **changes) -> cases.Case:
    values = dict(batch=1, num_keys=99, num_queries=19, num_heads=2, num_kv_heads=2, config=config)
    return cases.Case(name=name, **(values | changes))


def _where(case: cases.Case) -> dict:
    ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
    return dict(query_positions=jnp.asarray(case.query_positions), segment_ids=ids)


def _placed(case: cases.Case, query):
    batch, num_queries = query.shape[:2]
    return place(case.config, batch=batch, num_queries=num_queries, num_keys=case.num_keys, **_where(case))


def _select(case: cases.Case, given: Indexed, sizes: IndexSizes) -> np.ndarray:
    arrays = (np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x for x in given)
    scale = given.query.shape[-1] ** -0.5 if case.scale is None else case.scale

    def choose(query, key, weights):
        keys = flat_if_shared(key)
        return selection.choose_by_index(query, keys, weights, _placed(case, query), scale, sizes=sizes)

    with interpreted():
        return np.asarray(jax.jit(choose)(*arrays))


def _check(case: cases.Case, *all_sizes: IndexSizes, **of_index) -> None:
    """Scores of quarters are exact in float32, and many tie: the choice must be that of the loops."""
    given = Indexed(
        *(None if x is None else np.round(4 * x) / 4 for x in index_cases.draw(case, dim=16, **of_index))
    )
    expected = index_cases.by_loops(case, given).blocks
    for sizes in all_sizes or (SMALL,):
        found = _select(case, given, sizes)
        assert (found == expected).all(), (case.name, sizes, np.argwhere((found != expected).any(-1))[:5])


def check_heads_and_weights():
    _check(_plain("one head"), SMALL, STREAMED)
    _check(_plain("three heads", num_kv_heads=3, num_heads=3, config=FORCED), heads=3)
    for heads in (1, 4):
        _check(_plain("weighted", num_kv_heads=1), STREAMED, heads=heads, weighted=True)


def check_keys_of_each_kv_head():
    case = _plain("own keys", FORCED, num_kv_heads=3, num_heads=3, batch=2)
    _check(case, SMALL_CHUNKS, STREAMED, heads=2, shared=False)
    _check(_plain("own keys, weighted"), heads=2, weighted=True, shared=False)
    _check(_plain("own keys, step", num_queries=1, num_keys=397), SMALL, shared=False)
    _check(dataclasses.replace(cases.PACKED_ROWS, config=FREE, name="own keys, packed"), shared=False)


def check_chunks_and_tiles():
    case = _plain("index chunks", FORCED, batch=3, num_queries=35, num_kv_heads=1)
    _check(case, SMALL_CHUNKS, SMALL._replace(buffer_bytes=2 * 35 * 32 * 4))
    _check(dataclasses.replace(case, batch=1, num_kv_heads=3, num_heads=3), SMALL_CHUNKS, STREAMED)


def check_odd_blocks():
    case = _plain("index odd blocks", ODD_BLOCKS)
    _check(case, SMALL_CHUNKS, heads=2)
    drawn = index_cases.draw(case, dim=16)
    negative = Indexed(np.abs(drawn.query), -np.abs(drawn.key), None)  # what pads a block has a product of 0
    assert (_select(case, negative, SMALL) == index_cases.by_loops(case, negative).blocks).all()
    _check(_plain("index one token a block", cases.ADJOINING, num_keys=41))
    _check(_plain("index one large block", dataclasses.replace(FREE, selection_block_size=64), num_keys=500))


def check_negative_scale():
    _check(_plain("index negative", scale=-0.5))
    _check(
        _plain("index negative weighted", scale=-0.25, num_queries=9),
        SMALL,
        KEYS_HELD,
        heads=2,
        weighted=True,
    )


def check_packed_rows():
    for config in (FREE, ODD_BLOCKS):
        config = dataclasses.replace(config, num_selected_blocks=3)
        case = dataclasses.replace(cases.PACKED_ROWS, config=config, name="index packed")
        _check(case, SMALL_CHUNKS)
        anywhere = cases.BY_NAME["packed_rows_queried_anywhere"].positions
        case = dataclasses.replace(case, positions=anywhere)
        _check(case, SMALL, KEYS_HELD, heads=2, weighted=True)


def check_few_queries():
    for queries in (1, 3):
        _check(_plain("index step", FORCED, num_queries=queries, num_keys=397, batch=2), SMALL, STREAMED)
    _check(_plain("index one token", num_keys=1, num_queries=1))
    _check(_plain("index all blocks fit", num_keys=37, num_queries=37))


def check_quantised_keys():
    """Each token's product takes its own scale, in tiles of whole blocks and in padded ones."""
    for case in (_plain("int8 keys", FORCED, num_queries=3, num_keys=397), _plain("int8 odd", ODD_BLOCKS)):
        given = index_cases.draw(case, dim=16, heads=2, shared=case.config is FORCED)
        # Whole numbers up to 127 are kept as they are; the scales are powers of 2, so all is exact.
        key = np.round(16 * given.key)
        key[..., 0] = 127
        powers = 2.0 ** np.random.default_rng(0).integers(-3, 1, (*key.shape[:3], 1))
        given = Indexed(np.round(4 * given.query) / 4, key * powers, None)
        keys = Quantised(jnp.asarray(key, jnp.int8), jnp.asarray(powers[..., 0], jnp.float32))
        expected = index_cases.by_loops(case, given).blocks
        for sizes in (SMALL, KEYS_HELD):
            found = _select(case, given._replace(key=keys), sizes)
            assert (found == expected).all(), (case.name, sizes)


def check_what_is_not_finite_stays():
    """In its own row and KV head, and in the future; the others choose as ever."""
    case = _plain("index nan", batch=2, num_keys=70, num_queries=40)
    for weighted in (False, True):
        given = index_cases.draw(case, heads=2, dim=16, weighted=weighted)
        given = given._replace(weights=-np.abs(given.weights) if weighted else None)
        for sizes in (SMALL, KEYS_HELD):
            _check_not_finite(case, given, sizes)


def _check_not_finite(case: cases.Case, given: Indexed, sizes: IndexSizes) -> None:
    plain = _select(case, given, sizes)
    spoilt = given._replace(query=given.query.copy(), key=given.key.copy())
    spoilt.query[0, 5, 1] = math.nan
    spoilt.query[0, 6, 0] = math.inf
    spoilt.key[1, 50:] = math.nan
    found = _select(case, spoilt, sizes)
    same = np.ones(plain.shape[:3], bool)
    same[0, 5, 1] = same[0, 6, 0] = False
    same[1, 50 - 30 :] = False  # these may see token 50
    assert (found[same] == plain[same]).all()
    rounded = Indexed(*(None if x is None else np.asarray(x, np.float32) for x in spoilt))
    expected = index_cases.by_loops(case, rounded).blocks
    assert (found[~same] == expected[~same]).all()
    if given.weights is not None:
        return
    assert found[0, 5, 1].tolist() == [0, 1, 2, 3, 35 // 8]  # ties and the local block


def check_scores_that_are_given():
    case = _plain("given scores", FORCED, batch=3, num_keys=131, num_queries=23, num_heads=3, num_kv_heads=3)
    rng = case.generator()
    drawn = rng.integers(-3, 4, (3, 23, 3, 17)).astype(np.float32)
    drawn[0] *= np.where(rng.random(drawn[0].shape) < 0.5, 0.0, -0.0)
    drawn[1] = rng.choice([-math.inf, -1e38, 1, math.inf, math.nan], drawn[1].shape)
    expected = index_cases.best_of(case, drawn)
    for sizes in (None, SelectionSizes(buffer_bytes=1, tokens=8, best_columns=4)):
        with interpreted():
            settings = dict(config=case.config, implementation="triton", **_where(case))
            if sizes is None:
                found = attention.top_blocks(jnp.asarray(drawn), **settings)
            else:
                placed = place(case.config, batch=3, num_queries=23, num_keys=136, **_where(case))
                found = jax.jit(functools.partial(selection.choose_best, sizes=sizes))(drawn, placed)
            assert (np.asarray(found) == expected).all(), sizes


def _check_taught(case: cases.Case, sizes: IndexSizes = SMALL, **of_index) -> None:
    """Scores, and gradients for a random cotangent. Products of quarters are exact, and many tie."""
    given = Indexed(
        *(None if x is None else np.round(4 * x) / 4 for x in index_cases.draw(case, dim=16, **of_index))
    )
    _check_scores(case, given, sizes)


def _check_scores(case: cases.Case, given: Indexed, sizes: IndexSizes) -> None:
    arrays = [None if x is None else np.asarray(x, np.float32) for x in given]
    num_blocks = -(-case.num_keys // case.config.selection_block_size)
    shape = (*given.query.shape[:3], num_blocks)
    cotangent = case.generator("index cotangent").standard_normal(shape).astype(np.float32)
    scale = given.query.shape[-1] ** -0.5 if case.scale is None else case.scale

    def score(query, key, weights):
        return operations.block_scores(query, key, weights, None, _placed(case, query), scale)

    @jax.jit
    def scores_and_gradients(cotangent, *arrays):
        scores, pull_back = jax.vjp(score, *arrays)
        return scores, pull_back(cotangent)

    with interpreted(), mock.patch.object(selection, "_index_sizes", return_value=sizes):
        scores, found = scores_and_gradients(cotangent, *arrays)
    rounded = Indexed(*(None if x is None else np.asarray(x, np.float64) for x in arrays))
    expected = index_cases.by_loops(case, rounded, cotangent.astype(np.float64))
    np.testing.assert_allclose(scores, expected.scores, rtol=1e-6, atol=1e-6, err_msg=case.name)
    for ours, right in zip(found, expected.gradients, strict=True):
        if right is not None:
            size = np.abs(right).max()
            np.testing.assert_allclose(ours, right, rtol=0, atol=2e-6 * size, err_msg=case.name)


def check_scores_that_are_taught():
    _check_taught(_plain("taught"))
    _check_taught(_plain("taught heads", ODD_BLOCKS, batch=2, scale=-0.5), STREAMED, heads=3)
    _check_taught(_plain("taught own keys", num_kv_heads=3, num_heads=3, batch=2), heads=2, shared=False)
    _check_taught(_plain("taught weighted own keys"), STREAMED, heads=2, weighted=True, shared=False)
    _check_taught(_plain("taught weighted", num_kv_heads=3, num_heads=3), heads=2, weighted=True)
    packed = dataclasses.replace(cases.PACKED_ROWS, config=FREE, name="taught packed")
    _check_taught(packed)
    anywhere = cases.BY_NAME["packed_rows_queried_anywhere"].positions
    _check_taught(dataclasses.replace(packed, positions=anywhere), STREAMED, heads=2, weighted=True)


def check_scores_that_are_not_finite_have_no_gradient():
    case = _plain("taught nan", batch=2, num_keys=40, num_queries=40)
    given = index_cases.draw(case, heads=2, dim=16)
    given.query[0, 5, 1] = math.nan
    given.query[0, 6, 0, :, 0] = math.inf
    given.key[1, 20] = math.nan
    given.key[1, 25:30] = math.nan
    for sizes in (SMALL, KEYS_HELD):
        _check_scores(case, given, sizes)


def _check_chosen(case: cases.Case, spoil: bool = False, **of_index) -> None:
    """Scores of slots, and gradients; a block has several items, of several tiles."""
    given = index_cases.draw(case, dim=16, **of_index)
    given = Indexed(*(None if x is None else np.round(4 * x) / 4 for x in given))
    if spoil:
        given.query[0, 5, 1] = math.nan
        given.query[0, 7, 0, 1, 2] = math.nan  # the other head scores
        given.query[0, 6, 0, :, 0] = math.inf
        given.key[-1, 20] = math.nan
        given.key[-1, 32:48] = math.nan
        if given.weights is not None:
            given.weights[0, 8, 1, 0] = math.inf
            given.weights[0, 9, 1, 0] = math.nan
    slots = index_cases.slots_of(case, given).blocks
    expected, cotangent, gradients = index_cases.slots_by_loops(case, given, slots)
    settings = dict(config=case.config, scale=case.scale, implementation="triton", **_where(case))

    @jax.jit
    def scores_and_gradients(*arrays):
        def score(query, key, weights):
            known = dict(weights=weights, block_indices=jnp.asarray(slots))
            return attention.block_scores(query, key, **known, **settings)

        scores, pull_back = jax.vjp(score, *arrays)
        return scores, pull_back(jnp.asarray(cotangent, jnp.float32))

    tiles = dict(chosen_score_rows=lambda *_: 16, chosen_gradient_tile=lambda _: (16, 16))
    small = mock.patch.multiple(chosen_scores, ITEM=16, **tiles)
    with interpreted(), small, mock.patch.object(backward_key, "PACKED_NUMBERS", 4):
        found, ours = scores_and_gradients(*(None if x is None else np.asarray(x, np.float32) for x in given))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=case.name)
    for x, right in zip(ours, gradients, strict=True):
        if right is not None:
            np.testing.assert_allclose(x, right, rtol=0, atol=2e-6 * np.abs(right).max(), err_msg=case.name)


def check_scores_of_chosen_blocks():
    config = dataclasses.replace(FREE, selection_block_size=16)
    plain = _plain("chosen", config, num_queries=44)
    _check_chosen(plain)
    own_keys = dict(batch=2, num_heads=3, num_kv_heads=3, num_queries=27, scale=-0.5)
    _check_chosen(dataclasses.replace(plain, name="chosen own keys", **own_keys), heads=3, shared=False)
    _check_chosen(dataclasses.replace(plain, name="chosen weighted"), spoil=True, heads=2, weighted=True)
    _check_chosen(dataclasses.replace(plain, name="chosen nan"), spoil=True, heads=2)
    _check_chosen(dataclasses.replace(plain, name="chosen nothing", scale=0.0), spoil=True, heads=2)
    packed = dataclasses.replace(cases.PACKED_ROWS, config=config, name="chosen packed")
    _check_chosen(packed, heads=2, weighted=True, shared=False)


def check_float16_adds_up_what_is_too_small_for_it():
    """64 queries give the first key 2.5e-8 each, less than half of the smallest number of float16."""
    config = dataclasses.replace(FREE, selection_block_size=16)
    query, key = np.ones((1, 64, 1, 1, 16), np.float16), np.ones((1, 64, 1, 16), np.float16)
    key[0, 0] = 2  # the best of its block
    blocks = np.where(np.arange(5) == 0, 0, -1).astype(np.int32)
    settings = dict(config=config, implementation="triton", scale=0.25)
    settings |= dict(block_indices=jnp.asarray(np.broadcast_to(blocks, (1, 64, 1, 5))))

    def total(key):
        return 1e-7 * attention.block_scores(jnp.asarray(query), key, **settings)[..., 0].sum()

    with interpreted():
        found = jax.jit(jax.grad(total))(key)
    np.testing.assert_allclose(found[0, 0], 64 * 2.5e-8, rtol=0.04)  # half of the smallest number


def check_public():
    """The call from outside, under `vmap` too."""
    case = _plain("index public", batch=2, num_queries=21)
    given = index_cases.draw(case, heads=2, dim=32, weighted=True)
    arrays = [jnp.asarray(x, jnp.float32) for x in given]
    expected = index_cases.by_loops(case, Indexed(*(np.asarray(x, np.float64) for x in arrays))).blocks

    def select(query, key, weights):
        settings = dict(config=case.config, implementation="triton")
        return attention.select_by_index(query, key, weights=weights, **settings)

    with interpreted():
        found = jax.jit(select)(*arrays)
        mapped = jax.jit(jax.vmap(lambda *row: select(*(x[None] for x in row))[0]))(*arrays)
    assert (np.asarray(found) == expected).all()
    assert (np.asarray(mapped) == expected).all()


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_") and (len(sys.argv) < 2 or name in sys.argv[1:]):
            begun = time.time()
            check()
            print(f"{name}: ok in {time.time() - begun:.1f} s", flush=True)
