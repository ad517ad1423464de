"""A prepared model writes what the model writes, from joined kernels, and keeps what is not ours."""

import collections
import dataclasses
import gc
import weakref

import garbage
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL
from flax import nnx
from modules import abstract, randomised
from selector_examples import Loudest, Recent

from nsa_jax.generate import Batcher, generate, loop, prepare, start
from nsa_jax.generate import prepared as prepared_models
from nsa_jax.model import Transformer, TransformerConfig, save
from nsa_jax.nn import DenseAttention, Gate, IndexerConfig, NSAAttention, weights
from nsa_jax.nn.joined import Joined
from nsa_jax.pretrained import to_nsa

NSA = dataclasses.replace(SMALL, num_local_blocks=1, num_selected_blocks=3)  # the last queries choose one
CONFIG = TransformerConfig(
    vocab_size=32, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, nsa=NSA,
    dtype="float64", param_dtype="float64",
)  # fmt: skip
TEXT = np.random.default_rng(0).integers(0, 32, (2, 31))
PROMPT = 28
EPS = np.finfo(np.float64).eps


class OwnGate(nnx.Module):
    """A user's gate, with a product of its own."""

    def __init__(self, in_features, num_heads, *, rngs):
        self.project = nnx.LinearGeneral(in_features, (num_heads, 2), param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return nnx.softmax(self.project(x))


def wide_gate(in_features, num_heads, *, rngs):
    return Gate(in_features, num_heads, 40, num_branches=2, dtype="float64", param_dtype="float64", rngs=rngs)


# Two branches are quicker to compile than three. A layer of all three writes, below.
TWO = dict(branches=("slc", "win"), selector=IndexerConfig(dim=6))
ALONE = dict(
    branches=("slc",), selector=IndexerConfig(num_heads=2, dim=6, weighted=True), tie_embeddings=False
)
CASES = {
    "an indexer alone": ALONE,
    "keys and values shared, another indexer and gate": TWO
    | dict(
        share_keys_values=True,
        selector=IndexerConfig(dim=6, shared_key=False, normalize=True),
        gate=wide_gate,
    ),
    "a user's gate and selector": TWO | dict(gate=OwnGate, selector=Loudest),
}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def made(**options):
    return randomised(abstract(Transformer, dataclasses.replace(CONFIG, **options)), 0.3)


def joined(model):
    return [path for path, module in nnx.iter_modules(model) if isinstance(module, Joined)]


@nnx.jit
def forward(model, text):
    return model(text)


@nnx.jit
def made_of_input(model, text):
    """What a layer makes of its input: what attention is given, what it selects, and the MLP."""
    x, layer = model.embed(text), model.layers[0]
    return layer.attention.operands(x), layer.attention.inspect(x), layer.mlp(x)


def agree(found, expected):
    """An output of one layer is a sum of a few hundred terms, added in another order, of at most 5 layers."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1000 * EPS * np.abs(expected).max())


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_it_computes_what_the_model_computes(options):
    model = made(**options)
    prepared = prepare(model)

    assert len(joined(prepared)) == 2 * len(model.layers)
    jax.tree.map(agree, made_of_input(prepared, TEXT), made_of_input(model, TEXT))


def test_what_reads_the_input_of_a_layer_is_one_kernel():
    prepared = prepare(made(selector=IndexerConfig(dim=6)))

    held = {
        name: array.shape for name, array in weights(prepared.layers[0]).items() if "compressor" not in name
    }

    assert held == {
        "attention.joined.kernel": (
            16,
            128,
        ),  # 16 + 6 x 8 of queries, keys and values, 8 of the gate, 18 of the indexer
        "attention.joined.bias": (128,),  # that of the gate
        "attention.gate.kernel_out": (8, 4, 3),
        "attention.gate.bias_out": (4, 3),
        "attention.out_proj.kernel": (4, 4, 16),
        "attention_norm.scale": (16,),
        "mlp.joined.kernel": (16, 256),  # 24 of the gate and 24 of the other, each filled up to 128
        "mlp.down_proj.kernel": (128, 16),
        "mlp_norm.scale": (16,),
    }
    assert not np.any(prepared.layers[0].mlp.down_proj.kernel[24:])


def test_a_batcher_holds_joined_kernels():
    model, found = made(attention="dense"), []

    def begin():
        session = Batcher(model, 2, max_length=16)._session
        found.append(joined(session.structure.model(session.parameters)))

    jax.eval_shape(begin)
    assert len(found[0]) == 2


@garbage.of_this_test()
def test_sessions_of_a_model_share_its_joined_kernels_while_one_is_left():
    model = made(attention="dense", qkv_bias=True)
    session, other = (start(model, TEXT[:1, :PROMPT], max_length=40) for _ in range(2))
    assert all(x is y for x, y in zip(session.parameters, other.parameters, strict=True))

    own = set(map(id, jax.tree.leaves(nnx.state(model))))
    joined = [weakref.ref(array) for array in session.parameters if id(array) not in own]
    assert len(joined) == 4  # kernel and bias of attention, kernel of the MLP, its padded third
    model.layers[0].mlp.up_proj.kernel[...] *= 2
    changed = start(model, TEXT[:1, :PROMPT], max_length=40)
    assert not np.allclose(changed.rows.logits, session.rows.logits)
    del session, other
    gc.collect()
    assert all(array() is None for array in joined)


@garbage.of_this_test()
def test_models_whose_joined_kernels_are_gone_take_no_place_of_others(monkeypatch):
    """Bug: calls of `generate` with a divided model pushed out those that sessions still share."""
    monkeypatch.setattr(prepared_models, "_SHARED", collections.deque(maxlen=2))
    held, model = made(attention="dense"), made(attention="dense")
    _, arrays = prepared_models.prepared_parts(held)

    for _ in range(3):
        prepared_models.prepared_parts(model)
        gc.collect()

    _, again = prepared_models.prepared_parts(held)
    assert all(x is y for x, y in zip(arrays, again, strict=True))


def test_a_divided_model_that_is_prepared_is_taken_apart_once_in_a_call(monkeypatch):
    """Bug: it was taken apart once more, to learn that it is prepared."""
    model, taken = prepare(made(attention="dense")), []
    monkeypatch.setattr(loop, "are_whole", lambda _: False)  # as if it were divided over devices
    for module in (loop, prepared_models):
        apart = module.split
        monkeypatch.setattr(module, "split", lambda model, apart=apart: taken.append(model) or apart(model))

    jax.eval_shape(lambda: generate(model, TEXT[:1, :4], max_new_tokens=1))

    assert taken == [model]


def test_the_model_keeps_what_it_had_and_shares_what_stays():
    model = made()
    before = weights(model)

    prepared = prepare(model)

    assert all(np.array_equal(before[name], array) for name, array in weights(model).items())
    assert prepared.embed.embedding.get_value() is model.embed.embedding.get_value()
    assert prepare(prepared) is prepared


class Negated(nnx.Module):
    """Stands for what users put around a projection."""

    def __init__(self, of):
        self.of = of

    def __call__(self, x):
        return -self.of(x)


def test_changed_modules_stay_as_they_are():
    """Beside ours in one layer, and what two layers share."""
    kinds = ("dense", "dense", "nsa", "nsa", "dense", "dense")
    model = made(num_layers=6, attention=kinds, **TWO | dict(selector=Recent))
    first, second, third, fourth, fifth, _ = model.layers
    first.attention.value_proj = Negated(first.attention.value_proj)
    first.mlp.down_proj = Negated(first.mlp.down_proj)
    second.attention.query_proj = Negated(second.attention.query_proj)
    second.mlp = Negated(second.mlp)
    fourth.attention.gate = third.attention.gate
    model.layers[5] = fifth

    prepared = prepare(model)

    assert {(path[1], path[2]) for path in joined(prepared)} == {
        (layer, part) for layer in (0, 2, 3, 4) for part in ("attention", "mlp")
    }
    agree(forward(prepared, TEXT), forward(model, TEXT))


@pytest.mark.parametrize("option", [dict(dtype="float32"), dict(precision="highest")], ids="_".join)
def test_a_gate_that_computes_otherwise_stays_beside_the_joined_kernel(option):
    numbers = dict(dtype="float64", param_dtype="float64") | option
    model = made(gate=lambda *sizes, rngs: Gate(*sizes, **numbers, rngs=rngs))

    held = weights(prepare(model).layers[0].attention)

    assert {"joined.kernel", "gate.kernel_in"} <= set(held)


class Own(Transformer):
    """A user's model, which may read its projections by their names."""


def test_a_user_s_model_stays_as_it_is():
    model = abstract(Own, CONFIG)

    assert prepare(model) is model


def test_parameters_are_held_in_the_dtype_of_the_computation():
    """As they are used: a model whose parameters are rounded beforehand computes the same bits."""
    model = made(dtype="bfloat16", param_dtype="float32", tie_embeddings=False, branches=("cmp", "slc"))
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    values = {path: np.asarray(variable.get_value()) for path, variable in flat}
    values |= {path: x.astype(jnp.bfloat16) for path, x in values.items() if not path[-2].endswith("norm")}
    flat = [(path, variable.replace(jnp.asarray(values[path]))) for path, variable in flat]
    rounded = nnx.merge(graph, nnx.from_flat_state(flat))
    assert [x.lm_head.kernel.get_value().dtype for x in (model, rounded)] == [jnp.float32, jnp.bfloat16]

    prepared, expected = weights(prepare(model)), weights(prepare(rounded))

    assert {array.dtype for name, array in prepared.items() if "norm" not in name} == {jnp.dtype("bfloat16")}
    assert all(np.array_equal(prepared[name], array) for name, array in expected.items())
    np.testing.assert_array_equal(forward(model, TEXT[:, :5]), forward(rounded, TEXT[:, :5]))


def test_donating_frees_what_was_replaced_part_by_part(monkeypatch):
    model = made(num_layers=2, model_dim=64, mlp_dim=128)
    held = [live_bytes()]
    join = prepared_models.join
    monkeypatch.setattr(
        prepared_models, "join", lambda *part, **into: (join(*part, **into), held.append(live_bytes()))[0]
    )

    prepared = prepare(model, donate=True)

    part = sum(x.nbytes for name, x in weights(prepared).items() if name.startswith("layers.0."))
    assert len(held) == 5
    assert max(held) <= max(held[0], live_bytes()) + part
    assert model.layers[0].mlp.up_proj.kernel.get_value().is_deleted()
    assert not model.layers[0].attention.out_proj.kernel.get_value().is_deleted()
    assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(prepared)))


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


def test_donating_keeps_what_another_layer_still_reads():
    model, copy = made(num_layers=2), made(num_layers=2)
    for each in (model, copy):
        first, second = (layer.attention for layer in each.layers)
        second.gate, second.key_slc_proj = first.gate, first.key_slc_proj
        second.query_proj.kernel = first.query_proj.kernel

    prepared, expected = weights(prepare(model, donate=True)), weights(prepare(copy))

    assert prepared.keys() == expected.keys()
    assert all(np.array_equal(prepared[name], array) for name, array in expected.items())


@pytest.mark.parametrize("kind", [NSAAttention, DenseAttention])
def test_a_layer_of_the_user_s_that_follows_its_parameters_dtype(kind):
    own = dict(branches=("slc",), selector=IndexerConfig(dim=6), config=NSA)
    options = own if kind is NSAAttention else {}
    model = made(attention="dense")
    model.layers[0].attention = randomised(
        abstract(kind, 4, 16, num_kv_heads=2, param_dtype="float64", **options), 0.5
    )

    session = start(model, TEXT[:, :PROMPT], max_length=40)

    assert session.rows.cache[0].lengths.tolist() == [PROMPT] * 2
    np.testing.assert_allclose(session.rows.logits, forward(model, TEXT)[:, PROMPT - 1], rtol=0, atol=1e-10)


def test_a_prepared_model_is_neither_saved_nor_converted(tmp_path):
    prepared, message = prepare(made(attention="dense")), r"^a model must not be prepared to be saved or"

    with pytest.raises(ValueError, match=message):
        save(tmp_path / "checkpoint", prepared)
    with pytest.raises(ValueError, match=message):
        to_nsa(prepared, rngs=nnx.Rngs(0))
    assert not any(tmp_path.iterdir())


def test_it_can_be_prepared_inside_jit():
    model = made(attention="dense")

    agree(nnx.jit(lambda model, text: prepare(model)(text))(model, TEXT), forward(model, TEXT))
