"""What `docs/guide/profiling.md` says a profile shows, compared with compiled programs.

A trace names the instructions of a program; their scopes are in the program. So no trace is needed here, but
that of the page itself, which `test_docs_code` runs.
"""

import fnmatch
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from modules import abstract

from nsa_jax import NSAConfig, attention, cache, layout
from nsa_jax.cache import Compression, TokenKeysValues
from nsa_jax.nn import NSAAttention

PAGE = (pathlib.Path(__file__).resolve().parent.parent / "docs/guide/profiling.md").read_text()
ON_CPU = "| program | `op_name` contains | is the selected branch in |"
ON_GPU = "| program, for a GPU | `op_name` contains |"
KERNELS = "| GPU kernel | is |"
PROGRAMS = ("forward", "gradient", "checkpoint", "decode")
WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
SMALL = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
    window_size=8,
)


def table(header: str) -> list[list[str]]:
    """The rows of the page's table with this header."""
    _, found, rest = PAGE.partition(f"{header}\n")
    assert found, f"the page has no table {header!r}"
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def missing(rows: list[list[str]], op_names) -> list[str]:
    """The scopes of a table that are in no `op_name` of their program."""
    return [
        f"{program}: {scope}"
        for program, cell, *_ in rows
        for scope in code(cell)
        if not any(scope in name for name in op_names(program))
    ]


@functools.cache
def on_cpu(program: str) -> frozenset[str]:
    """The `op_name`s of a layer's program."""
    layer = abstract(NSAAttention, 4, 32, num_kv_heads=2, config=SMALL, compression="mean")
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((1, 1 if program == "decode" else 256, 32), jnp.float32)

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    def loss(state, x):
        return (forward(state, x) ** 2).mean()

    def step(state, x):
        return nnx.merge(graph, state).decode_step(x, layer.init_cache(1, 256))

    functions = (forward, jax.grad(loss), jax.grad(jax.checkpoint(loss)), step)
    function = dict(zip(PROGRAMS, functions, strict=True))[program]
    return op_names(jax.jit(function).lower(state, x).compile())


def op_names(compiled) -> frozenset[str]:
    return frozenset(re.findall(r'op_name="([^"]*)"', compiled.as_text()))


def test_programs_on_a_cpu_have_the_scopes_of_the_page():
    rows = table(ON_CPU)

    assert {program for program, *_ in rows} == set(PROGRAMS)
    assert missing(rows, on_cpu) == []


@pytest.mark.parametrize(
    "operation", ["compressed_attention", "select_blocks", "window_attention", "gated_sum"]
)
def test_the_other_operations_stand_in_the_same_places(operation):
    rows = table(ON_CPU)
    if operation == "select_blocks":  # has no gradient
        rows = [row for row in rows if "backward" not in row[2]]
    others = [[program, cell.replace("selected_attention", operation)] for program, cell, _ in rows]

    assert missing(others, on_cpu) == []


def test_a_scope_that_a_program_lacks_is_found():
    rows = [["forward", "`transpose(jvp(nsa_jax`, `nsa_jax.xla.native_sparse_attention`"]]

    assert missing(rows, on_cpu) == ["forward: transpose(jvp(nsa_jax"]


@functools.cache
def on_h100(program: str) -> frozenset[str]:
    """The `op_name`s of the operation, and of a decode step, compiled for a GPU that is not there."""
    import triton_compile

    config, length = NSAConfig(), 4096  # and sizes whose kernels other tests have compiled

    def array(num_tokens, *last):
        return jax.ShapeDtypeStruct((1, num_tokens, *last), jnp.bfloat16)

    def forward(*operands):
        return attention.native_sparse_attention(*operands, config=config, implementation="mosaic_gpu")

    def gradient(cotangent, *operands):
        return jax.vjp(forward, *operands)[1](cotangent)

    def step(*operands):
        return cache.decode_step(*operands, config=config, compress=Compression())

    query, compressed = array(length, 64, 128), array(layout.num_compression_blocks(length, config), 4, 128)
    operands = (query, *[compressed] * 2, *[array(length, 4, 128)] * 4, array(length, 64, 3))
    sizes = dict(num_kv_heads=4, key_dim=128, value_dim=128, config=config, dtype=jnp.bfloat16)
    held = jax.eval_shape(lambda: cache.init_cache(1, length, **sizes))
    tokens = TokenKeysValues(*[array(1, 4, 128)] * 6)
    function, *arguments = {
        "forward": (forward, *operands),
        "gradient": (gradient, query, *operands),
        "decode": (step, held, array(1, 64, 128), tokens, array(1, 64, 3)),
    }[program]
    return op_names(triton_compile.compile_for_h100(function, *arguments))


def needs_gpu_compiler():
    pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
    pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)


@pytest.mark.slow
def test_programs_for_a_gpu_have_the_scopes_of_the_page():
    needs_gpu_compiler()
    rows = table(ON_GPU)

    assert {program for program, _ in rows} == {"forward", "gradient", "decode"}
    assert missing(rows, on_h100) == []


def test_the_page_has_the_names_of_all_kernels():
    """Those lists are compared with compiled kernels in the tests that they come from."""
    needs_gpu_compiler()
    import test_mosaic_compile
    import test_triton_compile

    kernels = test_triton_compile.EVERY | test_mosaic_compile.EVERY
    patterns = [pattern for row in table(KERNELS) for pattern in code(row[0])]

    assert {x for x in kernels if not any(fnmatch.fnmatch(x, pattern) for pattern in patterns)} == set()
    assert {x for x in patterns if not fnmatch.filter(kernels, x)} == set()
