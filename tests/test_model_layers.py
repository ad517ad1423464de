"""How a forward pass and its gradient run the layers: what is stored of each, and as a scan over them."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_compile
from equations import equations
from flax import nnx
from messages import refused
from modules import MODEL, NSA, abstract, randomised

from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, TransformerConfig, restore, save
from nsa_jax.nn import IndexerConfig

# Sizes that the kernels take.
CONFIG = TransformerConfig(
    vocab_size=32, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=1, head_dim=16,
    nsa=NSAConfig(selection_block_size=32, num_selected_blocks=4, window_size=64), dtype="bfloat16",
)  # fmt: skip


def launches(config):
    """How often the program of a loss and its gradient launches each kernel."""
    pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)
    graph, state = nnx.split(abstract(Transformer, config, implementation="triton"))
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)

    def loss(state, tokens):
        return nnx.merge(graph, state).loss(tokens)

    with triton_compile.device(90):
        program = jax.make_jaxpr(jax.grad(loss))(state, tokens).jaxpr

    called = (each for each in equations(program) if each.primitive.name == "triton_kernel_call")
    return collections.Counter(each.params["name"] for each in called)


BRANCHES = ("compressed", "selected", "window")
FORWARD = *(f"nsa_{branch}_forward" for branch in BRANCHES), "nsa_importance", "nsa_best_blocks"
BACKWARD = tuple(f"nsa_{branch}_key_gradients" for branch in BRANCHES)


@pytest.mark.parametrize(("remat", "times"), [(False, 1), (True, 2), ("attention", 1)])
@pytest.mark.parametrize(("scan_layers", "num_bodies"), [(False, 2), (True, 1)])
def test_the_attention_of_a_layer_runs_once_if_its_results_are_kept(remat, times, scan_layers, num_bodies):
    """A scan has the program of one layer for both."""
    launched = launches(dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers))

    assert {name: launched[name] for name in FORWARD} == dict.fromkeys(FORWARD, times * num_bodies)
    assert {name: launched[name] for name in BACKWARD} == dict.fromkeys(BACKWARD, num_bodies)


# The last two layers are alike.
LAYERS = dataclasses.replace(
    MODEL, num_layers=3, dtype="float64", param_dtype="float64",
    nsa=dataclasses.replace(NSA, num_selected_blocks=2, num_local_blocks=1),
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 17))
PACKED = np.array([[1] * 9 + [2] * 8, [3] * 14 + [0] * 3])
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def looped_and_scanned(run, config, *operands):
    """Results of `run(model, each)` for a model that loops over its layers, and for one that scans them."""
    found = []
    with jax.enable_x64(True):
        state = nnx.state(randomised(abstract(Transformer, config), scale=0.3))
        for scan_layers in (False, True):
            graph = nnx.graphdef(abstract(Transformer, dataclasses.replace(config, scan_layers=scan_layers)))
            program = jit(lambda state, each, graph=graph: run(nnx.merge(graph, state), each))
            found.append([jax.device_get(program(state, each)) for each in operands])
    return found


def close(found, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, expected)


def test_scanned_layers_compute_what_a_loop_does():
    def run(model, tokens):
        return nnx.value_and_grad(lambda model: model.loss(tokens, segment_ids=PACKED))(model)

    config = dataclasses.replace(LAYERS, num_layers=2, attention="window", remat=True)
    close(*looped_and_scanned(run, config, TOKENS))


def test_scanned_layers_of_nsa_have_their_own_selections_and_losses():
    shape = (2, 17, MODEL.num_kv_heads, 2)
    blocks = [np.broadcast_to(np.array(each), shape) for each in ([0, 2], [1, 3])]

    def run(model, blocks):
        return model(TOKENS, distil="dense", block_indices=blocks)

    selects = dict(selector=IndexerConfig(dim=4), branches=("slc",))
    config = dataclasses.replace(LAYERS, attention=("window", "nsa", "nsa"), **selects)
    looped, scanned = looped_and_scanned(run, config, blocks, blocks[::-1], blocks[:1] * 2)

    close(scanned, looped)
    for (x, loss), (y, _) in itertools.combinations(looped, 2):  # the blocks of both layers matter
        assert np.abs(x - y).max() > 0.01
        assert loss > 0.01


def test_a_checkpoint_keeps_it(tmp_path):
    config = dataclasses.replace(MODEL, num_layers=1, attention="dense", remat="attention")
    save(tmp_path, randomised(abstract(Transformer, config)))

    assert restore(tmp_path).config == config
    changed = dataclasses.replace(config, remat=False, scan_layers=True)
    assert restore(tmp_path, changed).config == changed


@pytest.mark.parametrize("value", ["layers", 1, None])
def test_what_else_is_refused(value):
    with refused(ValueError, "dropout_rate must be 0 for scan_layers, got 0.5"):
        dataclasses.replace(MODEL, scan_layers=True, dropout_rate=0.5)
    with refused(ValueError, f"remat must be True, False or 'attention', got {value!r}"):
        dataclasses.replace(MODEL, remat=value)


class Counting(nnx.Module):
    """A gate that counts its calls."""

    def __init__(self, in_features, num_heads, *, rngs):
        self.num_heads, self.calls = num_heads, nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.full((*x.shape[:2], self.num_heads, 2), 0.5)


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_refuses_to_lose_what_a_part_changes(remat):
    """Without a scan the variable is kept; with one, its new value was dropped in silence."""
    options = dict(gate=Counting, remat=remat, selector=IndexerConfig(dim=4), branches=("slc", "win"))
    tokens, config = jnp.zeros((1, 9), jnp.int32), dataclasses.replace(MODEL, **options)
    loop = randomised(abstract(Transformer, dataclasses.replace(config, num_layers=1)))
    scanned = abstract(Transformer, dataclasses.replace(config, scan_layers=True))
    calls = loop.layers[0].attention.gate.calls
    before = int(calls[...])

    nnx.jit(lambda model: model(tokens))(loop)

    assert int(calls[...]) == before + 1
    with refused(NotImplementedError, r"must not change their variables, got new values of .*gate\.calls"):
        nnx.eval_shape(lambda model: model.loss(tokens), scanned)


def test_a_scan_checks_selections_as_a_loop_does():
    """It made one array of all before: a block of 2^32 became block 0, and shapes were JAX's to refuse."""
    model = abstract(Transformer, dataclasses.replace(MODEL, scan_layers=True))
    tokens = jnp.zeros((1, 9), jnp.int32)
    good = [np.full((1, 9, MODEL.num_kv_heads, NSA.num_selected_blocks), -1)] * MODEL.num_layers

    def loss(blocks):
        return nnx.eval_shape(lambda model: model.loss(tokens, block_indices=blocks), model)

    assert loss(good).shape == ()
    with refused(ValueError, "block_indices must be within"):
        loss([np.where(blocks == -1, 2**32, blocks) for blocks in good])
    with refused(ValueError, "block_indices must have num_selected_blocks"):
        loss([good[0], *(blocks[..., :-1] for blocks in good[1:])])
