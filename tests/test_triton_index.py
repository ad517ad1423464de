"""Selection by an indexer on GPUs that are not there: its kernel as machine code, and what is chosen."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402
import triton_kernels  # noqa: E402
from messages import has_form  # noqa: E402
from triton_kernels import TARGETS  # noqa: E402

from nsa_jax import attention, dispatch  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402


class Shape(NamedTuple):
    block: int = 128
    heads: int = 1  # index heads of a KV head
    dim: int = 128
    dtype: str = "bfloat16"
    weighted: bool = False
    packed: bool = False
    batch: int = 1
    queries: int = 65536
    length: int = 65536
    kv_heads: int = 4
    shared: bool = True  # whether all KV heads share an index key


MSA = Shape()
SHAPES = {
    "blocks of 64": Shape(64),
    "lightning": Shape(64, 4, 32, weighted=True),
    "a step": Shape(batch=8, queries=1),
    "packed": Shape(packed=True, batch=2, queries=8192, length=8192),
    "of dense heads": Shape(heads=4, dim=64, kv_heads=8, shared=False),
    "wide": Shape(128, 8, 256, "float16", weighted=True),
    "eight heads": Shape(128, 8, 32, weighted=True),
    "odd blocks": Shape(48, 2, 96, kv_heads=3, queries=8192, length=8192),
    "float32": Shape(64, 1, 64, "float32", queries=8192, length=8192),
}
CASES = [*((90, shape) for shape in SHAPES.values()), *((capability, MSA) for capability in TARGETS)]
LOADED_BY_ROW = {SHAPES["odd blocks"]}
SMALL_TILES = {SHAPES["a step"]}


def config_of(shape: Shape) -> NSAConfig:
    return NSAConfig(selection_block_size=shape.block)


def operands(shape: Shape) -> list[jax.ShapeDtypeStruct]:
    rows = (shape.batch, shape.queries, shape.kv_heads, shape.heads)
    shapes = [
        (*rows, shape.dim),
        (shape.batch, shape.length, 1 if shape.shared else shape.kv_heads, shape.dim),
    ]
    found = [jax.ShapeDtypeStruct(x, shape.dtype) for x in (*shapes, *([rows] if shape.weighted else []))]
    return found + ([jax.ShapeDtypeStruct(shapes[1][:2], jnp.int32)] if shape.packed else [])


def program(shape: Shape):
    def run(query, key, *more):
        weights, ids = (
            more if len(more) == 2 else (*more, None) if shape.weighted else (None, *more, None)[:2]
        )
        settings = dict(config=config_of(shape), segment_ids=ids, implementation="triton")
        return attention.select_by_index(query, key, weights=weights, **settings)

    return run


@pytest.mark.parametrize(("capability", "shape"), CASES, ids=str)
def test_kernel_becomes_machine_code(capability, shape):
    """Two programs share a multiprocessor, in the shape that the sizes are made for.

    One's maxima run beside the other's products. The best blocks are chosen by the kernel that
    `select_blocks` has, too: it is compiled in one case here, and in `test_triton_compile`.
    """
    main = (capability, shape) == (90, MSA)
    known = set() if main else {"nsa_best_blocks"}
    found = triton_kernels.compiled(program(shape), *operands(shape), capability=capability, but=known)

    assert {kernel.name for kernel in found} == {"nsa_index_scores", "nsa_best_blocks"} - known
    for kernel in found:
        print(shape, kernel._replace(ptx=""))  # shown if the test fails
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability]
        assert kernel.spill_bytes == kernel.scratch_bytes == 0
    scores = next(kernel for kernel in found if kernel.name == "nsa_index_scores")
    assert ("cp.async.bulk.tensor" in scores.ptx) == (capability >= 90 and shape not in LOADED_BY_ROW)
    if capability == 90:
        assert ("wgmma" in scores.ptx) != (shape in SMALL_TILES)
    if main:
        assert 2 * (scores.shared_bytes + 1024) <= 228 * 1024  # a program takes 1 KB more
        assert 2 * 256 * scores.registers <= 65536


SCORES, OF_QUERIES, OF_KEYS = (
    f"nsa_{name}" for name in ("block_scores", "index_query_gradients", "index_key_gradients")
)
TAUGHT = {name: shape._replace(queries=8192) for name, shape in SHAPES.items()}
# The scores have the tiles of those above, and more registers in use. Gradients of queries are products of 16
# rows, the same on every GPU, those of keys of more.
TAUGHT_CASES = {
    (90, "blocks of 64"): {SCORES, OF_QUERIES, OF_KEYS},
    (90, "float32"): {SCORES, OF_QUERIES, OF_KEYS},
    (90, "lightning"): {SCORES, OF_QUERIES, OF_KEYS},
    (90, "wide"): {OF_QUERIES, OF_KEYS},
    (90, "odd blocks"): {OF_QUERIES, OF_KEYS},
    (90, "packed"): {OF_KEYS},
    (89, "blocks of 64"): {OF_KEYS},
    (100, "blocks of 64"): {OF_KEYS},
}
TAUGHT_SPILLS = {(90, "odd blocks"): 36}


@pytest.mark.parametrize(
    ("capability", "name"), TAUGHT_CASES, ids=[f"{TARGETS[c]}-{s}" for c, s in TAUGHT_CASES]
)
def test_scores_with_gradients_become_machine_code(capability, name):
    shape, own = TAUGHT[name], TAUGHT_CASES[capability, name]

    def gradients(*arrays):
        ids = arrays[-1] if shape.packed else None
        floats = arrays[: 2 + shape.weighted]

        def score(query, key, weights=None):
            return attention.block_scores(
                query, key, weights=weights, config=config_of(shape), segment_ids=ids, implementation="triton"
            )

        scores, pull_back = jax.vjp(score, *floats)
        return pull_back(scores)

    known = {SCORES, OF_QUERIES, OF_KEYS} - own
    found = triton_kernels.compiled(gradients, *operands(shape), capability=capability, but=known)

    assert {kernel.name for kernel in found} == own
    for kernel in found:
        print(shape, kernel._replace(ptx=""))  # shown if the test fails
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability]
        assert kernel.spill_bytes <= TAUGHT_SPILLS.get((capability, name), 0)
        assert kernel.scratch_bytes == 0


CHOSEN, OF_CHOSEN_KEYS = "nsa_chosen_scores", "nsa_chosen_key_gradients"
OF_ITEMS = {
    f"nsa_{x}" for x in ("count_items", "item_table", "count_below", "sum_counts", "place_bounds")
} | {"nsa_place_counts", "nsa_sorted_pairs"}
SMOLLM2 = Shape(128, 3, 32, kv_heads=3, shared=False, queries=8192, length=8192)
CHOSEN_CASES = {
    (90, SMOLLM2): {CHOSEN, OF_QUERIES, OF_CHOSEN_KEYS, "nsa_selected_add_partials"},
    (90, TAUGHT["lightning"]): {CHOSEN},
    (90, TAUGHT["packed"]): {CHOSEN, OF_CHOSEN_KEYS, "nsa_selected_add_partials"},
    (90, MSA._replace(block=256)): {CHOSEN, OF_CHOSEN_KEYS},
    (90, MSA._replace(dtype="float32")): {CHOSEN, OF_CHOSEN_KEYS},
    (89, TAUGHT["wide"]): {CHOSEN, OF_CHOSEN_KEYS},
    (100, MSA): {CHOSEN, OF_CHOSEN_KEYS},
}


@pytest.mark.parametrize(("capability", "shape"), CHOSEN_CASES, ids=str)
def test_scores_of_chosen_blocks_become_machine_code(capability, shape):
    """With their gradients. Items are made by the kernels that the selected branch has, too."""

    def gradients(blocks, *arrays):
        ids = arrays[-1] if shape.packed else None

        def score(query, key, weights=None):
            return attention.block_scores(
                query, key, weights=weights, block_indices=blocks, config=config_of(shape), segment_ids=ids,
                implementation="triton",
            )  # fmt: skip

        scores, pull_back = jax.vjp(score, *arrays[: 2 + shape.weighted])
        return pull_back(scores)

    own = CHOSEN_CASES[capability, shape]
    slots = config_of(shape).num_selected_blocks
    blocks = jax.ShapeDtypeStruct((shape.batch, shape.queries, shape.kv_heads, slots), jnp.int32)
    known = {CHOSEN, OF_QUERIES, OF_CHOSEN_KEYS, "nsa_selected_add_partials", *OF_ITEMS} - own
    found = triton_kernels.compiled(gradients, blocks, *operands(shape), capability=capability, but=known)

    assert {kernel.name for kernel in found} == own
    for kernel in found:
        print(shape, kernel._replace(ptx=""))  # shown if the test fails
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability]
        assert kernel.spill_bytes == kernel.scratch_bytes == 0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (dict(dim=40), "dims that are a power of two or the sum of two"),
        (dict(dtype="float64"), "support the dtypes"),
        (dict(block=512), "a selection_block_size of at most 256 for an indexer"),
        (
            dict(block=256, dim=256, dtype="float32"),
            "index keys of a selection block to fit into shared memory",
        ),
    ],
)
def test_what_the_kernel_refuses(changes, rule):
    shape = MSA._replace(**changes)
    with triton_compile.device(90):
        reason = dispatch.unsupported_reason(
            "select_by_index", "triton", *operands(shape), config=config_of(shape)
        )

    assert rule in reason
    assert has_form(reason)


@pytest.mark.parametrize(
    ("capability", "changes", "rule"),
    [
        (90, dict(block=48), "that is a power of two of at least 16 to score chosen blocks, got 48"),
        (89, dict(dim=80, dtype="float32"), "index keys of a chosen block to fit into shared memory"),
    ],
)
def test_chosen_blocks_that_the_kernel_refuses(capability, changes, rule):
    """All blocks of these can be scored."""
    shape = MSA._replace(**changes)
    blocks = jax.ShapeDtypeStruct((1, shape.queries, shape.kv_heads, 16), jnp.int32)
    with triton_compile.device(capability):
        known = "block_scores", "triton", *operands(shape)
        reason = dispatch.unsupported_reason(*known, blocks, config=config_of(shape))
        assert dispatch.unsupported_reason(*known, config=config_of(shape)) is None

    assert rule in reason
    assert has_form(reason)
