"""Decode steps by the Triton kernels on a GPU, against `xla` in float32 on the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

from nsa_jax import attention, cache, dispatch
from nsa_jax.cache import Compression, ResidualMLP, TokenKeysValues
from nsa_jax.config import BRANCHES, NSAConfig
from nsa_jax.kernels.triton.decode import step as steps
from nsa_jax.layout import Run, Runs, slots
from nsa_jax.layout.quantised import fields, is_quantised, like, widened
from nsa_jax.layout.quantised import held as held_array
from nsa_jax.nn.rotary import Rotary

pytestmark = pytest.mark.gpu

PAPER = NSAConfig()
MSA = NSAConfig(selection_block_size=128, num_local_blocks=1)
OTHER = NSAConfig(
    compression_block_size=16, compression_stride=8, selection_block_size=32, num_selected_blocks=6,
    window_size=100, num_initial_blocks=2, num_local_blocks=1,
)  # fmt: skip
# Lengths around the ends of blocks and windows, long ones, and a full row.
LENGTHS = (0, 30, 31, 32, 46, 577, 1023, 1025, 2047, 4095, 16383, 30000, 65520, 65536)


def operands(dtype, num_new, *, config=PAPER, lengths=LENGTHS, heads=(32, 2), dims=(128, 128), equal=False,
             max_length=65536, kept=None):  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(num_new), 40))
    batch, (num_heads, num_kv_heads) = len(lengths), heads

    def normal(shape, alike=False):
        return jnp.ones(shape, dtype) if alike else jax.random.normal(next(keys), shape, dtype)

    empty = cache.init_cache(
        batch, max_length, num_kv_heads=num_kv_heads, key_dim=dims[0], value_dim=dims[1], config=config,
        dtype=kept or dtype, raw_dtype=dtype,
    )  # fmt: skip
    filled = {
        name: like(normal(x.shape, equal and name.startswith("key")), held_array(empty, name))
        for name, x in empty._asdict().items()
        if name not in ("lengths", "overflowed") and not name.endswith("_scale") and x is not None
    }
    held = empty._replace(**fields(filled), lengths=jnp.asarray(lengths, jnp.int32))
    shapes = [(batch, num_new, num_kv_heads, dim) for dim in dims * 3]
    tokens = TokenKeysValues(*(normal(shape, equal and i % 2 == 0) for i, shape in enumerate(shapes)))
    gates = jax.nn.sigmoid(normal((batch, num_new, num_heads, 3)))
    return held, normal((batch, num_new, num_heads, dims[0])), tokens, gates


def wide(arrays):
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays
    )


@functools.partial(jax.jit, static_argnames=("config",))
def by_kernels(held, query, tokens, gates, num_tokens, config):
    return steps.decode_step(
        held, query, tokens, gates, num_tokens, Compression(), config, query.shape[-1] ** -0.5
    )


@functools.partial(jax.jit, static_argnames=("config",))
def by_xla(held, query, tokens, gates, num_tokens, config):
    step = cache.decode_step(
        held, query, tokens, gates, num_tokens=num_tokens, config=config, compress=Compression(),
        implementation="xla",
    )  # fmt: skip
    offset = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
    here = offset < (step.cache.lengths - held.lengths)[:, None]
    positions = jnp.where(here, held.lengths[:, None] + offset, -1)
    blocks = attention.select_blocks(
        query, step.cache.key_cmp, config=config, query_positions=positions, implementation="xla"
    )
    return step, blocks


def distance(found, expected):
    return float(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32)).max())


@pytest.mark.parametrize(
    ("dtype", "num_new", "more"),
    [
        ("bfloat16", 1, {}),
        ("bfloat16", 1, dict(equal=True)),
        ("bfloat16", 4, {}),
        ("float32", 1, {}),
        ("float16", 8, dict(heads=(12, 2), dims=(64, 32))),
        ("bfloat16", 1, dict(heads=(8, 8), dims=(192, 128))),
        ("float32", 3, dict(config=OTHER, max_length=8192, lengths=(0, 15, 16, 31, 700, 8000))),
        ("bfloat16", 2, dict(config=OTHER, equal=True, max_length=8192, lengths=(0, 15, 16, 31, 700, 8000))),
        ("bfloat16", 1, dict(heads=(16, 1), lengths=(200_000, 65536, 7), max_length=262_144)),
    ],
)
def test_step_equals_xla(dtype, num_new, more):
    config = more.get("config", PAPER)
    arrays = operands(jnp.dtype(dtype), num_new, **more)
    batch = len(arrays[0].lengths)
    num_tokens = None if num_new == 1 else jnp.arange(batch, dtype=jnp.int32) % (num_new + 1)
    found = by_kernels(*arrays, num_tokens, config)
    own, own_blocks = by_xla(*arrays, num_tokens, config)
    exact, exact_blocks = by_xla(*wide(arrays), num_tokens, config)

    assert distance(found.out, exact.out) <= 2 * distance(own.out, exact.out) + 4e-6
    for name, got in found.cache._asdict().items():
        want = getattr(own.cache, name)
        assert got is want is None or distance(got, want) <= (1e-6 if dtype == "float32" else 2e-3), name
    chosen = jnp.sort(jnp.where(found.blocks < 0, 2**20, found.blocks), -1)
    same = [(chosen == jnp.where(x < 0, 2**20, x)).all(-1) for x in (own_blocks, exact_blocks)]
    assert (same[0] | same[1]).all()
    assert (found.out == by_kernels(*arrays, num_tokens, config).out).all(), "two runs differ"


@functools.partial(jax.jit, static_argnames=("config",))
def attended(after, first, query, gates, blocks, config):
    """Plain attention to a cache as it is after the step that began at `first`; and the blocks it chooses."""
    added, history = after.lengths - first, config.window_size - 1
    names = "key_cmp", "value_cmp", "key_slc", "value_slc"
    rings = (held_array(after, name) for name in ("key_win_ring", "value_win_ring"))
    window = [slots.read_ring(x, first - history, history + query.shape[1]) for x in rings]
    arrays = widened([held_array(after, name) for name in names], query.dtype)
    runs = Runs((Run(query.shape[1], first),), num_queries=added)
    where = dict(config=config, query_positions=runs, implementation="xla")
    out = attention.native_sparse_attention(
        query, *arrays, *widened(window, query.dtype), gates, first_key_win=first - history,
        block_indices=blocks, **where,
    )  # fmt: skip
    return out, attention.select_blocks(query, arrays[0], **where)


@pytest.mark.parametrize(
    ("kept", "dtype", "num_new", "more"),
    [
        ("int8", "bfloat16", 1, {}),
        ("int8", "bfloat16", 4, dict(heads=(8, 8), dims=(192, 128))),
        ("int8", "float16", 8, dict(heads=(12, 2), dims=(64, 32))),
        ("int8", "float32", 3, dict(config=OTHER, max_length=8192, lengths=(0, 15, 16, 31, 700, 8000))),
        ("int8", "bfloat16", 1, dict(equal=True)),
        ("float8_e4m3fn", "bfloat16", 1, {}),
        ("float8_e4m3fn", "float32", 2, dict(heads=(16, 1), lengths=(200_000, 7), max_length=262_144)),
    ],
)
def test_step_attends_to_a_quantised_cache(kept, dtype, num_new, more):
    """To what is in it afterwards, which differs from what `xla` writes where half a number is rounded."""
    config = more.get("config", PAPER)
    arrays = before, query, _, gates = operands(jnp.dtype(dtype), num_new, kept=kept, **more)
    num_tokens = None if num_new == 1 else jnp.arange(len(before.lengths), dtype=jnp.int32) % (num_new + 1)
    found = by_kernels(*arrays, num_tokens, config)
    blocks = jnp.sort(jnp.where(found.blocks < 0, 2**20, found.blocks), -1)
    blocks = jnp.where(blocks == 2**20, -1, blocks)
    of_cache = found.cache, before.lengths
    own, own_blocks = attended(*of_cache, query, gates, blocks, config)
    exact, exact_blocks = attended(*of_cache, *wide((query, gates)), blocks, config)

    assert distance(found.out, exact) <= 2 * distance(own, exact) + 4e-6
    assert ((blocks == own_blocks).all(-1) | (blocks == exact_blocks).all(-1)).all()
    settings = dict(num_tokens=num_tokens, config=config, compress=Compression(), implementation="xla")
    expected = jax.jit(lambda *arrays: cache.decode_step(*arrays, **settings).cache)(*arrays)
    for name, got in found.cache._asdict().items():
        want = getattr(expected, name)
        if got is None or name in ("lengths", "overflowed", "key_raw_ring", "value_raw_ring"):
            assert got is want is None or (got == want).all(), name
        elif is_quantised(got.dtype):  # neighbours in int8; in float8 at most 1 / 8 apart
            got, want = (x.astype(jnp.float32) for x in (got, want))
            assert (jnp.abs(got - want) <= jnp.maximum(1, jnp.abs(want) / 8)).all(), name
            assert (got == want).mean() > 0.999, name
        else:  # means of blocks have been rounded to the dtype of tokens
            rounding = 4 * float(jnp.finfo(dtype).eps) if "cmp" in name else 1e-6
            assert jnp.allclose(got, want, rtol=rounding), name
    assert (found.out == by_kernels(*arrays, num_tokens, config).out).all(), "two runs differ"


@pytest.mark.parametrize(
    ("branches", "dtype", "num_new", "config"),
    [
        (BRANCHES, "bfloat16", 1, PAPER),
        (BRANCHES, "float32", 3, PAPER),
        (BRANCHES, "float16", 8, PAPER),
        (("slc",), "bfloat16", 1, MSA),
        (("slc",), "float32", 3, PAPER),
        (("slc", "win"), "bfloat16", 4, PAPER),
        (("cmp", "slc"), "float16", 2, PAPER),
    ],
)
def test_given_blocks_are_attended_to(branches, dtype, num_new, config):
    """Any number of blocks of the row, some twice, and of blocks that are not there yet; any branches."""
    held, query, tokens, gates = operands(jnp.dtype(dtype), num_new, config=config)
    absent = [name for name in BRANCHES if name not in branches]
    drop = {f"{part}_{name}" for part in ("key", "value") for name in absent}
    rings = {f"{part}_raw_ring" for part in ("key", "value") if "cmp" in absent}
    rings |= {f"{part}_win_ring" for part in ("key", "value") if "win" in absent}
    held = held._replace(**dict.fromkeys((drop | rings) & set(held._fields)))
    tokens = tokens._replace(**dict.fromkeys(drop & set(tokens._fields)))
    gates = gates[..., : len(branches)] if len(branches) > 1 else None
    arrays = held, query, tokens, gates
    rng, batch = np.random.default_rng(num_new), len(LENGTHS)
    last = np.array(LENGTHS)[:, None, None, None] // config.selection_block_size
    blocks = (rng.random((batch, num_new, 2, 16)) * (last + 2)).astype(np.int32)
    blocks = np.where(np.arange(16) < rng.integers(17, size=(batch, num_new, 2, 1)), blocks, -1)
    num_tokens = None if num_new == 1 else jnp.arange(batch, dtype=jnp.int32) % (num_new + 1)
    compress = Compression() if "cmp" in branches else None

    @functools.partial(jax.jit, static_argnames=("implementation",))
    def run(implementation, *arrays):
        options = dict(num_tokens=num_tokens, block_indices=jnp.asarray(blocks), compress=compress)
        return cache.decode_step(*arrays, **options, config=config, implementation=implementation)

    found, own, exact = run("triton", *arrays), run("xla", *arrays), run("xla", *wide(arrays))

    assert distance(found.out, exact.out) <= 2 * distance(own.out, exact.out) + 4e-6
    for name, got in found.cache._asdict().items():
        want = getattr(own.cache, name)
        assert got is want is None or distance(got, want) <= (1e-6 if dtype == "float32" else 2e-3), name
    if branches == BRANCHES:
        chosen = by_kernels(*arrays, num_tokens, config).out
        assert distance(found.out, chosen) > 0.1, "the blocks were not taken"


def test_a_bad_row_stays_alone():
    arrays = operands(jnp.bfloat16, 4, lengths=(700, 2000, 65000))
    clean = by_kernels(*arrays, None, PAPER)
    held, query, tokens, gates = arrays
    spoilt = jax.tree.map(lambda x: x.at[1].set(jnp.nan), tokens)
    found = by_kernels(held, query.at[1].set(jnp.nan), spoilt, gates, None, PAPER)

    assert jnp.isnan(found.out[1]).all()
    for row in (0, 2):
        assert (found.out[row] == clean.out[row]).all()
        held = zip(jax.tree.leaves(found.cache), jax.tree.leaves(clean.cache), strict=True)
        assert all((got[row] == want[row]).all() for got, want in held)


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf], ids=str)
def test_what_is_not_finite_stays_in_its_row_and_head_of_an_int8_cache(number):
    """One number of a value: all who see it see NaN, as int8 cannot hold it, and nobody else does."""
    held, query, tokens, gates = operands(jnp.bfloat16, 4, lengths=(700, 2000, 65000), kept="int8")
    clean = by_kernels(held, query, tokens, gates, None, PAPER)
    spoilt = tokens._replace(value_win=tokens.value_win.at[1, 2, 0, 3].set(number))
    found = by_kernels(held, query, spoilt, gates, None, PAPER)

    assert jnp.isnan(found.out[1, 2:, :16]).all()
    assert (found.out.at[1, 2:, :16].set(clean.out[1, 2:, :16]) == clean.out).all()


def mlp(seed, dim=128, units=256):
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = ((32, dim), (32 * dim, units), (units,), (units, dim), (dim,))
    arrays = (jax.random.normal(key, x) / x[0] ** 0.5 for key, x in zip(keys, shapes, strict=True))
    return ResidualMLP(*arrays)


COMPRESSORS = {
    "mean": Compression(),
    "rotated mean": Compression(rotation=Rotary(10000.0, None).rotation(128)),
    "mlp": Compression(mlp(1), mlp(2), Rotary(10000.0, None).rotation(128)),
    "function": lambda k, v, p: (k.mean(2) * 1.5, v.max(2)),
}


@pytest.mark.parametrize("compress", COMPRESSORS.values(), ids=COMPRESSORS.keys())
def test_compiled_loop_equals_steps_of_xla(compress):
    """The cache is updated in place, across ends of blocks; the rows end at different steps."""
    arrays = operands(jnp.float32, 1, lengths=(0, 20, 1000, 5000), max_length=8192)
    steps = 80

    def run(implementation, held, query, tokens, gates):
        def body(i, carry):
            held, out = carry
            step = cache.decode_step(
                held, jnp.roll(query, i, 2), jax.tree.map(lambda x: jnp.roll(x, i, 3), tokens), gates,
                num_tokens=(i < jnp.array([80, 60, 80, 33])).astype(jnp.int32), config=PAPER,
                compress=compress, implementation=implementation,
            )  # fmt: skip
            return step.cache, out.at[i].set(step.out)

        return jax.lax.fori_loop(0, steps, body, (held, jnp.zeros((steps, *query.shape))))

    found, out = jax.jit(functools.partial(run, "triton"))(*arrays)
    with jax.default_matmul_precision("highest"):
        expected, right = jax.jit(functools.partial(run, "xla"))(*arrays)

    assert found.lengths.tolist() == expected.lengths.tolist() == [80, 80, 1080, 5033]
    assert distance(out, right) <= 1e-5
    for name, got, want in zip(found._fields[:8], found, expected, strict=False):
        # An MLP sums 4096 products; this allows 16 roundings of its largest number.
        rounding = 2e-6 * float(jnp.abs(want).max()) if name.endswith("cmp") else 0
        assert distance(got, want) <= rounding, name


def test_step_kernels_are_what_runs_by_default():
    held, query, *_ = operands(jnp.bfloat16, 1, lengths=(700,), max_length=1024)
    chosen = dispatch.choose("decode_step", query, held.key_cmp, held.value_cmp, config=PAPER)

    assert chosen.implementation == "triton"
