"""The selection loss of a layer: its value from the public operations, and who learns by it."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from flax import nnx
from messages import refused
from modules import abstract, randomised
from selector_examples import Recent
from small_layer import CONFIG as ONE_FREE
from small_layer import LENGTH, ROUNDING, WIDTH, assert_close, random
from small_layer import make_layer as make

import nsa_jax
from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import IndexerConfig, distillation

CONFIG = dataclasses.replace(ONE_FREE, num_selected_blocks=4)  # one selected block of choice has no loss
make_layer = functools.partial(make, config=CONFIG)
PACKED = np.array([[0, 0] + [3] * 9 + [1] * 12, [5] * 3 + [0] + [2] * 19])
LAYERS = {
    "importance": dict(branches=("cmp", "slc")),
    "indexer": dict(selector=IndexerConfig(dim=4), branches=("slc",)),
    "weighted indexer": dict(selector=IndexerConfig(num_heads=2, dim=4, weighted=True), branches=("slc",)),
}


@functools.cache
def layer_of(name):
    with jax.enable_x64(True):
        return make_layer(jnp.float64, **LAYERS[name])


def without_fixed(scores, segment_ids=None):
    """Scores, with -inf for the first block of a sequence and for that of the query."""
    index = np.broadcast_to(np.arange(scores.shape[1]), scores.shape[:2])
    if segment_ids is not None:
        begins = np.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        index = index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    fixed = (index // 4)[:, :, None, None] == np.arange(scores.shape[3])
    return jnp.where(fixed | (np.arange(scores.shape[3]) == 0), -jnp.inf, scores)


def at_slots(scores, blocks):
    """Scores of the selected blocks."""
    return jnp.where(blocks < 0, -jnp.inf, jnp.take_along_axis(scores, jnp.maximum(blocks, 0), axis=3))


def expected_losses(layer, x, targets, segment_ids):
    """For each target the mean over all queries at once, by the operations on whole rows."""
    operands, blocks = (
        layer.operands(x, segment_ids=segment_ids),
        layer.inspect(x, segment_ids=segment_ids)[0],
    )
    where = dict(config=CONFIG, segment_ids=segment_ids)
    if layer.selects == "importance":
        scores = nsa_jax.importance_scores(operands.query, operands.key_cmp, scale=layer.scale, **where)
        scores = scores[..., : -(-x.shape[1] // CONFIG.selection_block_size)]
    else:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        if segment_ids is not None:
            positions = nsa_jax.layout.sequence_positions(segment_ids)
        (query, weights), key = layer.selector.project(x, operands.query, operands.key_slc, positions)
        scores = nsa_jax.block_scores(query, key, weights=weights, **where)
    scores = without_fixed(scores, segment_ids)
    real = np.ones(x.shape[:2], bool) if segment_ids is None else np.asarray(segment_ids) != 0

    def mean(target):
        to = operands.query, operands.key_slc
        if target == "dense":
            pair = scores, nsa_jax.block_probabilities(*to, scale=layer.scale, **where)
        else:
            share = nsa_jax.selected_probabilities(*to, blocks, scale=layer.scale, **where)
            pair = at_slots(scores, blocks), share
        return nsa_jax.selection_loss(*pair)[real].mean()

    return [mean(target) for target in targets]


def small_chunks():
    """Context in which chunks have 5 queries."""
    return mock.patch.object(distillation, "SCORES_AT_ONCE", 2 * 2 * 6 * 5)


@pytest.mark.parametrize("name", ["importance", "indexer"])
def test_loss_is_the_mean_of_all_queries(name):
    """In chunks, without gradients; for every target in one program, as the layer's forward is the same.

    24 tokens have as many compressed keys as 25, and these one block more: importance must not count it.
    """

    @nnx.jit
    def run(layer, x):
        expected = expected_losses(layer, x, distillation.TARGETS, None)
        return layer(x), expected, [layer(x, distil=target) for target in distillation.TARGETS]

    with jax.enable_x64(True), small_chunks():
        alone, each, found = run(layer_of(name), random(2, 24, WIDTH))
        for expected, (out, loss) in zip(each, found, strict=True):
            assert_close(out, alone, ROUNDING)
            assert_close(loss, expected, ROUNDING)
            assert expected > 1e-3


@pytest.mark.parametrize(
    ("remat", "scan", "times"), [("attention", True, 1), (True, True, 2), (True, False, 4)]
)
def test_a_remat_policy_keeps_the_gradients_of_the_loss(remat, scan, times, monkeypatch):
    """So that the backward pass of a layer does not ask for probabilities again. A scan has one program."""

    def probabilities(*arrays, **options):
        x = block_probabilities(*arrays, **options)
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    block_probabilities = nsa_jax.block_probabilities
    monkeypatch.setattr(distillation.attention, "block_probabilities", probabilities)
    config = TransformerConfig(
        vocab_size=11, num_layers=2, model_dim=8, num_heads=2, num_kv_heads=1, nsa=CONFIG, branches=("slc",),
        selector=IndexerConfig(dim=4), remat=remat, scan_layers=scan,
    )  # fmt: skip
    graph, state = nnx.split(abstract(Transformer, config))

    def loss(state):
        return sum(nnx.merge(graph, state).loss(np.ones((1, 40), np.int32), distil="dense"))

    program = jax.make_jaxpr(jax.value_and_grad(loss))(state).jaxpr

    assert [each.primitive.name for each in equations(program)].count("pure_callback") == times


@pytest.mark.parametrize(
    ("name", "target", "learns", "segment_ids"),
    [
        ("importance", "selected", "compressor_key", None),  # packed rows are quicker with an indexer
        ("weighted indexer", "dense", "selector", PACKED),
    ],
    ids=["importance", "weighted indexer"],
)
def test_chunks_add_up_and_teach_the_selector_alone(name, target, learns, segment_ids):
    """Losses with gradients, a dense one under remat, against those of all queries at once."""

    def expected_of(layer, x):
        (expected,) = expected_losses(layer, x, [target], segment_ids)
        return expected

    def loss_of(layer, x):
        return layer(x, distil=target, segment_ids=segment_ids)[1]

    @nnx.jit
    def run(layer, x):
        again = nnx.remat(loss_of) if target == "dense" else loss_of
        of_loss = nnx.value_and_grad(again, argnums=(0, 1))(layer, x)
        return nnx.value_and_grad(expected_of)(layer, x), of_loss

    with jax.enable_x64(True), small_chunks():
        (expected, right), (loss, (gradient, of_input)) = run(layer_of(name), random(2, LENGTH, WIDTH))
    assert_close(loss, expected, ROUNDING)
    assert expected > 1e-3
    for wanted, got in zip(*map(jax.tree.leaves, (right[learns], gradient[learns])), strict=True):
        assert_close(got, wanted, ROUNDING)
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(right[learns])) > 1e-3
    flat = nnx.to_flat_state(gradient)
    assert {path[0] for path, leaf in flat if np.asarray(leaf.get_value()).any()} == {learns}
    assert not np.asarray(of_input).any()


def test_gradients_of_many_queries_stay_in_the_range_of_float16():
    """Each is 1e4, and their mean is, too; their sum is not."""

    def scores(queries, held, at, **where):
        return held.astype(jnp.float32) * jnp.broadcast_to(jnp.array([1e4, 0.0]), (*at.shape, 1, 2))

    def loss(held):
        query, blocks = jnp.zeros((1, 64, 1, 4), jnp.float16), jnp.zeros((1, 64, 1, 1), jnp.int32)
        at = 64 + jnp.arange(64, dtype=jnp.int32)[None]
        share = jnp.broadcast_to(jnp.array([0.0, 1.0]), (1, 64, 1, 2))
        config = NSAConfig(selection_block_size=32, num_initial_blocks=0, num_local_blocks=1)
        settings = dict(config=config, segment_ids=None, scale=1.0, scores_slots=False)
        with mock.patch.object(distillation.attention, "block_probabilities", return_value=share):
            return distillation.mean_loss(
                scores, (), held, query, query, blocks, at, None, implementation="xla", **settings
            )

    assert jax.jit(jax.grad(loss))(jnp.ones((), jnp.float16)) == 1e4


class Likes(nnx.Module):
    """A selector of a user that can be taught: a learned number for each token, summed over a block."""

    def __init__(self, in_features, num_kv_heads, config, *, rngs):
        self.kernel = nnx.Param(rngs.params.normal((in_features, num_kv_heads)))

    def project(self, x, query, key_slc, positions):
        own = jnp.zeros(x.shape[:2], jnp.int32)  # integers have no gradient
        return own, (x @ self.kernel[...], own)

    def scores(self, queries, keys, at, *, config, **where):
        size, (keys, own) = config.selection_block_size, keys
        keys = jnp.where(own[..., None] == 0, keys, 0)
        likes = jnp.pad(keys, ((0, 0), (0, -keys.shape[1] % size), (0, 0)))
        likes = likes.reshape(len(keys), -1, size, keys.shape[2]).sum(2).swapaxes(1, 2)
        likes = jnp.broadcast_to(likes[:, None], (*at.shape, *likes.shape[1:]))
        sees = jnp.arange(likes.shape[-1]) * size <= at[:, :, None, None]
        return jnp.where(sees, likes, -jnp.inf)

    def choose(self, queries, keys, at, **where):
        return nsa_jax.top_blocks(self.scores(queries, keys, at, **where), **where)


def test_a_selector_with_scores_of_its_own_is_taught():
    @nnx.jit
    def run(layer, x):
        operands, blocks = layer.operands(x), layer.inspect(x).block_indices
        at = jnp.broadcast_to(jnp.arange(LENGTH), x.shape[:2])
        scores = layer.selector.scores((), layer.selector.project(x, None, None, None)[1], at, config=CONFIG)
        scores = without_fixed(scores)
        to, settings = (operands.query, operands.key_slc), dict(config=CONFIG, scale=layer.scale)
        expected = {
            "dense": (scores, nsa_jax.block_probabilities(*to, **settings)),
            "selected": (
                at_slots(scores, blocks),
                nsa_jax.selected_probabilities(*to, blocks, **settings),
            ),
        }

        def loss_of(target):
            return nnx.remat(lambda layer: layer(x, distil=target)[1])

        assert expected.keys() == set(distillation.TARGETS)
        return [
            (
                nnx.value_and_grad(loss_of(target))(layer),
                nsa_jax.selection_loss(*pair).mean(),
            )
            for target, pair in expected.items()
        ]

    with jax.enable_x64(True), small_chunks():
        layer = make_layer(jnp.float64, selector=Likes, branches=("slc",))
        results = run(layer, random(2, LENGTH, WIDTH))
    for (loss, gradient), expected in results:
        assert_close(loss, expected, ROUNDING)
        learnt = {path[0] for path, leaf in nnx.to_flat_state(gradient) if np.any(leaf.get_value())}
        assert learnt == {"selector"}


@pytest.mark.parametrize("name", ["importance", "indexer"])
def test_a_layer_of_gpu_kernels_has_a_loss(name, monkeypatch):
    """Scores by importance with a gradient are plain JAX; all else is asked of the layer's implementation."""
    asked = []

    def run(operation, implementation, arrays, operands, **more):
        asked.append((operation, implementation))
        return right(operation, "xla", arrays, operands, **more)

    layer, right = make_layer(**LAYERS[name], implementation="triton"), nsa_jax.dispatch.run
    monkeypatch.setattr(nsa_jax.dispatch, "run", run)
    jax.eval_shape(lambda x: layer(x, distil="dense"), jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.float32))
    assert dict(asked).get("importance_scores") == ("xla" if name == "importance" else None)
    assert {by for operation, by in asked if operation != "importance_scores"} == {"triton"}


def test_steps_against_the_loss_make_it_smaller():
    """And the recall of the best block of dense attention larger."""
    layer = make_layer(selector=IndexerConfig(dim=8), branches=("slc",))
    x = random(4, 64, WIDTH).astype(np.float32)

    @nnx.jit
    def step(layer):
        loss, gradient = nnx.value_and_grad(lambda layer: layer(x, distil="dense")[1])(layer)
        state = jax.tree.map(lambda p, g: p - 3.0 * g, nnx.state(layer), gradient)
        nnx.update(layer, state)
        return loss

    @nnx.jit
    def recall(layer):
        operands = layer.operands(x)
        best = nsa_jax.block_probabilities(
            operands.query, operands.key_slc, config=CONFIG, scale=layer.scale
        ).argmax(-1)
        return (layer.inspect(x).block_indices == best[..., None]).any(-1)[:, 16:].mean()

    before = recall(layer)
    losses = [step(layer) for _ in range(100)]
    assert losses[-1] < 0.7 * losses[0]
    assert recall(layer) > before


def test_a_model_adds_the_losses_of_its_layers():
    sizes = dict(vocab_size=17, num_layers=3, model_dim=16, num_heads=4, num_kv_heads=2, nsa=CONFIG)
    options = dict(attention=("nsa", "dense", "nsa"), selector=IndexerConfig(dim=4), branches=("slc",))
    plain = randomised(abstract(Transformer, TransformerConfig(**sizes, **options)), 0.3)
    tokens = np.random.default_rng(0).integers(0, 17, (2, 13))

    @nnx.jit
    def by_layers(model):
        x, total = model.embed(tokens), 0
        for index, layer in enumerate(model.layers):
            if index != 1:
                total += layer.attention(layer.attention_norm(x), distil="dense")[1]
            x, _ = layer(x, None, None)
        return model(tokens, distil="dense"), (model(tokens), total)

    for found, expected in zip(*by_layers(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    dense = randomised(abstract(Transformer, TransformerConfig(**sizes, attention="dense")))
    with refused(NotImplementedError, "distil needs NSA layers"):
        dense(tokens, distil="dense")


def test_loss_that_cannot_be_had():
    x = jnp.zeros((1, 9, WIDTH))
    blocks = jnp.zeros((1, 9, 2, 3), jnp.int32)
    with refused(ValueError, "distil must be one of"):
        make_layer()(x, distil="sparse")
    with refused(ValueError, "needs a selector with the method scores, got given"):
        make_layer(selector="given")(x, block_indices=blocks, distil="dense")
    with refused(ValueError, "needs a selector with the method scores, got Recent"):
        make_layer(selector=Recent)(x, distil="dense")
    with refused(NotImplementedError, "needs a layer without context_axis"):
        make_layer(context_axis="x")(x, distil="dense")
