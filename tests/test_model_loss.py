"""The loss that never holds all logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from flax import nnx
from messages import refused
from modules import MODEL, abstract, named, randomised

from nsa_jax.model import Transformer, next_tokens, token_chunks, token_divergences, token_losses
from nsa_jax.nn import IndexerConfig

LENGTH, VOCAB = 17, MODEL.vocab_size
# Two documents and padding; one document.
SEGMENTS = np.array([[1] * 6 + [2] * 9 + [0] * 2, [3] * LENGTH])
CHUNK = 5  # tokens, so that the last chunk is filled up
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture
def _in_chunks(monkeypatch):
    monkeypatch.setattr(token_chunks, "LOGITS_AT_ONCE", 2 * VOCAB * CHUNK)


def make_model(**changes):
    changes = dict(dtype="float64", param_dtype="float64") | changes
    config = dataclasses.replace(MODEL, num_layers=1, **changes)
    return randomised(abstract(Transformer, config), scale=0.3)


def tokens(seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, SEGMENTS.shape)


def losses_by_loops(logits, tokens, segment_ids):
    """Loss of each token that has a next one in its sequence, in NumPy."""
    losses, has_target = np.zeros(tokens.shape), np.zeros(tokens.shape, bool)
    for row, at in np.ndindex(tokens.shape):
        last = at + 1 == tokens.shape[1]
        if last or segment_ids[row, at] == 0 or segment_ids[row, at] != segment_ids[row, at + 1]:
            continue
        exponentials = np.exp(logits[row, at] - logits[row, at].max())
        losses[row, at] = -np.log(exponentials[tokens[row, at + 1]] / exponentials.sum())
        has_target[row, at] = True
    return losses, has_target


def test_next_tokens():
    ids = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    segment_ids = np.array([[1, 1, 2, 2, 2, 0], [0, 0, 7, 3, 3, 3]])

    np.testing.assert_array_equal(next_tokens(ids), [[1, 4, 1, 5, 9, -1], [6, 5, 3, 5, 8, -1]])
    expected = [[1, -1, 1, 5, -1, -1], [-1, -1, -1, 5, 8, -1]]
    np.testing.assert_array_equal(next_tokens(ids, segment_ids), expected)
    assert next_tokens(ids[:, :0]).shape == (2, 0)  # it was (2, 1)


@pytest.mark.usefixtures("_in_chunks")
def test_loss_and_gradients_are_those_of_all_logits():
    """In packed rows with padding, with a weight for each token, by models that compute layers again."""
    ids, weights = tokens(), np.random.default_rng(1).standard_normal(SEGMENTS.shape)
    with jax.enable_x64(True):
        plain, *ours = (make_model(attention="window", remat=x) for x in (False, "attention", True))
        _, has_target = losses_by_loops(np.zeros((*ids.shape, VOCAB)), ids, SEGMENTS)

        def by_logits(state):
            logits = nnx.merge(nnx.graphdef(plain), state)(ids, segment_ids=SEGMENTS)
            shares = jax.nn.log_softmax(logits)[:, :-1]
            own = jnp.take_along_axis(shares, ids[:, 1:, None], axis=-1)[..., 0]
            losses = jnp.where(has_target, -jnp.pad(own, ((0, 0), (0, 1))), 0)
            return (losses * weights).sum(), logits

        def by_chunks(state, graph):
            losses = nnx.merge(graph, state).loss(ids, segment_ids=SEGMENTS, reduce=None)
            return (losses * weights).sum(), losses

        @jit
        def of_ours(state):
            return [jax.value_and_grad(by_chunks, has_aux=True)(state, nnx.graphdef(model)) for model in ours]

        state = nnx.state(plain)
        (_, logits), expected = jit(jax.value_and_grad(by_logits, has_aux=True))(state)
        found = of_ours(state)

    looped, _ = losses_by_loops(np.asarray(logits), ids, SEGMENTS)
    expected = named(expected)
    for (_, losses), gradients in found:
        np.testing.assert_allclose(losses, looped, rtol=1e-11, atol=1e-12)
        assert named(gradients).keys() == expected.keys()
        for name, gradient in named(gradients).items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)


def test_the_selection_loss_comes_from_the_same_pass():
    model = abstract(Transformer, MODEL)

    def losses(state):
        return nnx.merge(nnx.graphdef(model), state).loss(tokens(), segment_ids=SEGMENTS, distil="dense")

    program = jax.make_jaxpr(losses)(nnx.state(model)).jaxpr

    assert [out.aval.shape for out in program.outvars] == [(), ()]
    calls = [each.params["name"] for each in equations(program) if each.primitive.name == "jit"]
    assert calls.count("native_sparse_attention") == MODEL.num_layers


@pytest.mark.usefixtures("_in_chunks")
def test_the_same_inside_a_scan_and_a_remat():
    """A scan over two batches, which sums their losses, each computed again for its gradient."""
    rng = np.random.default_rng(0)
    kernel, both = rng.standard_normal((4, VOCAB)), rng.standard_normal((2, 2, LENGTH, 4))
    targets = rng.integers(-1, VOCAB, both.shape[:3])

    def loss(kernel, given):
        return jnp.square(token_losses(given[0], kernel, given[1])).sum()

    def scanned(kernel):
        step = jax.checkpoint(lambda total, given: (total + loss(kernel, given), None))
        return jax.lax.scan(step, 0.0, (both, targets))[0]

    with jax.enable_x64(True):
        found = jit(jax.value_and_grad(scanned))(kernel)
        looped = jit(
            jax.value_and_grad(lambda kernel: sum(loss(kernel, (both[i], targets[i])) for i in (0, 1)))
        )
        each = looped(kernel)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12), found, each)


@pytest.mark.usefixtures("_in_chunks")
def test_what_a_token_without_a_target_holds_reaches_nothing():
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((2, LENGTH, 4)), rng.standard_normal((4, VOCAB))
    targets = np.asarray(next_tokens(tokens(), SEGMENTS))
    poisoned = np.where((targets < 0)[..., None], np.nan, x)

    @jit
    def run(x, kernel):
        losses, pull_back = jax.vjp(lambda *given: token_losses(*given, targets), x, kernel)
        return losses, *pull_back(jnp.cos(jnp.arange(losses.size, dtype=losses.dtype)).reshape(losses.shape))

    with jax.enable_x64(True):
        expected = run(x, kernel)
        found = run(poisoned, kernel)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert (np.asarray(found[0])[targets < 0] == 0).all()

    # In a model: padding whose embedding is NaN.
    ids, padding = np.where(SEGMENTS == 0, VOCAB - 1, tokens() % (VOCAB - 1)), VOCAB - 1
    with jax.enable_x64(True):
        model = make_model(attention="window", tie_embeddings=False)
        table = model.embed.embedding
        of_head = nnx.All(nnx.Param, lambda path, _: path[0] in ("final_norm", "lm_head"))
        gradient = nnx.jit(
            nnx.value_and_grad(
                lambda model: model.loss(ids, segment_ids=SEGMENTS), argnums=nnx.DiffState(0, of_head)
            )
        )
        expected = gradient(model)
        table.set_value(table.get_value().at[padding].set(jnp.nan))
        found = gradient(model)
    assert [np.any(x) for x in jax.tree.leaves(found)] == [True] * 3
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15), found, expected)


def by_all_logits(x, kernel, teacher_x, teacher_kernel):
    own, taught = jax.nn.log_softmax(x @ kernel), jax.nn.log_softmax(teacher_x @ teacher_kernel)
    return (jnp.exp(taught) * (taught - own)).sum(-1)


@pytest.mark.parametrize("at_once", [2**20, 2 * 2 * 7 * 3], ids=["whole", "chunks"])
def test_divergences_and_gradients_are_those_of_all_logits(at_once, monkeypatch):
    """The teacher is wider, surer, and gets no gradient."""
    monkeypatch.setattr(token_chunks, "LOGITS_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    shapes = (2, 11, 4), (4, 7), (2, 11, 6), (6, 7)
    x, kernel, teacher_x, teacher_kernel = map(rng.standard_normal, shapes)
    weights = rng.standard_normal((2, 11))

    def run(of):
        values, pull_back = jax.vjp(of, x, kernel, 20 * teacher_x, teacher_kernel)
        return values, pull_back(weights)

    with jax.enable_x64(True):
        (found, gradients), (expected, by_logits) = jit(
            lambda: (run(token_divergences), run(by_all_logits))
        )()

    assert found.min() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    for gradient, wanted in zip(gradients[:2], by_logits[:2], strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-10, atol=1e-12)
    assert not any(np.any(gradient) for gradient in gradients[2:])


@pytest.mark.usefixtures("_in_chunks")
def test_a_model_learns_from_a_teacher_where_it_has_a_target():
    """In packed rows, beside the loss and the selection loss."""
    ids, given = tokens(), dict(segment_ids=SEGMENTS, distil="selected")
    with jax.enable_x64(True):
        model = make_model(branches=("slc",), selector=IndexerConfig(dim=4))
        models = model, make_model(attention="dense", model_dim=8, tie_embeddings=False)

        @jit
        def run(states):
            model, teacher = (
                nnx.merge(nnx.graphdef(x), state) for x, state in zip(models, states, strict=True)
            )
            by_logits = model(ids, **given), teacher(ids, segment_ids=SEGMENTS)
            return model.loss(ids, **given, teacher=teacher), by_logits

        found, ((logits, selection), taught) = jax.device_get(run([nnx.state(each) for each in models]))

    losses, has_target = losses_by_loops(logits, ids, SEGMENTS)
    own, taught = (np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True)) for x in (logits, taught))
    apart = (np.exp(taught) * (taught - own)).sum(-1)[has_target].mean()
    np.testing.assert_allclose(found, (losses.sum() / has_target.sum(), selection, apart), rtol=1e-11)
    assert apart > 0.1


def test_a_model_and_its_teacher_compute_in_dtypes_of_their_own():
    """Their parameters are float32, as by default."""

    def divergence(dtype, of_teacher):
        numbers = dict(attention="dense", param_dtype="float32")
        teacher = make_model(model_dim=8, dtype=of_teacher, **numbers)
        return make_model(dtype=dtype, **numbers).loss(tokens(), teacher=teacher)[1]

    of = ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")
    expected, *found = jit(lambda: [divergence(*dtypes) for dtypes in of])()

    np.testing.assert_allclose(found, [expected] * 3, rtol=0.1)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 11])
def test_chunks_of_any_length(length, monkeypatch):
    rng = np.random.default_rng(length)
    x, kernel = rng.standard_normal((1, length, 3)), rng.standard_normal((3, 7))
    targets = rng.integers(-1, 7, (1, length))
    with jax.enable_x64(True):
        whole = jit(lambda *given: token_losses(*given))(x, kernel, targets)
        monkeypatch.setattr(token_chunks, "LOGITS_AT_ONCE", 7 * 2)
        found = jit(lambda *given: token_losses(*given))(x, kernel, targets)
    np.testing.assert_allclose(found, whole, rtol=1e-12)


def test_sums_are_float32_where_the_model_computes_in_bfloat16(monkeypatch):
    """The gradient of the kernel, which many chunks add up, is rounded once."""
    monkeypatch.setattr(token_chunks, "LOGITS_AT_ONCE", 1)
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((1, 600, 4), (4, 5)))
    targets = np.zeros((1, 600), np.int32)

    @jit
    def run(x, kernel):
        return jax.value_and_grad(lambda kernel: token_losses(x, kernel, targets).mean())(kernel)

    loss, gradient = run(x, kernel)
    expected = run(x.astype(jnp.float32), kernel.astype(jnp.float32))

    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(gradient.astype(jnp.float32), expected[1], rtol=2 * eps, atol=1e-3)


def temporary_bytes(vocab, length, run):
    shapes = (1, length, 8), (8, vocab)
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    others = (x, kernel) if run is token_divergences else (jax.ShapeDtypeStruct((1, length), jnp.int32),)

    def loss(*given):
        return run(*given).mean()

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, kernel, *others).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("run", [token_losses, token_divergences])
def test_memory_does_not_grow_with_tokens_times_vocabulary(monkeypatch, run):
    monkeypatch.setattr(token_chunks, "LOGITS_AT_ONCE", at_once := 2**16)

    def by_logits(x, kernel, targets):
        shares = jax.nn.log_softmax(x @ kernel)
        return -jnp.take_along_axis(shares, targets[..., None], axis=-1)

    small, large = (temporary_bytes(vocab, length, run) for vocab, length in ((512, 512), (2048, 2048)))

    # At most four arrays of a chunk, and what grows with the tokens or with the vocabulary alone.
    assert large - small <= 4 * 3 * 8 * (2048 + 2048)
    assert large <= 4 * (4 * at_once + 3 * 8 * (2048 + 2048))
    assert temporary_bytes(2048, 2048, by_logits) > 4 * 2048 * 2048


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(reduce="sum"), r"reduce must be one of \('mean',\), got 'sum'"),
        (
            dict(targets=np.full(SEGMENTS.shape, VOCAB)),
            "targets must be within -2147483648 .. 10, got values",
        ),
        (dict(targets=SEGMENTS[:, :-1]), r"axis T of targets must be 17 \(in tokens\), got shape \(2, 16\)"),
    ],
    ids=["reduce", "vocabulary", "shape"],
)
def test_refused(given, message):
    model = abstract(Transformer, MODEL)

    with refused(ValueError, message):
        nnx.eval_shape(lambda model: model.loss(tokens(), **given), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=12), "a teacher must have the vocabulary of the model, got 12 and 11 tokens"),
        (None, "teacher must be a Transformer, got Linear"),
    ],
    ids=["vocabulary", "type"],
)
def test_a_teacher_that_does_not_fit_is_refused(changes, message):
    changed = dataclasses.replace(MODEL, **changes or {})
    other = abstract(Transformer, changed) if changes else nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    with refused((TypeError, ValueError), message):
        abstract(Transformer, MODEL).loss(tokens(), teacher=other)


def test_a_model_whose_devices_have_parts_of_the_rows_needs_targets_and_has_no_teacher():
    model = abstract(Transformer, MODEL, context_axis="context")

    with refused(ValueError, "targets of a model with a context_axis must be given, got None"):
        model.loss(tokens())
    with refused(ValueError, "a model with a context_axis must learn without a teacher, got one"):
        model.loss(tokens(), targets=tokens(), teacher=model)
