"""Caches in 8 bits: what rounding costs, that all steps read what is kept, and what is refused.

The oracle rounds every key and value in NumPy, one token and head at a time, and attends in float64.
"""

import functools

import cache_layer
import decode_by_loops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import Layer
from flax import nnx
from messages import refused
from modules import abstract, randomised
from token_table import TokenTable

from nsa_jax import attention, cache, generate, reference
from nsa_jax.cache import Compression, rewinding
from nsa_jax.layout import Quantised
from nsa_jax.layout.quantised import LARGEST, quantised, widened
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import IndexerConfig, NSAAttention

LENGTH = 57
OPTIONS = dict(dtype="int8", raw_dtype="float64")


def by_loops(x, dtype="int8") -> np.ndarray:
    """An array `[B, T, K, D]` as a cache gives it back."""
    x = np.asarray(x)
    arrays = dict(key=np.zeros(x.shape, jnp.dtype(dtype)), key_scale=np.zeros(x.shape[:3], np.float32))
    for place in np.ndindex(x.shape[:2]):
        decode_by_loops.store(arrays, "key", place, x[place])
    return np.float64(arrays["key"]) * np.float64(arrays["key_scale"])[..., None]


@pytest.mark.parametrize("dtype", LARGEST)
def test_rounding_errs_by_no_more_than_half_a_step(dtype):
    """Of int8 a step is `largest / 127`; of float8 it is 1/8 of a number, or 2^-9 of the scale below 2^-6."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal((3, 50, 2, 16)) * 10.0 ** rng.uniform(-6, 6, (3, 50, 2, 1)))
    x[0, :2], x[1, 0, 0, 3], x[1, 1, 1, 5] = 0, np.nan, -np.inf
    x[2, 0] = 2.0 ** rng.integers(-12, 3, (2, 16))

    found = jax.jit(quantised, static_argnums=1)(x, dtype)

    seen = np.float64(found.widened(jnp.float32))
    bad = np.isnan(np.asarray(found.scale))
    assert np.argwhere(bad).tolist() == [[1, 0, 0], [1, 1, 1]]
    assert np.isnan(seen[bad]).all()
    assert not seen[0, :2].any()
    largest = np.abs(np.where(bad[..., None], 0, x)).max(-1, keepdims=True)
    half = largest / 254
    if dtype != "int8":
        half = np.maximum(np.abs(x) / 16, largest / 448 * 2.0**-10)
    # The scale has two roundings in float32, the product one more.
    assert (np.abs(seen - x) <= half + 2.0**-22 * np.abs(x))[~bad].all()
    np.testing.assert_allclose(seen[~bad], by_loops(np.where(bad[..., None], 0, x), dtype)[~bad], 2.0**-21)


@pytest.fixture(scope="module")
def layer():
    with jax.enable_x64(True):
        return Layer.make(length=LENGTH, dtype=jnp.float64)


def exact(layer) -> np.ndarray:
    """The full forward on rounded keys and values."""
    with jax.enable_x64(True):
        operands = cache_layer.jit(lambda *arrays: Layer(layer.config, *arrays).operands())
        query, *arrays, gates = operands(*layer.arrays)
        program = cache_layer.jit(functools.partial(reference.native_sparse_attention, config=layer.config))
        return np.asarray(program(query, *map(by_loops, arrays), gates))


def decoded(layer, held) -> np.ndarray:
    """Prompts of 5 and 38 tokens in chunks of 7, then steps of up to 4; NaN where a row has no token."""
    found = np.full(layer.query.shape[:3] + layer.tokens.value_slc.shape[3:], np.nan)
    lengths = np.array([5, 38])
    out, held = layer.prefill_in_chunks(held, lengths, 7)
    found[0, :5], found[1, :38] = out[0, :5], out[1]
    for counts in ([1, 4], [0, 3], [4, 0], [4, 4], [2, 1], [4, 4]):
        out, held = layer.decode_step(held, *layer.slice(lengths, 4), num_tokens=np.array(counts))
        for row, count in enumerate(counts):
            found[row, lengths[row] : lengths[row] + count] = out[row, :count]
        lengths = lengths + counts
    assert held.lengths.tolist() == lengths.tolist() == [20, 54]
    return found


@pytest.fixture(scope="module")
def clean(layer):
    with jax.enable_x64(True):
        return decoded(layer, layer.empty(LENGTH, **OPTIONS))


def test_prompts_and_steps_attend_to_what_is_kept(layer, clean):
    """Each token of ragged rows, and itself, its window, chosen and new compressed blocks: all rounded."""
    expected = exact(layer)

    for row, length in enumerate((20, 54)):
        assert np.abs(clean[row, :length] - expected[row, :length]).max() <= 1e-12


def test_unused_slots_may_hold_anything(layer, clean):
    def spoilt(x):
        value = {"int8": 113, "float32": np.nan, "float64": np.nan}.get(x.dtype.name)
        return x if value is None else np.full_like(x, value)

    with jax.enable_x64(True):
        held = jax.tree.map(spoilt, layer.empty(LENGTH, **OPTIONS))
        found = decoded(layer, held)

    np.testing.assert_allclose(found, clean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ["key_win", "value_win"])
@pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)
def test_what_is_not_finite_reaches_those_who_see_it(layer, clean, part, number):
    """Token 40 of row 1 and KV head 0 is in the windows of tokens 40 to 47."""
    array = np.array(getattr(layer.tokens, part))
    array[1, 40, 0, 2] = number
    other = Layer(layer.config, layer.query, layer.tokens._replace(**{part: array}), layer.gates)
    with jax.enable_x64(True):
        found = decoded(other, other.empty(LENGTH, **OPTIONS))

    assert np.isnan(found[1, 40:48, :2]).all()
    found[1, 40:48, :2] = clean[1, 40:48, :2]
    np.testing.assert_allclose(found, clean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("window_size", "dtype"), [(None, "float8_e4m3fn"), (5, "int8")], ids=["dense float8", "window int8"]
)
def test_dense_and_window_layers_err_by_what_rounding_allows(window_size, dtype):
    """Chunks and steps agree with the oracle; against what is not rounded, the error is below its bound.

    With `r` 1 / 254 or 1 / 16, a logit errs by at most `e = |q|_1 scale max|k| r`, so a weight by a factor of
    up to exp(2 e), and a value by `max|v| r`.
    """
    rng, length, scale = np.random.default_rng(1), 16, 8**-0.5
    query, key, value = (rng.standard_normal((2, length, n, 8)) for n in (4, 2, 2))
    step = functools.partial(cache_layer.jit, static_argnames="window_size")

    def run(dtype):
        sizes = dict(num_kv_heads=2, key_dim=8, value_dim=8, window_size=window_size, step_capacity=3)
        held, outs, first = cache.init_dense_cache(2, length, dtype=dtype, **sizes), [], 0
        for count in (7, 3, 3, 3):
            take = step(cache.dense_prefill if count == 7 else cache.dense_decode_step)
            new = (x[:, first : first + count] for x in (query, key, value))
            out, held = take(held, *new, window_size=window_size)
            outs, first = [*outs, np.asarray(out)], first + count
        return np.concatenate(outs, axis=1)

    def oracle(key, value):
        at, seen = np.arange(length)[:, None], np.arange(length)
        hidden = (seen > at) | (seen <= at - (window_size or length))
        logits = np.einsum("btkgh,bskh->bkgts", query.reshape(2, length, 2, 2, 8), key) * scale
        weights = np.exp(np.where(hidden, -np.inf, logits))
        out = np.einsum("bkgts,bskv->btkgv", weights / weights.sum(-1, keepdims=True), value)
        return out.reshape(query.shape)

    with jax.enable_x64(True):
        found = run(dtype)

    assert np.abs(found - oracle(by_loops(key, dtype), by_loops(value, dtype))).max() <= 1e-12
    share = 1 / 254 if dtype == "int8" else 1 / 16
    logit = np.abs(query).sum(-1).max() * scale * np.abs(key).max() * share
    bound = np.abs(value).max() * (np.exp(2 * logit) - 1 + share)
    assert np.abs(found - oracle(key, value)).max() <= bound


def test_an_indexer_reads_rounded_keys():
    """Its scores are those of the widened keys; prompts and steps of a layer choose alike."""
    rng = np.random.default_rng(2)
    config = cache_layer.SMALL
    query, key, weights = (
        np.float32(rng.standard_normal(shape)) for shape in ((1, 9, 2, 3, 8), (1, 60, 1, 8), (1, 9, 2, 3))
    )
    kept = jax.jit(quantised, static_argnums=1)(key, "int8")
    scale = np.array(kept.scale)
    scale[0, 5] = np.nan
    choose = cache_layer.jit(functools.partial(attention.select_by_index, weights=weights, config=config))
    of_pair, of_floats = choose(query, kept._replace(scale=scale)), kept.numbers * scale[..., None]
    assert np.array_equal(of_pair, choose(query, of_floats))

    with jax.enable_x64(True):
        options = dict(num_kv_heads=2, config=config, dtype="float64", param_dtype="float64")
        options["selector"] = IndexerConfig(dim=8)
        of_all = abstract(NSAAttention, 4, 16, **options)
        of_all = nnx.eval_shape(lambda layer: layer.init_cache(1, 46, dtype="int8"), of_all)
        assert of_all.key_raw_ring.dtype == np.float64
        layer = randomised(abstract(NSAAttention, 4, 16, branches=("slc",), **options), seed=0)
        x = rng.standard_normal((1, 46, 16))
        empty = layer.init_cache(1, 46, dtype="int8")
        assert isinstance(empty.kept, Quantised)
        prefill, step = (cache_layer.jit(method) for method in (layer.prefill, layer.decode_step))
        whole, written = jax.tree.map(np.asarray, prefill(x, empty))
        held = cache.rewind(written, np.array([6]))
        for first in range(40, 46, 2):
            out, held = step(x[:, first : first + 2], held)
            np.testing.assert_allclose(out, whole[:, first : first + 2], rtol=0, atol=1e-12)
    assert np.array_equal(held.kept.numbers, written.kept.numbers)


def test_a_user_s_selector_sees_floats():
    seen = []

    class Latest:
        def __init__(self, in_features, num_kv_heads, config, *, rngs):
            self.config = config

        def project(self, x, query, key_slc, positions):
            return (), (x[:, :, None, :4], x[:, :, 0])

        def choose(self, queries, keys, at, **_):
            seen.append(jax.tree.map(lambda x: x.dtype.name, keys))
            block = at // self.config.selection_block_size
            return jnp.broadcast_to(block[:, :, None, None], (*at.shape, 2, 1))

    options = dict(num_kv_heads=2, config=cache_layer.SMALL, branches=("slc", "win"))
    layer = randomised(abstract(NSAAttention, 4, 16, selector=Latest, **options))
    empty = jax.eval_shape(lambda: layer.init_cache(1, 16, dtype="int8"))

    assert [x.dtype.name for x in jax.tree.leaves(empty.kept)] == ["int8", "float32", "float32"]
    seen.clear()
    jax.eval_shape(layer.prefill, jax.ShapeDtypeStruct((1, 9, 16), jnp.float32), empty)
    assert seen == [("float32", "float32")]


def test_a_checkpoint_leaves_the_scales_of_lasting_arrays():
    held = Layer.make(length=9).empty(9, dtype="int8", raw_dtype="float32")
    rings = {name for name in held._fields if "ring" in name}

    kept = rewinding.forgetful(held, 9)._asdict()
    past = rewinding.recalled(held, rewinding.forgetful(held, 9))

    assert {name for name, x in kept.items() if x is not None} == rings | {"lengths", "overflowed"}
    assert jax.tree.structure(past) == jax.tree.structure(held)
    dense = cache.init_dense_cache(1, 9, num_kv_heads=1, key_dim=4, value_dim=4, dtype="int8")
    assert rewinding.forgetful(dense, 9)[:2] == rewinding.forgetful(dense, 9)[4:] == (None, None)


def test_half_the_bytes():
    """At dim 128 the scales add 1 / 32."""
    sizes = dict(num_kv_heads=1, key_dim=128, value_dim=128)
    held = [
        jax.eval_shape(lambda dtype=dtype: cache.init_dense_cache(1, 64, **sizes, dtype=dtype))
        for dtype in ("bfloat16", "int8", "float8_e4m3fn")
    ]
    moved = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(each)) - 5 for each in held]

    assert moved[1] == moved[2] == moved[0] // 2 + 64 * 2 * 4


def test_what_does_not_fit_is_refused():
    made = Layer.make(length=9)
    held = made.empty(9, dtype="int8", raw_dtype="float32")
    arrays = made.slice(0, 4)

    def step(held):
        jax.eval_shape(functools.partial(cache_layer.decode_step, config=made.config), held, *arrays)

    with refused(ValueError, "raw_dtype must be given for a quantised cache, got None and dtype int8"):
        made.empty(9, dtype="int8")
    with refused(ValueError, "raw_dtype must be dtype in a cache that is not quantised, got float32 and bfl"):
        made.empty(9, dtype="bfloat16", raw_dtype="float32")
    with refused(ValueError, "dtype must be floating or quantised, got 'int4'"):
        made.empty(9, dtype="int4")
    with refused(TypeError, "cache.key_slc must be floating point, got int8"):
        step(held._replace(**{name: None for name in held._fields if name.endswith("_scale")}))
    for name in ("key_slc_scale", "value_win_ring_scale"):
        with refused(ValueError, f"a scale of each, got .*{name.removesuffix('_scale')}"):
            step(held._replace(**{name: None}))
    with refused(ValueError, r"got \['float8_e4m3fn', 'int8'\]"):
        step(held._replace(value_cmp=held.value_cmp.astype("float8_e4m3fn")))
    with refused(TypeError, "cache.key_cmp_scale must be float32, got bfloat16"):
        step(held._replace(key_cmp_scale=held.key_cmp_scale.astype(jnp.bfloat16)))
    with refused(ValueError, "axis K of cache.key_slc_scale must be 2"):
        step(held._replace(key_slc_scale=held.key_slc_scale[..., :1]))
    with refused(ValueError, "must have one dtype, got cache.key_raw_ring bfloat16, tokens.key_cmp float32"):
        step(made.empty(9, dtype="int8", raw_dtype="bfloat16"))
    with refused(NotImplementedError, "gradients need keys and values of a floating dtype, got int8"):
        query, *rest = arrays
        settings = dict(config=made.config, compress=Compression(), implementation="xla")
        loss = jax.grad(lambda query: cache.decode_step(held, query, *rest, **settings).out.sum())
        jax.eval_shape(loss, query)


def test_rounding_has_no_gradient_and_says_so():
    """Keys of a prompt; its queries have one. In dense layers, too."""
    made = Layer.make(length=9)
    query, tokens, gates = made.slice(0, 9)[:3]
    held, settings = made.empty(9, dtype="int8", raw_dtype="float32"), dict(config=made.config)

    def attend(query, key):
        given = tokens._replace(key_slc=key)
        return cache.prefill(held, query, given, gates, compress=Compression(), **settings).out.sum()

    def dense(value):
        empty = cache.init_dense_cache(2, 9, num_kv_heads=2, key_dim=8, value_dim=8, dtype="int8")
        return cache.dense_prefill(empty, value, value, value).out.sum()

    assert jax.eval_shape(jax.grad(attend), query, tokens.key_slc).shape == query.shape
    for gradient, arrays in (
        (jax.grad(attend, 1), (query, tokens.key_slc)),
        (jax.grad(dense), (jnp.ones((2, 9, 2, 8)),)),
    ):
        with refused(NotImplementedError, "gradients need keys and values of a floating dtype, got int8"):
            jax.eval_shape(gradient, *arrays)


def test_index_keys_that_are_no_pair_are_refused():
    """Where they are chosen by, in a layer, and where they are written."""
    query, key = (
        np.ones((1, 9, 2, 3, 8), np.float32),
        Quantised(np.ones((1, 60, 1, 8), np.int8), np.ones((1, 60, 1), np.float32)),
    )
    choose = functools.partial(attention.select_by_index, query, config=cache_layer.SMALL)
    options = dict(num_kv_heads=2, config=cache_layer.SMALL, selector=IndexerConfig(dim=8))
    layer = randomised(abstract(NSAAttention, 4, 16, **options))
    held = jax.eval_shape(lambda: layer.init_cache(1, 60, dtype="int8"))
    wrong = {
        r"a scale float32\[1, 60, 1\], got int8\[1, 60, 1, 8\] and float32\[1, 30, 1\]": key.scale[:, :30],
        r"got int8\[1, 60, 1, 8\] and bfloat16\[1, 60, 1\]": key.scale.astype(jnp.bfloat16),
        r"got int8\[1, 60, 1, 8\]\. Pass": None,
    }
    for message, scale in wrong.items():
        with refused(ValueError, f"key_index must have numbers in one of .* {message}"):
            choose(key._replace(scale=scale))
        with refused(ValueError, f"cache.kept must have numbers in one of .* {message}"):
            layer.check_cache(held._replace(kept=key._replace(scale=scale)), 1)
    with refused(ValueError, r"got int32\[1, 60, 1, 8\] and float32"):
        choose(key._replace(numbers=key.numbers.astype(jnp.int32)))
    with refused(ValueError, r"new must have numbers in .* a scale float32\[1, 2, 1\], got"):
        cache.keep(held, Quantised(key.numbers[:, :2], key.scale[:, :1]))


def test_widening_leaves_what_is_not_quantised():
    pair = jax.jit(quantised, static_argnums=1)(np.ones((2, 4), np.float32), "int8")
    tree = {"a": jnp.ones(2), "b": pair, "c": None}

    found = widened(tree, jnp.bfloat16)

    assert found["a"] is tree["a"]
    assert found["b"].dtype == jnp.bfloat16
    assert found["b"].tolist() == [[1.0] * 4] * 2


def test_sessions_go_back_and_copy_rows():
    """Numbers, scales and what an indexer keeps: a checkpoint, a few tokens back, rows in other places."""
    options = dict(nsa=cache_layer.SMALL, selector=IndexerConfig(dim=8), branches=("slc", "win"))
    config = TransformerConfig(
        **options, vocab_size=17, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=16
    )
    model = randomised(abstract(Transformer, config), 0.5, seed=4)
    prompts = np.random.default_rng(0).integers(0, 17, (2, 40))

    state = generate.start(model, prompts, max_length=64, cache_dtype="int8")
    assert {x.dtype.name for x in jax.tree.leaves(state.rows.cache[0].kept)} == {"int8", "float32"}
    past = generate.checkpoint(state)
    swapped = generate.gather(state, np.array([1, 0]))
    state, new = generate.advance(state, 12)
    tokens = np.asarray(new.tokens)

    _, found = generate.advance(swapped, 12)
    assert np.array_equal(found.tokens, tokens[::-1])
    state, found = generate.advance(generate.rewind(state, 5), 5)
    assert np.array_equal(found.tokens, tokens[:, 7:])
    _, found = generate.advance(generate.rewind_to(state, past), 12)
    assert np.array_equal(found.tokens, tokens)


def test_models_are_asked_for_the_dtype():
    asked = []

    class Asked(TokenTable):
        def init_cache(self, batch, max_length, *, dtype=None):
            asked.append(dtype)
            return super().init_cache(batch, max_length)

    prompts, options = np.zeros((1, 3), int), dict(max_new_tokens=2)
    for dtype in ("int8", jnp.float8_e4m3fn, None):
        jax.eval_shape(lambda to=dtype: generate.generate(Asked(5), prompts, cache_dtype=to, **options))
    generate.Batcher(Asked(5), 1, max_length=8, cache_dtype="int8").read_prefix([1, 2])

    # The batcher asks for its slots, and for the empty row behind which it reads prompts.
    assert asked == ["int8", "float8_e4m3fn", None, "int8", "int8"]
    with refused(TypeError, r"must have init_cache\(.*\) for a cache_dtype, got TokenTable"):
        generate.generate(TokenTable(5), prompts, cache_dtype="int8", **options)
