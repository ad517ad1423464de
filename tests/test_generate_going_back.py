"""Sessions that went back write what sessions write that never were further."""

import jax
import jax.numpy as jnp
import numpy as np
from cache_layer import SMALL
from flax import nnx
from messages import refused
from modules import abstract, randomised
from test_generate import Stub
from token_table import TokenTable

from nsa_jax.cache import rewind as rewind_cache
from nsa_jax.generate import (
    DraftModel,
    Ended,
    advance,
    checkpoint,
    extend,
    gather,
    rewind,
    rewind_to,
    start,
)  # fmt: skip
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import NSAAttention

VOCAB, ROOM, ROWS = 17, 90, 8
RNG = np.random.default_rng(0)
PROMPTS, LENGTHS = RNG.integers(0, 11, (ROWS, 27)), np.arange(27, 27 - ROWS, -1)
TURN = RNG.integers(0, 11, (ROWS, 9))
BACK = np.arange(ROWS)  # 0 .. 7 tokens: with blocks of 4, the way of most rows is over the end of one
TABLE = TokenTable(VOCAB)
# Sessions with these options, or other values of them, share their programs.
ENDLESS = dict(repetition_penalty=1.0, stop=[[99] * 3])  # which is never written
DRAFTED = dict(temperature=np.zeros(ROWS), presence_penalty=np.zeros(ROWS), eos_id=99)


def begun(model, **options):
    return start(model, PROMPTS, max_length=ROOM, **(dict(lengths=LENGTHS, key=3) | options))


def texts_of(state):
    tokens = np.asarray(state.rows.history)
    return [row[:length].tolist() for row, length in zip(tokens, state.lengths.tolist(), strict=True)]


def test_layers_attend_as_if_they_had_never_been_further():
    """Rings of the window branch, of tokens that await compression, and of a window layer."""
    config = TransformerConfig(
        vocab_size=VOCAB, num_layers=2, model_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=16, nsa=SMALL,
        attention=("nsa", "window"), dtype="float64", param_dtype="float64",
    )  # fmt: skip

    with jax.enable_x64(True):
        model = randomised(abstract(Transformer, config, implementation="xla"), 0.5, seed=4)
        forward = nnx.jit(lambda model, text: model(text))
        state, new = advance(begun(model), 20)
        past = checkpoint(state)
        texts = [text[: len(text) - back] for text, back in zip(texts_of(state), BACK, strict=True)]

        state = rewind(state, BACK)
        assert texts_of(state) == texts
        state, again = advance(state, 8)  # greedy, so those that were taken back come again
        for back, tokens, those in zip(BACK, new.tokens.tolist(), again.tokens.tolist(), strict=True):
            assert those[:back] == tokens[20 - back :]

        state = extend(rewind_to(state, past), TURN)  # rows are longer now, or shorter, than they were
        state = extend(rewind(state, np.minimum(BACK, 6)), TURN)

        texts, padded = texts_of(state), np.zeros((ROWS, ROOM), np.int32)
        for row, text in enumerate(texts):
            assert text[-9:] == TURN[row].tolist()
            padded[row, : len(text)] = text
        expected = np.asarray(forward(model, padded))[np.arange(ROWS), [len(text) - 1 for text in texts]]
        np.testing.assert_allclose(state.rows.logits, expected, rtol=1e-9, atol=1e-11)


def test_a_prompt_is_taken_back_by_six_tokens():
    """Its newest token is read again, by the step that goes on from there."""
    back = np.minimum(BACK, 6)
    _, new = advance(rewind(begun(TABLE, **ENDLESS), back), 12)

    _, want = advance(begun(TABLE, lengths=LENGTHS - back, **ENDLESS), 12)
    assert new.tokens.tolist() == want.tokens.tolist()


def test_ends_and_penalties_are_those_of_what_is_left():
    """A row that a sequence ended goes on, and ends again where the sequence does, half of which is left."""
    options = ENDLESS | dict(repetition_penalty=1.3)
    _, new = advance(begun(TABLE, **options), 12)
    ends = new.tokens[0, 4:7].tolist()
    options |= dict(stop=[ends])
    state, first = advance(begun(TABLE, **options), 12)
    assert (first.ended[0], first.lengths[0]) == (Ended.STOP, 7)
    assert (first.ended[1:] == Ended.NO).all()

    _, again = advance(rewind(state, np.where(BACK == 0, 2, BACK)), 12)

    assert (again.ended[0], again.tokens[0, :2].tolist()) == (Ended.STOP, ends[1:])
    for back in BACK[1:]:
        assert again.tokens[back, :back].tolist() == first.tokens[back, 12 - back :].tolist()


def test_a_session_with_drafts_goes_back():
    state, new = advance(begun(TABLE, drafts=DraftModel(TABLE, 7), **DRAFTED), 20)

    _, more = advance(rewind(state, 5), 10)

    assert more.tokens[:, :5].tolist() == new.tokens[:, 15:].tolist()
    assert int(more.steps) == 2  # the drafts agree, so their cache went back, too


def test_a_checkpoint_brings_everything_back():
    """Keys and counters, too, so that draws are the same; going there does not use it up."""
    options = DRAFTED | dict(temperature=np.full(ROWS, 1.2), presence_penalty=np.full(ROWS, 0.3))
    options |= dict(drafts=DraftModel(TokenTable(VOCAB, seed=1), 7))
    state, _ = advance(begun(TABLE, **options), 5)
    past = checkpoint(state)
    assert past.row_bytes < state.row_bytes
    state, first = advance(extend(state, TURN), 30)

    for _ in range(2):
        state = rewind_to(state, past)
        assert state.lengths.tolist() == (LENGTHS + 5).tolist()
        state, again = advance(extend(state, TURN), 30)
        assert again.tokens.tolist() == first.tokens.tolist()


def test_the_way_back_counts_from_where_a_row_was_longest():
    """Its rings have lost what came before: behind another way back, a turn, and drafts that were refused."""
    state, _ = advance(begun(TABLE, **ENDLESS), 20)
    state = rewind(state, 5)
    assert rewind(gather(state, np.arange(ROWS)), 2).lengths.tolist() == (LENGTHS + 13).tolist()
    with refused(ValueError, r"at most \[2, 2, .*\], got \[3, 3,"):
        rewind(state, 3)
    state = extend(state, TURN[:, :3])
    with refused(ValueError, r"at most \[5, 5, .*\], got \[6, 6,"):  # its cache had one token more
        rewind(state, 6)

    _, new = advance(begun(TABLE, **ENDLESS), 4)
    options = DRAFTED | dict(eos_id=int(new.tokens[0, 3]))
    drafted = begun(TABLE, drafts=DraftModel(TABLE, 7), **options)
    state, new = advance(drafted, 12)
    assert (new.ended[0], new.lengths[0], new.steps) == (Ended.END_TOKEN, 4, 2)
    with refused(
        ValueError, r"at most \[2, .*\], got \[3, 0, "
    ):  # its cache had 8 tokens, of which it kept 3
        rewind(state, np.where(BACK == 0, 3, 0))


def test_what_cannot_go_back_is_refused():
    state = begun(TABLE, **ENDLESS)
    with refused(ValueError, r"num_tokens must be at least 0 and at most \[6, 6, .*\], got \[7, 7,"):
        rewind(state, 7)
    with refused(ValueError, "num_tokens must be at least 0"):
        rewind(state, -1)
    with refused(ValueError, "num_tokens must be at most 7"):
        rewind(state, 8)
    with refused(ValueError, r"num_tokens must be one number, or one for each row, got .*\(2,\) and batch=8"):
        rewind(state, np.array([1, 2]))
    with refused(TypeError, "num_tokens must be an int"):
        rewind(state, 1.5)
    past = checkpoint(state)
    with refused(TypeError, "past must be a Checkpoint, got Session"):
        rewind_to(state, state)
    for other in (gather(state, np.array([0])), begun(TABLE)):
        with refused(ValueError, "past must be of this session, got one of another number of rows"):
            rewind_to(other, past)
    moved = gather(state, np.array([1, 0, 2, 3, 4, 5, 6, 7]))
    with refused(ValueError, r"begin with the tokens of the checkpoint, got other ones in rows \[0, 1\]"):
        rewind_to(moved, past)
    with refused(ValueError, "must begin with the tokens of the checkpoint"):
        rewind_to(rewind(state, 1), past)
    with refused(TypeError, "caches of a model must be made of NSACache and DenseCache to go back"):
        rewind(start(Stub(), PROMPTS, lengths=LENGTHS, max_length=ROOM), 1)


def test_inside_jit_a_row_that_cannot_go_back_stays():
    after = jax.jit(lambda state: rewind(state, BACK))(begun(TABLE, **ENDLESS))

    assert after.lengths.tolist() == np.where(BACK == 7, LENGTHS, LENGTHS - BACK).tolist()


def test_a_cache_is_rewound_only_by_what_it_has():
    layer = abstract(NSAAttention, 4, 16, num_kv_heads=2, config=SMALL)
    cache = layer.init_cache(2, 30)._replace(lengths=jnp.array([5, 2]))

    assert rewind_cache(cache, jnp.array([3, 2])).lengths.tolist() == [2, 0]
    with refused(ValueError, r"at most what the row has, got \[3, 3\] for rows of \[5, 2\] tokens"):
        rewind_cache(cache, np.array([3, 3]))
    with refused(ValueError, "num_tokens"):
        rewind_cache(cache, np.array([3]))
    with refused(TypeError, "cache must be an NSACache or a DenseCache, got tuple"):
        rewind_cache((cache,), np.array([3, 2]))
    with refused(TypeError, "num_tokens"):
        rewind_cache(cache, np.array([1.0, 2.0]))
