"""Few query heads a KV head: which calls of the selected branch come in parts, and what that needs."""

import math
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)

import test_triton_compile  # noqa: E402
import triton_compile  # noqa: E402
import triton_kernels  # noqa: E402
from equations import equations  # noqa: E402

import nsa_jax  # noqa: E402
from nsa_jax import layout  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from nsa_jax.kernels.triton import selected  # noqa: E402
from nsa_jax.kernels.triton.backward import Backward  # noqa: E402
from nsa_jax.kernels.triton.selected.chunks import PART_BYTES, Chunks  # noqa: E402
from nsa_jax.kernels.triton.selected.in_parts import chunks_of  # noqa: E402

FORWARD, BACKWARD = "nsa_selected_output_parts", "nsa_selected_gradient_parts"
OF_TILES = "nsa_selected_forward", "nsa_selected_query_gradient"


def program(
    heads=32, kv_heads=8, dim=128, *, length=32768, block=64, slots=16, dtype="bfloat16", gradients=True
):  # fmt: skip
    """The selected branch, with its gradients unless `gradients` says no, and abstract arguments."""
    config = NSAConfig(selection_block_size=block, num_selected_blocks=slots)

    def both(*arrays):
        def attend(query, key, value):
            return nsa_jax.selected_attention(
                query, key, value, arrays[3], config=config, implementation="triton"
            )

        if not gradients:
            return attend(*arrays[:3])
        found, pull_back = jax.vjp(attend, *arrays[:3])
        return found, pull_back(found)

    arrays = [jax.ShapeDtypeStruct((1, length, n, dim), dtype) for n in (heads, kv_heads, kv_heads)]
    return both, [*arrays, jax.ShapeDtypeStruct((1, length, kv_heads, slots), jnp.int32)]


def launches(function, arrays, capability=90) -> tuple[str, ...]:
    """Which kernels forward and backward start: of "tiles", "parts", or "both"; none is in a `cond`.

    A program without gradients has no second entry.

    Each is started once, by tiles for all rows together.
    """

    def launches_in(jaxpr):
        for equation in jaxpr.eqns:
            assert equation.primitive.name != "cond"
            if equation.params.get("name") in (*OF_TILES, FORWARD, BACKWARD):
                yield equation.params["name"], equation.outvars[0].aval.shape
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from launches_in(inner)

    with triton_compile.device(capability):
        launched = list(launches_in(jax.make_jaxpr(function)(*arrays).jaxpr))
    found = dict(launched)
    assert len(found) == len(launched)
    assert {found[name][0] for name in OF_TILES if name in found} <= {math.prod(arrays[0].shape[:-3])}
    ways = []
    for tiles, parts in zip(OF_TILES, (FORWARD, BACKWARD), strict=True):
        if {tiles, parts} & {*found}:
            ways.append("both" if {tiles, parts} <= {*found} else "tiles" if tiles in found else "parts")
    return tuple(ways)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, ("both", "both")),
        (dict(dtype="float16"), ("both", "both")),
        (dict(length=8192), ("tiles", "both")),
        (dict(heads=9, kv_heads=3, dim=64), ("both", "parts")),
        (dict(heads=9, kv_heads=3, dim=64, length=12288), ("tiles", "parts")),
        (dict(heads=9, kv_heads=3, dim=64, length=8192), ("parts", "parts")),
        (dict(heads=9, kv_heads=3, dim=64, length=4096), ("tiles", "tiles")),
        (dict(kv_heads=2), ("tiles", "tiles")),
        (dict(kv_heads=4), ("both", "both")),
        (dict(heads=40), ("both", "both")),
        (dict(heads=40, length=8192), ("tiles", "tiles")),
        (dict(heads=28, kv_heads=4, length=8192), ("tiles", "both")),
        (dict(heads=14, kv_heads=2, dim=64, length=8192), ("tiles", "tiles")),
        (dict(heads=12, kv_heads=2, dim=192), ("tiles", "tiles")),
        (dict(dtype="float32"), ("tiles", "tiles")),
        (dict(block=32), ("tiles", "tiles")),
        (dict(block=128), ("tiles", "tiles")),
        (dict(dim=256), ("both", "both")),
        (dict(heads=8, kv_heads=4, dim=256, length=8192), ("tiles", "both")),
        (dict(length=2**18), ("both", "tiles")),
        (dict(heads=4, kv_heads=1, length=8192), ("tiles", "tiles")),
    ],
    ids=[
        *("llama", "float16", "8k", "smollm", "smollm_12k", "smollm_8k", "smollm_short", "sixteen_heads"),
        *("eight_heads", "five_heads", "five_heads_8k", "seven_heads_8k", "seven_small_heads_8k"),
        "six_wide_heads",
        *("float32", "small_blocks", "large_blocks", "wide", "wide_8k", "cut_along_the_queries", "few_pairs"),
    ],
)
def test_only_calls_that_gain_come_in_parts(shape, expected):
    """Where neighbours decide, those of both ways are started."""
    assert launches(*program(**shape)) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [({}, [4, 4]), (dict(length=8192), [3, 3]), (dict(length=2**18), [4, 3])],
    ids=["both_ways", "forward_by_tiles", "backward_by_tiles"],
)
def test_lists_are_not_made_where_nobody_reads_them(shape, expected):
    """Their launches have an operand more, which says so."""
    function, arrays = program(**shape)
    with triton_compile.device(90):
        found = [*equations(jax.make_jaxpr(function)(*arrays).jaxpr)]
    launched = [len(one.invars) for one in found if one.params.get("name") == "nsa_union_lists"]

    assert launched == expected


@pytest.mark.parametrize(
    ("length", "expected"), [(8192, "tiles"), (12288, "tiles"), (16384, "both")], ids=["8k", "12k", "16k"]
)
@pytest.mark.parametrize("whole", [False, True], ids=["branch", "whole"])
def test_a_forward_alone_makes_no_lists_that_only_parts_use(length, expected, whole):
    """At 8k a training step takes parts at once, since its backward pass has the same lists."""
    shape = dict(heads=9, kv_heads=3, dim=64, length=length)
    alone, arrays = program(**shape, gradients=False)
    with_gradients, _ = program(**shape)
    if whole:
        alone, with_gradients, arrays = whole_operation(*arrays)

    assert launches(alone, arrays) == (expected,)
    assert launches(with_gradients, arrays)[0] == ("parts" if length == 8192 else expected)


def whole_operation(query, key, _, blocks):
    """All three branches, with the blocks given: without and with gradients, and their arguments."""
    config = NSAConfig()
    compressed = jax.ShapeDtypeStruct((1, (key.shape[1] - 32) // 16 + 1, *key.shape[2:]), key.dtype)
    gates = jax.ShapeDtypeStruct((*query.shape[:3], 3), query.dtype)

    def attend(query, blocks, *others):
        return nsa_jax.native_sparse_attention(
            query, *others, block_indices=blocks, config=config, implementation="triton"
        )

    def both(query, blocks, *others):
        found, pull_back = jax.vjp(lambda *arrays: attend(arrays[0], blocks, *arrays[1:]), query, *others)
        return found, pull_back(found)

    return attend, both, [query, blocks, compressed, compressed, key, key, key, key, gates]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, Chunks(heads=2, queries=32768, ranges=1, number=4)),
        (dict(length=8192), Chunks(8, 8192, 1, 1)),
        (dict(length=65536), Chunks(1, 65536, 1, 8)),
        (dict(length=2**17), Chunks(1, 2**17, 1, 8)),
        (dict(length=2**17 + 1), Chunks(1, 2**16 + 1, 2, 16)),
        (dict(heads=9, kv_heads=3, dim=64), Chunks(3, 32768, 1, 1)),
    ],
    ids=["llama", "8k", "64k", "whole_head", "cut_head", "smollm"],
)
def test_chunks_are_whole_heads_while_these_fit(shape, expected):
    """A chunk is within its bound, or one KV head or less that takes up to twice as much."""
    query, *_, blocks = program(**shape)[1]
    found = chunks_of(query, blocks, query.shape[3])

    assert found == expected
    of_query = 2 * 16 * query.shape[2] // blocks.shape[2] * query.shape[3]
    assert found.heads * found.queries * of_query <= PART_BYTES * (1 if found.heads > 1 else 2)


def test_older_gpus_have_no_parts():
    assert launches(*program(), capability=80) == ("tiles", "tiles")


def test_only_packed_rows_are_sorted_by_xla():
    """On a GPU its sort is a call of a library, which is in no CUDA graph."""
    _, arrays = program(9, 3, 64, length=8192)

    def both(query, key, value, blocks, segments=None):
        def attend(query, key, value):
            return nsa_jax.selected_attention(
                query, key, value, blocks, config=NSAConfig(), implementation="triton", segment_ids=segments
            )

        found, pull_back = jax.vjp(attend, query, key, value)
        return pull_back(found)

    packed = *arrays, jax.ShapeDtypeStruct((1, 8192), jnp.int32)

    assert " sort(" not in triton_compile.compile_for_h100(both, *arrays).as_text()
    assert "= sort[" in triton_compile.traced(both, *packed)


def test_vmap_makes_one_choice():
    """The mapped axis is part of the batch."""
    function, arrays = program(length=16384)
    arrays = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in arrays]

    assert launches(jax.vmap(function), arrays) == ("both", "both")


@pytest.mark.slow
def test_shards_of_kv_heads_choose_on_their_own_in_bounded_memory():
    """Also where chunks are a loop, whose carry must keep its type under `shard_map`.

    Memory is for a chunk of parts, the partial sums of the keys, the lists, and less than a query for the
    rest. Nothing is copied.
    """
    length, heads, kv_heads, dim = 32768, 32, 8, 128  # of a shard

    compiled = triton_compile.compile_for_two(*program(2 * heads, 2 * kv_heads, dim, length=length))

    text = compiled.as_text()
    assert "conditional(" not in text
    assert text.count(" while(") == 4
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text)
    pairs = length * kv_heads * 16
    partials = 2 * pairs // 2048 * 64 * 2 * dim * 4
    most = PART_BYTES + partials + 32 * pairs + 2 * length * heads * dim
    assert compiled.memory_analysis().temp_size_in_bytes <= most
    assert not re.findall(rf"bf16\[1,{length},{heads},{dim}\]\S* copy\(", text)


# Most bytes that a thread may store to spill registers, as measured with Triton 3.8; others spill nothing.
SPILLS = {
    (3, 64): {},
    (4, 128): {FORWARD: 4, BACKWARD: 224},  # 192 of two stages, which take 5 % longer
    (7, 128): {FORWARD: 20, BACKWARD: 324},
    (2, 256): {BACKWARD: 1480},  # of half the rows and two stages far fewer, which take 3 % longer
}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim"), SPILLS)
def test_kernels_compile_to_machine_code(heads, dim, monkeypatch):
    """Products by wgmma, whole vectors from and to memory, and room for several forward programs.

    A multiprocessor holds four of them, of keys of 256 two.
    """
    length, config = 32768, NSAConfig()
    monkeypatch.setattr(selected, "_choose_way", lambda sizes, *_, **__: selected._Way(sizes, None))

    def both(query, key, value, blocks, number):
        placed = layout.place(config, batch=1, num_queries=length, num_keys=length)
        arrays = query, key, value, blocks, placed
        given = Backward(query, number, query, number, number, query)
        return (
            selected.attend_selected(*arrays, scale=0.1, with_probabilities=True),
            selected.selected_gradients(*arrays, given, scale=0.1),
        )

    query, key = (jax.ShapeDtypeStruct((1, length, n, dim), jnp.bfloat16) for n in (2 * heads, 2))
    blocks = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.int32)
    number = jax.ShapeDtypeStruct((1, length, 2 * heads), jnp.float32)
    names = {FORWARD, BACKWARD}
    if (heads, dim) != (4, 128):  # of what adds parts, narrower and wider ones
        names |= {"nsa_selected_add_output_parts", "nsa_selected_add_query_parts"}
    given, known = (query, key, key, blocks, number), test_triton_compile.EVERY - names
    found = {x.name: x for x in triton_kernels.compiled(both, *given, capability=90, but=known)}

    assert set(found) == names
    for name in names:
        kernel = found[name]
        assert kernel.spill_bytes <= SPILLS[heads, dim].get(name, 0), (name, kernel.spill_bytes)
        assert kernel.scratch_bytes == 0, name
        assert "ld.global.v4" in kernel.ptx or "cp.async.cg" in kernel.ptx, name
        assert "st.global.v4" in kernel.ptx, name
        assert ("wgmma" in kernel.ptx) == (name in (FORWARD, BACKWARD)), name
    programs = 4 if dim <= 128 else 2
    assert programs * found[FORWARD].registers <= 512  # of a thread; programs have 128 threads, the GPU 65536
    assert programs * found[FORWARD].shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[90]
