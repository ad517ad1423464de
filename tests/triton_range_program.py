"""The range attention kernels in Triton's interpreter against plain sums; run it as a program.

Float32 on small odd shapes; every output is poisoned first. Prints the largest error of each check.
"""

from triton_interpreter import interpreted  # isort: skip

import functools
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention

from nsa_jax.budget import allowance, distance
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.ranges.backward_key import query_bounds, range_key_gradients
from nsa_jax.kernels.triton.ranges.backward_query import range_query_gradient
from nsa_jax.kernels.triton.ranges.edges import Edges, KeyRanges, compression_ranges, window_ranges
from nsa_jax.kernels.triton.ranges.forward import attend_ranges
from nsa_jax.kernels.triton.sizes.ranges import RangeKeySizes, RangeQuerySizes
from nsa_jax.layout import FirstKeys, Index, Run, Runs, place

EPS = float(np.finfo(np.float32).eps)


class Case(NamedTuple):
    heads: int  # query heads per KV head
    key_dim: int
    value_dim: int
    ranges: str
    batch: int = 1
    kv_heads: int = 2
    num_queries: int = 37
    num_keys: int = 53
    weighted: bool = False
    scale: float | None = None
    edges: Edges = Edges()
    segments: int = 1
    keys_first: bool = True
    keys: int = 16  # of a step of the queries' kernels
    peel: bool = True
    halve: bool = False
    runs: Runs | None = (
        None  # the queries, in a row of `length` tokens, of which the array begins at `origin`
    )
    length: int = 0
    origin: int | tuple[int, ...] = 0


def known(first_position: int | None, window: int | None, size: int = 1, stride: int = 1) -> Edges:
    return Edges("range", first_position, window=window, size=size, stride=stride)


CASES = {
    "window": Case(2, 16, 16, "window", num_queries=53, weighted=True),
    "compressed": Case(16, 16, 32, "compressed", kv_heads=1, num_keys=13, segments=3, weighted=True),
    "packed": Case(
        6, 32, 16, "packed", batch=2, kv_heads=1, keys_first=False, segments=2, num_queries=33, peel=False
    ),
    "scattered": Case(1, 48, 16, "scattered", num_keys=35, batch=2, segments=2, weighted=True),
    "apart": Case(3, 16, 16, "apart", num_queries=35, num_keys=600),
    "all": Case(2, 16, 48, "all", scale=-0.3, keys_first=False, weighted=True, num_queries=20, num_keys=35),
    "known_window": Case(8, 16, 16, "window_16", num_queries=53, edges=known(0, 16), weighted=True),
    "known_odd": Case(3, 16, 16, "window_18", num_queries=45, edges=known(0, 18), weighted=True, keys=32),
    "known_long": Case(
        8, 16, 16, "window_66", num_queries=80, num_keys=80, edges=known(0, 66), keys=32, peel=False
    ),
    "known_peeled": Case(8, 16, 16, "window_66", num_queries=80, num_keys=80, edges=known(0, 66), keys=32),
    "known_many": Case(1, 16, 16, "window_18", num_queries=50, edges=known(0, 18)),
    "known_short": Case(2, 16, 16, "window_3", num_queries=40, edges=known(0, 3), keys=32, peel=False),
    "known_end": Case(2, 16, 16, "window_18", num_queries=40, edges=known(None, 18), batch=2, keys=32),
    "known_later": Case(4, 16, 16, "window_16", num_queries=20, edges=known(33, 16), keys=32),
    "known_strides": Case(
        8, 16, 16, "strides", num_queries=75, num_keys=18, edges=known(0, None, 8, 4), segments=3
    ),
    "known_causal": Case(
        4, 16, 16, "strides_1", num_queries=53, edges=known(0, None), keys=32, halve=True, weighted=True
    ),
    "known_halves": Case(
        5,
        16,
        16,
        "strides",
        kv_heads=1,
        num_queries=215,
        edges=known(0, None, 8, 4),
        keys=32,
        halve=True,
    ),
    "known_halves_many": Case(
        1,
        16,
        16,
        "strides",
        kv_heads=1,
        num_queries=215,
        edges=known(0, None, 8, 4),
        keys=32,
        halve=True,
    ),
    "runs_window": Case(
        8,
        16,
        16,
        "window",
        num_queries=32,
        num_keys=90,
        length=90,
        keys=32,
        batch=2,
        runs=Runs(
            (Run(16, jnp.asarray([5, 74])), Run(16, jnp.asarray([60, 40]))), num_queries=jnp.asarray([32, 21])
        ),
    ),
    "runs_one": Case(
        3,
        16,
        16,
        "window",
        num_queries=27,
        num_keys=70,
        length=70,
        keys=16,
        weighted=True,
        runs=Runs((Run(27, jnp.asarray(38)),)),
    ),
    "runs_three_heads": Case(  # tiles whose rows are all used would reach into both runs
        3, 16, 16, "window", num_queries=48, num_keys=90, length=90, runs=Runs((Run(24, 2), Run(24, 50)))
    ),
    "runs_of_odd_length": Case(
        4, 16, 16, "window", num_queries=26, num_keys=60, length=60, runs=Runs((Run(13, 2), Run(13, 40)))
    ),
    "runs_ring": Case(  # an array of 40 of 90 keys, and one that begins before its row
        8,
        16,
        16,
        "window",
        num_queries=32,
        num_keys=40,
        length=90,
        batch=2,
        origin=(30, -9),
        keys=16,
        runs=Runs((Run(16, jnp.asarray([29, 0])), Run(16, jnp.asarray([63, 20])))),
    ),
    "runs_stretches": Case(  # the keys of each run after those of the run before; one begins before its row
        8,
        16,
        16,
        "window",
        num_queries=32,
        num_keys=66,
        length=90,
        batch=2,
        keys=16,
        segments=2,
        runs=Runs((Run(16, jnp.asarray([5, 30])), Run(16, jnp.asarray([70, 0]))), halo=17),
    ),
    "runs_strides": Case(
        8,
        16,
        16,
        "compressed",
        num_queries=64,
        num_keys=22,
        length=95,
        segments=2,
        keys=32,
        halve=True,
        runs=Runs((Run(32, 0), Run(32, 62))),
        kv_heads=1,
    ),
    "runs_strides_part": Case(
        4,
        16,
        16,
        "compressed",
        num_queries=32,
        num_keys=12,
        length=95,
        batch=2,
        origin=(4, -3),
        runs=Runs((Run(16, jnp.asarray([30, 0])), Run(16, jnp.asarray([70, 44])))),
    ),
    "nothing": Case(4, 16, 16, "nothing", kv_heads=1, num_queries=5),
    "zero_scale": Case(1, 16, 16, "window", scale=0.0, num_queries=20),
}


def key_ranges(case: Case, random) -> KeyRanges:
    if case.runs is None:
        return KeyRanges(*ranges_of(case, random), None, case.edges)
    config = NSAConfig(
        compression_block_size=8, compression_stride=4, selection_block_size=16, window_size=18
    )
    origin = Index(jnp.asarray(case.origin) if isinstance(case.origin, tuple) else case.origin)
    placing = functools.partial(
        place, config, batch=case.batch, num_queries=case.num_queries, num_keys=case.length,
        query_positions=case.runs, first_keys=FirstKeys(cmp=origin, win=origin),
    )  # fmt: skip
    ranges = window_ranges if case.ranges == "window" else compression_ranges
    return jax.jit(lambda: ranges(placing(), case.num_keys))()


def ranges_of(case: Case, random) -> tuple[np.ndarray, np.ndarray]:
    t = np.arange(case.num_queries) + (case.edges.first_position or 0)
    shape = (case.batch, case.num_queries)
    if case.ranges == "window":
        start, end = np.maximum(t - 10, 0), np.minimum(t + 1, case.num_keys)
    elif case.ranges.startswith("window_"):
        start, end = np.maximum(t + 1 - int(case.ranges[7:]), 0), t + 1
    elif case.ranges == "strides_1":
        start, end = 0 * t, t + 1
    elif case.ranges == "strides":
        start, end = 0 * t, np.maximum((t - 7) // 4 + 1, 0)
    elif case.ranges == "compressed":
        start, end = 0 * t, (t + 1) * case.num_keys // case.num_queries
    elif case.ranges == "packed":  # sequences of 15 keys; some queries are padding
        start = np.broadcast_to(t // 15 * 15, shape).copy()
        end = np.where(random.random(shape) < 0.2, 0, t + 1)
    elif case.ranges == "scattered":
        start = random.integers(0, case.num_keys, shape)
        end = random.integers(0, case.num_keys + 1, shape)
    elif case.ranges == "apart":  # no step has keys of two queries
        start, end = 16 * t, 16 * t + 16
    elif case.ranges == "all":
        start, end = 0 * t, 0 * t + case.num_keys
    else:
        start, end = 0 * t + 7, 0 * t + 3
    return tuple(np.broadcast_to(x, shape).astype(np.int32) for x in (start, end))


def check_case(name: str) -> dict[str, float]:
    case = CASES[name]
    random = np.random.default_rng(0)
    num_heads = case.heads * case.kv_heads

    def draw(*shape):
        return random.standard_normal(shape).astype(np.float32)

    query = draw(case.batch, case.num_queries, num_heads, case.key_dim)
    key = draw(case.batch, case.num_keys, case.kv_heads, case.key_dim)
    value = draw(case.batch, case.num_keys, case.kv_heads, case.value_dim)
    d_out = draw(case.batch, case.num_queries, num_heads, case.value_dim)
    d_lse = draw(case.batch, case.num_queries, num_heads)
    weight = 1 / (1 + np.exp(-draw(*d_lse.shape))) if case.weighted else None
    if weight is not None:
        weight[:, ::5] = 0
        d_lse[:, ::10] = 0
    previous = draw(*query.shape) if case.weighted else None
    ranges = key_ranges(case, random)
    if case.runs is not None:  # whole tiles, or a single run
        tokens = ranges.rows_of_tile(32, case.heads).tokens
        assert ranges.edges.of_tiles(tokens, case.num_queries).known == ("odd" not in name), name
    index, (start, end) = np.arange(case.num_keys), (np.asarray(x) for x in (ranges.start, ranges.end))
    seen = ((index >= start[..., None]) & (index < end[..., None]))[:, :, None]
    scale = case.key_dim**-0.5 if case.scale is None else case.scale

    arrays = query, key, value, seen, scale, d_out, d_lse, weight, previous
    same, exact = (plain_attention.with_gradients(*arrays, dtype=x) for x in (np.float32, np.float64))

    @jax.jit
    def kernels(query, key, value, d_out, d_lse, weight, previous):
        found, operands = {}, (query, key, value, ranges)
        found["out"], found["lse"] = attend_ranges(
            *operands, scale=scale,
            sizes=RangeQuerySizes(32, case.keys, 4, 2, peel=case.peel, halve=case.halve),
        )  # fmt: skip
        given = Backward(found["out"], found["lse"], d_out, d_lse, weight, previous)
        found["d_query"], found["products"], delta = range_query_gradient(
            *operands, given, scale=scale, sizes=RangeQuerySizes(32, case.keys, 4, 2, peel=case.peel),
        )  # fmt: skip
        found["d_key"], found["d_value"] = range_key_gradients(
            *operands, given, delta, scale=scale,
            sizes=RangeKeySizes(16, 16, 4, 2, case.segments, case.keys_first),
        )  # fmt: skip
        return found

    with interpreted():
        found = jax.tree.map(np.asarray, kernels(query, key, value, d_out, d_lse, weight, previous))
    empty = exact["lse"] == -np.inf
    assert np.array_equal(found["lse"] == -np.inf, empty), name
    assert not found["out"][empty].any(), name
    errors = {x: distance(found[x], exact[x]) for x in exact}
    allowed = {x: allowance(same[x], exact[x], EPS) for x in exact}
    assert all(errors[x] <= allowed[x] for x in exact), (name, errors, allowed)
    return errors


def check_hidden_keys_may_be_anything() -> dict[str, float]:
    """Keys that nobody sees may be NaN; what a query sees does not change by a bit."""
    random = np.random.default_rng(1)
    query, key, value = (random.standard_normal((1, 21, 2, 16)).astype(np.float32) for _ in range(3))
    t = np.arange(21, dtype=np.int32)[None]
    sizes, ranges = RangeQuerySizes(32, 16, 4, 2), KeyRanges(0 * t, np.minimum(t, 9))
    attend = jax.jit(lambda key: attend_ranges(query, key, value, ranges, scale=0.25, sizes=sizes))
    hidden = np.copy(key)
    hidden[:, 9:] = np.nan
    with interpreted():
        plain, found = attend(key), attend(hidden)
    assert all(np.array_equal(x, y) for x, y in zip(plain, found, strict=True))
    return {}


def check_edges_of_the_paper() -> dict[str, float]:
    """Training on plain rows needs no loop but the one without a mask."""
    assert known(0, 512).end_steps(4, 64) == dict(TAIL=16, FRONT=True, REST=False)
    assert known(0, None, 32, 16).end_steps(4, 64) == dict(TAIL=64, FRONT=False, REST=False)
    assert known(0, None, 32, 16).end_steps(4, 128, halve=True) == dict(TAIL=64, FRONT=False, REST=False)
    assert Edges().end_steps(4, 128, halve=True)["TAIL"] == 128
    assert known(0, 514).end_steps(4, 64)["REST"]  # 512 .. 514 keys before the first query of a tile
    assert not known(2, 510).end_steps(4, 64)["REST"]
    assert known(0, 512).end_steps(64, 32)["REST"]  # 63 keys behind the first query
    assert known(0, 512).end_steps(64, 64)["TAIL"] == 64
    assert known(0, None, 8, 4).end_steps(8, 64)["REST"]
    assert known(None, 512).end_steps(4, 64) == dict(TAIL=16, FRONT=True, REST=True)
    assert Edges().end_steps(4, 64) == dict(TAIL=64, FRONT=True, REST=True)
    return {}


def check_bounds() -> dict[str, float]:
    """Every pair of a query and a key that it sees lies inside the bounds, and full tiles are full."""
    random = np.random.default_rng(2)
    keys, tokens = 8, 4
    find = jax.jit(query_bounds, static_argnums=(2, 3, 4))
    for kind in ("window", "compressed", "packed", "scattered", "all", "nothing"):
        case = Case(1, 16, 16, kind, batch=2)
        start, end = ranges_of(case, random)
        bounds = np.asarray(find(start, end, case.num_keys, keys, tokens))
        start, end = np.asarray(start), np.asarray(end)
        for b in range(case.batch):
            for j, (first, full_first, full_last, last) in enumerate(bounds[b]):
                past = min((j + 1) * keys, case.num_keys)
                t = np.arange(case.num_queries)
                some = start[b] < end[b]
                sees = some & (start[b] < past) & (end[b] > j * keys)
                assert not (sees & ((t // tokens < first) | (t // tokens >= last))).any(), kind
                full = (t // tokens >= full_first) & (t // tokens < full_last)
                assert (some & (start[b] <= j * keys) & (end[b] >= past))[full].all(), kind
                if kind == "all" and j == 0:
                    assert (full_first, full_last) == (0, case.num_queries // tokens)
    return {}


def main() -> None:
    checks = {f"case {name}": (lambda name=name: check_case(name)) for name in CASES}
    checks |= {"hidden keys": check_hidden_keys_may_be_anything, "bounds": check_bounds}
    checks["edges"] = check_edges_of_the_paper
    for name, check in checks.items():
        if len(sys.argv) > 1 and not any(name.endswith(x) for x in sys.argv[1:]):
            continue
        began = time.perf_counter()
        errors = ", ".join(f"{x} {error:.1e}" for x, error in check().items())
        print(f"{name}: ok in {time.perf_counter() - began:.1f} s {errors}", flush=True)


if __name__ == "__main__":
    main()
