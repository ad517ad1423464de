"""Selected attention in Triton's interpreter against plain sums: `python tests/triton_block_program.py`.

Float32 on small odd shapes; every output is poisoned first. Prints the largest error of each check.
"""

from triton_interpreter import interpreted  # isort: skip

import contextlib
import functools
import time
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
from cases import PACKED

from nsa_jax.budget import allowance, distance
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import repaired, selected
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.selected import in_parts, item_table, items
from nsa_jax.kernels.triton.selected.deltas import row_deltas
from nsa_jax.kernels.triton.selected.items import invert
from nsa_jax.kernels.triton.selected.sum_query_parts import add_query_parts
from nsa_jax.kernels.triton.selected.unions import union_lists
from nsa_jax.kernels.triton.sizes.selected import (
    SelectedForwardSizes,
    SelectedGradientSizes,
    SelectedKeySizes,
    SelectedPartSizes,
)
from nsa_jax.layout import Run, Runs, distinct_blocks, place

EPS = float(np.finfo(np.float32).eps)


class Case(NamedTuple):
    heads: int  # query heads per KV head
    key_dim: int = 16
    value_dim: int = 16
    block: int = 16
    slots: int = 4
    rows: int = 16
    keys: int = 16
    item: int = 1024
    empty: bool = False  # whether whole tiles of queries choose nothing
    repeated: bool = False  # whether a query names a block twice; it counts once
    packed: bool = False
    positions: str = "all"
    batch: int = 1
    kv_heads: int = 1
    num_keys: int = 45
    weighted: bool = False
    previous: bool = False
    scale: float = 0.3
    peel: bool = True
    num_stages: int = 2  # of the gradients of the keys
    keys_first: bool = True  # there


CASES = {
    "one_head": Case(1, weighted=True),
    "two_heads_split_blocks": Case(2, 48, 16, item=5, rows=32, previous=True),
    "six_heads_seven_slots": Case(6, 16, 48, slots=7, item=7, weighted=True, num_keys=33),
    "sixteen_heads": Case(
        16, 32, 16, rows=64, weighted=True, previous=True, item=9, peel=False, keys_first=False
    ),
    "block_of_two_steps": Case(2, block=32, batch=2, item=6, positions="last", num_keys=49),
    "packed": Case(3, packed=True, num_keys=75, item=4, weighted=True, rows=32),
    "empty_tiles": Case(2, block=32, slots=2, item=4, empty=True),
    "packed_anywhere": Case(
        6,
        packed=True,
        batch=2,
        num_keys=75,
        positions="shuffled",
        item=5,
        rows=64,
        peel=False,
        keys_first=False,
    ),
    "anywhere": Case(3, positions="shuffled", kv_heads=2, block=32, slots=2, item=4, num_stages=3),
    "more_slots_than_blocks": Case(2, slots=9, num_keys=30, scale=-0.4, kv_heads=3, item=6),
    "repeated": Case(2, item=20, num_keys=100, repeated=True, keys_first=False),
    "nothing": Case(4, positions="none", num_keys=20, peel=False),
    "one_query": Case(16, positions="one", num_keys=40, kv_heads=2),
    "fewer_keys_than_a_block": Case(2, num_keys=5, block=32, slots=1, keys=32, rows=32),
}


OF_BOTH_WAYS = ("two_heads_split_blocks", "packed")
SORTED_IN_OTHER_WAYS = ("two_heads_split_blocks", "packed_anywhere", "nothing")


@functools.cache
def inputs(case: Case):
    """Operands, placement, cotangents, weight, and the gradient of the queries to add to."""
    random = np.random.default_rng(len(str(case)))
    runs = [[i for i, n in row for _ in range(n)] for row in PACKED[: case.batch]]
    segment_ids = np.asarray(runs, np.int32) if case.packed else None
    positions = np.arange(case.num_keys)
    if case.positions == "shuffled":
        positions = np.where(random.random(27) < 0.2, -1, random.permutation(case.num_keys)[:27])
    elif case.positions == "last":
        positions = positions[-17:]
    elif case.positions == "none":
        positions = np.full(9, -1)
    elif case.positions == "one":
        positions = positions[-1:]
    neighbours = case.positions in ("all", "last", "one")
    known = Runs((Run(len(positions), int(positions[0])),)) if neighbours else None
    positions = np.tile(positions, (case.batch, 1)).astype(np.int32)
    config = NSAConfig(
        compression_block_size=16, compression_stride=16, selection_block_size=case.block,
        num_selected_blocks=case.slots, num_initial_blocks=0, num_local_blocks=1,
    )  # fmt: skip
    num_queries = positions.shape[1]
    placing = functools.partial(
        place, config, batch=case.batch, num_queries=num_queries, num_keys=case.num_keys,
        segment_ids=segment_ids, query_positions=positions if known is None else known,
    )  # fmt: skip
    placed = jax.jit(placing)()
    blocks = -(-case.num_keys // case.block)
    indices = np.full((case.batch, num_queries, case.kv_heads, case.slots), -1, np.int32)
    position = np.asarray(placed.position)
    for at in np.ndindex(*indices.shape[:3]):
        # Some blocks lie after the query: there is nothing to see in them.
        visible = min(max(int(position[at[:2]]), 0) // case.block + 2, blocks)
        some = random.permutation(visible)[: random.integers(0, case.slots + 1)]
        indices[at][: len(some)] = np.sort(some)
    if case.repeated:
        indices[..., 1] = indices[..., 0]
        distinct = jax.jit(lambda blocks: distinct_blocks(blocks, case.num_keys, config))
        indices = np.array(distinct(indices))
    if case.empty:
        indices[:, 8:24] = -1

    def normal(*shape):
        return jax.device_put(random.standard_normal(shape).astype(np.float32))

    rows = (case.batch, num_queries, case.heads * case.kv_heads)
    query, d_out = normal(*rows, case.key_dim), normal(*rows, case.value_dim)
    key, value = (normal(case.batch, case.num_keys, case.kv_heads, x) for x in (case.key_dim, case.value_dim))
    weight = jax.device_put(random.uniform(size=rows).astype(np.float32)) if case.weighted else None
    previous = normal(*rows, case.key_dim) if case.previous else None
    operands = (query, key, value, jax.device_put(indices))
    return operands, placed, (d_out, normal(*rows)), weight, previous


def seen(case: Case, indices, placed) -> np.ndarray:
    """`[B, T, K, S]`: which keys a query attends to."""
    position = np.arange(case.num_keys) - np.asarray(placed.sequence_start)[..., None]
    causal = (position >= 0) & (position <= np.asarray(placed.position)[..., None])
    chosen = position[:, :, None, None] // case.block == np.asarray(indices)[..., None]
    return causal[:, :, None] & chosen.any(3)


@functools.cache
def program(case: Case, way: str, *, repair: bool):
    """Output, log-sum-exps, probabilities of the slots, and gradients; `repair` what is not finite.

    A way is "tiles" or "parts", whose kernels alone are started; or "few" or "many", where those of both
    are, and what neighbours share decides whose results remain.
    """
    (_, _, _, indices), placed, (d_out, d_lse), weight, previous = inputs(case)
    sizes = {
        id(selected.SELECTED_FORWARD): SelectedForwardSizes(case.rows, case.keys, 4, 1, peel=case.peel),
        id(selected.SELECTED_QUERY_GRADIENT): SelectedGradientSizes(
            case.rows, case.keys, 4, 1, peel=case.peel
        ),
        id(selected.SELECTED_KEY_GRADIENTS): SelectedKeySizes(
            case.rows, case.keys, 4, case.num_stages, case.item, case.keys_first
        ),
    }
    asked = 3.5 if way in ("few", "many") else 4
    parts = SelectedPartSizes(16, 4, 1, None, case.item, fewest_keys=0, most_shared=asked)
    of_query = 4 * case.slots * case.heads * max(case.key_dim, case.value_dim)
    whole = in_parts.PART_BYTES if case.weighted and case.previous else None
    in_chunks, by_heads = whole or 10 * of_query, whole or indices.shape[1] * of_query
    settings = dict(
        choose_sizes=lambda table, shape: sizes[id(table)],
        find_sizes=lambda table, shape: None if way == "tiles" else parts,
        shares_less=lambda *_: jnp.asarray(way == "few"),
        BLOCK=case.block, FEWEST_PAIRS=0, FEWEST_ASKED_FORWARD=0,
    )  # fmt: skip
    attend, differentiate = selected.attend_selected, selected.selected_gradients
    if repair:  # of one branch alone, which has no weight and nothing to add to
        weight = previous = None
        attend = repaired.attend_blocks
        differentiate = functools.partial(repaired.differentiate_blocks, by=repaired.BY_TRITON)

    @jax.jit
    def kernels(query, key, value):
        arrays = query, key, value, indices, placed
        with mock.patch.object(in_parts, "PART_BYTES", in_chunks):
            out, lse, probabilities = attend(*arrays, scale=case.scale, with_probabilities=True)
        given = Backward(out, lse, d_out, jnp.where(lse > -jnp.inf, d_lse, jnp.nan), weight, previous)
        with mock.patch.object(in_parts, "PART_BYTES", by_heads):
            found = differentiate(*arrays, given, scale=case.scale)
        return out, lse, *found[:3], probabilities

    def run(query, key, value, *, compiled=True):
        with (
            interpreted(),
            mock.patch.multiple(selected, **settings),
            jax.disable_jit(not compiled),
        ):
            return kernels(query, key, value)

    return run


NAMES = ("out", "lse", "d_query", "d_key", "d_value")


@functools.cache
def found_by(case: Case, way: str):
    """What `program` gives, without a repair."""
    (query, key, value, _), *_ = inputs(case)
    return jax.tree.map(np.asarray, program(case, way, repair=False)(query, key, value))


@functools.cache
def oracle(case: Case):
    """Results by plain sums in float32 and float64, and the probabilities of the slots."""
    (query, key, value, indices), placed, (d_out, d_lse), weight, previous = inputs(case)
    arrays = query, key, value, seen(case, indices, placed), case.scale, d_out, d_lse, weight, previous
    same, exact = (plain_attention.with_gradients(*arrays, dtype=x) for x in (np.float32, np.float64))
    return same, exact, probabilities_of(case, query, key, indices, placed)


def check_case(case: Case, way: str) -> dict[str, float]:
    """Errors of the output, the log-sum-exp and the three gradients, each within its budget."""
    *found, probabilities = found_by(case, way)
    same, exact, expected = oracle(case)
    errors = {}
    for name, result in zip(NAMES, found, strict=True):
        errors[name] = distance(result, exact[name])
        allowed = allowance(same[name], exact[name], EPS)
        assert errors[name] <= allowed, (way, name, errors[name], allowed)
    errors["probabilities"] = np.abs(probabilities - expected).max(initial=0)
    assert errors["probabilities"] <= case.heads * 16 * 10 * EPS, (way, errors)
    assert ((probabilities == 0) == (expected == 0)).all(), way
    if way in ("few", "many"):  # the other way's kernels have added nothing
        alone = found_by(case, "parts" if way == "few" else "tiles")
        for name, mine, theirs in zip(NAMES, found, alone, strict=False):
            assert np.array_equal(mine, theirs), (way, name)
    return errors


def probabilities_of(case: Case, query, key, indices, placed) -> np.ndarray:
    """`[B, T, K, R]`: by loops, in float64."""
    query, key, indices = np.asarray(query, np.float64), np.asarray(key, np.float64), np.asarray(indices)
    mask, start = seen(case, indices, placed), np.asarray(placed.sequence_start)
    found = np.zeros(indices.shape)
    for b, t, k in np.ndindex(*indices.shape[:3]):
        for head in range(k * case.heads, (k + 1) * case.heads):
            logits = np.where(mask[b, t, k], key[b, :, k] @ query[b, t, head] * case.scale, -np.inf)
            if mask[b, t, k].any():
                shares = np.exp(logits - logits.max())
                shares /= shares.sum()
                for slot in np.flatnonzero(indices[b, t, k] >= 0):
                    first = start[b, t] + indices[b, t, k, slot] * case.block
                    found[b, t, k, slot] += shares[first : first + case.block].sum()
    return found


def check_nan(case: Case, way: str) -> None:
    """A value that is NaN, and a key, reach the queries that see them, and the keys that these see."""
    (query, key, value, indices), placed, *_ = inputs(case)
    mask = seen(case, indices, placed)
    position = np.asarray(placed.position)[0]  # also of the keys: each has its query
    ends = position % case.block == case.block - 1  # queries of the block that come before see others of it
    at = int((mask.sum((0, 1, 2)) * ends).argmax())
    sees = mask[..., at]
    assert sees.any()
    assert not sees.all()
    run = program(case, way, repair=True)
    touched = (mask & sees[..., None]).any(1).swapaxes(1, 2)  # [B, S, K]
    for where in ("key", "value"):
        bad, good = (dict(key=np.array(key), value=np.array(value)) for _ in range(2))
        bad[where][:, at], good[where][:, at] = np.nan, 0
        found, expected = run(query, **bad), run(query, **good)
        of_query = np.repeat(sees, case.heads, axis=2)
        hits = (of_query,) * 3 + (touched,) * 2 + (sees,)
        for name, hit, x, y in zip((*NAMES, "probabilities"), hits, found, expected, strict=True):
            x, y = np.asarray(x), np.asarray(y)
            np.testing.assert_allclose(x[~hit], y[~hit], rtol=0, atol=1e-4, err_msg=f"{where} {name}")
            if name == "out":
                assert np.isnan(x[hit]).any(-1).all(), where


def check_one_way_has_nothing_to_do(case: Case) -> None:
    """Where both are started: tiles rest and get no items, or chunks no heads and no items."""
    (query, key, value, _), *_ = inputs(case)
    given: dict[str, list[jax.Array]] = {}

    def spy(function, find):
        def call(*args, **kwargs):
            given.setdefault(function.__name__, []).append(find(args))
            return function(*args, **kwargs)

        return call

    # What these functions are given: lists, items, and the row of a chunk.
    spied = (
        (selected.forward, "attend_selected", lambda args: args[3].counts),
        (selected, "selected_query_gradient", lambda args: args[3].counts),
        (selected, "selected_key_gradients", lambda args: args[3].items),
        (in_parts, "output_parts", lambda args: args[6]),
        (in_parts, "gradient_parts", lambda args: args[9]),
    )
    for way in ("few", "many"):

        @jax.jit
        def launches(way=way):
            given.clear()
            with contextlib.ExitStack() as patches:
                for module, name, find in spied:
                    patches.enter_context(mock.patch.object(module, name, spy(getattr(module, name), find)))
                program(case, way, repair=False)(query, key, value, compiled=False)
            return dict(given)

        found = launches()
        assert len(found) == len(spied)
        few = way == "few"
        for name in ("attend_selected", "selected_query_gradient"):
            counts = np.concatenate(found[name])
            assert ((counts == -1) if few else (counts >= 0)).all()
        assert (np.concatenate(found["selected_key_gradients"]) == -1).all() == few
        for name in ("output_parts", "gradient_parts"):
            heads, _, first, end = np.stack(found[name]).T
            assert ((heads == case.batch * case.kv_heads) & (first == end)).all() != few


def check_lists(case: Case) -> None:
    """The lists hold the blocks of the tile's queries, each once and ascending."""
    (_, _, _, indices), placed, *_ = inputs(case)
    tokens = 4
    with interpreted():
        lists = jax.jit(lambda: union_lists(indices, placed, case.num_keys, tokens=tokens))()
    lists = jax.tree.map(np.asarray, lists)
    position, sequence_start = np.asarray(placed.position), np.asarray(placed.sequence_start)
    rows = np.where(position >= 0, sequence_start + position, -1)
    assert (rows == lists.rows).all()
    starts = np.asarray(placed.sequence_start)[:, :, None, None] + np.asarray(indices) * case.block
    starts = np.where((np.asarray(indices) >= 0) & (starts <= rows[:, :, None, None]), starts, -1)
    for b, k, tile in np.ndindex(*lists.counts.shape):
        mine = starts[b, tile * tokens : (tile + 1) * tokens, k]
        expected = {}
        for i, of_token in enumerate(mine):
            for start in of_token[of_token >= 0]:
                expected[int(start)] = expected.get(int(start), 0) | 1 << i
        count = lists.counts[b, k, tile]
        assert list(lists.starts[b, k, tile, :count]) == sorted(expected)
        assert list(lists.members[b, k, tile, :count]) == [expected[x] for x in sorted(expected)]
        seeing = rows[b, tile * tokens : (tile + 1) * tokens]
        least = min(seeing[seeing >= 0], default=2**31)
        assert lists.unmasked[b, k, tile] == sum(x + case.block - 1 <= least for x in expected)


CUTS = (None, None), (10, None), (1000, 1), (1000, 2)  # queries of a range, heads of a chunk


@functools.cache
def inverted(case: Case) -> dict:
    """`invert` with all CUTS, in one program."""
    (_, _, _, indices), placed, *_ = inputs(case)

    @jax.jit
    def turned(indices):
        return [
            invert(indices, placed, case.num_keys, item=case.item, range_queries=queries, chunk_heads=heads)
            for queries, heads in CUTS
        ]

    with interpreted():
        return dict(zip(CUTS, jax.tree.map(np.asarray, turned(indices)), strict=True))


def check_items(case: Case, range_queries: int | None, chunk_heads: int | None) -> None:
    """Every pair lies in one item, in order, and every item, slot and block fits the static sizes.

    The items of a chunk follow each other, the longest first. With ranges they hold codes of token and slot.
    """
    (_, _, _, indices), placed, *_ = inputs(case)
    indices, sequence_start, position = map(np.asarray, (indices, placed.sequence_start, placed.position))
    found = inverted(case)[range_queries, chunk_heads]
    lanes = [0] * len(found.items)
    if range_queries is not None:
        codes = np.asarray(found.tokens)
        found = found._replace(tokens=codes // case.slots)
        ranges = -(-indices.shape[1] // range_queries)
        heads = case.batch * case.kv_heads
        of_chunk = 1 if ranges > 1 else min(chunk_heads or heads, heads)
        assert len(found.bounds) == heads * ranges + 1
        for number, (head, start, _, first, _, end, _) in enumerate(np.asarray(found.items)):
            if head < 0:
                assert number >= found.bounds[-1]
                continue
            lane = np.searchsorted(np.asarray(found.bounds), number, side="right") - 1
            lanes[number] = lane // of_chunk
            b, k = divmod(int(head), case.kv_heads)
            whole = max(ranges, of_chunk)  # lanes of a head, or of a chunk
            assert lane // whole == head * ranges // whole
            for code in codes[first:end]:
                t, slot = divmod(int(code), case.slots)
                assert (head * ranges + t // range_queries) // of_chunk == lane // of_chunk
                assert sequence_start[b, t] + indices[b, t, k, slot] * case.block == start
        slots, partials = np.asarray(found.slots).ravel(), np.asarray(found.partials).ravel()
        taken = [s + i for s, n in zip(slots, partials, strict=True) for i in range(n)]
        assert taken == list(range(len(taken)))
        assert (partials != 1).all()
    rows = np.where(position >= 0, sequence_start + position, -1)
    expected = {
        (b * case.kv_heads + k, int(sequence_start[b, t]) + int(indices[b, t, k, r]) * case.block, t)
        for b, t, k, r in np.ndindex(*indices.shape)
        if indices[b, t, k, r] >= 0 and indices[b, t, k, r] * case.block <= position[b, t]
    }
    got, slots, order = [], [], []
    for lane, (head, start, limit, first, masked, end, slot) in zip(
        lanes, np.asarray(found.items), strict=True
    ):
        if head < 0:
            continue
        assert first <= masked <= end <= first + case.item
        assert limit <= case.num_keys
        row = rows[head // case.kv_heads, np.asarray(found.tokens)[first:end]]
        assert ((start + case.block - 1 > row) == (np.arange(first, end) < masked)).all()
        got += [(int(head), int(start), int(t)) for t in np.asarray(found.tokens)[first:end]]
        slots += [int(slot)] if slot >= 0 else []
        order.append((lane, first - end))
    assert order == sorted(order)
    assert len(got) == len(set(got)) == len(expected)
    assert set(got) == expected
    assert sorted(slots) == list(range(len(slots)))
    assert len(slots) <= found.num_partials


def check_orders(case: Case) -> None:
    """Small tiles of the counting sort, and XLA's sort, which many blocks need, give the same items.

    So do few groups in a step, and XLA's sums, of many. With many more they stay in the order of the groups.
    """
    for tile_pairs, step, most_groups in ((32, 4, 2**15), (None, 4096, 0)):
        with (
            mock.patch.object(items, "fitting_tile", return_value=tile_pairs),
            mock.patch.multiple(item_table, STEP=step, GROUPS_AT_ONCE=min(step, 128)),
            mock.patch.object(items, "MOST_GROUPS", most_groups),
        ):
            others = inverted.__wrapped__(case)
        for cut, found in inverted(case).items():
            other = others[cut]
            pairs = found.items[:, 5].max(where=found.items[:, 0] >= 0, initial=0)
            assert np.array_equal(found.tokens[:pairs], other.tokens[:pairs])
            rest = (jax.tree.leaves(x._replace(tokens=0)) for x in (found, other))
            assert all(np.array_equal(x, y) for x, y in zip(*rest, strict=True))
    with mock.patch.object(item_table, "MOST_ORDERED", 0):
        others = inverted.__wrapped__(case)
    for cut, found in inverted(case).items():
        found, other = (x.items[x.items[:, 0] >= 0] for x in (found, others[cut]))
        assert sorted(map(tuple, found)) == sorted(map(tuple, other))
        assert (np.diff(other[:, 3]) >= 0).all()


def check_parts(case: Case) -> None:
    """The parts of visible slots are added up in place, and nothing else is read or written."""
    (query, _, _, indices), placed, (d_out, d_lse), weight, previous = inputs(case)
    heads, (batch, length, _, dim) = case.batch * case.kv_heads, query.shape
    random = np.random.default_rng(3)
    rows = placed.sequence_start + placed.position
    starts = np.asarray(placed.sequence_start)[:, :, None, None] + np.asarray(indices) * case.block
    sees = (np.asarray(indices) >= 0) & (starts <= np.asarray(rows)[:, :, None, None])
    sees &= (np.asarray(placed.position) >= 0)[:, :, None, None]
    padded, given, sums = max(8, 1 << (case.heads - 1).bit_length()), [], []
    for lanes, queries, first in ((heads, length, (0, 0)), (2, -(-length // 2), (heads - 1, length // 2))):
        parts = np.full((lanes, queries, case.slots, padded, dim), np.nan, np.float32)
        before = random.standard_normal(query.shape).astype(np.float32)
        expected = before.astype(np.float64)
        for lane, q in np.ndindex(lanes, queries):
            (b, k), t = divmod(first[0] + lane, case.kv_heads), first[1] + q
            if b >= batch or t >= length:
                continue
            slots = np.flatnonzero(sees[b, t, k])
            parts[lane, q, slots, : case.heads] = random.standard_normal((len(slots), case.heads, dim))
            total = parts[lane, q, slots, : case.heads].astype(np.float64).sum(0)
            mine = slice(k * case.heads, (k + 1) * case.heads)
            more = 0 if previous is None else np.asarray(previous, np.float64)[b, t, mine]
            expected[b, t, mine] = total + more
        given.append((before, parts.reshape(lanes, -1, padded, dim), np.asarray(first, np.int32)))
        sums.append(expected)
    out = random.standard_normal(d_out.shape).astype(np.float32)

    @jax.jit
    def run(given, out):
        added = [add_query_parts(*arrays, indices, placed, previous) for arrays in given]
        return added, row_deltas(Backward(out, d_lse, d_out, d_lse, weight))

    with interpreted():
        added, (products, delta) = run(given, out)
    for found, expected in zip(added, sums, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2 * case.slots * EPS * 4)
    exact = (np.asarray(out, np.float64) * np.asarray(d_out)).sum(-1)
    np.testing.assert_allclose(products, exact, rtol=0, atol=out.shape[-1] * EPS * 8)
    exact = exact * (1 if weight is None else np.asarray(weight)) - np.asarray(d_lse)
    np.testing.assert_allclose(delta, exact, rtol=0, atol=out.shape[-1] * EPS * 8)


def check_blocks_named_twice() -> None:
    """Against the rule, and with another block between: more pairs than queries, but slots stay in bounds."""
    config = NSAConfig(selection_block_size=16, compression_block_size=16, compression_stride=16)
    own = np.arange(60, dtype=np.int32) // 16
    indices = np.stack([own * 0, own, own * 0], axis=-1)[None, :, None]  # not by `distinct_blocks`

    @jax.jit
    def both(indices):
        placed = place(config, batch=1, num_queries=60, num_keys=60)
        return [invert(indices, placed, 60, item=item) for item in (64, 20)]

    with interpreted():
        given = jax.tree.map(np.asarray, both(indices))
    for item, found in zip((64, 20), given, strict=True):
        slots = found.items[:, -1]
        assert (slots < found.num_partials).all()
        assert (found.slots + found.partials <= found.num_partials).all()
        assert (slots >= 0).any() == (item < 60)


def main() -> None:
    for name, case in CASES.items():
        began = time.time()
        check_lists(case)
        for cut in CUTS:
            check_items(case, *cut)
        if name in SORTED_IN_OTHER_WAYS:
            check_orders(case)
        check_parts(case)
        for way in ("parts", "few", "many") if name in OF_BOTH_WAYS else ("parts",):
            check_case(case, way)
        errors = check_case(case, "tiles")
        errors = ", ".join(f"{x} {error:.1e}" for x, error in errors.items())
        print(f"{name}: ok in {time.time() - began:.1f} s {errors}", flush=True)
    check_blocks_named_twice()
    print("named twice: ok", flush=True)
    check_one_way_has_nothing_to_do(CASES["two_heads_split_blocks"])
    print("nothing to do: ok", flush=True)
    for way, name in (("parts", "one_head"), ("tiles", "packed")):  # the repair is alike after both ways
        check_nan(CASES[name], way)
    print("not a number: ok", flush=True)


if __name__ == "__main__":
    main()
