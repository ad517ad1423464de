"""Context parallelism on GPUs that are not there: messages of compiled programs, and what kernels know."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402

from nsa_jax import layout  # noqa: E402
from nsa_jax.compression import Compression  # noqa: E402
from nsa_jax.config import NSAConfig  # noqa: E402
from nsa_jax.kernels.triton.ranges import compression_ranges, window_ranges  # noqa: E402
from nsa_jax.parallel import context_attention  # noqa: E402
from nsa_jax.parallel.devices import Devices  # noqa: E402
from nsa_jax.parallel.shards import Shards  # noqa: E402

CONFIG = NSAConfig()
KV_HEADS, KEY_DIM, VALUE_DIM, BYTES = 1, 16, 32, 2  # bfloat16
TOKENS = PartitionSpec(None, "context")
CHUNK, DEVICES = 512, 8
MESSAGE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def compiled() -> str:
    """The program of a forward and a backward pass, for eight H100s."""
    mesh = triton_compile.mesh_of_h100s(context=DEVICES)
    length = 2 * DEVICES * CHUNK

    def tokens(*rest: int):
        sharding = NamedSharding(mesh, TOKENS)
        return jax.ShapeDtypeStruct((1, length, *rest), jnp.bfloat16, sharding=sharding)

    keys_values = tokens(KV_HEADS, KEY_DIM), tokens(KV_HEADS, VALUE_DIM)
    operands = tokens(1, KEY_DIM), *keys_values * 3, tokens(1, 3)

    def local(*operands):
        settings = dict(compress=Compression(), config=CONFIG, axis="context", implementation="triton")
        return context_attention(*operands, **settings)

    def run(d_out, *operands):
        attend = jax.shard_map(local, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS)
        out, pull_back = jax.vjp(attend, *operands)
        return out, pull_back(d_out)

    with triton_compile.without_code_of_kernels(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(run).lower(tokens(1, VALUE_DIM), *operands)
    return lowered.compile(compiler_options=triton_compile.FAST_TO_COMPILE).as_text()


def messages(text: str) -> dict[str, list[int]]:
    """The bytes of each message on a device, by kind: what a gather gives, and what a scatter takes."""
    found: dict[str, list[int]] = {}
    for result, kind, is_async in MESSAGE.findall(text):
        arrays = ARRAY.findall(result)
        assert {dtype for dtype, _ in arrays} == {"bf16"}, result
        sizes = [math.prod(int(n) for n in dims.split(",")) * BYTES for _, dims in arrays]
        if is_async:  # its result holds the operands, then the results
            half = len(sizes) // 2
            sizes = [sum(sizes[:half]), sum(sizes[half:])]
        else:
            assert kind == "collective-permute", result  # of the others, both sizes must be there
        found.setdefault(kind, []).append(max(sizes))
    return found


@pytest.mark.slow
def test_a_program_moves_what_the_documentation_says():
    found = messages(compiled())

    per_token = KV_HEADS * (KEY_DIM + VALUE_DIM) * BYTES
    length, stride = 2 * DEVICES * CHUNK, CONFIG.compression_stride
    rows = (length + length // stride) * per_token
    halo = CONFIG.window_size - 1 + CONFIG.compression_block_size - stride
    assert sum(found.pop("all-gather")) == rows
    assert sum(found.pop("reduce-scatter")) == rows
    assert found.pop("collective-permute") == [halo * per_token] * 4  # each way, forward and backward
    assert found == {}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_every_implementation_takes_rows_on_several_devices(implementation, packed):
    """Traces a forward and a backward pass; packed rows were once an error of mosaic_gpu."""
    device = AbstractDevice(triton_compile.DEVICE_KINDS[90], 132, platform="gpu")
    mesh = AbstractMesh((2,), ("context",), (AxisType.Auto,), abstract_device=device)

    def tokens(*rest, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, 8 * CHUNK, *rest), dtype)

    operands = tokens(16, 64), *[tokens(1, 64)] * 6, tokens(16, 3)
    rows = dict(segment_ids=tokens(dtype=jnp.int32)) if packed else {}

    def local(operands, rows):
        settings = dict(compress=Compression(), config=CONFIG, axis="context", implementation=implementation)
        return context_attention(*operands, **settings, **rows)

    def run(d_out, operands, rows):
        attend = jax.shard_map(local, mesh=mesh, in_specs=(TOKENS, TOKENS), out_specs=TOKENS)
        out, pull_back = jax.vjp(lambda operands: attend(operands, rows), operands)
        return out, pull_back(d_out)[0]

    with jax.sharding.use_abstract_mesh(mesh):
        out, gradients = jax.eval_shape(run, tokens(16, 64), operands, rows)

    assert [x.shape for x in (out, *gradients)] == [x.shape for x in (operands[0], *operands)]


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_kernels_compute_what_a_device_sees(order):
    """They load no range, and know that no tile of queries lies in two selection blocks."""
    mesh = AbstractMesh((4,), ("context",), (AxisType.Auto,))
    halo, known = CONFIG.window_size - 1, []

    def local(x):
        shards = Shards.of(Devices.along("context"), order, x.shape[1], CONFIG)
        where = dict(batch=1, num_queries=x.shape[1], query_positions=shards.runs(halo))
        placement = layout.place(CONFIG, **where, num_keys=8 * CHUNK)
        known.append(placement.tile_in_one_block(64))
        for ranges in (compression_ranges(placement, 8), window_ranges(placement, 8)):
            edges, (starts, _, runs) = ranges.kernel_operands(64)
            known.append(edges.known and starts is None and runs is not None)
        return x

    x = jax.ShapeDtypeStruct((1, 8 * CHUNK), jnp.float32)
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS), x)

    assert known == [True] * 3
