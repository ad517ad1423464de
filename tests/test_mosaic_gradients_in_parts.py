"""When the gradients of the queries come in parts, into which chunks they are cut, and what that needs."""

import os
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip(
    "jax_triton", reason="the lists are Triton kernels; installed by `tox -e test`", exc_type=ImportError
)

import lists_by_loops
import test_mosaic_compile
import triton_compile
import triton_kernels
from equations import equations
from jax.sharding import NamedSharding, PartitionSpec

import nsa_jax
from nsa_jax import layout
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.mosaic_gpu import gradients_in_parts
from nsa_jax.kernels.mosaic_gpu import operations as by_mosaic
from nsa_jax.kernels.mosaic_gpu.gradients_in_parts import can_form_parts, chunks_of, shares_little
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.selected.chunks import Chunks
from nsa_jax.kernels.triton.selected.items import most_partials

LENGTH = 65536
COLLECTIVES = {"all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter"}


def random_blocks(length, tokens_alike=1, slots=16, batch=1, kv_heads=2):
    """Blocks of 64 tokens before each token, the same for some neighbours; some slots are empty."""
    random = np.random.default_rng(1)
    most = np.arange(length).repeat(kv_heads).reshape(length, kv_heads) // 64 + 1
    most = most[::tokens_alike, :, None].repeat(tokens_alike, axis=0)[:length]
    share = random.random((batch, length // tokens_alike, kv_heads, slots)).repeat(tokens_alike, axis=1)
    return np.where(share < 0.9, (share * most / 0.9).astype(np.int32), -1)


def abstract(length=LENGTH, heads=64, kv_heads=4, dims=(128, 128), slots=16, batch=1, dtype="bfloat16"):
    """Query, values and blocks."""
    query = jax.ShapeDtypeStruct((batch, length, heads, dims[0]), dtype)
    value = jax.ShapeDtypeStruct((batch, length, kv_heads, dims[1]), dtype)
    return query, value, jax.ShapeDtypeStruct((batch, length, kv_heads, slots), jnp.int32)


@pytest.mark.parametrize("tokens_alike", [1, 2])  # a pair that chooses alike still masks half of each tile
def test_few_share_a_block_where_neighbours_choose_at_random(tokens_alike):
    assert shares_little(random_blocks(32768, tokens_alike), 4)


@pytest.mark.parametrize("tokens_alike", [4, 32])
def test_many_share_a_block_where_neighbours_choose_alike(tokens_alike):
    assert not shares_little(random_blocks(32768, tokens_alike), 4)


def test_mean_over_the_tiles_decides():
    """By loops: pairs of a query and a block for each block that a tile of 4 tokens chose."""
    blocks = random_blocks(4000)
    pairs = distinct = 0
    tiles = range(0, 1000, 3)  # every third tile is looked at
    for tile in tiles:
        for k in range(2):
            mine = blocks[0, 4 * tile : 4 * tile + 4, k]
            pairs += (mine >= 0).sum()
            distinct += len(set(mine[mine >= 0]))
    ratio = pairs / distinct

    for more in (0.99, 1.01):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients_in_parts, "MOST_SHARED", ratio * more)
            assert shares_little(blocks, 4) == (more > 1)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, Chunks(heads=1, queries=32768, ranges=2, number=8)),
        (dict(length=65537), Chunks(1, 21846, 3, 12)),
        (dict(length=8192, batch=3), Chunks(4, 8192, 1, 3)),
        (dict(length=10000, batch=3), Chunks(3, 10000, 1, 4)),
        (dict(length=1000), Chunks(4, 1000, 1, 1)),
        (dict(heads=36), Chunks(1, 32768, 2, 8)),  # 9 heads of a KV head are stored as 16
        (dict(slots=128), Chunks(1, 4096, 16, 64)),
    ],
    ids=["64k", "odd", "batch", "not_a_divisor", "short", "nine_heads", "many_slots"],
)
def test_chunks_fit(shape, expected):
    query, _, blocks = abstract(**shape)
    found = chunks_of(query, blocks)

    assert found == expected
    assert found.heads * found.queries * blocks.shape[3] * 16 * 128 * 2 <= gradients_in_parts.PART_BYTES
    assert found.ranges == 1 or found.heads == 1
    assert found.ranges * found.queries >= query.shape[1]


@pytest.mark.parametrize(
    ("shape", "block", "possible"),
    [
        ({}, 64, True),
        (dict(dims=(64, 64), heads=48), 64, True),
        ({}, 32, False),
        (dict(dims=(192, 128)), 64, False),
        (dict(heads=32), 64, False),
        (dict(length=8192), 64, False),
        (dict(length=2**17), 64, True),
        (dict(length=2**17 + 64), 64, False),
        (dict(length=2**17, kv_heads=1, heads=16), 64, True),
        (dict(length=2**17, slots=32), 64, False),
        (dict(length=2**14, batch=2048), 64, False),
        (dict(length=0), 64, False),
    ],
    ids=[
        *("paper", "smaller", "block", "dims", "heads", "short", "four_ranges", "five_ranges", "one_head"),
        *("many_slots", "codes", "no_queries"),
    ],
)
def test_only_calls_with_kernels_and_enough_work_form_parts(shape, block, possible):
    query, value, blocks = abstract(**shape)
    config = NSAConfig(selection_block_size=block)
    placed = layout.place(config, batch=1, num_queries=8, num_keys=8)

    assert can_form_parts(query, value, blocks, placed) == possible


@pytest.mark.parametrize(
    ("queries", "keys", "possible", "gigabytes"),
    [
        (2**17, 2**17, True, 2.7),
        (2**17, 2**18, True, 4.8),
        (2**17, 2**20, False, 17.7),
        (2**16, 2**18, True, 2.4),
        (2**16, 2**19, False, 4.6),
    ],
    ids=["128k", "256k_of_two", "1m_of_eight", "256k_of_four", "512k_of_eight"],
)
def test_some_queries_of_a_row_form_parts_if_the_sums_of_all_keys_are_few(queries, keys, possible, gigabytes):
    """As on each of several GPUs that divide the tokens of a row."""
    query, value, blocks = abstract(length=queries)
    value = jax.ShapeDtypeStruct((1, keys, *value.shape[2:]), value.dtype)
    placed = layout.place(NSAConfig(), batch=1, num_queries=queries, num_keys=keys)

    assert can_form_parts(query, value, blocks, placed) == possible
    item, ranges = gradients_in_parts.ITEM_QUERIES, chunks_of(query, blocks).ranges
    sums = most_partials(blocks, placed, keys, item=item, ranges=ranges)
    assert round(4 * 64 * (128 + 128) * sums / 1e9, 1) == gigabytes


def test_packed_rows_form_parts_if_their_queries_are_known_to_be_consecutive():
    """Else nearly every token might begin a block that is chosen in several ranges: 35 GB of sums."""
    query, value, blocks = abstract()
    ids, positions = jnp.zeros((1, LENGTH), jnp.int32), jnp.arange(LENGTH)[None]

    def possible(**queries):
        placed = layout.place(
            NSAConfig(), batch=1, num_queries=LENGTH, num_keys=LENGTH, segment_ids=ids, **queries
        )
        return can_form_parts(query, value, blocks, placed)

    assert possible()
    assert not possible(query_positions=positions)


@pytest.mark.parametrize("item", [8, 60])
@pytest.mark.parametrize("lengths", [[60], [13, 17, 1, 15, 14], [1] * 60])
def test_sums_are_no_more_than_counted(lengths, item):
    """By loops, where every query chooses all blocks in sight, and sequences reach into several ranges."""
    config = NSAConfig(selection_block_size=2, compression_block_size=2, compression_stride=2)
    segments = jnp.asarray(np.repeat(np.arange(1, len(lengths) + 1), lengths))[None]
    placed = layout.place(config, batch=1, num_queries=60, num_keys=60, segment_ids=segments)
    number = np.arange(30)
    starts, positions = np.asarray(placed.sequence_start), np.asarray(placed.position)
    blocks = np.where(number * 2 <= positions[..., None], number, -1)[:, :, None]

    for ranges in (1, 4):
        items, _ = lists_by_loops.items_by_loops(
            blocks, starts, starts + positions, block=2, num_keys=60, item=item, packed=True,
            range_queries=60 // ranges,
        )  # fmt: skip
        assert items.num_partials <= most_partials(blocks, placed, 60, item=item, ranges=ranges)


def program(heads, kv_heads, dim, block, *, length):
    """The gradients of the whole operation, and their abstract arguments."""
    config = NSAConfig(selection_block_size=block)

    def gradients(*arrays):
        def attend(query, key, value):
            return nsa_jax.selected_attention(
                query, key, value, arrays[3], config=config, implementation="mosaic_gpu"
            )

        found, pull_back = jax.vjp(attend, *arrays[:3])
        return pull_back(found)

    arrays = [jax.ShapeDtypeStruct((1, length, n, dim), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)]
    return gradients, [*arrays, jax.ShapeDtypeStruct((1, length, kv_heads, 16), jnp.int32)]


def found_in(jaxpr, inside=()):
    """For each launch of the kernel that adds up the parts: the primitives that it is inside of."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if equation.params.get("name") == "nsa_selected_add_query_parts":
            yield inside
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from found_in(inner, (*inside, name))


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_one_of_the_two_runs_also_under_vmap(mapped, monkeypatch):
    """`lax.cond` would run both under `vmap`, if the mapped axis were not part of the batch."""
    monkeypatch.setattr(gradients_in_parts, "FEWEST_PAIRS", 0)
    function, arrays = program(64, 4, 128, 64, length=528)  # which no other test has traced, or will
    if mapped:
        function = jax.vmap(function)
        arrays = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays]

    with triton_compile.device(90):
        launches = list(found_in(jax.make_jaxpr(function)(*arrays).jaxpr))

    assert len(launches) == 1
    assert launches[0].count("cond") == 1


@pytest.mark.slow
def test_shards_of_kv_heads_choose_on_their_own():
    """Under plain `jit`, whose `custom_partitioning` refuses effects, and in a `shard_map`, as it is traced.

    There JAX types what varies.
    """
    function, arrays = program(64, 4, 64, 64, length=32768)
    mesh = triton_compile.mesh_of_h100s(x=2)
    heads = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    arrays = [x.update(sharding=heads) for x in arrays]

    text = triton_compile.compile_on(mesh, function, *arrays).as_text()

    assert text.count("conditional(") == 1
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text)

    in_shards = jax.shard_map(function, mesh=mesh, in_specs=heads.spec, out_specs=heads.spec)
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(in_shards)(*arrays).jaxpr

    (inside,) = found_in(traced)
    assert inside.count("cond") == 1
    assert not {x.primitive.name for x in equations(traced)} & COLLECTIVES


@pytest.mark.slow
def test_memory_at_64k_tokens_is_bounded_and_little_spills(capfd, monkeypatch):
    """A chunk of parts, the partial sums of the keys, and less than a gradient of queries for the rest."""
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    query, value, blocks = abstract()
    number = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)

    def gradients(query, key, value, blocks, out, lse, d_out, d_lse, weight, previous):
        placed = layout.place(NSAConfig(), batch=1, num_queries=LENGTH, num_keys=LENGTH)
        given = Backward(out, lse, d_out, d_lse, weight, previous)
        return by_mosaic.selected_gradients(query, key, value, blocks, placed, given, scale=0.1)

    operands = query, value, value, blocks, query, number, query, number, number, query
    compiled = triton_compile.compile_for_h100(gradients, *operands)

    partials = (LENGTH * 4 * 16 // 1024 + 8 * 1024) * 64 * 256 * 4
    found = compiled.memory_analysis().temp_size_in_bytes
    assert found <= gradients_in_parts.PART_BYTES + partials + query.size
    text = compiled.as_text()
    assert "conditional(" in text
    assert not re.findall(r"bf16\[1,65536,64,128\]\S* copy\(", text)  # nor is a gradient copied
    reports = test_mosaic_compile.reports("".join(capfd.readouterr()))
    assert len(reports) == 3, reports
    most = 2128 if test_mosaic_compile.LINKED else 12  # as measured, with weights and parts
    for name, registers, spilled in reports:
        assert spilled <= most, (name, spilled)
        assert registers <= 168, (name, registers)


def test_kernels_that_move_memory_load_whole_vectors():
    query, _, blocks = abstract(length=512)
    parts = jax.ShapeDtypeStruct((2, 256 * 16, 16, 128), query.dtype)
    number = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)

    def both(d_query, parts, first, blocks, previous, number):
        placed = layout.place(NSAConfig(), batch=1, num_queries=512, num_keys=512)
        total = gradients_in_parts.add_query_parts(d_query, parts, first, blocks, placed, previous)
        return total, gradients_in_parts.row_deltas(Backward(d_query, number, previous, number, number))

    first = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = triton_kernels.compiled(both, query, parts, first, blocks, query, number, capability=90)

    assert {x.name for x in found} == {"nsa_selected_add_query_parts", "nsa_selected_deltas"}
    for kernel in found:
        assert kernel.spill_bytes == 0
        assert "ld.global.v4.b32" in kernel.ptx
        assert kernel.registers <= (88 if "parts" in kernel.name else 64)  # 16 slots are in flight
