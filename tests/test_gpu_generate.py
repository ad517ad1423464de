"""Text that a GPU generates by the step kernels, against one forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from modules import abstract

from nsa_jax.budget import allowance, distance

pytest.importorskip("jax_triton", reason="needs jax-triton", exc_type=ImportError)

from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate
from nsa_jax.model import Transformer, TransformerConfig

pytestmark = pytest.mark.gpu

# Initial and local blocks fill all slots, so no score decides which blocks are chosen.
MODEL = TransformerConfig(
    vocab_size=101, num_layers=2, model_dim=128, num_heads=8, num_kv_heads=2, head_dim=64,
    nsa=NSAConfig(num_selected_blocks=4, num_initial_blocks=1, num_local_blocks=3),
    tie_embeddings=False, dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
PROMPT, NEW = 3000, 10_000


def model_beside(model, dtype):
    """A model by `xla` in another dtype, with the same parameters."""
    config = dataclasses.replace(MODEL, dtype=dtype, param_dtype=dtype)
    graph, _ = nnx.split(abstract(Transformer, config, implementation="xla"))
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.split(model)[1]))


@nnx.jit
def forward(model, text):
    return model(text)[0, PROMPT - 1 : -1]


@nnx.jit
def step_by_step(model, text):
    """Logits of the tokens after the prompt, each computed by a step through a cache."""

    def step(held, token):
        logits, held = model.decode_step(token[None, None], held)
        return held, logits[0, 0]

    first, held = model.prefill(text[:, :PROMPT], model.init_cache(1, text.shape[1]))
    _, logits = jax.lax.scan(step, held, text[0, PROMPT:-1])
    return jnp.concatenate([first, logits])


def test_ten_thousand_tokens_are_those_of_one_forward():
    """Steps give logits within the budget, and the tokens of a float32 forward where its margin is clear."""
    model = Transformer(MODEL, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, MODEL.vocab_size, (1, PROMPT))
    new, again = (np.asarray(generate(model, prompt, max_new_tokens=NEW).tokens[0]) for _ in range(2))
    text = jnp.asarray(np.concatenate([prompt[0], new])[None], jnp.int32)

    exact, same = (np.asarray(forward(model_beside(model, x), text)) for x in ("float32", "bfloat16"))
    budget = allowance(same, exact, float(jnp.finfo(jnp.bfloat16).eps))
    ranked = np.sort(exact, axis=-1)
    clear = ranked[:, -1] - ranked[:, -2] > 2 * budget

    assert (new == again).all(), "two runs differ"
    assert distance(step_by_step(model, text), exact) <= budget
    # XLA's choice of algorithms decides the text, and with it how many are clear: 854 in one run.
    assert clear.sum() >= 500, "too few tokens are compared"
    assert (new == exact.argmax(-1))[clear].all()
