"""The kernels of a dense or window layer's step as machine code, and a compiled loop of such steps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_triton", reason=f"needs jax-triton, {WHERE}", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402
import triton_kernels  # noqa: E402
from messages import has_form  # noqa: E402

from nsa_jax import cache, dispatch  # noqa: E402
from nsa_jax.kernels.triton.decode.sizes import DenseStepShape, dense_step_sizes  # noqa: E402

KERNELS = ["nsa_step_dense", "nsa_step_dense_merge"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Operands of a step."""

    batch: int = 8
    num_new: int = 1
    heads: int = 16
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    max_length: int = 65536
    window_size: int | None = None
    kept: str | None = None  # dtype of the cache, if it is quantised

    def operands(self):
        """Cache, query, key and value, of 4 KV heads."""

        def array(*last):
            return jax.ShapeDtypeStruct((self.batch, self.num_new, *last), jnp.dtype(self.dtype))

        sizes = dict(num_kv_heads=4, key_dim=self.key_dim, value_dim=self.value_dim)
        sizes["dtype"] = self.kept or self.dtype
        held = jax.eval_shape(
            lambda: cache.init_dense_cache(self.batch, self.max_length, window_size=self.window_size, **sizes)
        )
        return held, array(4 * self.heads, self.key_dim), array(4, self.key_dim), array(4, self.value_dim)

    def step(self, *operands):
        return cache.dense_decode_step(*operands, window_size=self.window_size, implementation="triton")


SHAPES = {
    "main": Shape(),
    "a ring, eight tokens": Shape(num_new=8, window_size=4096),
    "64 heads, 192/192": Shape(heads=64, num_new=2, key_dim=192, value_dim=192),
    "wide float32": Shape(dtype="float32", num_new=4, key_dim=256, value_dim=256),
}
# An A100 and a consumer Blackwell have the sizes and the products of an L4, a B200 those of an H100.
CASES = [*((90, name) for name in SHAPES), (89, "main")]
# As in `test_triton_compile`.
SPILLS = {(90, "wide float32"): {"nsa_step_dense": 612}}


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), CASES, ids=[f"{c}-{s}" for c, s in CASES])
def test_step_becomes_machine_code(capability, name):
    shape = SHAPES[name]
    found = triton_kernels.compiled(shape.step, *shape.operands(), capability=capability)

    for kernel in found:  # shown if the test fails
        print(name, capability, kernel._replace(ptx=""))
    assert sorted(kernel.name for kernel in found) == KERNELS
    allowed = SPILLS.get((capability, name), {})
    for kernel in found:
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability], kernel.name
        assert kernel.spill_bytes <= allowed.get(kernel.name, 0), kernel.name
        assert kernel.scratch_bytes == 0, kernel.name
    if name == "main":
        attends = next(kernel for kernel in found if kernel.name == KERNELS[0])
        # A thread loads keys and values by 16 bytes, asynchronously, and two programs fit a multiprocessor.
        assert re.search(r"cp\.async\.cg\.shared\.global[^;]*, 0x10", _text(attends.ptx))
        assert not re.search(r"cp\.async\.ca", _text(attends.ptx))
        assert 2 * attends.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability]
        assert attends.registers <= 65536 // (2 * 128)


def _text(ptx):
    return ptx.decode() if isinstance(ptx, bytes) else ptx


def test_loop_copies_no_cache_and_launches_two_kernels():
    """As XLA compiles it for an H100: in a body of two layers, nothing of the size of a cache is copied.

    Of all such loops this one also shows what XLA's assembler says to the kernels.
    """
    pytest.importorskip("jax_plugins.xla_cuda13", reason=f"needs jax-cuda13-pjrt, {WHERE}")
    shape = Shape(batch=2, max_length=4096)
    held, query, key, value = shape.operands()

    def loop(caches, query, key, value):
        def body(_, carry):
            caches, query = carry
            after = []
            for one in caches:
                done = shape.step(one, query, key, value)
                after.append(done.cache)
                query = done.out
            return tuple(after), query

        return jax.lax.fori_loop(0, 100, body, (caches, query))

    program = triton_compile.compile_for_h100(loop, (held, held), query, key, value, code_of_kernels=True)
    body = program.as_text().split("ENTRY")[0]

    copied = re.findall(r"(\w+)\[([\d,]*)\]\S* copy\(", body)
    assert all(_elements(dims) < held.key.size for _, dims in copied), copied
    assert body.count('custom_call_target="triton_kernel_call_ffi"') == 2 * len(KERNELS)
    # The parts, in float32, and no array of the cache.
    assert program.memory_analysis().temp_size_in_bytes < 2 * held.key.size


def _elements(dims: str) -> int:
    total = 1
    for dim in dims.split(","):
        total *= int(dim or 1)
    return total


def test_steps_that_do_not_fit_are_refused():
    def reason(**changes):
        held, query, *_ = Shape(**changes).operands()
        with triton_compile.device(90):
            return dispatch.unsupported_reason(
                "dense_decode_step", "triton", query, held.key, held.value, platform="cuda"
            )

    assert reason() is None
    assert reason(num_new=8, heads=64) is None
    refused = {
        "at most 8 tokens": reason(num_new=9),
        "query heads of one KV head": reason(heads=65),
        "power of two": reason(key_dim=100),
    }
    for part, text in refused.items():
        assert text is not None
        assert part in text
        assert has_form(text)


def test_shards_of_heads_agree_on_lengths():
    """KV heads are on different GPUs and lengths on all of them, before the step and after it."""
    shape = Shape(batch=2, max_length=4096)
    device = AbstractDevice(triton_compile.DEVICE_KINDS[90], 132, platform="gpu")
    mesh = AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device)
    of_heads, alike = PartitionSpec(None, None, "x"), PartitionSpec()
    specs = cache.DenseCache(of_heads, of_heads, alike, alike)

    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(
            lambda *operands: tuple(shape.step(*operands)), mesh=mesh, in_specs=(specs, *[of_heads] * 3),
            out_specs=(of_heads, specs),
        )  # fmt: skip
        text = str(jax.jit(sharded).trace(*shape.operands()).jaxpr)

    assert "= triton_kernel_call[" in text


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_work_fills_an_h100(batch):
    """At 64k tokens at least 96 % of the last wave has work; a short row has no more parts than tiles."""
    known = dict(gpu=90, float_bytes=2, kv_heads=4 * batch, num_new=1, heads=16, dims=256)
    sizes = dense_step_sizes(DenseStepShape(slots=65536, **known))
    short = dense_step_sizes(DenseStepShape(slots=512, **known))

    programs = sizes.parts * 4 * batch
    assert programs >= 0.96 * 132 * -(-programs // 132)
    assert 65536 // sizes.keys // sizes.parts >= 15  # tiles of a part
    assert 1 <= short.parts <= 512 // short.keys
