"""Every Triton kernel compiles to machine code for GPUs that are not there: memory, spills, instructions.

The kernels are those of a forward and backward at 64k tokens, as JAX lowers them. Triton's own assembler
turns their PTX into machine code and says what that needs.
"""

import collections
import dataclasses
import functools
import re
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from flax import nnx

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
jax_triton = pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402
import triton_kernels  # noqa: E402
from messages import has_form  # noqa: E402
from modules import abstract  # noqa: E402
from triton_kernels import TARGETS  # noqa: E402

from nsa_jax import attention, dispatch, layout, nn  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from nsa_jax.kernels.triton import support  # noqa: E402
from nsa_jax.kernels.triton.selected.items import invert  # noqa: E402

CONFIG = NSAConfig()
LENGTH = 65536
DEFAULT_ON_HOPPER = "mosaic_gpu" if jaxlib.version.__version_info__ < (0, 12) else "triton"

# Every kernel, by the name that a profile shows.
WITH_PRODUCTS = {
    *(f"nsa_{branch}_forward" for branch in ("compressed", "window", "selected")),
    *(f"nsa_{branch}_query_gradient" for branch in ("compressed", "window", "selected")),
    *(f"nsa_{branch}_key_gradients" for branch in ("compressed", "window", "selected")),
    "nsa_importance",
}
OF_PROBABILITIES = {
    *("nsa_block_probabilities", "nsa_dense_log_sum_exp", "nsa_selected_probabilities"),
    "nsa_selected_recompute_probabilities",
}
OF_ALL_AT_ONCE = ("forward", "query_gradient")
RECOMPUTING = {
    *(f"nsa_native_recompute_{what}" for what in OF_ALL_AT_ONCE),
    *(f"nsa_{branch}_recompute_key_gradients" for branch in ("compressed", "window", "selected")),
}
RECOMPUTING_ONE = {  # in operations of one branch
    f"nsa_{branch}_recompute_{what}"
    for branch in ("compressed", "window", "selected", "selected_causal")
    for what in OF_ALL_AT_ONCE
}
OF_A_SORT = {"nsa_place_counts", "nsa_sum_counts", "nsa_place_bounds", "nsa_sorted_pairs"}
OF_ITEMS = {"nsa_count_items", "nsa_item_table"}
OF_LISTS = {"nsa_union_lists", "nsa_selected_add_partials"} | OF_A_SORT | OF_ITEMS
WITHOUT_PRODUCTS = OF_LISTS | {
    "nsa_add_segments",
    "nsa_best_blocks",
    "nsa_gated_sum",
    "nsa_gate_gradients",
    "nsa_row_scalars",
}
KERNELS = WITH_PRODUCTS | WITHOUT_PRODUCTS | RECOMPUTING
OF_A_STEP = {  # in test_triton_decode and test_triton_dense_decode
    *("nsa_step_first", "nsa_step_hidden", "nsa_step_second", "nsa_step_dense", "nsa_step_dense_merge"),
}
OF_AN_INDEX = {  # in test_triton_index
    *("nsa_index_scores", "nsa_block_scores", "nsa_index_query_gradients", "nsa_index_key_gradients"),
    *("nsa_chosen_scores", "nsa_chosen_key_gradients"),
}
OF_PACKED_ROWS = {"nsa_count_below"}  # whose pairs XLA sorts
OF_MOSAIC = {"nsa_visit_lists"}  # compiled in test_mosaic_compile
OF_PARTS = {  # of few heads
    *("nsa_selected_output_parts", "nsa_selected_add_output_parts", "nsa_selected_gradient_parts"),
    *("nsa_selected_add_query_parts", "nsa_selected_deltas", "nsa_undefined"),
}
OF_SHORT_ROWS = {  # the window's, by other names and with other ranges
    f"nsa_selected_causal_{what}"
    for what in ("forward", "query_gradient", "key_gradients", "recompute_key_gradients")
}
EVERY = KERNELS | RECOMPUTING_ONE | OF_PROBABILITIES | OF_A_STEP | OF_AN_INDEX | OF_MOSAIC
EVERY |= OF_PARTS | OF_SHORT_ROWS | OF_PACKED_ROWS


class Shape(NamedTuple):
    heads: int  # query heads per KV head
    key_dim: int
    value_dim: int
    dtype: str


MAIN = Shape(16, 128, 128, "bfloat16")
SHAPES = {
    "main": MAIN,
    "192/128": Shape(16, 192, 128, "bfloat16"),
    "256": Shape(16, 256, 256, "bfloat16"),
    "4 heads": Shape(4, 64, 64, "float16"),
    "5 heads": Shape(5, 128, 128, "bfloat16"),
    "1 head": Shape(1, 128, 128, "bfloat16"),
    "float32": Shape(4, 64, 64, "float32"),
    "64 heads": Shape(64, 192, 128, "bfloat16"),
    "128 heads": Shape(128, 256, 128, "bfloat16"),
    "128 wide heads": Shape(128, 256, 192, "bfloat16"),
}


def of_branch(branch: str) -> set[str]:
    """The kernels of a branch that multiply matrices, but those that recompute."""
    return {f"nsa_{branch}_{what}" for what in ("forward", "query_gradient", "key_gradients")}


SELECTED, WINDOW = of_branch("selected"), of_branch("window")
OF_TWO_BRANCHES = ("64 heads", "128 heads")  # compiled as operations of one branch, not as the whole
# Where the forward has other registers with gradients than without. Elsewhere that without is compiled, which
# ends in the gated sum and so needs more of them.
BOTH_FORMS = ((90, "main"), (90, "192/128"), (100, "main"))
# The kernels that a case compiles: all in the main shape on Hopper. Of another shape or GPU only those for
# which `sizes` has another row there, which multiply by other instructions, or which come nearest to the
# limits of a row in registers or shared memory. The compressed branch mostly has the tiles of the window:
# then what its kernels need is known of the window's, which add the front of a range and lack wider ends and
# segments. As measured, the compressed branch spilled at most 4 bytes more. What recomputes has the same
# sizes and the same `mma.sync` on every GPU, and takes 16 heads at a time, however many there are. Like what
# has no products it is compiled on Hopper, and must fit into the shared memory of every GPU.
CASES: dict[tuple[int, str], set[str]] = {
    (90, "128 wide heads"): SELECTED | WINDOW | {
        *(f"nsa_native_recompute_{what}" for what in OF_ALL_AT_ONCE), "nsa_selected_recompute_key_gradients",
    },
    (90, "128 heads"): {"nsa_selected_query_gradient", "nsa_window_query_gradient"},
    (90, "64 heads"): {
        "nsa_selected_key_gradients", "nsa_window_key_gradients",
        *(f"nsa_{x}_recompute_{what}" for x in ("selected", "window") for what in OF_ALL_AT_ONCE),
    },
    (90, "float32"): SELECTED | WINDOW | {
        *(f"nsa_native_recompute_{what}" for what in OF_ALL_AT_ONCE), "nsa_selected_recompute_key_gradients",
        "nsa_importance",
    },
    (90, "1 head"): (SELECTED | WINDOW) - {"nsa_window_forward", "nsa_selected_key_gradients"} | {
        "nsa_union_lists",
        "nsa_sorted_pairs",  # here also for parts
    },
    (90, "4 heads"): WINDOW | {"nsa_compressed_forward", "nsa_selected_key_gradients", "nsa_importance"},
    (90, "5 heads"): (SELECTED | WINDOW) - {"nsa_selected_key_gradients"},  # 12 tokens in 64 rows
    (90, "256"): SELECTED | WINDOW | {"nsa_importance", "nsa_gated_sum", "nsa_gate_gradients"},
    (90, "192/128"): SELECTED | WINDOW | {"nsa_compressed_forward"},
    (90, "main"): KERNELS,
    (80, "main"): {
        "nsa_gate_gradients",
        "nsa_window_query_gradient", "nsa_window_key_gradients",  # the others have the sizes of these
    },
    # An L4 and a consumer Blackwell have the same rows and as much shared memory: a row is compiled for the
    # one where it spills more.
    (89, "main"): {"nsa_selected_key_gradients", "nsa_window_forward", "nsa_window_key_gradients"},
    (100, "main"): SELECTED | WINDOW | {"nsa_compressed_forward", "nsa_importance"},
    (120, "main"): (SELECTED | WINDOW | {"nsa_importance"}) - {
        "nsa_selected_key_gradients", "nsa_window_forward",
    },
}  # fmt: skip

# Most bytes that a thread of a kernel may store to spill registers, by GPU and shape; kernels not named spill
# nothing. As measured with Triton 3.8, its ptxas and the `sizes` of tiles.
SPILLS: dict[tuple[int, str], dict[str, int]] = {
    (80, "main"): {
        "nsa_gate_gradients": 28,
    },
    (89, "main"): {
        "nsa_selected_key_gradients": 4,
        "nsa_window_forward": 104,
        "nsa_window_key_gradients": 8,
    },
    (90, "main"): {
        "nsa_add_segments": 8,
        "nsa_selected_key_gradients": 56,  # with 32 rows they take 29 % longer
    },
    (100, "main"): {
        "nsa_importance": 256,
        "nsa_window_forward": 12,
        "nsa_window_key_gradients": 28,
    },
    (120, "main"): {
        "nsa_window_key_gradients": 1184,
    },
    (90, "192/128"): {
        "nsa_selected_forward": 16,
        "nsa_selected_key_gradients": 56,
        "nsa_window_forward": 52,
    },
    (90, "256"): {
        "nsa_selected_query_gradient": 56,
        "nsa_window_forward": 316,
    },
    (90, "4 heads"): {
        "nsa_compressed_forward": 40,  # capped at 128 registers, a seventh faster than without the cap
        "nsa_selected_key_gradients": 40,
        "nsa_window_forward": 20,  # as the compressed branch; 11 % faster than with steps of 64 keys
    },
    (90, "5 heads"): {  # more masks at the ends of ranges and lists than with 4; 8 padded heads took longer
        "nsa_selected_forward": 36,
        "nsa_window_forward": 44,
        "nsa_window_query_gradient": 28,
    },
    (90, "1 head"): {
        "nsa_selected_forward": 112,
        "nsa_window_query_gradient": 8,
    },
    (90, "float32"): {
        "nsa_selected_key_gradients": 272,
        "nsa_selected_query_gradient": 4,
        "nsa_window_key_gradients": 464,
    },
    (90, "64 heads"): {
        "nsa_selected_recompute_forward": 8,
        "nsa_selected_key_gradients": 24,
        "nsa_window_key_gradients": 152,
    },
    (90, "128 wide heads"): {
        "nsa_selected_recompute_key_gradients": 8,
        "nsa_selected_key_gradients": 112,
        "nsa_window_key_gradients": 2296,
    },
}

# The instructions that multiply matrices.
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}

# Tiles of few heads have fewer rows than the 64 of `wgmma`.
SMALL_TILES = {("1 head", "nsa_selected_forward"), ("1 head", "nsa_selected_query_gradient")}


def operands(shape: Shape, length: int = LENGTH, kv_heads: int = 4) -> tuple[jax.ShapeDtypeStruct, ...]:
    def array(*last):
        return jax.ShapeDtypeStruct((1, *last), jnp.dtype(shape.dtype))

    heads = shape.heads * kv_heads
    compressed = layout.num_compression_blocks(length, CONFIG)
    lengths = (compressed, length, length)
    keys = [array(n, kv_heads, dim) for n in lengths for dim in (shape.key_dim, shape.value_dim)]
    return array(length, heads, shape.key_dim), *keys, array(length, heads, 3)


def attend(*operands):
    return attention.native_sparse_attention(*operands, config=CONFIG, implementation="triton")


def gradients(*operands):
    """Forward and backward of the whole operation, and of the gated sum alone."""
    out, pull_back = jax.vjp(attend, *operands)
    total, pull_back_gates = jax.vjp(lambda gates: attention.gated_sum(out, out, out, gates), operands[-1])
    return pull_back(out), total, pull_back_gates(out)


def everything(*operands):
    """All kernels, some of the forward in two forms: without gradients it ends in the gated sum."""
    return attend(*operands), gradients(*operands)


def two_branches(query, _, __, key_slc, value_slc, key_win, value_win, ___):
    """The selected and the window branch with their gradients, as operations of one branch."""

    def attend(query, *keys_values):
        key_slc, value_slc, key_win, value_win = keys_values
        settings = dict(config=CONFIG, implementation="triton")
        selected = attention.selected_attention(query, key_slc, value_slc, blocks, **settings)
        return selected.out, attention.window_attention(query, key_win, value_win, **settings).out

    blocks = jnp.zeros((1, query.shape[1], key_slc.shape[2], CONFIG.num_selected_blocks), jnp.int32)
    out, pull_back = jax.vjp(attend, query, key_slc, value_slc, key_win, value_win)
    return pull_back(out)


def instructions(kernel: triton_kernels.Kernel, capability: int, name: str) -> list[str]:
    """What the PTX of a kernel must contain: matrix products, and on Hopper loads of whole tiles."""
    if kernel.name not in WITH_PRODUCTS:
        return []
    if name == "float32":
        products = []
    elif (name, kernel.name) in SMALL_TILES:
        products = ["mma.sync"]
    else:
        products = [PRODUCTS[capability]]
    # The queries that chose a block may be anywhere, so the gradient of its keys gathers them by pointers.
    gathers = kernel.name == "nsa_selected_key_gradients"
    return products if capability < 90 or gathers else [*products, "cp.async.bulk.tensor"]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), CASES, ids=[f"{TARGETS[c]}-{s}" for c, s in CASES])
def test_kernels_become_machine_code(capability, name):
    own, shape = CASES[capability, name], SHAPES[name]
    known = (KERNELS | RECOMPUTING_ONE | (OF_PARTS if shape.heads <= 8 else set())) - own

    def compiled(program, known):
        return triton_kernels.compiled(program, *operands(shape), capability=capability, but=known)

    if name in OF_TWO_BRANCHES:
        found = compiled(two_branches, known)
    elif (capability, name) in BOTH_FORMS:
        found = compiled(everything, known)
    else:
        found = compiled(attend, known)
        found += compiled(gradients, known | {kernel.name for kernel in found})

    assert {kernel.name for kernel in found} == own
    allowed = SPILLS.get((capability, name), {})
    for kernel in found:  # shown if the test fails
        print(name, TARGETS[capability], kernel._replace(ptx=""))
    problems = []
    for kernel in found:
        alike = kernel.name in WITHOUT_PRODUCTS or "recompute" in kernel.name
        limit = triton_compile.SHARED_MEMORY_BYTES[89 if alike else capability]
        if kernel.shared_bytes > limit:
            problems.append(f"{kernel.name} takes {kernel.shared_bytes} bytes of shared memory of {limit}")
        if kernel.spill_bytes > allowed.get(kernel.name, 0):
            problems.append(f"{kernel.name} spills {kernel.spill_bytes} bytes")
        if kernel.scratch_bytes:  # jaxlib would allocate it in every launch, which a CUDA graph may not do
            problems.append(f"{kernel.name} needs {kernel.scratch_bytes} bytes of global scratch")
        for instruction in instructions(kernel, capability, name):
            if instruction not in kernel.ptx:
                problems.append(f"{kernel.name} has no {instruction}")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "own", "spilled"),
    [
        # The forwards have the sizes of 16 heads, which are compiled above on Hopper.
        (90, (SELECTED | WINDOW) - {"nsa_selected_forward", "nsa_window_forward"}, 264),
        (100, (SELECTED | WINDOW) - {"nsa_selected_forward"}, 368),
    ],
    ids=["90", "100"],
)
def test_few_wide_heads_become_machine_code(capability, own, spilled):
    """Two heads of 256, as in Gemma 2: Blackwell has other sizes, and in the backward pass no parts."""
    shape = operands(Shape(2, 256, 256, "bfloat16"))

    found = triton_kernels.compiled(two_branches, *shape, capability=capability, but=EVERY - own)

    assert {kernel.name for kernel in found} == own  # test_selected_in_parts has the parts on Hopper
    for kernel in found:
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability], kernel.name
        assert kernel.spill_bytes <= spilled, (kernel.name, kernel.spill_bytes)
    traced = triton_compile.traced(two_branches, *shape, capability=capability)
    assert ("nsa_selected_gradient_parts" in traced) == (capability == 90)


@pytest.mark.parametrize(
    ("capability", "shape", "own", "spilled"),
    [
        (90, Shape(3, 64, 64, "bfloat16"), SELECTED, 16),
        (100, Shape(3, 64, 64, "bfloat16"), SELECTED, 0),
        (90, MAIN, {"nsa_selected_forward"}, 0),
        (90, Shape(1, 192, 128, "bfloat16"), {"nsa_selected_forward"}, 0),
        (90, Shape(2, 256, 256, "bfloat16"), {"nsa_selected_forward"}, 0),
    ],
    ids=["3 heads", "3 heads, Blackwell", "main", "1 head of 192", "2 heads of 256"],
)
def test_kernels_of_long_blocks_become_machine_code(capability, shape, own, spilled):
    """Most steps have 128 keys; the key gradients of 3 heads spill a little and are still faster."""
    config = dataclasses.replace(CONFIG, selection_block_size=128)

    def attend(query, _, __, key, value, *rest):
        blocks = jnp.zeros((1, LENGTH, key.shape[2], config.num_selected_blocks), jnp.int32)
        settings = dict(block_indices=blocks, config=config, implementation="triton")
        selected = functools.partial(attention.selected_attention, **settings)
        out, pull_back = jax.vjp(lambda *arrays: selected(*arrays).out, query, key, value)
        return pull_back(out)

    found = triton_kernels.compiled(attend, *operands(shape), capability=capability, but=EVERY - own)

    assert {kernel.name for kernel in found} == own
    for kernel in found:
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability], kernel.name
        assert kernel.spill_bytes <= spilled, kernel._replace(ptx="")


def test_kernels_of_short_rows_become_machine_code():
    found = triton_kernels.compiled(
        everything, *operands(MAIN, 1024), capability=90, but=EVERY - OF_SHORT_ROWS
    )

    assert {kernel.name for kernel in found} == OF_SHORT_ROWS
    for kernel in found:
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[90], kernel.name
        assert kernel.spill_bytes == 0, kernel.name


def test_kernels_of_packed_rows_become_machine_code():
    query, _, _, key, *_ = operands(MAIN, 8192)
    blocks = jax.ShapeDtypeStruct((*key.shape[:3], CONFIG.num_selected_blocks), jnp.int32)

    def lists(blocks, ids):
        placed = layout.place(CONFIG, batch=1, num_queries=8192, num_keys=8192, segment_ids=ids)
        return invert(blocks, placed, 8192, item=1024).items

    ids = jax.ShapeDtypeStruct(query.shape[:2], jnp.int32)
    found = triton_kernels.compiled(lists, blocks, ids, capability=90, but=EVERY - OF_PACKED_ROWS)

    assert {kernel.name for kernel in found} == OF_PACKED_ROWS
    assert all(kernel.spill_bytes == kernel.scratch_bytes == 0 for kernel in found)


@pytest.mark.parametrize(
    ("capability", "dtype", "spilled"),
    [
        (89, "bfloat16", 0),
        (90, "bfloat16", 0),
        (100, "bfloat16", 96),
        (90, "float32", 20),
    ],
)
def test_probabilities_become_machine_code(capability, dtype, spilled):
    """Of packed rows, on Hopper of plain ones too, where two programs share an SM, three of the forward.

    Of the GPUs with little shared memory, which have the same sizes, one.
    """
    query, _, _, key, *_ = operands(MAIN if dtype == "bfloat16" else SHAPES["float32"], 32768)
    ids = jax.ShapeDtypeStruct(query.shape[:2], jnp.int32)
    lse = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    blocks = jax.ShapeDtypeStruct((*key.shape[:3], CONFIG.num_selected_blocks), jnp.int32)
    main = (capability, dtype) == (90, "bfloat16")

    def targets(query, key, blocks, lse, ids):
        settings = dict(config=CONFIG, implementation="triton")
        plain = attention.block_probabilities(query, key, reduce="max", **settings) if main else ()
        packed = attention.block_probabilities(query, key, segment_ids=ids, **settings)
        by_forward = attention.selected_probabilities(query, key, blocks, **settings)
        given = attention.selected_probabilities(query, key, blocks, lse=lse, **settings)
        return plain, packed, given, by_forward

    own = OF_PROBABILITIES | {"nsa_selected_forward"}
    if capability != 90:  # what recomputes has the same code on every GPU
        own -= {"nsa_selected_recompute_probabilities"}
    found = triton_kernels.compiled(
        targets, query, key, blocks, lse, ids, capability=capability, but=EVERY - own
    )

    assert {kernel.name for kernel in found} == own
    assert len(found) == len(own) + 2 * main  # plain rows and packed ones differ in two kernels
    for kernel in found:
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability]
        assert kernel.spill_bytes <= spilled, kernel._replace(ptx="")
        assert kernel.scratch_bytes == 0
        if "recompute" in kernel.name:
            continue
        assert dtype == "float32" or PRODUCTS[capability] in kernel.ptx
        if capability == 90 and dtype == "bfloat16":
            assert "cp.async.bulk.tensor" in kernel.ptx
            assert kernel.shared_bytes <= 113 * 1024
            assert kernel.registers <= (168 if kernel.name == "nsa_selected_forward" else 128)


def test_no_two_functions_share_a_name():
    """So a profile and a traceback point to one place; and every kernel has a name for profiles."""
    names = collections.Counter(name.rpartition(".")[2] for name in triton_kernels.jit_functions().values())

    assert [name for name, count in names.items() if count > 1] == []
    branches = ("compressed", "window", "selected", "selected_causal")
    at_once = tuple(f"recompute_{what}_kernel" for what in OF_ALL_AT_ONCE)
    kernels = {f.repr(types.SimpleNamespace(constants=dict(BRANCH=branch)))
               for f, name in triton_kernels.jit_functions().items() if name.endswith("_kernel")
               for branch in (*branches, *["native"] * name.endswith(at_once))}  # fmt: skip
    assert kernels == EVERY


@pytest.mark.parametrize("capability", triton_kernels.TARGETS)
def test_dispatch_accepts_the_gpus(capability):
    with triton_compile.device(capability):
        reasons = {
            dispatch.unsupported_reason(operation, "triton", *arrays, config=CONFIG)
            for operation, arrays in calls().items()
        }
        chosen = dispatch.choose("native_sparse_attention", *operands(MAIN), config=CONFIG)

    assert reasons == {None}
    assert chosen.implementation == (DEFAULT_ON_HOPPER if capability == 90 else "triton")


@pytest.mark.parametrize("operation", [
    name for name in dispatch.OPERATIONS if "decode" not in name and name not in support.WITHOUT_KERNELS
])  # fmt: skip
def test_operation_launches_kernels(operation):
    """In the forward alone, without a named implementation: dispatch chooses the kernels.

    Those are among the kernels that `test_kernels_become_machine_code` compiles.
    """
    settings = {} if operation == "gated_sum" else dict(config=CONFIG)

    def run(*arrays):
        return getattr(attention, operation)(*arrays, **settings)

    text = triton_compile.traced(run, *calls()[operation])

    selects = operation in ("selected_attention", "native_sparse_attention")
    assert f"nsa_jax.{DEFAULT_ON_HOPPER if selects else 'triton'}.{operation}" in text
    assert "= triton_kernel_call[" in text


def calls(length: int = LENGTH) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    """Operands of each public operation."""
    query, key_cmp, value_cmp, key, value, _, _, gates = operands(MAIN, length)
    out = jax.ShapeDtypeStruct((*query.shape[:3], MAIN.value_dim), query.dtype)
    key_index = jax.ShapeDtypeStruct((1, length, 1, MAIN.key_dim), query.dtype)
    query_index = query.update(shape=(1, length, key.shape[2], 1, MAIN.key_dim))
    indices = jax.ShapeDtypeStruct((1, length, key.shape[2], CONFIG.num_selected_blocks), jnp.int32)
    return {
        "compressed_attention": (query, key_cmp, value_cmp),
        "select_blocks": (query, key_cmp),
        "block_scores": (query_index, key_index),
        "select_by_index": (query_index, key_index),
        "top_blocks": (jax.ShapeDtypeStruct((1, length, key.shape[2], length // 64), jnp.float32),),
        "selected_attention": (query, key, value, indices),
        "window_attention": (query, key, value),
        "block_probabilities": (query, key),
        "selected_probabilities": (query, key, indices),
        "gated_sum": (out, out, out, gates),
        "native_sparse_attention": operands(MAIN, length),
    }


def traced_window(batch: int) -> str:
    arrays = [jax.ShapeDtypeStruct((batch, 64, 1, 64), jnp.bfloat16)] * 3
    return triton_compile.traced(
        lambda *arrays: attention.window_attention(*arrays, config=CONFIG, implementation="triton"), *arrays
    )


def test_more_heads_than_a_grid_holds_are_refused():
    refusal = pytest.raises(NotImplementedError, match="at most 65535 batch rows times KV heads, got 65536")
    with refusal as error:
        traced_window(65536)
    assert has_form(str(error.value))
    assert "= triton_kernel_call[" in traced_window(65535)


def test_heads_that_take_turns_do_not_count_towards_that_limit():
    """With three query heads a KV head each has its own steps in the gradients of keys."""
    query, key = (jax.ShapeDtypeStruct((30000, 64, n, 64), jnp.bfloat16) for n in (3, 1))

    def loss(*arrays):
        out, _ = attention.window_attention(*arrays, config=CONFIG, implementation="triton")
        return out.astype(jnp.float32).sum()

    assert "nsa_row_scalars" in triton_compile.traced(jax.grad(loss), query, key, key)


@pytest.mark.parametrize("branches", [("slc",), ("cmp", "slc", "win")], ids=["msa", "nsa"])
def test_a_selection_loss_takes_its_target_from_the_forward(branches):
    """Beside the kernels of a layer alone it starts those of scores, and the repair of the probabilities."""
    layer = abstract(
        nn.NSAAttention, 16, 64, num_kv_heads=1, head_dim=64, branches=branches, selector=nn.IndexerConfig(),
        dtype="bfloat16", implementation="triton",
    )  # fmt: skip
    graph, state = nnx.split(layer)

    def kernels(distil):
        def loss(state, x):
            found = nnx.merge(graph, state)(x, distil=distil)
            return (found if distil is None else found[0]).sum() + (0 if distil is None else found[1])

        x = jax.ShapeDtypeStruct((1, 4096, 64), "bfloat16")
        text = triton_compile.traced(jax.grad(loss), state, x)
        return collections.Counter(re.findall(r"name=(nsa_\w+)", text))

    more = kernels("selected") - kernels(None)
    assert {"nsa_chosen_scores", "nsa_index_query_gradients", "nsa_chosen_key_gradients"} <= {*more}
    assert "nsa_block_scores" not in more
    of_branch = {name: times for name, times in more.items() if "selected" in name or "log_sum_exp" in name}
    del of_branch["nsa_selected_add_partials"]  # of the index keys' gradients
    assert of_branch == {"nsa_selected_recompute_probabilities": 1}


def test_the_choice_of_blocks_has_no_gradient():
    """Even if the log-sum-exps that it is given depend on what is differentiated."""
    query, key_cmp, value_cmp, key, value, *_ = operands(MAIN, 4096)

    def loss(query, key_cmp, value_cmp, key, value):
        settings = dict(config=CONFIG, implementation="triton")
        cmp = attention.compressed_attention(query, key_cmp, value_cmp, **settings)
        blocks = attention.select_blocks(query, key_cmp, lse_cmp=cmp.lse, **settings)
        out = attention.selected_attention(query, key, value, blocks, **settings).out
        return (out + cmp.out).astype(jnp.float32).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    text = triton_compile.traced(gradients, query, key_cmp, value_cmp, key, value)

    assert text.count("= triton_kernel_call[") > 10
