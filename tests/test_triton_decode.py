"""The kernels of a decode step as machine code, and a compiled loop of steps: launches, copies, memory."""

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
from nsa_jax.cache import Compression, ResidualMLP, Rotation, TokenKeysValues  # noqa: E402
from nsa_jax.config import BRANCHES, NSAConfig  # noqa: E402

CONFIG = NSAConfig()
FIRST, SECOND, HIDDEN = (f"nsa_step_{part}" for part in ("first", "second", "hidden"))
CHAIN = [FIRST, SECOND]
BY_MLP = [HIDDEN, *CHAIN]


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
    config: NSAConfig = CONFIG
    branches: tuple[str, ...] = BRANCHES
    kept: str | None = None  # dtype of the cache, if it is quantised

    def operands(self):
        """Cache, query, tokens and gates, of 4 KV heads."""

        def array(*last):
            return jax.ShapeDtypeStruct((self.batch, self.num_new, *last), jnp.dtype(self.dtype))

        sizes = dict(num_kv_heads=4, key_dim=self.key_dim, value_dim=self.value_dim, config=self.config)
        sizes["branches"] = self.branches
        sizes |= dict(dtype=self.kept or self.dtype, raw_dtype=self.dtype)
        held = jax.eval_shape(lambda: cache.init_cache(self.batch, self.max_length, **sizes))
        tokens = TokenKeysValues(*(array(4, dim) for dim in (self.key_dim, self.value_dim) * 3))
        absent = {f"{x}_{branch}" for x in ("key", "value") for branch in set(BRANCHES) - {*self.branches}}
        gates = array(4 * self.heads, len(self.branches)) if len(self.branches) > 1 else None
        tokens = tokens._replace(**dict.fromkeys(absent))
        return held, array(4 * self.heads, self.key_dim), tokens, gates

    def blocks(self):
        """What a step without a compressed branch is given; else None."""
        shape = (self.batch, self.num_new, 4, self.config.num_selected_blocks)
        return None if "cmp" in self.branches else jax.ShapeDtypeStruct(shape, jnp.int32)


MAIN = Shape()
SHAPES = {
    "main": MAIN,
    "eight tokens": Shape(num_new=8),
    "one head": Shape(heads=1, num_new=4),
    "wide float32": Shape(dtype="float32", key_dim=256, value_dim=256),
    "1m tokens": Shape(batch=32, max_length=2**20),
    "one row of 192/192": Shape(batch=1, key_dim=192, value_dim=192),
    "one row of 256/256": Shape(batch=1, key_dim=256, value_dim=256),
    "int8": Shape(kept="int8"),
    "int8, 64 heads": Shape(kept="int8", heads=64, num_new=2),
    "int8, dim 16": Shape(kept="int8", key_dim=16, value_dim=16),
    "selected alone": Shape(branches=("slc",), config=NSAConfig(selection_block_size=128)),
    "selected and window": Shape(branches=("slc", "win"), num_new=3, dtype="float32"),
    # A selection block of 32 compressed keys is more than an L4 can load ahead.
    "large": Shape(dtype="float32", key_dim=256, value_dim=256, config=NSAConfig(compression_stride=2)),
}
# The kernels that a case compiles: those to which no other case gives the same sizes or more. The first one's
# are rows, dims and stages, the second one's warps, registers and the steps of its loops. On other GPUs it is
# what differs there: an A100 has fewer stages, an L4 and a consumer Blackwell less shared memory, and a B200
# other products of 64 rows. All have the same products of 16 rows. Of many heads a cache in
# int8 stands for one of 16 bits, and of int8 an A100 for a Hopper: their sizes differ in stages alone.
CASES = {
    (90, "main"): CHAIN,
    (90, "eight tokens"): CHAIN,
    (90, "one head"): [SECOND],
    (90, "1m tokens"): [SECOND],
    (90, "one row of 192/192"): CHAIN,
    (90, "one row of 256/256"): [SECOND],
    (90, "int8, 64 heads"): CHAIN,
    (90, "int8, dim 16"): [SECOND],
    (90, "selected alone"): CHAIN,
    (90, "selected and window"): CHAIN,
    (80, "int8"): CHAIN,
    (89, "large"): CHAIN,
    (100, "eight tokens"): [FIRST],
    (120, "main"): CHAIN,
}
# The same with MLPs, which have the same code on other GPUs; the second kernel does not know of them.
BY_MLPS = {(90, "main"): BY_MLP[:2], (89, "wide float32"): BY_MLP[:2]}
# As in `test_triton_compile`.
SPILLS: dict[tuple[int, str], dict[str, int]] = {
    (89, "large"): {FIRST: 152, SECOND: 84},
    (90, "eight tokens"): {SECOND: 4},
    (90, "1m tokens"): {SECOND: 72},  # 1024 threads, with 64 registers each
    (90, "one head"): {SECOND: 8},
}
MLP_SPILLS: dict[tuple[int, str], dict[str, int]] = {
    (89, "wide float32"): {FIRST: 492},
    (90, "main"): {FIRST: 16},
}


def step(compress, config, held, query, tokens, gates, **others):
    settings = dict(config=config, compress=compress, implementation="triton", **others)
    return cache.decode_step(held, query, tokens, gates, **settings)


def by_function(key_windows, value_windows, first_positions):
    return key_windows[:, :, 0], value_windows.max(2)


def compression(shape):
    """Two MLPs and a rotation, of the shapes that a layer has by default."""
    size, arrays = shape.config.compression_block_size, {}
    for name, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
        shapes = ((size, dim), (size * dim, 2 * dim), (2 * dim,), (2 * dim, dim), (dim,))
        arrays[name] = ResidualMLP(*(jax.ShapeDtypeStruct(x, jnp.dtype(shape.dtype)) for x in shapes))
    pairs = (shape.key_dim // 2,)
    ticks, rest = (jax.ShapeDtypeStruct(pairs, dtype) for dtype in (jnp.int32, jnp.float32))
    return Compression(**arrays, rotation=Rotation(ticks, rest, jax.ShapeDtypeStruct((), jnp.float32)))


def check(capability, name, compress, kernels, spills):
    shape = SHAPES[name]

    def one_step(compress, blocks, *operands):
        return step(compress, shape.config, *operands, block_indices=blocks)

    given = compress, shape.blocks(), *shape.operands()
    known = {*BY_MLP} - {*kernels}
    found = triton_kernels.compiled(one_step, *given, capability=capability, but=known)

    for kernel in found:  # shown if the test fails
        print(name, capability, kernel._replace(ptx=""))
    assert [kernel.name for kernel in found] == kernels
    for kernel in found:
        (threads,) = re.findall(r"\.reqntid (\d+)", kernel.ptx)
        assert int(threads) * kernel.registers <= 64 * 1024, kernel.name  # or it cannot be launched
        assert kernel.shared_bytes <= triton_compile.SHARED_MEMORY_BYTES[capability], kernel.name
        assert kernel.spill_bytes <= spills.get((capability, name), {}).get(kernel.name, 0), kernel.name
        assert kernel.scratch_bytes == 0, kernel.name
        if shape.kept and shape.key_dim > 16:  # two numbers at a time, see `decode.pairs`
            assert "ld.shared.b8" not in kernel.ptx, kernel.name


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), CASES, ids=[f"{c}-{s}" for c, s in CASES])
def test_step_becomes_machine_code(capability, name):
    compress = Compression() if "cmp" in SHAPES[name].branches else None

    check(capability, name, compress, CASES[capability, name], SPILLS)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), BY_MLPS, ids=[f"{c}-{s}" for c, s in BY_MLPS])
def test_step_with_mlps_becomes_machine_code(capability, name):
    check(capability, name, compression(SHAPES[name]), BY_MLPS[capability, name], MLP_SPILLS)


@pytest.mark.parametrize(
    ("compress", "kernels"),
    [(Compression(), CHAIN), (compression(MAIN), BY_MLP), (by_function, CHAIN), (None, CHAIN)],
    ids=["mean", "mlp", "function", "no compressed branch"],
)
def test_loop_copies_no_cache_and_launches_few_kernels(compress, kernels):
    """As XLA compiles it for an H100: in a body of two layers, nothing of the size of a cache is copied."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason=f"needs jax-cuda13-pjrt, {WHERE}")
    shape = Shape(batch=2, max_length=4096, branches=BRANCHES if compress else ("slc", "win"))
    held, query, tokens, gates = shape.operands()

    data = compress if isinstance(compress, Compression) else None

    def loop(data, blocks, caches, query, tokens, gates):
        def body(_, carry):
            caches, query = carry
            after = []
            for one in caches:
                done = step(data or compress, shape.config, one, query, tokens, gates, block_indices=blocks)
                after.append(done.cache)
                query = done.out
            return tuple(after), query

        return jax.lax.fori_loop(0, 100, body, (caches, query))

    given = data, shape.blocks(), (held, held), query, tokens, gates
    program = triton_compile.compile_for_h100(loop, *given)
    body = program.as_text().split("ENTRY")[0]

    arrays = held.key_slc, held.key_cmp, held.key_win_ring, held.key_raw_ring
    smallest = min(x.size for x in arrays if x is not None)
    copied = re.findall(r"(\w+)\[([\d,]*)\]\S* copy\(", body)
    assert all(_elements(dims) < smallest for _, dims in copied), copied
    assert body.count('custom_call_target="triton_kernel_call_ffi"') == 2 * len(kernels)
    assert program.memory_analysis().temp_size_in_bytes < 2 * held.key_slc.size


def _elements(dims: str) -> int:
    total = 1
    for dim in dims.split(","):
        total *= int(dim or 1)
    return total


def test_steps_that_do_not_fit_are_refused():
    def reason(gpu=90, **changes):
        config = {name: changes.pop(name) for name in list(changes) if hasattr(CONFIG, name)}
        shape = Shape(**changes, config=NSAConfig(**config))
        held, query, *_ = shape.operands()
        with triton_compile.device(gpu):
            return dispatch.unsupported_reason(
                "decode_step", "triton", query, held.key_cmp, held.value_cmp, config=shape.config,
                platform="cuda",
            )  # fmt: skip

    assert reason() is None
    assert reason(max_length=2**20) is None
    assert reason(kept="float8_e4m3fn") is None
    assert reason(gpu=80, kept="int8") is None
    refused = {
        "at most 8 tokens": reason(num_new=9),
        "fit into shared memory": reason(gpu=80, key_dim=256, dtype="float32", selection_block_size=128),
        "query heads of one KV head": reason(heads=65),
        "room for at least one compression block, got room for 0": reason(max_length=31),
        "in lists of at most 1024": reason(max_length=2**21),
        "num_selected_blocks of at most 256": reason(num_selected_blocks=257),
        "selection_block_size of at most 128": reason(selection_block_size=144),
        "32 compression strides": reason(compression_stride=1),
        "power of two": reason(key_dim=100),
        "8.9 or newer for float8_e4m3fn, got 8.0": reason(gpu=80, kept="float8_e4m3fn"),
    }
    for part, text in refused.items():
        assert text is not None
        assert part in text
        assert has_form(text)


@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
def test_vmap_is_a_larger_batch(given):
    """Also of given blocks. Then a step stores no scores: 16 rows of a KV head, times 64 blocks."""
    shape = Shape(batch=2, max_length=4096)
    operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), shape.operands())
    blocks = jax.ShapeDtypeStruct((3, 2, 1, 4, 16), jnp.int32) if given else None

    def mapped(blocks, *operands):
        def one(blocks, *x):
            return step(Compression(), shape.config, *x, block_indices=blocks).out

        return jax.vmap(one)(blocks, *operands)

    text = triton_compile.traced(mapped, blocks, *operands)

    assert "bf16[6,4096,4,128]" in text
    assert ("f32[6,4,16,64]" in text) != given
    assert text.count("= triton_kernel_call[") == len(CHAIN)


def test_vmap_over_weights_runs_once_for_each():
    shape = Shape(batch=2, max_length=4096)
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (compression(shape), *shape.operands())
    )

    def mapped(weights_are_mapped, compress, *operands):
        return jax.vmap(
            lambda c, *x: step(c, shape.config, *x).out, (0 if weights_are_mapped else None, 0, 0, 0, 0)
        )(compress, *operands)

    apart = triton_compile.traced(lambda *x: mapped(True, *x), *operands)
    together = triton_compile.traced(lambda *x: mapped(False, *x), compression(shape), *operands[1:])

    assert apart.count("= triton_kernel_call[") == together.count("= triton_kernel_call[") == len(BY_MLP)
    assert "= while[" in apart or "= scan[" in apart
    assert "= while[" not in together
    assert "= scan[" not in together
    assert "bf16[6,4096,4,128]" in together


def test_shards_of_heads_agree_on_lengths():
    """KV heads are on different GPUs and lengths on all of them, before the step and after it."""
    shape = Shape(batch=2, max_length=4096)
    device = AbstractDevice(triton_compile.DEVICE_KINDS[90], 132, platform="gpu")
    mesh = AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device)
    of_heads, alike = PartitionSpec(None, None, "x"), PartitionSpec()
    held, *rest = shape.operands()
    specs = cache.NSACache(*[of_heads] * 8, lengths=alike, overflowed=alike)
    rest_specs = jax.tree.map(lambda _: of_heads, tuple(rest))

    def run(held, query, tokens, gates):
        done = step(Compression(), shape.config, held, query, tokens, gates)
        return done.out, done.cache

    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, *rest_specs), out_specs=(of_heads, specs))
        text = str(jax.jit(sharded).trace(held, *rest).jaxpr)

    assert text.count("= triton_kernel_call[") == len(CHAIN)
