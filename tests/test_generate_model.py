"""`generate` with the real model: the same tokens as full forwards give, row by row."""

import re
from unittest import mock

import numpy as np
import pytest
from cache_layer import SMALL
from flax import nnx
from modules import abstract, randomised
from selector_examples import Recent

from nsa_jax.generate import generate, loop
from nsa_jax.generate.loop import _run
from nsa_jax.model import Transformer, TransformerConfig

VOCAB = 17
CONFIG = TransformerConfig(
    vocab_size=VOCAB, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=16, nsa=SMALL,
    qkv_bias=True, normalize_qk=True, branches=("slc", "win"), selector=Recent,
)  # fmt: skip
NEW = 24
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (3, 27))
LENGTHS = np.array([27, 3, 14])  # 27 + 24 tokens are 7 selection blocks
CAPACITY = 4096  # far more than is used, so that an array of this size stands out in the program
# No token equals VOCAB, so no row ends early.
ARGUMENTS = dict(max_new_tokens=NEW, max_length=CAPACITY, eos_id=VOCAB, chunk_size=5, prefill_chunk=10)


@pytest.fixture(scope="module")
def model():
    """Two branches are quick to compile. All three write in `test_generate_long` and, ragged, in
    `test_generate_going_back`, window layers in `test_pretrained_nsa`, dense ones in `test_dense_cache`."""
    return randomised(abstract(Transformer, CONFIG), 0.3, seed=4)


@pytest.fixture(scope="module")
def generated(model):
    return generate(model, PROMPTS, lengths=LENGTHS, **ARGUMENTS)


def test_greedy_equals_argmax_of_full_forwards(model, generated):
    """One full forward over the generated text gives, for every position, the token that comes next.

    The model writes as it is prepared, the forward is that of the model itself.
    """
    tokens = np.zeros((3, 27 + NEW), np.int32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = PROMPTS[row, :length]
        tokens[row, length : length + NEW] = generated.tokens[row]
    logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))

    for row, length in enumerate(LENGTHS):
        rows = logits[row, length - 1 : length - 1 + NEW]
        ranked = np.sort(rows, axis=-1)
        # Two forwards differ by rounding alone, so with this margin there is no doubt about the token.
        assert (ranked[:, -1] - ranked[:, -2]).min() > 1e-4 * np.abs(rows).max()
        assert generated.tokens[row].tolist() == rows.argmax(-1).tolist()
    assert generated.lengths.tolist() == [NEW] * 3


def test_stops_where_the_token_came(model, generated):
    """With a generated token as the end token, rows stay the same up to it, in the same program."""
    eos_id = int(generated.tokens[0, 6])
    programs = _run._cache_size()

    stopped = generate(model, PROMPTS, lengths=LENGTHS, pad_id=-1, **(ARGUMENTS | dict(eos_id=eos_id)))

    for row in range(3):
        tokens = generated.tokens[row].tolist()
        expected = tokens[: tokens.index(eos_id) + 1] if eos_id in tokens else tokens
        assert stopped.tokens[row].tolist() == expected + [-1] * (NEW - len(expected))
        assert stopped.lengths[row] == len(expected)
    assert int(stopped.lengths[0]) <= 7
    assert _run._cache_size() == programs


def test_row_is_independent_of_the_others(model, generated):
    """With other neighbours, of other lengths, the row stays the same."""
    prompts, lengths = PROMPTS.copy(), np.array([5, 22, 14])
    prompts[:2] = (prompts[:2] + 5) % VOCAB

    other = generate(model, prompts, lengths=lengths, **ARGUMENTS)

    assert other.tokens[2].tolist() == generated.tokens[2].tolist()
    assert other.tokens[0].tolist() != generated.tokens[0].tolist()


def test_loops_write_the_cache_in_place(model):
    """Outside the entry, which makes the empty cache, only scatters produce an array of its capacity."""
    with mock.patch.object(loop, "_run", wraps=_run) as run:
        generate(model, PROMPTS, lengths=LENGTHS, **ARGUMENTS)
    (arguments, static) = run.call_args
    program = _run.lower(*arguments, **static).compile()  # the one that has run: compiled once

    large = [line for line in loop_bodies(program.as_text()) if f"= f32[3,{CAPACITY}," in line]
    written = [line for line in large if not re.search(r" (get-tuple-element|parameter|bitcast)\(", line)]

    # Keys and values, in prefill and in decoding.
    assert len(written) == 4
    assert all("scatter" in line.split(" = ")[0] for line in written)


def loop_bodies(text):
    """Instructions of a program outside its entry and its fusions, whose inner copies are never stored."""
    inside = False
    for line in text.splitlines():
        if line.endswith("{"):
            inside = not line.startswith("ENTRY") and not re.match(r"%(fused|wrapped)_", line)
        elif inside and " = " in line:
            yield line
