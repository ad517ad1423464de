"""On a GPU: selection by an indexer and by given scores, by the Triton kernels, against exact scores."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from poisoned import poison_memory

import nsa_jax
from nsa_jax import attention, layout
from nsa_jax.config import NSAConfig

pytestmark = pytest.mark.gpu


class Shape(NamedTuple):
    block: int = 128
    heads: int = 1
    dim: int = 128
    dtype: str = "bfloat16"
    weighted: bool = False
    packed: bool = False
    batch: int = 1
    queries: int = 3000  # the last of the row
    length: int = 3000
    kv_heads: int = 4
    shared: bool = True  # whether all KV heads share an index key
    scale: float | None = None


MSA = Shape()
SHAPES = {
    "MSA": MSA,
    "8k": Shape(64, length=8192, queries=8192),
    "lightning": Shape(64, 4, 32, weighted=True, batch=2),
    "float32": Shape(64, 2, 64, "float32", kv_heads=2),
    "negative scale": Shape(64, 3, 96, "float16", kv_heads=3, scale=-0.1),
    "odd blocks": Shape(48, 2, 64, kv_heads=1),
    "packed": Shape(packed=True, batch=2),
    "packed, many heads": Shape(64, 8, 256, weighted=True, packed=True, batch=2, kv_heads=2),
    "of dense heads": Shape(heads=4, dim=64, kv_heads=8, shared=False),
    "of dense heads, packed": Shape(64, 3, 32, kv_heads=3, packed=True, batch=2, shared=False),
    "step of dense heads": Shape(heads=4, dim=64, kv_heads=8, shared=False, batch=4, queries=1, length=65500),
    **{f"step of {n}": Shape(batch=4, queries=n, length=65536) for n in (1, 3, 8)},
    "step of a lightning indexer": Shape(64, 4, 32, weighted=True, batch=8, queries=1, length=65500),
}


def config_of(shape: Shape) -> NSAConfig:
    return NSAConfig(selection_block_size=shape.block, num_selected_blocks=8)


def draw(shape: Shape, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Query, key and weights."""
    keys = jax.random.split(jax.random.key(seed), 3)
    rows = (shape.batch, shape.queries, shape.kv_heads, shape.heads)
    shapes = (
        (*rows, shape.dim),
        (shape.batch, shape.length, 1 if shape.shared else shape.kv_heads, shape.dim),
        rows,
    )
    drawn = [jax.random.normal(key, x, shape.dtype) for key, x in zip(keys, shapes, strict=True)]
    return *drawn[:2], drawn[2] if shape.weighted else None


def settings(shape: Shape) -> dict:
    ids = None
    if shape.packed:  # three sequences with padding between them
        ends = np.array([shape.length // 5, shape.length // 5 + 37, shape.length * 3 // 4])
        ids = 1 + np.searchsorted(ends, np.arange(shape.length), side="right")
        ids = jnp.asarray(np.tile(np.where(ids == 2, 0, ids), (shape.batch, 1)), jnp.int32)
    return dict(config=config_of(shape), segment_ids=ids, scale=shape.scale)


def select(shape: Shape, *arrays, **more) -> np.ndarray:
    def run(query, key, weights):
        known = dict(implementation="triton") | settings(shape) | more
        return attention.select_by_index(query, key, weights=weights, **known)

    return np.asarray(jax.jit(run)(*arrays))


def exact_scores(shape: Shape, *arrays, **more) -> tuple[np.ndarray, np.ndarray]:
    """Scores in float64 by `xla`, inf for forced blocks and -inf for later ones; and the best blocks."""
    with jax.enable_x64(True):
        wide = [None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in arrays]

        def run(query, key, weights):
            known = dict(implementation="xla") | settings(shape) | more
            scores = attention.block_scores(query, key, weights=weights, **known)
            return scores, attention.select_by_index(query, key, weights=weights, **known)

        scores, blocks = map(np.asarray, jax.jit(run)(*wide))
    visible = scores > -np.inf
    last = np.where(visible, np.arange(scores.shape[-1]), -1).max(-1, keepdims=True)
    block = np.arange(scores.shape[-1])
    forced = (block < 1) | (block > last - 2)
    return np.where(visible, np.where(forced, np.inf, scores), -np.inf), blocks


def agree(shape: Shape, found: np.ndarray, scores: np.ndarray, blocks: np.ndarray) -> None:
    """Each selection is ascending and its scores are the best, up to the rounding of float32 sums."""
    used = found >= 0
    assert (used == (blocks >= 0)).all()
    assert ((np.diff(found, axis=-1) > 0) | ~used[..., 1:]).all()

    def of(chosen):
        gathered = np.take_along_axis(scores, np.maximum(chosen, 0), -1)
        return -np.sort(-np.where(chosen >= 0, gathered, -np.inf), axis=-1)

    ours, theirs = of(found), of(blocks)
    assert (np.isinf(ours) == np.isinf(theirs)).all()
    finite = np.isfinite(theirs)
    # Half an eps for each of the E products of at most this size, and for each of the heads that are added.
    size = np.abs(scores[np.isfinite(scores)]).max() * (10 if shape.weighted else 5)
    eps = float(jnp.finfo(jnp.float32).eps)
    assert np.abs(np.where(finite, ours - np.where(finite, theirs, 0), 0)).max() <= 16 * eps * size


@pytest.mark.parametrize("name", SHAPES)
def test_selection_has_the_best_scores(name):
    shape = SHAPES[name]
    arrays = draw(shape)
    poison_memory()
    agree(shape, select(shape, *arrays), *exact_scores(shape, *arrays))


def test_the_kernels_are_what_runs_by_default():
    query, key, _ = draw(MSA)
    operands = dict(select_by_index=(query, key), block_scores=(query, key), top_blocks=(query[..., 0, :24],))
    for operation, arrays in operands.items():
        assert nsa_jax.choose(operation, *arrays, config=config_of(MSA)).implementation == "triton"


def test_sampled_rows_of_64k_tokens():
    """In several chunks; the choice of some queries is compared."""
    shape = MSA._replace(queries=65536, length=65536)
    query, key, _ = draw(shape)
    poison_memory()
    found = select(shape, query, key, None)
    at = np.sort(np.random.default_rng(0).choice(65536, 48, replace=False))
    at = np.concatenate([at, [0, 127, 128, 1023, 1024, 32767, 65535]]).astype(np.int32)
    some = exact_scores(shape, query[:, at], key, None, query_positions=jnp.asarray(at[None]))
    agree(shape, found[:, at], *some)


def test_runs_agree_bitwise():
    for shape in (MSA, Shape(64, 4, 32, weighted=True), Shape(batch=4, queries=2, length=65536)):
        arrays = draw(shape)
        first = select(shape, *arrays)
        for _ in range(5):
            poison_memory()
            assert np.array_equal(select(shape, *arrays), first)


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_a_number_stays_where_it_is(weighted):
    """In its own query and KV head, in its row, and in the future, bitwise."""
    shape = Shape(64, 2, 64, weighted=weighted, batch=2)
    query, key, weights = draw(shape)
    plain = select(shape, query, key, weights)
    bad = query.at[0, 1500, 2].set(jnp.nan).at[0, 1700, 1, 0, 3].set(jnp.inf)
    found = select(shape, bad, key.at[1, 2000:].set(jnp.nan), weights)
    same = np.ones(found.shape[:3], bool)
    same[0, 1500, 2] = same[0, 1700, 1] = False
    same[1, 2000:] = False

    assert np.array_equal(found[same], plain[same])
    assert (found[~same] >= 0).all()


def test_the_future_changes_nothing():
    query, key, _ = draw(MSA)
    found, other = (select(MSA, query, x, None) for x in (key, key.at[:, 2000:].multiply(-3)))

    assert np.array_equal(found[:, :2000], other[:, :2000])
    assert not np.array_equal(found[:, 2000:], other[:, 2000:])


def test_ties_go_to_the_lower_block():
    for weighted in (False, True):
        shape = Shape(64, 2, 64, weighted=weighted)
        query, key, weights = draw(shape)
        found = select(shape, query, jnp.broadcast_to(key[:, :1], key.shape), weights)
        own = 2999 // 64
        assert (found[:, -1] == [0, 1, 2, 3, 4, 5, own - 1, own]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scores_that_are_given_are_ranked_as_by_xla(dtype):
    rng = np.random.default_rng(0)
    drawn = rng.integers(-40, 40, (3, 2500, 3, 40)).astype(np.float32) / 4
    drawn[0] = rng.choice([-np.inf, -2.0, -0.0, 0.0, 1.0, np.inf, np.nan], drawn[0].shape)
    scores = jnp.asarray(drawn, dtype)
    for more in ({}, dict(query_positions=layout.Runs((layout.Run(2500, jnp.int32(60)),)))):
        found, expected = (
            attention.top_blocks(scores, config=config_of(Shape(64)), implementation=name, **more)
            for name in ("triton", "xla")
        )
        assert np.array_equal(found, expected)


def test_vmap_equals_the_batch():
    shape = Shape(64, 2, 64, weighted=True, batch=3)
    arrays = draw(shape)

    def one(query, key, weights):
        known = dict(config=config_of(shape), implementation="triton")
        return attention.select_by_index(query[None], key[None], weights=weights[None], **known)[0]

    assert np.array_equal(jax.jit(jax.vmap(one))(*arrays), select(shape, *arrays))


TAUGHT = (
    Shape(64, 2, 64, "float32", weighted=True, queries=200),
    MSA._replace(queries=700, length=2048),
    Shape(64, 4, 32, "float16", queries=500, length=1000, batch=2),
    Shape(48, 2, 96, kv_heads=3, queries=300, length=500),
    Shape(packed=True, batch=2, queries=4000, length=4000),
    Shape(heads=3, dim=32, kv_heads=3, shared=False, queries=2500, length=2500),
)


@pytest.mark.parametrize(
    ("what", "shape"),
    [("all", x) for x in TAUGHT] + [("chosen", x) for x in TAUGHT if x.block != 48],  # which xla scores
    ids=str,
)
def test_scores_and_their_gradients_equal_those_of_float64(what, shape):
    """Of all blocks, and of the chosen ones: all queries choose the first, which makes several items."""
    arrays = draw(shape)
    blocks = jnp.asarray(select(shape, *arrays)) if what == "chosen" else None

    def gradients(implementation, query, key, weights):
        def score(query, key, weights):
            known = settings(shape) | dict(implementation=implementation, block_indices=blocks)
            return attention.block_scores(query, key, weights=weights, **known)

        scores, pull_back = jax.vjp(score, query, key, weights)
        cotangent = jnp.cos(jnp.arange(scores.size, dtype=scores.dtype)).reshape(scores.shape)
        return jnp.where(jnp.isfinite(scores), scores, -1e4), *pull_back(cotangent)

    poison_memory()
    run = jax.jit(functools.partial(gradients, "triton"))
    found = run(*arrays)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), found, run(*arrays))), "runs differ"
    with jax.enable_x64(True):
        wide = (None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in arrays)
        exact = jax.jit(functools.partial(gradients, "xla"))(*wide)
    # Gradients of products, and the results, are rounded to the dtype of the arrays.
    rounding = 1e-4 if shape.dtype == "float32" else 4 * float(jnp.finfo(shape.dtype).eps)
    for number, (ours, right) in enumerate(zip(found, exact, strict=True)):
        if right is None:
            continue
        ours, right = np.asarray(ours, np.float64), np.asarray(right)
        size = np.abs(right[right > -1e4]).max()
        # Where two tokens tie up to rounding the gradient may go to either.
        far = np.abs(ours - right) > (1e-4 if number == 0 else rounding) * size
        assert far.mean() < (1e-9 if number == 0 else 1e-3)
