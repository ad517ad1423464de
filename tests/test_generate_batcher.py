"""A `Batcher` writes for each of many requests what `generate` writes for it alone."""

import asyncio
import functools
import gc
import itertools
import queue
import signal
import threading

import garbage
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_layer import SMALL
from messages import has_form, refused
from modules import abstract, randomised
from test_generate import VOCAB, Stub
from test_generate_options import constrained, even, written
from test_generate_stream import Letters

from nsa_jax.generate import Batcher, Ended, batching, buckets, generate
from nsa_jax.generate.parameters import NEUTRAL
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn import IndexerConfig

ROOM = 70  # prompts of up to 64 tokens share a program, and longer ones share another
HOT = dict(temperature=1.5, top_k=6)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, count).tolist() for count in (5, 20, 1, 33, 12, 2, 27, 9)]


@functools.cache
def one_stub():
    """One model for all tests of batchers, so that they share its programs."""
    return Stub()


@pytest.fixture
def stub():
    return one_stub()


def made(model, **settings):
    """A batcher. Those of one model share their programs."""
    settings = dict(max_length=ROOM, sampling=tuple(NEUTRAL), chunk_size=4) | settings
    return Batcher(model, 3, **settings)


@pytest.fixture
def batcher(stub):
    return made(stub)


def alone(model, prompt, count, **options):
    """The tokens of `generate` for one prompt."""
    new = generate(model, np.array(prompt)[None], max_new_tokens=count, max_length=ROOM, **options)
    return np.asarray(new.tokens)[0, : int(new.lengths[0])].tolist()


def told(request):
    return list(itertools.chain.from_iterable(piece.tokens for piece in request))


def finished(batcher):
    """Whether the batcher is as it was: all slots are free, and nothing is on its way."""
    while batcher.step():
        pass
    return not (batcher.running or batcher.waiting or batcher._in_flight or any(batcher._slots))


@pytest.fixture(scope="module")
def exact():
    """A model in float64, and a batcher for it, which its tests share. One branch is quick to compile."""
    config = TransformerConfig(
        vocab_size=VOCAB, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=16, nsa=SMALL,
        branches=("slc",), selector=IndexerConfig(dim=4), dtype="float64", param_dtype="float64",
    )  # fmt: skip
    with jax.enable_x64(True):
        model = randomised(abstract(Transformer, config, implementation="xla"), 0.5, seed=4)
        return model, made(model, sampling=("temperature", "top_k"), logprobs=0)


def in_any_order(model, batcher, rng, total):
    """Submits and cancels requests when chance has it. Checks their texts, and says why they ended."""
    going, done = [], []
    while len(done) < total:
        if len(going) < 14 and len(going) + len(done) < total:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
            options = HOT | dict(key=int(rng.integers(9)), eos_id=int(rng.integers(VOCAB)))
            count = int(rng.choice([1, 2, 9, 16]))
            going.append((batcher.submit(prompt, max_new_tokens=count, **options), count, options))
        if rng.random() < 0.6:
            batcher.step()
        if rng.random() < 0.1:
            going[rng.integers(len(going))][0].cancel()
        done += [each for each in going if each[0].ended]
        going = [each for each in going if not each[0].ended]

    assert finished(batcher)
    for request, count, options in done:
        expected = alone(model, request.asked.prompt, count, **options)
        if request.ended == Ended.CANCELLED:
            expected = expected[: len(request.tokens)]
        assert told(request) == request.tokens == expected
        assert request.ended != Ended.END_TOKEN or expected[-1] == options["eos_id"]
    return [request.ended for request, _, _ in done]


def live_bytes():
    """The size of all arrays that anything holds."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@garbage.of_this_test()
def test_requests_that_come_go_and_are_cancelled_write_what_generate_writes(exact):
    """200 in four rounds. After each all slots are free, and after the first no more memory is held."""
    (model, batcher), rng, reasons, held = exact, np.random.default_rng(1), [], []
    with jax.enable_x64(True):
        for _ in range(4):
            reasons += in_any_order(model, batcher, rng, 50)
            held.append(live_bytes())

    assert held == held[:1] * 4
    assert len(reasons) == 200
    assert min(map(reasons.count, (Ended.END_TOKEN, Ended.ENOUGH, Ended.CANCELLED))) >= 15


def test_a_text_does_not_depend_on_other_slots(exact):
    """Through the same compiled step, not even in the last bit of its log-probabilities."""
    _, batcher = exact

    def written(others):
        for prompt in others:
            batcher.submit(prompt, max_new_tokens=25, temperature=2.0)
        for _ in others:
            batcher.step()
        request = batcher.submit(PROMPTS[1], max_new_tokens=20, temperature=0.8, key=5)
        return [x for piece in request for x in zip(piece.tokens, piece.logprobs.chosen, strict=True)]

    with jax.enable_x64(True):
        by_itself = written([])
        assert len(by_itself) == 20
        assert written([PROMPTS[3], PROMPTS[0]]) == by_itself
        assert finished(batcher)


def test_each_request_has_its_own_options(stub, batcher):
    each = [
        dict(temperature=2.0, top_p=0.7, key=3),
        dict(temperature=1.0, min_p=0.2, key=jax.random.key(4)),
        dict(repetition_penalty=1.5, presence_penalty=1.0),
        dict(temperature=3.0, top_k=4, repetition_penalty=0.8),
        dict(),
    ]
    requests = [
        batcher.submit(prompt, max_new_tokens=15, **x) for prompt, x in zip(PROMPTS, each, strict=False)
    ]

    for request, prompt, options in zip(requests, PROMPTS, each, strict=False):
        assert told(request) == written(stub, prompt, 15, request.asked.key[0], options)
    assert finished(batcher)


def test_a_prefix_is_read_once(stub, batcher):
    """Texts behind it are those of whole prompts."""
    options = dict(temperature=1.5, repetition_penalty=1.3, key=2)
    prefix = batcher.read_prefix(PROMPTS[1])
    stub.log.prefills.clear()
    requests = [batcher.submit(prompt, prefix=prefix, max_new_tokens=9, **options) for prompt in PROMPTS[2:7]]

    for request, prompt in zip(requests, PROMPTS[2:7], strict=True):
        assert told(request) == written(stub, PROMPTS[1] + prompt, 9, request.asked.key[0], options)
    jax.effects_barrier()
    assert [int(counts[0]) for counts in stub.log.prefills] == [len(prompt) for prompt in PROMPTS[2:7]]
    with refused(ValueError, "must fit the cache, got 60 [+] 11 tokens and max_length=70"):
        batcher.submit([1] * 40, prefix=prefix, max_new_tokens=11)
    with refused(TypeError, "prefix must be a Prefix, got list"):
        batcher.submit([1], prefix=[2], max_new_tokens=11)
    with refused(ValueError, "prefix must be of this Batcher, got one of another"):
        made(stub).submit([1], prefix=prefix, max_new_tokens=11)
    assert finished(batcher)


def test_requests_end_with_an_end_token_or_a_stop_sequence(stub, batcher):
    free = alone(stub, PROMPTS[0], 30)
    ends = {
        "end token": (dict(eos_id=[99, free[9]]), free.index(free[9]) + 1, Ended.END_TOKEN),
        "stop": (dict(stop=[free[5:12], [99], free[2:14]]), 12, Ended.STOP),
        "both": (dict(stop=[free[:4], free[3:4]], eos_id=free[3]), free.index(free[3]) + 1, Ended.END_TOKEN),
        "neither": (dict(stop=[[99]], eos_id=98), 30, Ended.ENOUGH),
    }
    requests = [batcher.submit(PROMPTS[0], max_new_tokens=30, **x) for x, _, _ in ends.values()]

    for request, (_, length, why) in zip(requests, ends.values(), strict=True):
        assert told(request) == free[:length]
        assert request.ended == why
    assert finished(batcher)


def test_requests_enter_in_the_order_in_which_they_came(batcher, monkeypatch):
    """Short ones together, a long one alone, with a chunk of steps behind them. None overtakes another."""
    monkeypatch.setattr(batching.buckets, "PREFILL_TOKENS", 25)
    rounds, read = [], batching.Batcher._enter

    def noted(self, request, slot):
        rounds.append((self._round, len(request.asked.prompt)))
        read(self, request, slot)

    monkeypatch.setattr(batching.Batcher, "_enter", noted)
    for prompt in PROMPTS:
        batcher.submit(prompt, max_new_tokens=1)

    assert finished(batcher)

    groups = [[length for _, length in group] for _, group in itertools.groupby(rounds, lambda x: x[0])]
    assert groups == [[5, 20], [1], [33], [12, 2], [27], [9]]


def test_a_full_queue_refuses_and_disturbs_nothing(stub):
    batcher = made(stub, max_waiting=1)
    requests = [batcher.submit(prompt, max_new_tokens=25) for prompt in PROMPTS[:4]]

    for _ in range(3):
        with pytest.raises(queue.Full, match="got 1 requests that wait for a slot and max_wait") as error:
            batcher.submit(PROMPTS[4], max_new_tokens=25)
        assert has_form(str(error.value))
        batcher.step()  # all slots are taken now
    requests[3].cancel()
    requests[3] = batcher.submit(PROMPTS[3], max_new_tokens=25)

    for request, prompt in zip(requests, PROMPTS, strict=False):
        assert told(request) == alone(stub, prompt, 25)
    assert finished(batcher)


def test_a_request_is_cancelled_while_it_waits_and_while_it_is_written(stub, batcher):
    requests = [batcher.submit(prompt, max_new_tokens=25) for prompt in PROMPTS[:6]]
    waits, runs = requests[4], requests[1]
    waits.cancel()
    assert batcher.waiting == 5
    first = next(runs).tokens
    batcher.step()
    runs.cancel()

    assert first + told(runs) == alone(stub, PROMPTS[1], 25)[: len(runs.tokens)]
    assert told(waits) == []
    assert (waits.ended, runs.ended) == (Ended.CANCELLED, Ended.CANCELLED)
    for number in (0, 2, 3, 5):
        assert told(requests[number]) == alone(stub, PROMPTS[number], 25)
    assert len(runs.tokens) < 25
    assert finished(batcher)


def test_the_place_of_a_cancelled_request_is_free_after_the_chunk_on_its_way(stub, batcher):
    requests = [batcher.submit(prompt, max_new_tokens=25) for prompt in PROMPTS[:4]]
    next(requests[0])

    requests[0].cancel()
    told_before = [len(x.tokens) for x in requests]
    while not requests[3].tokens:
        batcher.step()

    assert max(len(x.tokens) - n for x, n in zip(requests[1:3], told_before[1:3], strict=True)) <= 1 + 4
    assert finished(batcher)


BAD = {
    "long": (dict(prompt=[1] * 60, max_new_tokens=11), "must fit the cache, got 60 [+] 11 tokens and max_le"),
    "longer": (dict(prompt=[1] * 71), "a prompt must fit the cache, got 71 tokens and max_length=70"),
    "id": (dict(prompt=[1, VOCAB]), r"prompt must be within 0 \.\. 10, got values from 1 to 11"),
    "negative": (dict(prompt=[1, -1]), r"prompt must be within 0 \.\. 10, got values from -1 to 1"),
    "empty": (dict(prompt=[]), r"prompt must be \[P\] with P at least 1, got shape \(0,\)"),
    "batch": (dict(prompt=np.ones((1, 2), int)), r"prompt must be \[P\] with P at least 1, got shape \(1, 2"),
    "ragged": (dict(prompt=[[1], [1, 2]]), "prompt must be one sequence of ids"),
    "count": (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    "greedy": (dict(top_k=3), "top_k must come with a temperature above 0"),
    "sampling": (dict(temperature=1.0, min_p=0.1), "must have all that a request uses, got .* with min_p"),
    "stop": (dict(stop=[[]]), "stop must have no empty sequence"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_written_is_refused_at_once(stub, bad, message):
    stub.vocab_size = VOCAB
    try:
        batcher = made(stub, sampling=("temperature", "top_k"))
    finally:
        del stub.vocab_size
    with refused(ValueError, message):
        batcher.submit(**(dict(prompt=[1], max_new_tokens=5) | bad))
    assert not batcher.step()


BAD_KINDS = {
    "text": (dict(prompt="hello"), "prompt must be token ids, got str"),
    "floats": (dict(prompt=[1.0]), "prompt must be an integer array, got float"),
    "key": (dict(key=1.5), "key must be an int or typed keys, got float"),
    "raw key": (dict(key=jax.random.PRNGKey(1)), "key must be an int or typed keys, got ArrayImpl"),
    "eos_id": (dict(eos_id=1.5), "eos_id must be an int, got float"),
    "temperature": (dict(temperature="1"), "temperature must be a number"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_KINDS.values(), ids=BAD_KINDS.keys())
def test_what_is_of_another_kind_is_refused_at_once(batcher, bad, message):
    with refused(TypeError, message):
        batcher.submit(**(dict(prompt=[1], max_new_tokens=5) | bad))
    assert not batcher.step()


BAD_BATCHERS = {
    "slots": (dict(slots=0), ValueError, "slots must be at least 1, got 0"),
    "waiting": (dict(max_waiting=-1), ValueError, "max_waiting must be at least 0, got -1"),
    "room": (dict(max_length=0), ValueError, "max_length must be at least 1, got 0"),
    "chunk": (dict(chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
    "name": (dict(sampling=("heat",)), ValueError, "sampling must be one of .*, got 'heat'"),
    "no temperature": (
        dict(sampling=("top_k",)),
        ValueError,
        "must have 'temperature' beside top_k, top_p or",
    ),
    "names": (dict(sampling="temperature"), TypeError, "sampling must be a sequence of names, got str"),
    "tokenizer": (dict(tokenizer="gpt2"), TypeError, "tokenizer must have a method decode"),
    "model": (dict(model=3), TypeError, "model must have the methods of Decoder"),
}


@pytest.mark.parametrize(("bad", "kind", "message"), BAD_BATCHERS.values(), ids=BAD_BATCHERS.keys())
def test_a_batcher_that_cannot_be_is_refused(stub, bad, kind, message):
    with refused(kind, message):
        Batcher(**(dict(model=stub, slots=2, max_length=ROOM) | bad))


def test_a_row_that_is_not_finite_ends_alone(stub, batcher):
    texts = [alone(stub, prompt, 20) for prompt in PROMPTS[:5]]

    def states(prompt, text):
        whole = np.array([*prompt, *text])
        sums = np.cumsum(whole * np.arange(1, len(whole) + 1)) % 64
        return sums[len(prompt) - 1 : -1].tolist()  # what each new token is drawn from

    seen = [states(prompt, text) for prompt, text in zip(PROMPTS, texts, strict=False)]
    place, bad = next(
        (place, x)
        for place, x in enumerate(seen[1])
        if place > 2 and all(x not in seen[n] for n in (0, 2, 3, 4))
    )
    table = stub.table[...]
    stub.table[...] = table.at[bad, 3].set(jnp.nan)
    try:
        batcher = made(stub)
    finally:
        stub.table[...] = table
    requests = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS[:5]]

    texts[1] = texts[1][:place]
    assert [told(request) for request in requests] == texts
    assert [x.ended for x in requests if x.ended != Ended.ENOUGH] == [Ended.NOT_FINITE]
    assert finished(batcher)


def test_a_prompt_that_cannot_be_read_fails_alone(stub, batcher, monkeypatch):
    read = batching.appended

    def fails(session, tokens, counts, *sizes, **options):
        if counts == [len(PROMPTS[1])]:
            raise MemoryError("no room")
        return read(session, tokens, counts, *sizes, **options)

    monkeypatch.setattr(batching, "appended", fails)
    requests = [batcher.submit(prompt, max_new_tokens=9) for prompt in PROMPTS]

    for request, prompt in zip(requests, PROMPTS, strict=True):
        if request is not requests[1]:
            assert told(request) == alone(stub, prompt, 9)
    with pytest.raises(MemoryError, match="no room"):
        next(requests[1])
    assert finished(batcher)


def test_a_device_that_fails_ends_what_it_was_writing_and_nothing_else(stub, batcher, monkeypatch):
    requests = [batcher.submit(prompt, max_new_tokens=9) for prompt in PROMPTS]
    batcher.step()

    def fails(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(batching.jax, "device_get", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
            batcher.step()

    failed = [request for request in requests if request.error is not None]
    assert failed
    assert all(request.ended == Ended.CANCELLED for request in failed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        told(failed[0])
    later = batcher.submit(PROMPTS[0], max_new_tokens=9)
    assert finished(batcher)
    assert batcher.running == 0
    assert told(later) == alone(stub, PROMPTS[0], 9)


def test_a_tokenizer_that_fails_disturbs_no_other_request(stub):
    class Fails(Letters):
        def decode(self, ids):
            if 9 in ids:
                raise KeyError("9")
            return super().decode(ids)

    batcher, texts = made(stub, tokenizer=Fails()), [alone(stub, prompt, 9) for prompt in PROMPTS]
    requests = [batcher.submit(prompt, max_new_tokens=9) for prompt in PROMPTS]

    assert finished(batcher)

    failed = [9 in text for text in texts]
    assert 0 < sum(failed) < len(texts)
    assert [isinstance(request.error, KeyError) for request in requests] == failed
    whole = [request.tokens for request in requests if request.error is None]
    assert whole == [text for text in texts if 9 not in text]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_takes_effect_between_chunks(stub, batcher, monkeypatch):
    """It comes at the worst time: arrays were donated, and what takes their place was not yet stored."""
    ask, calls = batching.dispatch_chunk, itertools.count()

    def interrupted(*given):
        given = ask(*given)
        if next(calls) % 2:
            signal.raise_signal(signal.SIGINT)
        return given

    monkeypatch.setattr(batching, "dispatch_chunk", interrupted)
    requests, interrupts = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS], 0
    while any(not request.ended for request in requests):
        try:
            batcher.step()
        except KeyboardInterrupt:
            interrupts += 1

    assert interrupts > 8
    assert [told(request) for request in requests] == [alone(stub, prompt, 20) for prompt in PROMPTS]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert finished(batcher)


def test_threads_may_wait_for_requests_of_their_own(stub, batcher):
    requests = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
    found = [[] for _ in requests]
    threads = [
        threading.Thread(target=lambda x=x, out=out: out.extend(told(x)))
        for x, out in zip(requests, found, strict=True)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert found == [alone(stub, prompt, 20) for prompt in PROMPTS]
    assert finished(batcher)


def test_tasks_share_the_steps_and_one_that_leaves_is_cancelled(stub, batcher):
    steps = itertools.count()
    batcher_step = batcher.step
    batcher.step = lambda: next(steps) >= 0 and batcher_step()

    async def take(request, most):
        found = []
        async for piece in request:
            found += piece.tokens
            if len(found) >= most:
                break
        return found

    async def main():
        requests = [batcher.submit(prompt, max_new_tokens=20) for prompt in PROMPTS]
        gone = asyncio.create_task(take(requests[7], 20))
        tasks = [take(request, 3 if request is requests[2] else 20) for request in requests[:7]]
        await asyncio.sleep(0.01)
        gone.cancel()
        found = await asyncio.gather(*tasks)
        with pytest.raises(asyncio.CancelledError):
            await gone
        await asyncio.sleep(0.01)
        return requests, found

    requests, found = asyncio.run(main())

    assert found[2] == alone(stub, PROMPTS[2], 20)[: len(found[2])]
    assert (requests[2].ended, requests[7].ended) == (Ended.CANCELLED, Ended.CANCELLED)
    for number in (0, 1, 3, 4, 5, 6):
        assert found[number] == alone(stub, PROMPTS[number], 20)
    assert next(steps) < 40
    assert finished(batcher)


def test_event_loops_do_not_share_a_step(stub, batcher):
    other = asyncio.new_event_loop()
    batcher._shared_step = other.create_future()  # as while a step of that loop runs

    async def waits():
        return [
            token async for piece in batcher.submit(PROMPTS[2], max_new_tokens=9) for token in piece.tokens
        ]

    assert asyncio.run(waits()) == alone(stub, PROMPTS[2], 9)
    other.close()


def test_new_widths_and_options_compile_nothing_within_a_bucket(caplog):
    batcher = made(Stub(), sampling=("temperature", "top_p"))  # of which nothing is compiled

    def compiled(lengths):
        """The programs that JAX compiles while prompts of these lengths are written."""
        caplog.clear()
        with jax.log_compiles(True):
            for number, length in enumerate(lengths):
                hot = dict(temperature=1.0 + number, top_p=0.9, key=number, eos_id=[1] * number, stop=[[2]])
                more = {} if number % 2 == 0 else hot
                batcher.submit([1] * length, max_new_tokens=1 + number, **more)
            assert finished(batcher)
        return [told for told in caplog.messages if "ompiling" in told]

    assert compiled([64, 65])
    assert compiled([1, 66, 2, 17, 63, 33, 50, 40]) == []


def test_prompts_longer_than_a_chunk_share_a_program(stub, caplog):
    batcher = made(stub, prefill_chunk=16)
    prefix = batcher.read_prefix([2, 3])
    with jax.log_compiles(True):
        written = [told(batcher.submit([1] * 17, max_new_tokens=3, prefix=x)) for x in (None, prefix)]
        caplog.clear()
        written += [told(batcher.submit([1] * length, max_new_tokens=3)) for length in (65, 32, 50)]
        written += [
            told(batcher.submit([1] * length, max_new_tokens=3, prefix=prefix)) for length in (40, 60)
        ]

    assert [told for told in caplog.messages if "ompiling" in told] == []
    prompts = (
        [1] * 17,
        [2, 3] + [1] * 17,
        *([1] * n for n in (65, 32, 50)),
        *([2, 3] + [1] * n for n in (40, 60)),
    )
    assert written == [alone(stub, prompt, 3) for prompt in prompts]


def test_a_hook_constrains_all_requests(stub):
    """More than there are slots, so that slots are used again, and each counts its own tokens."""
    batcher = made(stub, sampling=(), logits_hook=even)
    asked = [batcher.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:4]]
    expected = [constrained(stub, prompt, 6) for prompt in PROMPTS[:4]]

    assert [told(request) for request in asked] == expected
    assert expected != [alone(stub, prompt, 6) for prompt in PROMPTS[:4]]
    with refused(TypeError, "logits_hook must be a function"):
        made(stub, logits_hook=3)


def test_prompts_are_read_in_parts_of_few_sizes():
    parts = {length: buckets.parts(length, 8192) for length in range(1, 40_000)}

    for length, sizes in parts.items():
        assert sum(sizes[:-1]) < length <= sum(sizes)
        assert sizes.count(8192) >= length // 8192
        assert sum(sizes) - length <= buckets.TOKENS_OF_A_CALL
        assert len(sizes) <= length // 8192 + 3
        assert length > 8192 or sizes == [max(sizes)] or sum(sizes) < 1 << length.bit_length()
    assert {size for sizes in parts.values() for size in sizes} == {64 << n for n in range(8)}
    assert all(parts[64 << n] == [64 << n] for n in range(8))
    assert buckets.parts(9, 6) == [4, 4, 4]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [(16, 1)]), (16, [(16, 16)]), (17, [(16, 16), (16, 1)]), (50, [(16, 16)] * 3 + [(16, 2)])],
)
def test_a_long_prompt_is_read_part_by_part(stub, monkeypatch, length, expected):
    batcher, read, given = made(stub, prefill_chunk=16), batching.appended, []

    def noted(session, tokens, counts, size, **options):
        given.append((tokens.shape[1], *counts))
        return read(session, tokens, counts, size, **options)

    monkeypatch.setattr(batching, "appended", noted)
    prompt = [1 + n % 7 for n in range(length)]

    written = told(batcher.submit(prompt, max_new_tokens=3))

    assert given == expected
    assert written == alone(stub, prompt, 3)


def test_a_row_is_put_into_its_slot_in_place(stub, batcher):
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(batcher._session.rows.cache)]

    told(batcher.submit(PROMPTS[0], max_new_tokens=9))

    after = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(batcher._session.rows.cache)]
    assert after == pointers


def test_memory_stays_flat(stub, batcher):
    def arrays():
        for prompt in PROMPTS:
            batcher.submit(prompt, max_new_tokens=9)
        assert finished(batcher)
        jax.effects_barrier()
        stub.log.steps.clear()
        stub.log.prefills.clear()
        return len(jax.live_arrays())

    before = arrays()
    assert [arrays() for _ in range(3)] == [before] * 3


def events_of(batcher, monkeypatch):
    """What the batcher asks the device for, and what it reads: steps of a chunk, 0 for a first token."""
    events, ask, read = [], batching.dispatch_chunk, jax.device_get

    def asked(session, until, steps, *sizes):
        events.append(steps)
        return ask(session, until, steps, *sizes)

    monkeypatch.setattr(batching, "dispatch_chunk", asked)
    monkeypatch.setattr(jax, "device_get", lambda x: events.append("read") or read(x))
    return events


def test_while_all_slots_are_taken_the_device_never_waits(batcher, monkeypatch):
    events = events_of(batcher, monkeypatch)
    for prompt in PROMPTS[:6]:
        batcher.submit(prompt, max_new_tokens=17)

    assert finished(batcher)

    # Three enter as soon as the device was asked for all tokens of the first three, which ends with a chunk.
    first, second = (
        [0, 0, 0, 4, "read", 4, "read", "read", "read", 4, "read", 4, "read"],
        [0, 0, 0, 4, "read"],
    )
    assert events[: len(first) + len(second)] == first + second


def test_a_request_beside_a_free_slot_waits_for_one_chunk_at_most(batcher, monkeypatch):
    events = events_of(batcher, monkeypatch)
    batcher.submit(PROMPTS[0], max_new_tokens=30)
    for _ in range(4):
        batcher.step()
    assert events == [0, 4, "read", "read", 4, "read", 4, "read"]

    late = batcher.submit(PROMPTS[1], max_new_tokens=30)
    batcher.step()

    assert events[8:] == [0, 4, "read"]
    assert len(late.tokens) == 1


def test_text_comes_in_whole_characters(stub):
    batcher = made(stub, tokenizer=Letters())
    requests = [batcher.submit(prompt, max_new_tokens=26) for prompt in PROMPTS[:5]]

    for request in requests:
        pieces = list(request)
        assert "".join(piece.text for piece in pieces) == Letters().decode(request.tokens)
        assert [len(piece.tokens) for piece in pieces[:-1]] == [1, *[4] * (len(pieces) - 2)]
