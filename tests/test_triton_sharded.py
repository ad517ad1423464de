"""Programs for eight H100s, of plain `jit` on arrays sharded by rows and heads: what XLA moves and copies."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402

from nsa_jax import attention, cache, layout  # noqa: E402
from nsa_jax.cache import Compression, TokenKeysValues  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from nsa_jax.generate import loop  # noqa: E402
from nsa_jax.generate.structure import split  # noqa: E402
from nsa_jax.model import Transformer, TransformerConfig  # noqa: E402

AXES = dict(data=2, tensor=4)
CONFIG = NSAConfig()
# A device has 64 heads and 4 KV heads of 128, whose kernels other tests have compiled.
BATCH, HEADS, KV_HEADS, DIM, LENGTH = 4, 256, 16, 128, 4096
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
BOTH, ROWS, WHOLE = PartitionSpec("data", None, "tensor"), PartitionSpec("data"), PartitionSpec()


class Operation(NamedTuple):
    """An operation of a compiled program: its name, and the bytes of its results on a device."""

    name: str
    bytes: int


def operations(compiled) -> list[Operation]:
    """What copies data or moves it between GPUs. In fusions nothing does: their results alone are stored."""
    found, stored = [], True
    for line in compiled.as_text().splitlines():
        if line.endswith("{"):
            stored = not re.match(r"%(fused|wrapped)_", line)
        elif stored and (match := re.search(rf" = (.+?) (copy|{'|'.join(COLLECTIVES)})(?:-start)?\(", line)):
            found.append(Operation(match[2], size(match[1])))
    return found


def size(results: str) -> int:
    """Bytes of arrays as HLO writes them, such as `(bf16[2,8]{1,0}, s32[4])`."""
    total = 0
    for dtype, shape in re.findall(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]", results):
        bits = 8 if dtype == "pred" else int(re.sub(r"[a-z]+", "", dtype))
        for axis in filter(None, shape.split(",")):
            bits *= int(axis)
        total += bits // 8
    return total


def array(*shape, dtype=jnp.bfloat16, spec=BOTH) -> jax.ShapeDtypeStruct:
    mesh = triton_compile.mesh_of_h100s(**AXES)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(function, *arguments, **options):
    return triton_compile.compile_on(triton_compile.mesh_of_h100s(**AXES), function, *arguments, **options)


def attend(implementation, *arrays):
    return attention.native_sparse_attention(*arrays, config=CONFIG, implementation=implementation)


def gradients(implementation, *arrays):
    out, pull_back = jax.vjp(functools.partial(attend, implementation), *arrays)
    return pull_back(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "implementation", "length"),
    [
        (attend, "triton", LENGTH),
        (gradients, "triton", LENGTH),
        (gradients, "mosaic_gpu", LENGTH),
        (attend, "mosaic_gpu", 2 * LENGTH),  # long enough for a forward of its own
    ],
)
def test_attention_moves_nothing(function, implementation, length):
    blocks = layout.num_compression_blocks(length, CONFIG)
    keys = [array(BATCH, n, KV_HEADS, DIM) for n in (blocks, length, length) for _ in range(2)]
    run = functools.partial(function, implementation)
    program = compiled(run, array(BATCH, length, HEADS, DIM), *keys, array(BATCH, length, HEADS, 3))

    assert [x for x in operations(program) if x.name in COLLECTIVES] == []
    assert "triton_kernel_call_ffi" in program.as_text()
    assert {sharding.spec for sharding in jax.tree.leaves(program.output_shardings)} == {BOTH}


@pytest.mark.parametrize("shared", [True, False])
def test_selection_by_an_index_moves_nothing(shared):
    """Of a key for all heads every device along `tensor` holds those of its rows, else those of its heads.

    Scores of the chosen blocks move nothing either, nor their gradients, but for a key that heads share.
    """
    key = array(BATCH, LENGTH, 1, DIM, spec=ROWS) if shared else array(BATCH, LENGTH, KV_HEADS, DIM)
    arrays = array(BATCH, LENGTH, KV_HEADS, 2, DIM), key

    def run(query, key, weights):
        settings = dict(config=CONFIG, implementation="triton")
        blocks = attention.select_by_index(query, key, weights=weights, **settings)

        def score(query, key, weights):
            return attention.block_scores(query, key, weights=weights, block_indices=blocks, **settings)

        scores, pull_back = jax.vjp(score, query, key, weights)
        d_query, d_key, d_weights = pull_back(scores)
        return blocks, scores, d_query, d_weights, *(() if shared else (d_key,))

    program = compiled(run, *arrays, array(BATCH, LENGTH, KV_HEADS, 2))

    assert [x for x in operations(program) if x.name in COLLECTIVES] == []
    assert "triton_kernel_call_ffi" in program.as_text()
    assert {sharding.spec for sharding in program.output_shardings} == {BOTH}


def test_probabilities_move_nothing():
    def targets(query, key, blocks):
        settings = dict(config=CONFIG, implementation="triton")
        slots = attention.selected_probabilities(query, key, blocks, **settings)
        return slots, attention.block_probabilities(query, key, **settings)

    blocks = array(BATCH, LENGTH, KV_HEADS, CONFIG.num_selected_blocks, dtype=jnp.int32)
    program = compiled(targets, array(BATCH, LENGTH, HEADS, DIM), array(BATCH, LENGTH, KV_HEADS, DIM), blocks)

    assert [x for x in operations(program) if x.name in COLLECTIVES] == []
    assert [sharding.spec for sharding in program.output_shardings] == [BOTH, BOTH]


def step(held, *operands):
    return cache.decode_step(held, *operands, config=CONFIG, compress=Compression(), implementation="triton")


def chunks_of_steps(held, query, *others):
    """Loops as `generate` does: a while loop over chunks of a fixed number of steps."""

    def body(_, carry):
        out, held = step(carry[1], query + 0 * carry[0], *others)
        return out, held

    def chunk(carry):
        return jax.lax.fori_loop(0, 4, body, carry)

    start = jnp.zeros_like(query), held
    return jax.lax.while_loop(lambda carry: (carry[1].lengths < 32).any(), chunk, start)


@pytest.mark.parametrize("function", [step, chunks_of_steps])
def test_steps_update_a_sharded_cache_in_place(function):
    empty = jax.eval_shape(
        lambda: cache.init_cache(
            BATCH, 2**16, num_kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, config=CONFIG, dtype="bfloat16"
        )
    )
    held = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype, spec=BOTH if x.ndim > 2 else ROWS), empty)
    new = TokenKeysValues(*[array(BATCH, 1, KV_HEADS, DIM)] * 6)
    operands = array(BATCH, 1, HEADS, DIM), new, array(BATCH, 1, HEADS, 3)
    program = compiled(function, held, *operands, donate_argnums=0)

    # Nothing but whether all rows have ended, and the counters of the loop.
    assert [x for x in operations(program) if x.bytes > 8] == []
    memory = program.memory_analysis()
    on_a_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held)) // 8
    assert memory.alias_size_in_bytes >= on_a_device
    assert memory.temp_size_in_bytes < held.key_slc.size * 2 // 8


MODEL = TransformerConfig(
    vocab_size=256, num_layers=1, model_dim=128, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
    dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
SHARDING = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def sharded(variable: nnx.Variable) -> nnx.Variable:
    value, spec = variable.get_value(), variable.get_metadata("out_sharding", ())
    return variable.replace(array(*value.shape, dtype=value.dtype, spec=PartitionSpec(*spec)))


@pytest.mark.slow
def test_generation_gathers_no_cache():
    mesh = triton_compile.mesh_of_h100s(**AXES)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = nnx.eval_shape(
            lambda: Transformer(MODEL, sharding=SHARDING, implementation="triton", rngs=nnx.Rngs(0))
        )
    graphdef, state = nnx.split(model)
    state = jax.tree.map(sharded, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    structure, parameters = split(nnx.merge(graphdef, state))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))
    width, max_length = 128, 2**15

    def run(parameters, prompts, lengths, keys):
        return loop._run(
            structure, parameters, prompts, lengths, keys, loop._Sampling(None, None, None), None, 0, 64,
            max_length=max_length, chunk_size=4, prefill_chunk=width, cache_dtype=None, join=True,
        )  # fmt: skip

    program = compiled(
        run, parameters, array(BATCH, width, dtype=jnp.int32, spec=ROWS),
        array(BATCH, dtype=jnp.int32, spec=ROWS), array(*keys.shape, dtype=keys.dtype, spec=WHOLE),
        compiler_options=dict(xla_gpu_enable_triton_gemm=False),
    )  # fmt: skip

    held = f"bf16[{BATCH // 2},{max_length},{KV_HEADS // 4},{DIM}]"
    assert held in program.as_text()
    # The largest things to move are sums of activations, [BATCH, width, model_dim]; arrays of compressed keys
    # are larger, and all others of a cache that grow with its capacity.
    compressed = BATCH // 2 * layout.num_compression_blocks(max_length, MODEL.nsa) * KV_HEADS // 4 * DIM * 2
    assert BATCH // 2 * width * MODEL.model_dim * 2 < compressed
    assert [x for x in operations(program) if x.bytes >= compressed] == []
