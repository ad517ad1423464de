"""The Mosaic GPU kernels in Pallas's interpreter; `test_mosaic_interpreter` runs it.

Values and gradients against the oracle, with the interpreter's race detection. Rings are cut down to two
places, so that each is filled several times over. Prints a line of JSON: for each case named, the largest
error of each result over what its budget allows, and what else is wrong.
"""

import functools
import json
import sys
from typing import NamedTuple

import fewer_collections  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import triton_compile
import watched_products
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from lists_by_loops import add_items, items_by_loops
from mosaic_lists import visit_lists_by_loops

from nsa_jax import NSAConfig, layout, reference
from nsa_jax.budget import allowance, distance
from nsa_jax.kernels.mosaic_gpu import sizes
from nsa_jax.kernels.mosaic_gpu.key_arrays import KeyArrays, KeySums, QueryParts
from nsa_jax.kernels.mosaic_gpu.pipeline import Pipeline
from nsa_jax.kernels.mosaic_gpu.query_gradient import query_gradient
from nsa_jax.kernels.mosaic_gpu.range_forward import range_forward
from nsa_jax.kernels.mosaic_gpu.range_key_gradients import KEYS, range_key_gradients
from nsa_jax.kernels.mosaic_gpu.range_visits import RangeVisits
from nsa_jax.kernels.mosaic_gpu.selected_key_gradients import selected_key_gradients
from nsa_jax.kernels.mosaic_gpu.unstable import Form
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.ranges import causal_ranges, compression_ranges, window_ranges


class Case(NamedTuple):
    queries: int
    keys: int | None = None  # as many as queries if None; the queries are the last ones
    heads: int = 16  # query heads of a KV head
    kv_heads: int = 1
    batch: int = 1
    dims: tuple[int, int] = (64, 64)
    block: int = 32
    slots: int = 3
    packed: bool = False
    empty: bool = False  # whether some queries choose nothing
    bare: bool = False  # without weight, previous gradient and cotangent of the log-sum-exps
    item: int = 1000
    dtype: str = "bfloat16"
    processors: int = 1
    range: int | None = None  # queries whose parts of d_query the kernel of the keys stores in a call


CASES = {
    "twelve_heads": Case(29, heads=12, kv_heads=2, batch=2, empty=True, processors=3, item=7),
    "one_head_packed": Case(36, heads=1, kv_heads=2, packed=True, empty=True, item=9),
    "four_heads_wide_keys": Case(40, 136, heads=4, dims=(192, 128), block=64, empty=True, item=22),
    "parts_of_queries": Case(40, 200, block=64, bare=True, item=11, range=24),
    "packed_parts": Case(36, heads=12, kv_heads=2, block=64, packed=True, empty=True, item=9, range=36),
    "blocks_of_128": Case(20, 264, dims=(128, 128), block=128, dtype="float16"),
}


def choose(case: Case, placed) -> np.ndarray:
    """Random blocks of each query, mostly its own among them, and fewer than all slots for some queries."""
    random = np.random.default_rng(len(str(case)))
    position = np.asarray(placed.position)
    blocks = np.full((*position.shape, case.kv_heads, case.slots), -1, np.int32)
    for b, t, k in np.ndindex(blocks.shape[:3]):
        if position[b, t] < 0 or (case.empty and 4 < t < 9):
            continue
        own = position[b, t] // case.block
        some = random.permutation(own + 1)[: case.slots if t % 5 == 0 else case.slots - 1]
        some = np.unique(np.append(some[:-1], own) if t % 7 else some)
        blocks[b, t, k, : len(some)] = some
    return blocks


def by_reference(attend, query, key, value, d_out, shift, weight, previous) -> dict[str, jax.Array]:
    """Results and gradients in the dtype of the arrays; `shift` is the cotangent of the log-sum-exps."""

    @jax.jit
    def evaluate(*arrays):
        def both(*arrays):
            out, lse = attend(*arrays)
            weighted = out if weight is None else out * weight[..., None].astype(out.dtype)
            return (weighted, lse), out

        (_, lse), pull_back, out = jax.vjp(both, *arrays, has_aux=True)
        d_query, d_key, d_value = pull_back((d_out, jnp.where(jnp.isfinite(lse), shift, 0)))
        more = 0 if previous is None else previous
        products = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
        return dict(out=out, lse=lse, d_query=d_query + more, d_key=d_key, d_value=d_value, products=products)

    return evaluate(query, key, value)


class RangeCase(NamedTuple):
    branch: str
    queries: int
    heads: int = 16  # query heads of a KV head
    kv_heads: int = 1
    batch: int = 1
    keys: int = 32  # of a step
    bare: bool = False
    processors: int = 1
    segments: int = 1  # of the queries, for gradients of keys
    forward_keys: int = 32  # of a step of the forward
    dim: int = 64
    dtype: str = "bfloat16"


RANGES = {
    "window": RangeCase("window", 120, processors=3),
    "window_of_fifteen_heads": RangeCase("window", 75, heads=15, kv_heads=2, batch=2, bare=True),
    "compressed": RangeCase("compressed", 190),
    "compressed_in_segments": RangeCase("compressed", 290, 15, 2, segments=3, forward_keys=128, dim=128),
    "causal": RangeCase("causal", 70, 16, 2, batch=2, bare=True, processors=2, dtype="float16"),
}


def main_of_range(case: RangeCase) -> dict[str, float]:
    """Error over allowance of each result of the kernels of a range."""
    batch, length, dim, dtype = case.batch, case.queries, case.dim, jnp.dtype(case.dtype)
    config = NSAConfig(
        compression_block_size=4, compression_stride=2, selection_block_size=4, num_selected_blocks=length,
        window_size=length if case.branch == "causal" else 45,
    )  # fmt: skip
    compressed = case.branch == "compressed"
    num_keys = layout.num_compression_blocks(length, config) if compressed else length
    random = np.random.default_rng(7)
    num_heads = case.heads * case.kv_heads
    query, key, value, d_out = (
        random.standard_normal((batch, tokens, heads, dim)).astype(dtype)
        for tokens, heads in ((length, num_heads), *[(num_keys, case.kv_heads)] * 2, (length, num_heads))
    )
    shape = query.shape[:3]
    weight = None if case.bare else random.uniform(0.2, 1.5, shape).astype(np.float32)
    d_lse = None if case.bare else random.standard_normal(shape).astype(np.float32)
    previous = None if case.bare else random.standard_normal(query.shape).astype(dtype)
    shift = np.zeros(shape, np.float32) if d_lse is None else d_lse
    operation = reference.compressed_attention if compressed else reference.window_attention

    def attend(*arrays):
        return operation(*arrays, config=config)[:2]

    same = by_reference(attend, query, key, value, d_out, shift, weight, previous)
    ranges_of = dict(compressed=compression_ranges, window=window_ranges, causal=causal_ranges)[case.branch]
    ranges = ranges_of(layout.place(config, batch=batch, num_queries=length, num_keys=length), num_keys)
    at = np.arange(num_keys)
    seen = (at >= np.asarray(ranges.start)[..., None]) & (at < np.asarray(ranges.end)[..., None])
    arrays = query, key, value, seen[:, :, None], dim**-0.5, d_out, shift, weight, previous
    expected = plain_attention.with_gradients(*arrays, dtype=np.float32)
    visits = RangeVisits(ranges.edges, length, num_keys, sizes.tile_tokens(case.heads), case.keys)
    interpret = plgpu.InterpretGPUParams(detect_races=True)

    with triton_compile.device(90):
        given = Backward(same["out"], expected["lse"], d_out, d_lse, weight, previous)
        of_queries = functools.partial(
            query_gradient, lists=visits, last_keys=ranges.end - 1, given=given, first_keys=ranges.start,
            branch=ranges.edges.branch, scale=dim**-0.5, block_size=case.keys,
            form=Form.INTERPRETED, interpret=interpret, processors=case.processors,
        )  # fmt: skip
        d_query, products, delta = jax.block_until_ready(jax.jit(of_queries)(query, key, value))
        wrong = {"races of d_query": float(gpu_callbacks.get_races().races_found)}

        @jax.jit
        def of_keys(query, key, value):
            arrays = KeyArrays.of(query, key, value, given, delta, aligned=True)
            return range_key_gradients(
                arrays, ranges.edges, segments=case.segments, scale=dim**-0.5, form=Form.INTERPRETED,
                interpret=interpret, stages=2,
            )  # fmt: skip

        *sums, steps = jax.block_until_ready(of_keys(query, key, value))
        wrong["races of d_key"] = float(gpu_callbacks.get_races().races_found)
        found = dict(d_query=d_query, products=products)
        if case.branch != "window":
            sizes.FORWARD_KEYS = case.forward_keys
            forward = functools.partial(
                range_forward, edges=ranges.edges, last_keys=ranges.end - 1, scale=dim**-0.5,
                form=Form.INTERPRETED, interpret=interpret, processors=case.processors,
            )  # fmt: skip
            found["out"], found["lse"] = jax.block_until_ready(jax.jit(forward)(query, key, value))
            wrong["races of out"] = float(gpu_callbacks.get_races().races_found)
    there = np.repeat(np.asarray(steps) > 0, KEYS, axis=2).reshape(case.segments, batch, case.kv_heads, -1)
    there = there.swapaxes(2, 3)[:, :, :num_keys, :, None]
    for name, x in zip(("d_key", "d_value"), sums, strict=True):
        found[name] = np.where(there, np.asarray(x, np.float32)[:, :, :num_keys], 0).sum(0)
    for name, x in found.items():
        eps = float(jnp.finfo(jnp.float32 if name == "lse" else dtype).eps)
        wrong[name] = distance(x, expected[name]) / allowance(same[name], expected[name], eps)
    return wrong


def main(case: Case) -> dict[str, float]:
    """Error over allowance by result."""
    batch, length, kv_heads, (key_dim, value_dim) = case.batch, case.queries, case.kv_heads, case.dims
    num_keys, num_heads = case.keys or length, case.heads * kv_heads
    random = np.random.default_rng(7)

    def draw(*shape):
        return random.standard_normal(shape).astype(jnp.dtype(case.dtype))

    query, key = draw(batch, length, num_heads, key_dim), draw(batch, num_keys, kv_heads, key_dim)
    value, d_out = draw(batch, num_keys, kv_heads, value_dim), draw(batch, length, num_heads, value_dim)
    segments = np.repeat([0, 1, 2, 0, 3], [3, 18, 8, 2, num_keys - 31])[None] if case.packed else None
    config = NSAConfig(
        compression_block_size=16, compression_stride=16, selection_block_size=case.block,
        num_selected_blocks=case.slots, window_size=64,
    )  # fmt: skip
    segments = None if segments is None else np.broadcast_to(segments, (batch, num_keys)).astype(np.int32)
    of_row = dict(batch=batch, num_queries=length, num_keys=num_keys, segment_ids=segments)
    placed = jax.jit(functools.partial(layout.place, config, **of_row))()
    blocks = choose(case, placed)
    position, starts = np.asarray(placed.position), np.asarray(placed.sequence_start)
    last = np.where(position >= 0, starts + position, -1).astype(np.int32)
    tokens, aligned = sizes.tile_tokens(case.heads), not case.packed
    known = dict(
        scale=-0.3 if case.packed else key_dim**-0.5, block_size=case.block, form=Form.INTERPRETED,
        aligned=aligned,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )  # fmt: skip
    tiled = dict(one_block=placed.tile_in_one_block(tokens), processors=case.processors)
    wrong = {}

    def visits(tile):
        lists = visit_lists_by_loops(
            blocks, starts, last, block=case.block, keys=tile.keys, tokens=tokens,
            warpgroups=sizes.CONSUMERS, longest_gap=tile.stages,
        )  # fmt: skip
        fills = lists.counts[..., 0].sum() // min(case.processors, lists.counts[..., 0].size)
        wrong["wraps"] = float(fills < 2 * tile.stages + 1)
        return type(lists)(*map(jnp.asarray, lists))

    shape = (batch, length, num_heads)
    weight = None if case.bare else random.uniform(0.2, 1.5, shape).astype(np.float32)
    d_lse = None if case.bare else random.standard_normal(shape).astype(np.float32)
    previous = None if case.bare else draw(*query.shape)
    shift = np.zeros(shape, np.float32) if d_lse is None else d_lse

    def attend(query, key, value):
        return reference.selected_attention(
            query, key, value, jnp.asarray(blocks), config=config, segment_ids=segments, scale=known["scale"]
        )[:2]

    same = by_reference(attend, query, key, value, d_out, shift, weight, previous)
    at = np.arange(num_keys) - starts[..., None]
    own = at[:, :, None, None] // case.block == blocks[..., None]
    seen = ((at >= 0) & (at <= position[..., None]))[:, :, None] & own.any(3)
    arrays = query, key, value, seen, known["scale"], d_out, shift, weight, previous
    expected = plain_attention.with_gradients(*arrays, dtype=np.float32)

    with triton_compile.device(90):
        tile = sizes.gradient_sizes(key_dim, value_dim, case.block, aligned=aligned)
        given = Backward(same["out"], expected["lse"], d_out, d_lse, weight, previous)
        d_query, products, delta = jax.jit(
            functools.partial(query_gradient, branch="selected", **known, **tiled)
        )(query, key, value, visits(tile), last, given)
        jax.block_until_ready(d_query)
        wrong["races of d_query"] = float(gpu_callbacks.get_races().races_found)
        items, partials = items_by_loops(
            blocks, starts, last, block=case.block, num_keys=num_keys, item=case.item, packed=case.packed,
            range_queries=case.range,
        )  # fmt: skip

        @functools.partial(jax.jit, static_argnames="kernel")
        def of_keys(kernel, *changing):
            arrays = KeyArrays.of(query, key, value, given, delta, aligned=aligned)
            return kernel(arrays, *changing)

        if case.range is None:
            sums = of_keys(functools.partial(selected_key_gradients, items=items, last_keys=last, **known))
        else:
            sums, found_in_parts = in_ranges(case, of_keys, items, last, blocks, known)
        part_key, part_value, d_key, d_value = (np.asarray(x, np.float64) for x in sums)
        wrong["races of d_key"] = float(gpu_callbacks.get_races().races_found)
    d_key = add_items(items, partials, part_key, d_key, case.block)
    d_value = add_items(items, partials, part_value, d_value, case.block)
    found = dict(d_query=d_query, d_key=d_key, d_value=d_value, products=products)
    if case.range is not None:
        more = 0 if previous is None else np.asarray(previous, np.float64)
        found["d_query in parts"] = found_in_parts + more
        expected["d_query in parts"], same["d_query in parts"] = expected["d_query"], same["d_query"]
    for name, x in found.items():
        eps = float(jnp.finfo(case.dtype).eps)
        wrong[name] = distance(x, expected[name]) / allowance(same[name], expected[name], eps)
    return wrong


def in_ranges(case: Case, of_keys, items, last, blocks, known) -> tuple[KeySums, np.ndarray]:
    """The sums, and d_query from its parts: a call for each KV head and range of queries."""
    of_blocks = dict(block_size=case.block, aligned=known["aligned"])

    def poisoned(arrays):
        return tuple(jnp.full(x.shape, jnp.nan, x.dtype) for x in arrays.sums(items, **of_blocks))

    def gradients(arrays, rows, first, into):
        at = QueryParts(case.slots, 1, case.range, first, into)
        return selected_key_gradients(arrays, items._replace(items=rows), last, parts=at, **known)

    sums = tuple(map(jax.new_ref, of_keys(poisoned)))
    heads, key_dim = case.heads * case.kv_heads, case.dims[0]
    d_query = np.zeros((case.batch, case.queries, heads, key_dim))
    ranges, longest = -(-case.queries // case.range), np.diff(items.bounds).max()
    for lane, (begin, end) in enumerate(zip(items.bounds[:-1], items.bounds[1:], strict=True)):
        both, first = lane // ranges, lane % ranges * case.range
        rows = np.tile(items.items[-1], (longest, 1))  # nothing, for a program
        rows[: end - begin] = items.items[begin:end]
        parts = of_keys(gradients, rows, np.asarray([both, first], np.int32), sums)
        parts = np.asarray(*parts, np.float64)
        b, k = divmod(both, case.kv_heads)
        rows = slice(k * case.heads, (k + 1) * case.heads)
        for t in range(first, min(first + case.range, case.queries)):
            for slot in np.flatnonzero(blocks[b, t, k] >= 0):
                d_query[b, t, rows] += parts[0, (t - first) * case.slots + slot, : case.heads]
    return KeySums(*(jax.freeze(x) for x in sums)), d_query


def cut_rings() -> None:
    """Gives the rings of all kernels two places."""

    def few_places(sizes_of):
        return lambda *args, **kw: sizes_of(*args, **kw)._replace(stages=2)

    for name in ("gradient_sizes", "key_sizes", "forward_sizes"):
        setattr(sizes, name, few_places(getattr(sizes, name)))


def main_freed_early() -> dict[str, float]:
    """As if consumers freed values when they have come, so while a product reads them: a race is found."""
    wait, free = Pipeline.wait_values, Pipeline.free_values

    def wait_and_free(self, fill):
        wait(self, fill)
        free(self, self.slot(fill))

    Pipeline.wait_values, Pipeline.free_values = wait_and_free, lambda *_: None
    return main_of_range(RANGES["compressed"])


if __name__ == "__main__":
    cut_rings()
    watched_products.watch()
    run = {name: functools.partial(main, case) for name, case in CASES.items()}
    run |= {name: functools.partial(main_of_range, case) for name, case in RANGES.items()}
    run["freed_early"] = main_freed_early
    print(json.dumps({name: run[name]() for name in sys.argv[1:]}))
