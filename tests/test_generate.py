"""The compiled loop of `generate`, with a model that is simple enough to compute in NumPy, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx
from messages import refused
from token_table import TokenTable

from nsa_jax.generate import Ended, buckets, checks, generate
from nsa_jax.generate.loop import _run, _Sampling
from nsa_jax.generate.structure import split

VOCAB, PAD = 11, 99


class Stub(nnx.Module):
    """Logits depend on every token so far and its place. Logs its traces and how many tokens it writes."""

    def __init__(self):
        self.table = nnx.Param(jax.random.normal(jax.random.key(0), (64, VOCAB)))
        self.log = Log()

    def init_cache(self, batch, max_length):
        self.log.capacities.append(max_length)
        return dict(tokens=jnp.zeros((batch, max_length), jnp.int32), lengths=jnp.zeros(batch, jnp.int32))

    def prefill(self, tokens, cache, num_tokens):
        jax.debug.callback(self.log.prefills.append, num_tokens)
        logits, cache = self._logits(self._write(tokens, cache, num_tokens))
        return jnp.where(
            num_tokens[:, None] > 0, logits, -logits
        ), cache  # without a real token, logits mean nothing

    def decode_step(self, tokens, cache, num_tokens):
        self.log.traces += 1
        jax.debug.callback(self.log.steps.append, num_tokens)
        logits, cache = self._logits(self._write(tokens, cache, num_tokens))
        return logits[:, None], cache

    def _write(self, tokens, cache, num_tokens):
        rows, offset = jnp.arange(len(tokens))[:, None], jnp.arange(tokens.shape[1])
        slot = jnp.where(offset < num_tokens[:, None], cache["lengths"][:, None] + offset, 10**6)
        tokens = cache["tokens"].at[rows, slot].set(tokens, mode="drop")
        return dict(tokens=tokens, lengths=cache["lengths"] + num_tokens)

    def _logits(self, cache):
        place = jnp.arange(1, cache["tokens"].shape[1] + 1)
        held = place <= cache["lengths"][:, None]
        return self.table[jnp.where(held, cache["tokens"] * place, 0).sum(1) % 64], cache


class Log:
    def __init__(self):
        self.traces, self.steps, self.prefills, self.capacities = 0, [], [], []


@pytest.fixture(scope="module")
def shared():
    return Stub()


@pytest.fixture
def model(shared):
    """One model for all tests, so that they share its programs; its log starts empty."""
    shared.log.traces = 0
    for told in (shared.log.steps, shared.log.prefills, shared.log.capacities):
        told.clear()  # emptied, not replaced: compiled programs append to these lists
    return shared


PROMPTS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0], [5, 0, 0, 0, 0]])
LENGTHS = np.array([5, 3, 1])


def greedy(model, count, eos_id=None):
    """The greedy tokens of each row on its own, token by token."""
    table, rows = np.asarray(model.table[...]), []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        tokens = prompt[:length].tolist()
        while len(tokens) < length + count and (len(tokens) == length or tokens[-1] != eos_id):
            state = sum(token * place for place, token in enumerate(tokens, start=1))
            tokens.append(int(np.argmax(table[state % 64])))
        rows.append(tokens[length:])
    return rows


def run(model, **arguments):
    defaults = dict(lengths=LENGTHS, max_new_tokens=10, chunk_size=4, pad_id=PAD)
    out = jax.block_until_ready(generate(model, PROMPTS, **(defaults | arguments)))
    jax.effects_barrier()
    return out


def rows_of(out):
    for tokens, length in zip(np.asarray(out.tokens), out.lengths, strict=True):
        assert (tokens[length:] == PAD).all()
    return [
        tokens[:length].tolist() for tokens, length in zip(np.asarray(out.tokens), out.lengths, strict=True)
    ]


@pytest.mark.parametrize(("chunk_size", "prefill_chunk"), [(4, None), (32, 1), (1, 2)])
def test_greedy_equals_token_by_token(model, chunk_size, prefill_chunk):
    """10 is not a multiple of 4, so the last chunk is cut where the tokens end."""
    out = run(model, chunk_size=chunk_size, prefill_chunk=prefill_chunk)

    assert out.tokens.shape == (3, 10)
    assert rows_of(out) == greedy(model, 10)


def test_rows_stop_at_their_own_end(model):
    endless = greedy(model, 10)
    eos_id = endless[1][2]
    expected = greedy(model, 10, eos_id)
    assert len({len(row) for row in expected}) > 1  # some row ends early, some later

    out = run(model, eos_id=eos_id)

    assert rows_of(out) == expected
    assert [row[-1] == eos_id for row in rows_of(out)] == [
        len(row) < 10 or row[-1] == eos_id for row in expected
    ]


def test_rows_say_why_they_ended(model):
    """Also one whose end token is the last that was asked for; 0 is for rows that could go on."""
    eos_id, count = greedy(model, 10)[1][2], 3
    ends = [row[-1] == eos_id for row in greedy(model, count, eos_id)]
    assert ends == [False, True, False], "choose another seed"

    out = run(model, eos_id=eos_id, max_new_tokens=count)

    assert out.ended.tolist() == [Ended.END_TOKEN if end else Ended.NO for end in ends]
    assert out.check() is out
    assert run(model).ended.tolist() == [Ended.NO] * 3


def spoilt_from(place, model):
    """This model with logits that hold NaN where row 1 draws token number `place`, and nowhere else."""
    model = nnx.clone(model)
    states = []
    for prompt, length, row in zip(PROMPTS, LENGTHS, greedy(model, 10), strict=True):
        text = np.array([*prompt[:length], *row])
        states.append((np.cumsum(text * np.arange(1, len(text) + 1)) % 64)[length - 1 : -1].tolist())
    bad = states[1][place]
    assert bad not in (*states[0], *states[1][:place], *states[2]), "choose another place"
    model.table[...] = model.table[...].at[bad, 3].set(jnp.nan)
    return model


@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_is_not_finite_says_so_and_is_refused_on_request(model, place):
    """Its tokens end before, and then there is nothing but `pad_id`: no token that looks like one."""
    expected = greedy(model, 10)

    out = run(spoilt_from(place, model), pad_id=0)

    assert out.ended.tolist() == [Ended.NO, Ended.NOT_FINITE, Ended.NO]
    assert out.lengths.tolist() == [10, place, 10]
    assert out.tokens.tolist() == [expected[0], expected[1][:place] + [0] * (10 - place), expected[2]]
    with refused(ValueError, r"the logits of all rows must be finite, got NaN or infinity in rows \[1\]\."):
        out.check()


def test_a_result_is_checked_outside_of_jit(model):
    with refused(TypeError, "check must be called on values, got an array that is traced"):
        jax.eval_shape(lambda: generate(model, PROMPTS, max_new_tokens=10).check())


@pytest.fixture(scope="module")
def written():
    """Writes 5 tokens behind prompts that the host does not see, of a model that takes any id."""
    model = TokenTable(VOCAB)
    return jax.jit(lambda prompts: generate(model, prompts, lengths=LENGTHS, max_new_tokens=5, pad_id=PAD))


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_that_the_host_does_not_see_end_their_row(written, bad):
    """Of the model itself they would get tokens. Padding may still be anything."""
    prompts, expected = PROMPTS.copy(), written(PROMPTS)
    prompts[1, 1], prompts[2, 1:] = bad, bad

    out = written(prompts)

    assert out.ended.tolist() == [Ended.NO, Ended.NOT_FINITE, Ended.NO]
    assert out.lengths.tolist() == [5, 0, 5]
    assert out.tokens.tolist() == [expected.tokens[0].tolist(), [PAD] * 5, expected.tokens[2].tolist()]
    with refused(ValueError, r"in rows \[1\]\. Check the model and the ids in these rows"):
        out.check()


def test_finished_row_writes_nothing(model):
    """A row writes all its tokens but the last, which nobody would read, as no token comes after it."""
    eos_id = greedy(model, 10)[1][2]

    lengths = run(model, eos_id=eos_id).lengths

    told = np.stack(model.log.steps)
    assert (told.sum(0) == lengths - 1).all()
    assert (np.diff(told, axis=0) <= 0).all()  # once finished, a row stays finished


@pytest.mark.parametrize(("ends_after", "steps"), [(1, 0), (2, 8)])
def test_the_end_is_asked_for_once_a_chunk(model, ends_after, steps):
    """The first token needs no step. When all rows have ended, the chunk is finished and no other begins."""
    generated = greedy(model, 2)[0]
    assert generated[0] != generated[1]
    same = np.tile(PROMPTS[:1], (3, 1))

    generate(model, same, max_new_tokens=100, chunk_size=8, eos_id=generated[ends_after - 1])
    jax.effects_barrier()

    assert len(model.log.steps) == steps


def test_the_compiler_knows_how_many_steps_a_chunk_has(model):
    """Otherwise a GPU asks the host after each step whether there is another one."""
    arrays = PROMPTS.astype(np.int32), LENGTHS.astype(np.int32), jax.random.split(jax.random.key(0), 3)
    sizes = dict(max_length=15, chunk_size=7, prefill_chunk=5, cache_dtype=None, join=True)
    lowered = _run.lower(*split(model), *arrays, _Sampling(None, None, None), None, PAD, 10, **sizes)

    assert '"known_trip_count":{"n":"7"}' in lowered.compile().as_text()


def test_calls_of_the_same_shapes_compile_once(model):
    model = nnx.clone(model)
    arguments = dict(temperature=0.7, top_k=5, top_p=0.9, eos_id=3, key=1)
    run(model, **arguments)
    traces = model.log.traces

    run(
        model,
        **(arguments | dict(temperature=1.3, top_k=np.int64(2), top_p=1, eos_id=7, key=jax.random.key(5))),
    )
    run(model, **(arguments | dict(lengths=np.array([1, 1, 2]), pad_id=0)))
    model.table[...] *= 2
    run(model, **arguments)

    assert model.log.traces == traces


def test_sizes_of_a_bucket_share_a_program():
    """Prompts of 1 .. 64 tokens are one bucket, so are 1 .. 64 new tokens; the next buckets begin at 65."""
    model = Stub()
    prompts = np.random.default_rng(0).integers(0, VOCAB, (2, 80))

    def traced_by(width, max_new_tokens):
        before = _run._cache_size(), model.log.traces
        out = generate(model, prompts[:, :width], max_new_tokens=max_new_tokens)
        assert out.tokens.shape == (2, max_new_tokens)
        return _run._cache_size() - before[0], model.log.traces > before[1]

    assert traced_by(5, 10) == (1, True)
    assert {traced_by(width, new) for width in (1, 5, 37, 64) for new in (1, 2, 10, 63, 64)} == {(0, False)}
    assert traced_by(65, 10) == (1, True)
    assert traced_by(80, 64) == (0, False)
    assert traced_by(5, 65) == (1, True)
    assert traced_by(64, 80) == (0, False)


def test_an_explicit_capacity_leaves_the_number_of_new_tokens_free():
    model = Stub()
    generate(model, PROMPTS, max_new_tokens=3, max_length=205)
    traces = model.log.traces

    for max_new_tokens in (1, 100, 200):
        generate(model, PROMPTS, max_new_tokens=max_new_tokens, max_length=205)

    assert model.log.traces == traces
    assert set(model.log.capacities) == {205}


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_a_bucket_does_not_change_the_tokens(model, array):
    """They are those of a cache, a prompt and a chunk of exactly the sizes that are needed."""
    arguments = dict(lengths=LENGTHS, max_new_tokens=10, temperature=1.0, pad_id=PAD)

    out = generate(model, array(PROMPTS), chunk_size=4, **arguments)
    exact = generate(model, array(PROMPTS), max_length=15, prefill_chunk=5, chunk_size=9, **arguments)

    assert rows_of(out) == rows_of(exact)


@pytest.mark.parametrize(("longest", "chunks"), [(5, 2), (4, 1), (9, 3)])
def test_prefill_runs_the_chunks_that_the_longest_prompt_needs(model, longest, chunks):
    prompts = np.tile(PROMPTS, (1, 4))

    generate(model, prompts, lengths=np.array([longest, 3, 1]), max_new_tokens=1, prefill_chunk=4)
    jax.effects_barrier()

    assert len(model.log.prefills) == chunks
    assert np.sum(model.log.prefills, axis=0).tolist() == [longest, 3, 1]


@pytest.mark.parametrize("count", [1, 64, 65, 1000, 1024, 1025, 2047, 32768, 33000, 10**6 + 1])
def test_a_bucket_is_at_most_an_eighth_larger(count):
    bucket = buckets.bucketed(count)

    assert count <= bucket < count + max(64, count / 8)
    assert buckets.bucketed(bucket) == bucket
    assert buckets.bucketed(bucket + 1) > bucket


@pytest.mark.parametrize(
    ("batch", "width", "chunk"),
    [(1, 64, 64), (1, 8192, 8192), (1, 9216, 4608), (8, 36864, 1024), (64, 1024, 512)],
)
def test_prompts_are_prefilled_in_equal_chunks(batch, width, chunk):
    assert buckets.default_chunk(batch, width) == chunk


def test_seed_reproduces_and_another_one_differs(model):
    first, again, other = (run(model, temperature=1.0, key=key) for key in (1, jax.random.key(1), 2))

    assert rows_of(first) == rows_of(again)
    assert rows_of(first) != rows_of(other)


def test_row_is_independent_of_the_others(model):
    """With its own key a row comes out the same in another place, beside other rows or alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = rows_of(run(model, temperature=1.0, key=keys))

    order, options = np.array([2, 0, 2]), dict(max_new_tokens=10, temperature=1.0, pad_id=PAD)
    moved = generate(
        model, PROMPTS[order], lengths=LENGTHS[order], chunk_size=4, key=keys[order], **options
    )  # fmt: skip
    alone = generate(model, PROMPTS[1:2, :3], key=keys[1:2], **options)

    assert rows_of(moved) == [rows[row] for row in order]
    assert rows_of(alone) == [rows[1]]


def test_equal_prompts_draw_differently(model):
    out = generate(model, np.tile(PROMPTS[:1], (3, 1)), max_new_tokens=20, temperature=1.0, chunk_size=4)

    assert len({tuple(row) for row in out.tokens.tolist()}) == 3


def test_each_step_draws_anew():
    """All logits are equal, so only the key of a step makes its token differ from the others."""
    model = Stub()
    model.table[...] *= 0

    tokens = np.asarray(generate(model, PROMPTS, max_new_tokens=200, temperature=1.0).tokens)

    assert scipy.stats.chisquare(np.bincount(tokens.ravel(), minlength=VOCAB)).pvalue > 1e-4
    pairs = np.bincount((tokens[:, 1:] * VOCAB + tokens[:, :-1]).ravel(), minlength=VOCAB**2)
    assert scipy.stats.chisquare(pairs).pvalue > 1e-4


def test_top_k_of_one_is_greedy(model):
    options = dict(temperature=5.0, eos_id=PAD)  # which never comes: this is a program of a test above
    assert rows_of(run(model, **options, top_k=1, top_p=1)) == greedy(model, 10)
    assert rows_of(run(model, **options, top_k=VOCAB, top_p=1e-6)) == greedy(model, 10)


def test_counts_may_be_numpy_integers(model):
    assert rows_of(run(model, max_new_tokens=np.int64(10))) == greedy(model, 10)


def test_runs_inside_jit(model):
    out = jax.jit(lambda prompts, lengths: generate(model, prompts, lengths=lengths, max_new_tokens=10))(
        PROMPTS, LENGTHS
    )

    assert out.tokens.tolist() == greedy(model, 10)
    assert out.check().ended.tolist() == [Ended.NO] * 3


BAD = {
    "empty prompt": (dict(prompts=PROMPTS[:, :0]), "a prompt must have at least one token"),
    "no prompt": (dict(prompts=PROMPTS[:0], lengths=None), "a prompt must have at least one token"),
    "length": (dict(lengths=np.array([6, 3, 1])), r"within 1 \.\. 5, .* got \[6, 3, 1\]"),
    "long prompt": (dict(max_length=4), "a prompt must fit the cache, got 5 tokens and"),
    "small cache": (dict(max_length=14), r"prompt and new tokens must fit the cache, got 5 \+ 10 tok"),
    "top_k when greedy": (dict(top_k=3), "above 0, got temperature=0.0, top_k=3 and top_p=None"),
    "top_p when greedy": (dict(top_p=0.9), "above 0, got temperature=0.0, top_k=None and top_p=0.9"),
    "small pad": (dict(pad_id=-(2**31) - 1), "pad_id must be at least -2147483648, got"),
    "small key": (dict(key=-(2**63) - 1), f"key must be at least {-(2**63)}, got"),
    "more than a cache": (dict(max_new_tokens=2**30), "max_new_tokens must be at most 536870912"),
}


def renamed(self, tokens, cache, counts):
    raise AssertionError("it must not be called")


@pytest.mark.parametrize("method", ["prefill", "decode_step"])
def test_a_decoder_with_another_name_for_num_tokens_is_refused(method):
    decoder = type("Renamed", (Stub,), {method: renamed})()

    with refused(TypeError, rf"got Renamed\.{method}\(tokens, cache, counts\)\. Name the arg"):
        generate(decoder, PROMPTS, max_new_tokens=3)


def test_a_decoder_may_take_num_tokens_among_any_keywords(model):
    class Wrapped(Stub):
        def decode_step(self, *tokens_and_cache, **others):
            return super().decode_step(*tokens_and_cache, **others)

    assert rows_of(run(Wrapped())) == greedy(model, 10)


def test_the_smallest_and_the_largest_ids_and_seeds_are_accepted():
    checks.check_tokens(eos_id=2**31 - 1, pad_id=-(2**31))
    checks.check_tokens(eos_id=0, pad_id=2**31 - 1)

    for seed in (-(2**63), 2**63 - 1):
        assert checks.check_key(seed, batch=1).shape == (1,)


def test_a_decoder_is_a_module_with_its_methods():
    with refused(TypeError, "got Dict without init_cache, prefill, decode_step"):
        generate(nnx.Dict(), PROMPTS, max_new_tokens=3)
    with refused(TypeError, "model must be an nnx.Module, got .*Make it one, and pass an instance"):
        generate(Stub, PROMPTS, max_new_tokens=3)


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_runs(model, changes, message):
    arguments = dict(model=model, prompts=PROMPTS, lengths=LENGTHS, max_new_tokens=10) | changes
    with refused(ValueError, message):
        generate(**arguments)

    assert not model.log.traces


def test_a_cache_that_just_fits_is_enough(model):
    assert rows_of(run(model, max_length=15)) == greedy(model, 10)
