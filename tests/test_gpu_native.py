"""On a GPU: the whole operation by the Triton kernels is deterministic, transformable, and correct at 64k."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from poisoned import poison_memory

import nsa_jax
from nsa_jax import attention, budget, layout, reference
from nsa_jax.config import NSAConfig
from nsa_jax.kernels.triton import gpu

pytestmark = pytest.mark.gpu
CONFIG = NSAConfig()
NAMES = ("query", "key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win", "gates")


def operands(length, *, batch=1, heads=16, kv_heads=1, key_dim=128, value_dim=128, dtype="bfloat16", seed=0):
    """Random operands of `native_sparse_attention`, in its order."""
    compressed = max((length - 32) // 16 + 1, 0)
    shapes = [(length, heads, key_dim)]
    for tokens in (compressed, length, length):
        shapes += [(tokens, kv_heads, key_dim), (tokens, kv_heads, value_dim)]
    keys = jax.random.split(jax.random.key(seed), len(shapes) + 1)
    arrays = [
        jax.random.normal(key, (batch, *shape), dtype) for key, shape in zip(keys[:-1], shapes, strict=True)
    ]
    gates = jax.random.uniform(keys[-1], (batch, length, heads, 3), jnp.float32).astype(dtype)
    return *arrays, gates


def attend(*arrays, implementation="triton", **more):
    return attention.native_sparse_attention(*arrays, config=CONFIG, implementation=implementation, **more)


def with_gradients(cotangent, *arrays, function=attend):
    out, pull_back = jax.vjp(function, *arrays)
    return out, *pull_back(cotangent)


def in_float64(run, *arrays):
    """What `run` gives for the same numbers in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return [np.asarray(x) for x in jax.jit(run)(*wide)]


def assert_within_budget(names, found, same, exact):
    """Checks each result against the exact one; the same maths in the same dtype sets its budget."""
    for name, ours, theirs, right in zip(names, found, same, exact, strict=True):
        allowed = budget.allowance(theirs, right, float(jnp.finfo(ours.dtype).eps))
        assert budget.distance(ours, right) <= allowed, name


def assert_same_maths(found, other):
    """Checks two results of the same maths, added in other orders: neither is exact, so each has a budget."""
    allowed = 2 * 8 * float(jnp.finfo(found.dtype).eps) * budget.size(other)
    assert budget.distance(found, other) <= allowed


def test_the_kernels_are_what_runs_by_default():
    arrays = operands(300)
    chosen = nsa_jax.choose("native_sparse_attention", *arrays, config=CONFIG).implementation
    faster = gpu.capability() == (9, 0) and jaxlib.version.__version_info__ < (0, 12)
    assert chosen == ("mosaic_gpu" if faster else "triton")
    text = jax.jit(functools.partial(attend, implementation=None)).lower(*arrays).as_text(debug_info=True)
    assert f"nsa_jax.{chosen}.native_sparse_attention" in text
    assert "triton_kernel_call_ffi" in text


def test_kernels_from_disk_give_the_same_bits(tmp_path, monkeypatch):
    """Those that load through descriptors, too, of which the file says how they are made."""
    import triton_kernels

    from nsa_jax.kernels.triton import kernel_cache

    monkeypatch.setattr(kernel_cache, "_folder", lambda: tmp_path)
    arrays = operands(2500, heads=32, kv_heads=2)
    cotangent = jax.random.normal(jax.random.key(9), (1, 2500, 32, 128), "bfloat16")
    found = []
    for _ in range(2):
        with triton_kernels.kernels_forgotten():
            jax.clear_caches()
            found.append(jax.jit(with_gradients)(cotangent, *arrays))
        monkeypatch.delattr(kernel_cache, "_write", raising=False)  # the second time nothing is compiled
    assert list(tmp_path.iterdir())
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


def test_twenty_runs_agree_bitwise():
    arrays = operands(2500, heads=32, kv_heads=2)
    cotangent = jax.random.normal(jax.random.key(9), (1, 2500, 32, 128), "bfloat16")
    run = jax.jit(with_gradients)
    first = [np.asarray(x, np.float32) for x in run(cotangent, *arrays)]
    for _ in range(19):
        poison_memory()
        for ours, expected in zip(run(cotangent, *arrays), first, strict=True):
            assert np.array_equal(np.asarray(ours, np.float32), expected)


@pytest.mark.parametrize("length", [1, 31, 64, 1023])
def test_results_of_poisoned_memory_are_finite(length):
    arrays = operands(length, batch=3)
    cotangent = jax.random.normal(jax.random.key(9), (3, length, 16, 128), "bfloat16")
    poison_memory()
    for name, x in zip(("out", *NAMES), jax.jit(with_gradients)(cotangent, *arrays), strict=True):
        assert jnp.isfinite(x).all(), name


@pytest.mark.parametrize("part", ["row", "head"])
def test_what_is_not_a_number_stays_where_it_is(part):
    """A row of the batch, or a KV head, that is NaN leaves the others bitwise as they are."""
    arrays = operands(700, batch=3, heads=18, kv_heads=3)
    cotangent = jax.random.normal(jax.random.key(9), (3, 700, 18, 128), "bfloat16")

    def middle(x):
        third = x.shape[0 if part == "row" else 2] // 3
        return (slice(third, 2 * third),) if part == "row" else (..., slice(third, 2 * third), slice(None))

    run = jax.jit(with_gradients)
    found, expected = (
        run(*(x.at[middle(x)].set(value) for x in (cotangent, *arrays))) for value in (jnp.nan, 0)
    )
    for ours, plain in zip(found, expected, strict=True):
        ours, plain = (np.asarray(x.at[middle(x)].set(0), np.float32) for x in (ours, plain))
        assert np.array_equal(ours, plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_not_finite_reaches_those_who_see_it(dtype):
    """Outputs and gradients are finite exactly where those of the oracle are."""
    query, *keys, gates = operands(600, batch=2, heads=8, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype)
    cotangent = jax.random.normal(jax.random.key(9), (2, 600, 8, 64), dtype)
    blocks = attention.select_blocks(query, keys[0], config=CONFIG, implementation="xla")
    query = query.at[1, 300, 3, 7].set(jnp.nan)
    cotangent = cotangent.at[0, 500, 2, 5].set(jnp.inf)
    # Each of these numbers has queries that see no other of them; so that of the window is near the end.
    places = (0, 0.2, 1), (0, 0.5, 0), (1, 0.6, 1), (1, 0.9, 0), (0, 0.7, 0), (1, 0.97, 1)
    for i, (b, part, k) in enumerate(places):
        at = b, int(keys[i].shape[1] * part), k, 3 * i
        keys[i] = keys[i].at[at].set(jnp.inf if i == 3 else jnp.nan)
    arrays = cotangent, query, *keys, gates

    def oracle(cotangent, *arrays):
        function = functools.partial(reference.native_sparse_attention, config=CONFIG, block_indices=blocks)
        return with_gradients(cotangent, *arrays, function=function)

    same, exact = jax.jit(oracle)(*(x.astype("float32") for x in arrays)), in_float64(oracle, *arrays)
    poison_memory()
    run = functools.partial(with_gradients, function=functools.partial(attend, block_indices=blocks))
    for name, ours, *theirs in zip(("out", *NAMES), jax.jit(run)(*arrays), same, exact, strict=True):
        finite = np.isfinite(theirs[1])
        assert not finite.all(), name
        assert finite.any(), name
        assert np.array_equal(np.isfinite(np.asarray(ours, np.float32)), finite), name
        found = jnp.where(finite, ours, 0)
        assert_within_budget([name], [found], *([np.where(finite, x, 0)] for x in theirs))


@pytest.mark.parametrize("length", [512, 1536])
def test_runs_equal_their_positions(length):
    """Two runs that begin elsewhere in each row, the last of them not full, against an array of positions."""
    first = jnp.asarray([[64, 512], [0, 320]], jnp.int32)
    query, *others = operands(2048, batch=2, heads=8, kv_heads=2, key_dim=64, value_dim=64)
    query, gates = query[:, :length], others.pop()[:, :length]
    real = jnp.asarray([length, length - 37], jnp.int32)
    half = length // 2
    runs = layout.Runs((layout.Run(half, first[:, 0]), layout.Run(half, first[:, 1])), 64, real)
    positions = layout.positions_of(runs, 2)
    cotangent = jax.random.normal(jax.random.key(9), (2, length, 8, 64), "bfloat16")

    def run(where, *arrays):
        function = functools.partial(attend, query_positions=where)
        return with_gradients(cotangent, *arrays, function=function)

    found, expected = (jax.jit(run)(where, query, *others, gates) for where in (runs, positions))
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_maths(ours, theirs)
    assert not found[0][1, real[1] :].any()


def test_window_keys_with_an_origin_of_their_own():
    query, _, _, _, _, key, value, _ = operands(3000, batch=2, key_dim=64, value_dim=64)
    settings = dict(config=CONFIG, implementation="triton")

    def gradients(query, key, value, **more):
        def attend(*operands):
            return attention.window_attention(*operands, **settings, **more)[0]

        out, pull_back = jax.vjp(attend, query, key, value)
        return out, *pull_back(out)

    at = layout.Runs((layout.Run(200, 1000),))
    whole = jax.jit(gradients)(query[:, 1000:1200], key, value, query_positions=at)
    first = jnp.int32(480)
    part = jax.jit(gradients)(
        query[:, 1000:1200], key[:, 480:1250], value[:, 480:1250],
        query_positions=layout.Runs((layout.Run(200, first + 520),)), first_key=first,
    )  # fmt: skip
    for ours, theirs in zip(part[:2], whole[:2], strict=True):
        assert_same_maths(ours, theirs)
    for ours, theirs in zip(part[2:], whole[2:], strict=True):
        assert_same_maths(ours, theirs[:, 480:1250])


def test_the_sum_at_the_end_of_the_window_is_that_of_the_branches():
    """Without gradients the window's kernel computes the gated sum; with them, a kernel of its own does."""
    arrays = operands(1500, heads=32, kv_heads=2)
    out = jax.jit(attend)(*arrays)
    expected, _ = jax.jit(lambda *arrays: jax.vjp(attend, *arrays))(*arrays)
    assert_same_maths(out, expected)


@pytest.mark.parametrize("block_size", [64, 128])
def test_tokens_that_select_nothing(block_size):
    """Whole tiles of them, in poisoned memory: out 0, lse -inf, gradient 0, even if d_lse is NaN."""
    config = NSAConfig(selection_block_size=block_size)
    query, _, _, key, value, *_ = operands(1024)
    own = jnp.arange(1024, dtype=jnp.int32) // block_size
    blocks = jnp.full((1, 1024, 1, 16), -1, jnp.int32).at[0, :, 0, 0].set(own)
    blocks = blocks.at[:, 100:300].set(-1)
    empty = (blocks[..., 0, 0] < 0)[..., None]

    def run(query, key, value, implementation="xla"):
        def attend(query, key, value):
            settings = dict(config=config, implementation=implementation)
            return attention.selected_attention(query, key, value, blocks, **settings)

        results, pull_back = jax.vjp(attend, query, key, value)
        d_lse = jnp.where(empty, jnp.nan, jnp.ones_like(results.lse))
        return *results, *pull_back(type(results)(jnp.ones_like(results.out), d_lse))

    poison_memory()
    found = jax.jit(functools.partial(run, implementation="triton"))(query, key, value)
    out, lse, d_query = found[:3]
    assert not jnp.where(empty[..., None], out, 0).any()
    assert (jnp.isneginf(lse) == empty).all()
    assert not jnp.where(empty[..., None], d_query, 0).any()
    same, exact = jax.jit(run)(query, key, value), in_float64(run, query, key, value)
    assert_within_budget(("d_query", "d_key", "d_value"), found[2:], same[2:], exact[2:])


def assert_as_xla(cotangent, arrays, blocks):
    """Checks outputs and gradients of the kernels against those of `xla`, with the same selection."""

    def run(cotangent, *arrays, implementation="xla"):
        function = functools.partial(attend, implementation=implementation, block_indices=blocks)
        return with_gradients(cotangent, *arrays, function=function)

    found = jax.jit(functools.partial(run, implementation="triton"))(cotangent, *arrays)
    same, exact = jax.jit(run)(cotangent, *arrays), in_float64(run, cotangent, *arrays)
    assert_within_budget(("out", *NAMES), found, same, exact)


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(700, 8, 2), (2100, 8, 2), (2100, 14, 2)])
def test_values_and_gradients_equal_those_of_xla(length, heads, kv_heads):
    """In float32, with the same selection on both sides."""
    arrays = operands(length, heads=heads, kv_heads=kv_heads, key_dim=64, value_dim=64, dtype="float32")
    blocks = attention.select_blocks(*arrays[:2], config=CONFIG, implementation="xla")
    cotangent = jax.random.normal(jax.random.key(9), (1, length, heads, 64), "float32")
    assert_as_xla(cotangent, arrays, blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("heads", [8, 6])
def test_short_rows_attend_to_all_that_a_query_may_select(heads, packed, dtype):
    """Without lists, as `test_short_rows` sees: against `xla`, which selects; the future changes no bit."""
    arrays = operands(900, batch=2, heads=heads, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype)
    cotangent = jax.random.normal(jax.random.key(9), (2, 900, heads, 64), dtype)
    segments = jnp.repeat(jnp.asarray([[0, 1, 2, 0], [3, 1, 7, 2]]), jnp.asarray([5, 300, 500, 95]), axis=1)
    more = dict(segment_ids=segments) if packed else {}

    def run(cotangent, *arrays, implementation="xla"):
        function = functools.partial(attend, implementation=implementation, **more)
        return with_gradients(cotangent, *arrays, function=function)

    ours = jax.jit(functools.partial(run, implementation="triton"))
    poison_memory()
    found = ours(cotangent, *arrays)
    same, exact = jax.jit(run)(cotangent, *arrays), in_float64(run, cotangent, *arrays)
    assert_within_budget(("out", *NAMES), found, same, exact)
    later = [x.at[:, -(x.shape[1] // 9) :].set(3) for x in arrays]
    assert np.array_equal(*(np.asarray(ours(cotangent, *x)[0][:, :790], np.float32) for x in (arrays, later)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (10, 2)])
def test_the_forward_gives_the_probabilities_of_its_slots(heads, kv_heads):
    """Beside the same output and gradients, to the bit; they are those of a pass of their own."""
    arrays = operands(1500, heads=heads, kv_heads=kv_heads)
    blocks = jax.jit(functools.partial(attention.select_blocks, config=CONFIG))(*arrays[:2])
    cotangent = jax.random.normal(jax.random.key(9), attend(*arrays).shape, arrays[0].dtype)
    given = functools.partial(attend, block_indices=blocks)
    with_probabilities = functools.partial(given, return_probabilities=True)

    alone = jax.jit(functools.partial(with_gradients, function=given))(cotangent, *arrays)
    poison_memory()
    beside = jax.jit(functools.partial(with_gradients, function=lambda *x: with_probabilities(*x)[0]))(
        cotangent, *arrays
    )
    assert all(np.array_equal(x, y) for x, y in zip(alone, beside, strict=True))
    found = jax.jit(with_probabilities)(*arrays)[1]
    expected = attention.selected_probabilities(
        arrays[0], arrays[3], blocks, config=CONFIG, implementation="xla"
    )
    assert jnp.abs(found - expected).max() <= 16 * 6 * 1.2e-7 * (heads // kv_heads)


def test_many_heads_of_one_kv_head_equal_those_of_xla():
    """More heads than a tile has rows, and large dims: the largest tiles that shared memory holds."""
    arrays = operands(300, heads=100, key_dim=256, value_dim=192)
    blocks = attention.select_blocks(*arrays[:2], config=CONFIG, implementation="xla")
    cotangent = jax.random.normal(jax.random.key(9), (1, 300, 100, 192), "bfloat16")
    assert_as_xla(cotangent, arrays, blocks)


@pytest.mark.parametrize("length", [2000, 6000])
def test_a_block_named_twice_counts_once(length):
    """More queries name block 0 twice than an item holds.

    `triton_block_program.check_blocks_named_twice` checks that nothing is written out of bounds.
    """
    query, _, _, key, value, *_ = operands(length, key_dim=64, value_dim=64)
    own = jnp.arange(length, dtype=jnp.int32) // 64
    once = jnp.full((1, length, 1, 16), -1, jnp.int32).at[0, :, 0, 0].set(0).at[0, :, 0, 1].set(own)
    once = once.at[:, :64, :, 1].set(-1)
    twice = once.at[0, 64:, 0, 2].set(0)

    @jax.jit
    def gradients(blocks):
        def attend(key, value):
            return attention.selected_attention(
                query, key, value, blocks, config=CONFIG, implementation="triton"
            )[0]

        return jax.vjp(attend, key, value)[1](query)

    expected = gradients(once)
    poison_memory()
    for ours, plain in zip(gradients(twice), expected, strict=True):
        assert np.array_equal(np.asarray(ours, np.float32), np.asarray(plain, np.float32))


def test_vmap_equals_the_batch():
    arrays = operands(333, batch=3, dtype="float32", key_dim=64, value_dim=64)
    cotangent = jax.random.normal(jax.random.key(9), (3, 333, 16, 64), "float32")

    def one(cotangent, *row):
        return [x[0] for x in with_gradients(cotangent[None], *(x[None] for x in row))]

    expected = jax.jit(with_gradients)(cotangent, *arrays)
    found = jax.jit(jax.vmap(one))(cotangent, *arrays)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_remat_and_export_and_shard_map_change_nothing():
    arrays = operands(333, dtype="float32", key_dim=64, value_dim=64)
    cotangent = jax.random.normal(jax.random.key(9), (1, 333, 16, 64), "float32")
    expected = jax.jit(with_gradients)(cotangent, *arrays)
    remat = jax.checkpoint(attend, policy=jax.checkpoint_policies.nothing_saveable)
    program = jax.jit(with_gradients)
    exported = jax.export.export(
        program,
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")],
    )(cotangent, *arrays)
    restored = jax.export.deserialize(exported.serialize())
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.sharding.PartitionSpec(None, None, "x")
    in_shards = jax.shard_map(with_gradients, mesh=mesh, in_specs=heads, out_specs=heads)
    variants = {
        "remat": jax.jit(functools.partial(with_gradients, function=remat))(cotangent, *arrays),
        "export": restored.call(cotangent, *arrays),
        "shard_map": jax.jit(in_shards)(cotangent, *arrays),
    }
    for name, found in variants.items():
        for ours, theirs in zip(found, expected, strict=True):
            assert np.array_equal(ours, theirs), name


def test_scan_runs_the_kernels_in_a_compiled_loop():
    arrays = operands(100, dtype="float32", key_dim=64, value_dim=64)
    query, *others = arrays

    def step(carry, _):
        out = attend(carry, *others)
        return out, out

    _, found = jax.jit(lambda query: jax.lax.scan(step, query, None, length=3))(query)
    for ours in found:
        query = jax.jit(attend)(query, *others)
        assert np.array_equal(ours, query)


@pytest.mark.parametrize(
    ("operation", "distribution"),
    [
        ("native_sparse_attention", "random"),
        ("compressed_attention", "random"),
        ("select_blocks", "random"),
        ("selected_attention", "coherent"),
        ("window_attention", "random"),
    ],
)
def test_sampled_rows_of_64k_tokens(operation, distribution):
    """The gate of the benchmarks checks them: it computes rows in float64, from the definitions alone."""
    from benchmarks import gate, inputs, programs

    shape = inputs.Shape(
        length=65536, query_heads=64, kv_heads=4, key_dim=128, value_dim=128, dtype="bfloat16", config=CONFIG
    )
    draw = programs.draw(operation, "triton", shape, distribution)
    run = jax.jit(programs.function(operation, "triton", shape))
    result = run(*inputs.arguments(operation, draw, shape))
    positions = gate.sample_positions(shape.length)
    verdict = gate.check_rows(operation, result, positions, draw, shape)
    assert verdict.green, verdict


def test_offsets_beyond_two_to_the_31():
    """300 000 tokens with 64 heads have 2.46e9 query elements; the last rows equal those computed alone."""
    length, last = 300_000, 40
    query = jax.random.normal(jax.random.key(0), (1, length, 64, 128), "bfloat16")
    key, value = (jax.random.normal(jax.random.key(i), (1, length, 4, 128), "bfloat16") for i in (1, 2))
    settings = dict(config=CONFIG, implementation="triton")
    window = jax.jit(functools.partial(attention.window_attention, **settings))
    out, lse = window(query, key, value)
    kept = CONFIG.window_size + last
    alone = window(query[:, -kept:], key[:, -kept:], value[:, -kept:])
    assert np.array_equal(lse[:, -last:], alone[1][:, -last:])
    assert jnp.array_equal(out[:, -last:], alone[0][:, -last:])

    local = jnp.arange(length, dtype=jnp.int32) // 64
    blocks = jnp.stack([jnp.maximum(local - i, -1) for i in range(15, -1, -1)], -1)
    blocks = jnp.sort(jnp.where(blocks < 0, 1 << 30, blocks), -1)
    blocks = jnp.where(blocks == 1 << 30, -1, blocks)
    blocks = jnp.broadcast_to(blocks[None, :, None], (1, length, 4, 16))
    selected = jax.jit(functools.partial(attention.selected_attention, **settings))
    out, lse = selected(query, key, value, blocks)
    positions = jnp.arange(length - last, length, dtype=jnp.int32)[None]
    alone = selected(query[:, -last:], key, value, blocks[:, -last:], query_positions=positions)
    assert_same_maths(lse[:, -last:], alone[1])
    assert_same_maths(out[:, -last:], alone[0])

    def gradients(query, key, value, blocks, **more):
        def attend(*operands):
            return attention.selected_attention(*operands, blocks, **settings, **more)[0]

        out, pull_back = jax.vjp(attend, query, key, value)
        return pull_back(out)

    # Only its own queries choose the last block, so they alone give the gradients of its keys and values.
    own = length % 64 or 64
    positions = jnp.arange(length - own, length, dtype=jnp.int32)[None]
    of_all = jax.jit(gradients)(query, key, value, blocks)
    alone = jax.jit(gradients)(query[:, -own:], key, value, blocks[:, -own:], query_positions=positions)
    for ours, theirs in zip(of_all, alone, strict=True):
        assert_same_maths(ours[:, -own:], theirs[:, -own:])
