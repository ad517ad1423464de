"""`TransformerConfig.remat`: what the backward pass of a layer finds stored, in models and checkpoints."""

import collections
import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
import triton_compile
from flax import nnx
from messages import refused
from modules import MODEL, abstract, randomised

from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer, TransformerConfig, restore, save

# Sizes that the kernels take.
CONFIG = TransformerConfig(
    vocab_size=32, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=1, head_dim=16,
    nsa=NSAConfig(selection_block_size=32, num_selected_blocks=4, window_size=64), dtype="bfloat16",
)  # fmt: skip


def equations(jaxpr):
    """All equations of a program and of those inside it."""
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
        yield equation


@pytest.mark.parametrize(("remat", "times"), [(False, 1), (True, 2), ("attention", 1)])
def test_the_attention_of_a_layer_runs_once_if_its_results_are_kept(remat, times):
    pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)
    config = dataclasses.replace(CONFIG, remat=remat)
    graph, state = nnx.split(abstract(Transformer, config, implementation="triton"))
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)

    def loss(state, tokens):
        return nnx.merge(graph, state).loss(tokens)

    with triton_compile.device(90):
        program = jax.make_jaxpr(jax.grad(loss))(state, tokens).jaxpr

    launched = collections.Counter(
        each.params["name"] for each in equations(program) if each.primitive.name == "triton_kernel_call"
    )
    branches = ("compressed", "selected", "window")
    forward = [f"nsa_{branch}_forward" for branch in branches] + ["nsa_importance", "nsa_best_blocks"]
    assert {name: launched[name] for name in forward} == dict.fromkeys(forward, times * config.num_layers)
    backward = [f"nsa_{branch}_key_gradients" for branch in branches]
    assert {name: launched[name] for name in backward} == dict.fromkeys(backward, config.num_layers)


def test_a_checkpoint_keeps_it(tmp_path):
    config = dataclasses.replace(MODEL, num_layers=1, attention="dense", remat="attention")
    save(tmp_path, randomised(abstract(Transformer, config)))

    assert restore(tmp_path).config == config
    assert not restore(tmp_path, dataclasses.replace(config, remat=False)).config.remat


@pytest.mark.parametrize("value", ["layers", 1, None])
def test_what_else_is_refused(value):
    with refused(ValueError, f"remat must be True, False or 'attention', got {value!r}"):
        dataclasses.replace(MODEL, remat=value)
