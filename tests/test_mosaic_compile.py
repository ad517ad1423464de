"""The Mosaic GPU kernels as machine code for an H100, on a machine without a GPU.

Held are registers, spills to local memory and warnings that the compiler serialises the matrix products.
"""

import os
import re

import jax
import jax.numpy as jnp
import jaxlib
import pytest

pytest.importorskip(
    "jax_triton", reason="the lists are Triton kernels; installed by `tox -e test`", exc_type=ImportError
)

import triton_compile
from equations import equations

import nsa_jax
from nsa_jax import NSAConfig, layout
from nsa_jax.kernels.mosaic_gpu import operations as by_mosaic
from nsa_jax.kernels.mosaic_gpu import support, unstable
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.ranges import causal_ranges, compression_ranges, window_ranges

KERNELS = tuple(f"nsa_selected_{name}_mosaic" for name in ("query_gradient", "key_gradients"))
RANGE_KERNELS = tuple(
    f"nsa_{branch}_{name}_mosaic"
    for branch in ("compressed", "window")
    for name in ("query_gradient", "key_gradients")
)
QUERY_KERNELS = tuple(name for name in RANGE_KERNELS if "query" in name)
FORWARD = "nsa_compressed_forward_mosaic"
EVERY = {
    *KERNELS,
    *RANGE_KERNELS,
    FORWARD,
    *(x.replace("nsa_selected", "nsa_selected_causal") for x in KERNELS),
}
LINKED = support.links(jaxlib.__version__)
# Shape: query heads, KV heads, dims, block, options. Bytes spilled by d_query and d_key at most.
SHAPES = {
    "paper": ((64, 4, 128, 128, 64, {}), (0, 0)),
    "four_heads": ((16, 4, 128, 128, 64, {}), (0, 64)),
    "wide_keys": ((64, 4, 192, 128, 64, {}), (0, 0)),
    "packed": ((64, 4, 128, 128, 64, dict(packed=True)), (8, 0)),
    "odd_sizes": ((24, 4, 64, 64, 128, dict(dtype="float16", length=1001)), (12, 24)),
}
# The same where jaxlib links the kernels, so that warpgroups cannot share registers. Triton's kernels are the
# default there, see `support`; when these bytes are gone, they need not be.
LINKED_SPILLS = {
    "paper": (320, 1440),
    "four_heads": (280, 1444),
    "wide_keys": (340, 1540),
    "packed": (752, 1808),
    "odd_sizes": (184, 0),
}


def program(heads, kv_heads, key_dim, value_dim, block, *, packed=False, dtype="bfloat16", length=4096):
    config = NSAConfig(selection_block_size=block)

    def gradients(query, key, value, blocks, segment_ids, out, lse):
        segment_ids = segment_ids if packed else None
        placed = layout.place(config, batch=1, num_queries=length, num_keys=length, segment_ids=segment_ids)
        given = Backward(out, lse, out, lse)
        return by_mosaic.selected_gradients(query, key, value, blocks, placed, given, scale=0.1)

    of_query, of_keys = (1, length, heads, key_dim), (1, length, kv_heads, key_dim)
    of_values = (1, length, kv_heads, value_dim)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (of_query, of_keys, of_values)]
    arrays.append(jax.ShapeDtypeStruct((1, length, kv_heads, 16), jnp.int32))
    arrays.append(jax.ShapeDtypeStruct((1, length), jnp.int32))
    of_out, of_lse = (1, length, heads, value_dim), (1, length, heads)
    return gradients, (*arrays, jax.ShapeDtypeStruct(of_out, dtype), jax.ShapeDtypeStruct(of_lse, "float32"))


def reports(text: str) -> list[tuple[str, int, int]]:
    """Name, registers and bytes spilled of each kernel, from what the assembler says."""
    found = []
    for part in text.split("Compiling entry function '")[1:]:
        name = part.split("_mosaic_gpu_kernel'")[0]
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        found.append((name, int(re.search(r"Used (\d+) registers", part)[1]), int(spilled[1])))
    return found


def serialised(text: str) -> list[str]:
    """Where the assembler says that products wait for one another."""
    return [line for line in text.splitlines() if re.search(r"C75(0|1[0-8])", line)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_share_registers_and_spill_no_more_than_known(name, capfd, monkeypatch):
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    (*shape, options), allowed = SHAPES[name]
    allowed = LINKED_SPILLS[name] if LINKED else allowed
    function, arrays = program(*shape, **options)

    triton_compile.compile_for_h100(function, *arrays)

    said = "".join(capfd.readouterr())
    found = {name: numbers for name, *numbers in reports(said)}
    assert set(found) == set(KERNELS), found
    for kernel, most in zip(KERNELS, allowed, strict=True):
        registers, spilled = found[kernel]
        assert registers <= 168, (kernel, registers)
        assert spilled <= most, (kernel, spilled)
    assert bool(serialised(said)) == LINKED
    assert said.count("'setmaxnreg' ignored") == (len(KERNELS) if LINKED else 0)


@pytest.mark.slow
def test_gradients_of_ranges_spill_no_more_than_known(capfd, monkeypatch):
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    config, length, d = NSAConfig(), 1100, 128

    def of_branch(ranges_of, num_keys):
        def gradients(query, key, value, out, lse, previous):
            placed = layout.place(config, batch=1, num_queries=length, num_keys=length)
            given = Backward(out, lse, out, gate=lse, previous=previous)
            arrays = query, key, value, ranges_of(placed, num_keys), given
            return by_mosaic.range_gradients(*arrays, scale=0.1)

        of_query, of_keys = (1, length, 64, d), (1, num_keys, 4, d)
        arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (of_query, of_keys, of_keys, of_query)]
        lse = jax.ShapeDtypeStruct(of_query[:3], "float32")
        triton_compile.compile_for_h100(gradients, *arrays, lse, arrays[0])

    of_branch(compression_ranges, 67)
    of_branch(window_ranges, length)
    of_branch(causal_ranges, length)

    said = "".join(capfd.readouterr())
    assert bool(serialised(said)) == LINKED
    found = {name: numbers for name, *numbers in reports(said)}
    assert found.keys() == EVERY - {*KERNELS, FORWARD}
    most = {name: (448 if "query" in name else 1160) if LINKED else 0 for name in found}
    assert not {name: x for name, x in found.items() if x[0] > 168 or x[1] > most[name]}, found


def compile_forward() -> None:
    """Compiles that of the compressed branch."""
    length, num_keys, d = 8192, 511, 128

    def attend(query, key, value):
        placed = layout.place(NSAConfig(), batch=1, num_queries=length, num_keys=length)
        return by_mosaic.attend_ranges(query, key, value, compression_ranges(placed, num_keys), scale=0.1)

    of_query, of_keys = (
        jax.ShapeDtypeStruct((1, *x, d), jnp.bfloat16) for x in ((length, 64), (num_keys, 4))
    )
    triton_compile.compile_for_h100(attend, of_query, of_keys, of_keys)


@pytest.mark.slow
def test_the_compressed_forward_spills_no_more_than_known(capfd, monkeypatch):
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")

    compile_forward()

    said = "".join(capfd.readouterr())
    assert bool(serialised(said)) == LINKED
    ((name, registers, spilled),) = reports(said)
    assert name == FORWARD
    assert registers <= 168
    assert spilled <= (900 if LINKED else 0)


@pytest.mark.slow
def test_kernels_compile_with_the_public_api_alone(capfd, monkeypatch):
    def renamed():
        raise AttributeError("as if a new JAX had renamed it")

    monkeypatch.setattr(unstable, "_private", renamed)
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    assert by_mosaic.best_form() is unstable.Form.PUBLIC

    function, arrays = program(64, 4, 64, 64, 64, length=1024)
    triton_compile.compile_for_h100(function, *arrays)
    compile_forward()

    assert {name for name, *_ in reports("".join(capfd.readouterr()))} == {*KERNELS, FORWARD}


def test_this_jax_has_what_the_private_form_needs():
    old = jax.__version_info__ < (0, 11, 2)  # without arrivals that depend on a condition
    assert unstable.best_form() is (unstable.Form.PUBLIC if old else unstable.Form.PRIVATE)


@pytest.mark.parametrize(
    ("heads", "dim", "length", "of_ranges"),
    [
        (64, 128, 4096, RANGE_KERNELS),
        (60, 128, 8192, (*RANGE_KERNELS, FORWARD)),
        (56, 128, 8192, ()),
        (64, 64, 8192, QUERY_KERNELS),
    ],
)
def test_whole_operation_takes_its_kernels_from_mosaic(heads, dim, length, of_ranges):
    """As it is traced; test_profiles compiles the first."""
    config, num_compressed = NSAConfig(), (length - 32) // 16 + 1
    of_query = [(1, length, heads, x) for x in (dim, 3)]
    shapes = [of_query[0], *[(1, num_compressed, 4, dim)] * 2, *[(1, length, 4, dim)] * 4, of_query[1]]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def gradients(*arrays):
        def operation(*arrays):
            return nsa_jax.native_sparse_attention(*arrays, config=config, implementation="mosaic_gpu")

        out, pull_back = jax.vjp(operation, *arrays)
        return pull_back(out)

    with triton_compile.device(90):
        launched = [x.params.get("name") for x in equations(jax.make_jaxpr(gradients)(*arrays).jaxpr)]

    assert sorted(x for x in launched if str(x).endswith("_mosaic")) == sorted(KERNELS + of_ranges)
    assert "nsa_selected_forward" in launched  # Triton's
    theirs = {x.removesuffix("_mosaic") for x in (*KERNELS, *of_ranges)}
    assert not theirs & {*launched}
