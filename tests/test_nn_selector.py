"""Selectors and branches by name: one choice in training, prompts and steps; what is absent costs nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from messages import refused
from modules import abstract, randomised
from selector_examples import BlockMeans, Loudest, Random, Recent
from small_layer import (
    CONFIG,
    LENGTH,
    ROUNDING,
    ROWS,
    WIDTH,
    assert_chunks_give,
    assert_close,
    decode_step,
    make_layer,
    random,
)

import nsa_jax
from nsa_jax import nn
from nsa_jax.cache import TokenKeysValues, init_cache, prefill
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.model.checkpoint import restore, save
from nsa_jax.nn import IndexerConfig

LAYERS = {
    "random, slc": dict(selector=Random, branches=("slc",)),
    "block means, shared": dict(selector=BlockMeans, share_keys_values=True, branches=("slc", "win")),
    "loudest, slc and win": dict(selector=Loudest, branches=("slc", "win")),
    # Importance without a window is among the layers of test_nn_options.
    "indexer, slc": dict(selector=IndexerConfig(dim=5), branches=("slc",)),
    "weighted indexer, keys of each head": dict(
        selector=IndexerConfig(num_heads=2, dim=4, weighted=True, slow_pairs=True, shared_key=False),
        branches=("slc",),
    ),
}

# Outputs and selections by one program, which all tests of a layer share.
evaluate = nnx.jit(lambda layer, x, **more: (layer(x, **more), layer.inspect(x, **more).block_indices))
PACKED = ("random, slc", "block means, shared", "indexer, slc")


@functools.cache
def layer_of(name):
    with jax.enable_x64(True):
        return make_layer(jnp.float64, **LAYERS[name])


def of_rows(name, x):
    """Output and selection; of a layer whose rows are packed below, as rows of one sequence each."""
    more = dict(segment_ids=np.ones((ROWS, LENGTH), int)) if name in PACKED else {}
    return jax.tree.map(np.asarray, evaluate(layer_of(name), x, **more))


# "random", which has no keys, steps in test_nn_shared as Recent; "indexer" in test_generate_session. Prompts
# choose by the same code; layers of test_nn_options and of test_nn_shared read them.
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("random, slc", "indexer, slc")])
def test_steps_choose_as_a_whole_row_does(name):
    with jax.enable_x64(True):
        x = random(ROWS, LENGTH, WIDTH)
        assert_chunks_give(of_rows(name, x)[0], layer_of(name), x)


def test_layer_attends_the_blocks_that_inspect_shows():
    """And by no others: with another selection the output differs."""
    layer = layer_of("loudest, slc and win")

    @nnx.jit
    def run(layer, x):
        chosen = layer.inspect(x)
        other = jnp.zeros_like(chosen.block_indices).at[..., 1:].set(-1)
        given = [layer(x, block_indices=blocks) for blocks in (chosen.block_indices, other)]
        return layer(x), *given, chosen

    with jax.enable_x64(True):
        out, same, different, chosen = run(layer, random(2, LENGTH, WIDTH))
    assert chosen.gates is not None
    assert_close(same, out, ROUNDING)
    assert np.abs(different - out).max() > 1e-3


class Numbers(nnx.Module):
    """The blocks that a variable names, from the second block on."""

    def __init__(self, in_features, num_kv_heads, config, *, rngs):
        self.blocks = nnx.Variable(jnp.zeros(3, jnp.int32))

    def project(self, x, query, key_slc, positions):
        return (), ()

    def choose(self, queries, keys, at, **where):
        blocks = jnp.where(at[..., None] < 4, jnp.array([0, -1, -1]), self.blocks[...].astype(jnp.int32))
        return jnp.repeat(blocks[:, :, None], 2, axis=2)


def test_blocks_that_cannot_be_chosen_are_named_and_not_attended():
    @nnx.jit
    def run(layer, x):
        prompt, cache = layer.prefill(x[:, :11], layer.init_cache(2, 12))
        step, _ = layer.decode_step(x[:, 11:], cache)
        assert layer.inspect(x).gates is None
        return layer.inspect(x).block_indices, (layer(x), jnp.concatenate([prompt, step], axis=1))

    @jax.jit
    @checkify.checkify
    def checked(block_indices):
        at = np.broadcast_to(np.arange(12), (2, 12))
        nsa_jax.debug.check_block_indices(block_indices, config=CONFIG, query_positions=at)

    with jax.enable_x64(True):
        layer, x = make_layer(jnp.float64, selector=Numbers, branches=("slc",)), random(2, 12, WIDTH)

        def of(blocks):
            layer.selector.blocks.set_value(jnp.array(blocks, jnp.int32))
            return run(layer, x)

        chosen, (expected, steps) = of([0, 1, -1])
        checked(chosen)[0].throw()
        assert_close(steps, expected, ROUNDING)
        for wrong, message in {
            (0, 0, 1): "ascending without repetition",
            (-5, 0, 1): "must be at least -1, got -5",
            (0, 1, 2**31 - 1): "start at or before their query",
            (0, 1, 3): "start at or before their query",
        }.items():
            chosen, found = of(wrong)
            with pytest.raises(checkify.JaxRuntimeError, match=message):
                checked(chosen)[0].throw()
            for out in found:
                assert_close(out, expected, ROUNDING, str(wrong))


@pytest.mark.parametrize("name", LAYERS)
def test_a_changed_future_leaves_what_was_chosen(name):
    with jax.enable_x64(True):
        x, other = random(ROWS, LENGTH, WIDTH), 9 * random(ROWS, LENGTH, WIDTH, seed=1)
        _, chosen = of_rows(name, x)
        for t in (1, 6, 13, 20):
            changed = np.concatenate([x[:, :t], other[:, t:]], axis=1)
            assert (of_rows(name, changed)[1][:, :t] == chosen[:, :t]).all(), t


class Given:
    """A layer without a selector as one that knows which blocks each token of its rows is given."""

    def __init__(self, layer, block_indices):
        self.layer, self.block_indices, self.init_cache = layer, block_indices, layer.init_cache

    def _given(self, x, cache):
        at = jnp.minimum(cache.lengths[:, None] + jnp.arange(x.shape[1]), LENGTH - 1)
        return dict(block_indices=jax.vmap(lambda row, index: row[index])(self.block_indices, at))

    def decode_step(self, x, cache, num_tokens):
        return self.layer.decode_step(x, cache, num_tokens=num_tokens, **self._given(x, cache))


def test_given_steps_are_those_of_a_whole_row():
    with jax.enable_x64(True):
        layer, x = make_layer(jnp.float64, selector="given", branches=("slc",)), random(ROWS, LENGTH, WIDTH)
        at = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
        choose = functools.partial(Random(WIDTH, 2, CONFIG, rngs=None).choose, (), (), config=CONFIG)
        blocks = jax.jit(choose)(at)
        given, full = Given(layer, blocks), jax.jit(layer)(x, block_indices=blocks)
        step = jax.jit(given.decode_step)
        assert_chunks_give(full, given, x, lambda _, *new: step(*new))


def test_a_step_of_an_indexer_is_exported():
    layer, x = layer_of("indexer, slc"), random(ROWS, LENGTH, WIDTH)
    with jax.enable_x64(True):
        full, _ = of_rows("indexer, slc", x)
        cache = jax.jit(lambda: layer.init_cache(ROWS, 12))()
        exported = jax.export.export(jax.jit(layer.decode_step))(x[:, :8], cache)
        out, cache = exported.call(x[:, :8], cache)
        assert_close(np.asarray(out), full[:, :8], ROUNDING)
    assert cache.lengths.tolist() == [8] * ROWS


def test_some_branches_are_the_sum_of_their_operations():
    @nnx.jit
    def run(layer, x):
        operands, blocks = layer.operands(x), layer.inspect(x).block_indices
        assert operands.key_cmp is operands.value_cmp is None
        slc = nsa_jax.selected_attention(
            operands.query, operands.key_slc, operands.value_slc, blocks, config=CONFIG, scale=layer.scale
        )
        win = nsa_jax.window_attention(
            operands.query, operands.key_win, operands.value_win, config=CONFIG, scale=layer.scale
        )
        out = operands.gates[..., :1] * slc.out + operands.gates[..., 1:] * win.out
        return layer(x), layer.out_proj(out)

    with jax.enable_x64(True):
        found, expected = run(layer_of("loudest, slc and win"), random(2, LENGTH, WIDTH))
        assert_close(found, expected, ROUNDING)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_chosen_as_alone(name):
    """Alone in a packed row; one that is random, which steps do not check, in a plain row."""
    with jax.enable_x64(True):
        x, segment_ids = random(ROWS, LENGTH, WIDTH), np.zeros((ROWS, LENGTH), int)
        segment_ids[:2] = [0, 0] + [3] * 9 + [1] * 12, [4] * 5 + [2] * 18  # 18: five blocks for three
        sequences = [(0, 2, 11), (0, 11, 23), (1, 0, 5), (1, 5, 23)]
        alone = np.zeros((ROWS, LENGTH, WIDTH))
        for each, (row, first, end) in zip(alone, sequences, strict=True):
            each[: end - first] = x[row, first:end]
        out = np.asarray(evaluate(layer_of(name), x, segment_ids=segment_ids)[0])
        expected, _ = evaluate(layer_of(name), alone) if name == "random, slc" else of_rows(name, alone)
        for each, (row, first, end) in zip(np.asarray(expected), sequences, strict=True):
            assert_close(out[row, first:end], each[: end - first], ROUNDING)


def test_means_of_the_layer_s_keys_choose():
    """MoBA by loops: a query has one free block beside the first and its own."""
    with jax.enable_x64(True):
        layer = make_layer(jnp.float64, selector=BlockMeans, branches=("slc",))
        operands, found = nnx.jit(lambda layer, x: (layer.operands(x), layer.inspect(x).block_indices))(
            layer, random(1, LENGTH, WIDTH)
        )
    query, key, free = np.asarray(operands.query[0]), np.asarray(operands.key_slc[0]), set()
    for t, head in np.ndindex(LENGTH, 2):
        own = t // 4
        pair = query[t, 2 * head : 2 * head + 2]
        means = [key[4 * block : 4 * block + 4, head].mean(0) for block in range(own)]
        scores = {block: (pair @ means[block]).sum() for block in range(1, own)}
        best = [max(scores, key=scores.get)] if scores else []
        free |= {(own, *best)}
        chosen = sorted({0, own, *best})
        assert found[0, t, head].tolist() == chosen + [-1] * (3 - len(chosen)), t
    assert len(free) > 10  # it is not always the same


@pytest.mark.parametrize(
    ("branches", "parameters", "fields"),
    [
        (("slc",), {"query", "key_slc", "value_slc", "out"}, {"key_slc", "value_slc"}),
        (
            ("slc", "win"),
            {"query", "key_slc", "value_slc", "key_win", "value_win", "gate", "out"},
            {"key_slc", "value_slc", "key_win_ring", "value_win_ring"},
        ),
        (
            ("cmp", "slc"),
            {"query", "key_cmp", "value_cmp", "key_slc", "value_slc", "compressor_key", "compressor_value"}
            | {"gate", "out"},
            {"key_cmp", "value_cmp", "key_slc", "value_slc", "key_raw_ring", "value_raw_ring"},
        ),
    ],
)
def test_absent_branches_have_no_parameters_and_no_cache(branches, parameters, fields):
    layer = make_layer(branches=branches, selector=Recent)
    assert {name.partition(".")[0].removesuffix("_proj") for name in nn.weights(layer)} == parameters
    cache = layer.init_cache(2, 16)
    assert {name for name, x in cache._asdict().items() if jax.tree.leaves(x)} == (
        fields | {"lengths", "overflowed"}
    )


def test_what_a_selector_keeps_is_written_like_keys():
    layer = layer_of("loudest, slc and win")
    with jax.enable_x64(True):
        x = random(ROWS, 5, WIDTH)
        cache = jax.jit(lambda: layer.init_cache(ROWS, LENGTH))()
        for first in (5, 2), (5, 5), (5, 5), (5, 5), (5, 5):  # no room for 5 more after 20
            _, cache = decode_step(layer, x, cache, np.array([*first, 0, 0]))
    cache = jax.tree.map(np.asarray, cache)
    assert cache.lengths.tolist() == [20, 22, 0, 0]
    assert cache.overflowed.tolist() == [True, False, False, False]
    for row, length in enumerate(cache.lengths):
        assert cache.kept["position"][row, :length].tolist() == list(range(length))
        assert not cache.kept["loud"][row, length:].any()


# What such models write: test_generate_model, of a user's selector, and test_generate_session, of kept keys.
def model_of(**options):
    sizes = dict(vocab_size=17, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2)
    return randomised(abstract(Transformer, TransformerConfig(nsa=CONFIG, **sizes | options)), 0.3)


def test_selector_runs_under_remat():
    """It traces; test_nn_distillation has the gradients of an indexer."""
    model = model_of(selector=Loudest, branches=("slc",), remat=True)
    tokens = jnp.zeros((2, 13), jnp.int32)

    gradient = nnx.eval_shape(nnx.grad(lambda model: jax.nn.logsumexp(model(tokens)).sum()), model)

    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, nnx.state(model))


def test_a_checkpoint_holds_branches_and_indexer(tmp_path):
    model = model_of(selector=IndexerConfig(dim=4, weighted=True), branches=("slc", "win"))
    save(tmp_path, model)
    again = restore(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    with refused(TypeError, "must hold no functions to be saved, got selector"):
        save(tmp_path, model_of(selector=Loudest))


@pytest.mark.parametrize("name", ["loudest, slc and win", "indexer, slc"])
def test_numbers_that_are_not_finite_stay_in_their_row(name):
    with jax.enable_x64(True):
        x = random(ROWS, LENGTH, WIDTH)
        spoilt = x.copy()
        spoilt[0, 4] = np.nan
        spoilt[1, 20] = np.inf
        (out, _), (expected, _) = of_rows(name, spoilt), of_rows(name, x)
        assert (out[1, :20] == expected[1, :20]).all()
        assert (out[0, :4] == expected[0, :4]).all()


def test_op_without_some_branches_is_refused_where_it_does_not_fit():
    shape = dict(q=(1, 9, 4, 5), k=(1, 9, 2, 5), v=(1, 9, 2, 3))
    q, k, v = (jnp.zeros(size) for size in shape.values())
    blocks = jnp.zeros((1, 9, 2, 3), jnp.int32)
    call = functools.partial(nsa_jax.native_sparse_attention, config=CONFIG)
    with refused(ValueError, "gates must be .* and None for one alone, got shape"):
        call(q, None, None, k, v, None, None, jnp.ones((1, 9, 4, 3)), block_indices=blocks)
    with refused(ValueError, "gates must be .* got None"):
        call(q, None, None, k, v, k, v, None, block_indices=blocks)
    with refused(ValueError, "block_indices must be given without a compressed branch"):
        call(q, None, None, k, v, None, None, None)
    with refused(ValueError, "keys and values, or neither"):
        call(q, None, None, k, v, k, None, None, block_indices=blocks)


def test_step_of_other_branches_than_the_cache_is_refused():
    cache = init_cache(1, 16, num_kv_heads=2, key_dim=5, value_dim=3, config=CONFIG, dtype="float32",
                       branches=("slc",))  # fmt: skip
    q, k, v = (np.zeros((1, 4, *size), np.float32) for size in ((4, 5), (2, 5), (2, 3)))
    blocks = np.zeros((1, 4, 2, 3), np.int32)
    step = functools.partial(prefill, cache, q, config=CONFIG, compress=None)
    slc = TokenKeysValues(None, None, k, v)
    with refused(ValueError, "tokens must have key_cmp and value_cmp if and only if"):
        step(TokenKeysValues(k, v, k, v), None, block_indices=blocks)
    with refused(ValueError, "gates must be"):
        step(slc, np.ones((1, 4, 4, 3), np.float32), block_indices=blocks)
    with refused(ValueError, "block_indices must be given"):
        step(slc, None)
    with refused(ValueError, "compress must be None"):
        prefill(cache, q, slc, None, config=CONFIG, compress=lambda *x: x, block_indices=blocks)
    whole = make_layer(selector=Recent)
    with refused(ValueError, "a cache must have the branches of its layer"):
        make_layer(branches=("slc",), selector=Recent).check_cache(whole.init_cache(1, 16), 1)
    with refused(ValueError, "a cache must have the branches of its layer"):
        whole.check_cache(cache, 1)
    with refused(ValueError, "what its layer's selector keeps"):
        make_layer(selector=Loudest).check_cache(whole.init_cache(1, 16), 1)


class Half:
    def __init__(self, in_features, num_kv_heads, config, *, rngs):
        pass

    def choose(self, queries, keys, at, **where):
        return at


class OneHead(Recent):
    def choose(self, *arguments, **where):
        return super().choose(*arguments, **where)[:, :, :1]


class Floats(Recent):
    def choose(self, *arguments, **where):
        return super().choose(*arguments, **where).astype(jnp.float32)


class TooMany(Recent):
    def choose(self, *arguments, **where):
        return jnp.repeat(super().choose(*arguments, **where), 2, axis=-1)


class Bools(Recent):
    def choose(self, *arguments, **where):
        return super().choose(*arguments, **where) > 0


class Whole(Recent):
    def project(self, x, query, key_slc, positions):
        return (), x.sum(1)


class WithoutKeys(Recent):
    def project(self, x, query, positions):
        return (), ()


WRONG = {
    "a name": (dict(selector="best"), ValueError, "selector must be one of"),
    "no function": (dict(selector=3), TypeError, "selector must be a name"),
    "no methods": (dict(selector=Half), TypeError, "with the methods project and choose, got Half"),
    "another number of heads": (dict(selector=OneHead), ValueError, "must choose at most .* got shape"),
    "too many blocks": (dict(selector=TooMany), ValueError, r"at most 3 blocks .* got shape \(1, 8, 2, 6\)"),
    "another dtype": (dict(selector=Floats), TypeError, "must choose block numbers, got float32"),
    "bools": (dict(selector=Bools), TypeError, "must choose block numbers, got bool"),
    "project of other arguments": (
        dict(selector=WithoutKeys), TypeError,
        r"must take \(x, query, key_slc, positions\), got \(x, query, positions\) of WithoutKeys",
    ),
    "without tokens": (dict(selector=Whole), ValueError, "must return arrays .B, T"),
    "importance of nothing": (dict(branches=("slc",)), ValueError, "importance needs the compressed branch"),
    "no branch": (dict(branches=()), ValueError, "branches must be some of"),
    "unknown branch": (dict(branches=("slc", "mid")), ValueError, "branches must be some of"),
    "a string": (dict(branches="slc"), TypeError, "branches must be a sequence"),
    "without selection": (dict(branches=("cmp", "win")), ValueError, "branches must be some of"),
    "compression of nothing": (
        dict(branches=("slc",), selector=Recent, compression="mean"), ValueError, "got compression",
    ),
    "gate of one": (dict(branches=("slc",), selector=Recent, gate=nn.Gate), ValueError, "got gate"),
    "context": (dict(selector=Recent, context_axis="x"), NotImplementedError, "needs all branches and"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_selectors_and_branches(options, error, message):
    with refused(error, message) as raised:
        make_layer(**options)
    assert "\n" not in str(raised.value)


def test_given_selection_must_be_given():
    layer = make_layer(branches=("slc",), selector="given")
    x = jnp.zeros((1, 9, WIDTH))
    blocks = jnp.zeros((1, 9, 2, 3), jnp.int32)
    assert jax.eval_shape(layer, x, block_indices=blocks).shape == x.shape
    out, cache = jax.eval_shape(layer.prefill, x, layer.init_cache(1, 16), block_indices=blocks)
    assert (out.shape, cache.kept) == (x.shape, None)
    for call in (layer, lambda x: layer.prefill(x, layer.init_cache(1, 16)), layer.inspect):
        with refused(ValueError, "must be given block_indices"):
            jax.eval_shape(call, x)
