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
    lost = [line for line in said.splitlines() if re.search(r"C75(0|1[0-8])", line)]
    assert bool(lost) == LINKED, lost
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

    found = {name: numbers for name, *numbers in reports("".join(capfd.readouterr()))}
    assert found.keys() == EVERY - {*KERNELS, FORWARD}
    most = {name: (448 if "query" in name else 1160) if LINKED else 0 for name in found}
    assert not {name: x for name, x in found.items() if x[0] > 168 or x[1] > most[name]}, found


@pytest.mark.slow
def test_the_compressed_forward_spills_no_more_than_known(capfd, monkeypatch):
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    length, num_keys, d = 8192, 511, 128

    def attend(query, key, value):
        placed = layout.place(NSAConfig(), batch=1, num_queries=length, num_keys=length)
        ranges = compression_ranges(placed, num_keys)
        return by_mosaic.attend_ranges(query, key, value, ranges, scale=0.1)

    of_keys = jax.ShapeDtypeStruct((1, num_keys, 4, d), jnp.bfloat16)
    triton_compile.compile_for_h100(
        attend, jax.ShapeDtypeStruct((1, length, 64, d), jnp.bfloat16), of_keys, of_keys
    )

    ((name, registers, spilled),) = reports("".join(capfd.readouterr()))
    assert name == FORWARD
    assert registers <= 168
    assert spilled <= (1000 if LINKED else 0)


@pytest.mark.slow
def test_kernels_compile_with_the_public_api_alone(capfd, monkeypatch):
    def renamed():
        raise AttributeError("as if a new JAX had renamed it")

    monkeypatch.setattr(unstable, "_private", renamed)
    monkeypatch.setitem(os.environ, "MOSAIC_GPU_DUMP_PTXAS", "1")
    assert by_mosaic.best_form() is unstable.Form.PUBLIC

    function, arrays = program(64, 4, 64, 64, 64, length=1024)
    triton_compile.compile_for_h100(function, *arrays)

    assert {name for name, *_ in reports("".join(capfd.readouterr()))} == set(KERNELS)


def test_this_jax_has_what_the_private_form_needs():
    old = jax.__version_info__ < (0, 11, 2)  # without arrivals that depend on a condition
    assert unstable.best_form() is (unstable.Form.PUBLIC if old else unstable.Form.PRIVATE)


@pytest.mark.parametrize(("heads", "of_ranges"), [(64, RANGE_KERNELS), (52, RANGE_KERNELS), (48, ())])
def test_whole_operation_takes_its_gradients_from_mosaic(heads, of_ranges):
    """As it is traced; test_profiles compiles the first. With 12 heads a KV head Triton pads nothing."""
    config, length = NSAConfig(), 4096
    of_query = [(1, length, heads, x) for x in (128, 3)]
    shapes = [of_query[0], *[(1, 255, 4, 128)] * 2, *[(1, length, 4, 128)] * 4, of_query[1]]
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
    assert not {"nsa_selected_query_gradient", "nsa_selected_key_gradients"} & {*launched}
