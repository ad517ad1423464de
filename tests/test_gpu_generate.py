"""Text that a GPU generates by the step kernels: against one forward pass, in slots, and in a session."""

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
from nsa_jax.generate import Batcher, advance, extend, generate, start
from nsa_jax.model import Transformer, TransformerConfig

pytestmark = pytest.mark.gpu

# Initial and local blocks fill all slots, so no score decides which blocks are chosen.
MODEL = TransformerConfig(
    vocab_size=101, num_layers=2, model_dim=128, num_heads=8, num_kv_heads=2, head_dim=64,
    nsa=NSAConfig(num_selected_blocks=4, num_initial_blocks=1, num_local_blocks=3),
    tie_embeddings=False, dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
PROMPT, NEW = 3000, 10_000
IMPLEMENTATION = "triton"


def model_beside(model, dtype):
    """A model by `xla` in another dtype, with the same parameters."""
    config = dataclasses.replace(MODEL, dtype=dtype, param_dtype=dtype)
    graph, _ = nnx.split(abstract(Transformer, config, implementation="xla"))
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.split(model)[1]))


@nnx.jit
def forward(model, text):
    return model(text)[0, PROMPT - 1 : -1]


@nnx.jit
def logits_of(model, text):
    return model(text)[0]


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


def test_a_slot_writes_the_same_whatever_the_others_hold():
    """Through the same compiled step, not even in the last bit of its log-probabilities."""
    config = dataclasses.replace(MODEL, nsa=NSAConfig())  # here scores decide which blocks are chosen
    model = Transformer(config, implementation=IMPLEMENTATION, rngs=nnx.Rngs(0))
    batcher = Batcher(model, 8, max_length=4096, sampling=("temperature",), logprobs=3)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, 1500)

    def written(others):
        """What is written in the first slot, beside random requests in others, or beside what they left."""
        request = batcher.submit(prompt, max_new_tokens=200, temperature=1.0, key=1)
        beside = [
            batcher.submit(
                rng.integers(0, config.vocab_size, rng.integers(1, 3000)),
                max_new_tokens=int(rng.integers(50, 400)), temperature=2.0, key=int(rng.integers(1000)),
            )
            for _ in range(others)
        ]  # fmt: skip
        pieces = list(request)
        assert all(other.tokens for other in beside), "they ran one after another"
        while batcher.step():
            pass
        assert len(request.tokens) == 200
        assert all(len(other.tokens) == other.asked.max_new_tokens for other in beside)
        reports = [piece.logprobs for piece in pieces]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *reports), request.tokens

    alone = written(0)
    for others in (7, 0, 7):
        jax.tree.map(np.testing.assert_array_equal, written(others), alone)


def test_a_session_in_turns_equals_an_uninterrupted_one():
    """Bitwise, however steps are divided; and each token is as likely as in one forward of the whole text."""
    model, rng = Transformer(MODEL, implementation=IMPLEMENTATION, rngs=nnx.Rngs(0)), np.random.default_rng(1)
    prompts, lengths = rng.integers(0, MODEL.vocab_size, (2, 1500)), np.array([1500, 700])
    turn, turned = rng.integers(0, MODEL.vocab_size, (2, 90)), np.array([90, 33])

    def written(*turns):
        """The tokens of both turns and what is reported of them, by calls of `advance` for so many tokens."""
        settings = dict(max_length=2048, temperature=1.0, key=2, logprobs=3)
        session, found = start(model, prompts, lengths=lengths, **settings), []
        for number, steps in enumerate(turns):
            session = extend(session, turn, lengths=turned) if number else session
            for count in steps:
                session, new = advance(session, count)
                found.append((new.tokens, new.logprobs))
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)

    whole = written((60,), (64,))

    # All of these calls share a program.
    jax.tree.map(np.testing.assert_array_equal, written((1, 8, 20, 31), (13, 50, 1)), whole)
    tokens, reports = whole
    for row in range(2):
        parts = prompts[row, : lengths[row]], tokens[row, :60], turn[row, : turned[row]], tokens[row, 60:]
        text = np.concatenate(parts)
        at = np.concatenate([lengths[row] + np.arange(60), len(text) - 64 + np.arange(64)])
        exact, same = (
            np.asarray(jax.nn.log_softmax(logits_of(model_beside(model, x), text[None])[at - 1]))
            for x in ("float32", "bfloat16")
        )
        budget = allowance(same, exact, float(jnp.finfo(jnp.bfloat16).eps))
        ids = np.concatenate([text[at][:, None], reports.top_tokens[row]], axis=1)
        found = np.concatenate([reports.chosen[row][:, None], reports.top[row]], axis=1)
        assert distance(found, np.take_along_axis(exact, ids, axis=1)) <= budget
