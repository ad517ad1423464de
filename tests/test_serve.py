"""The server of the examples, driven by the real client of OpenAI through a real socket.

`tox -e serve` runs this; elsewhere the packages are missing, and the tests are skipped.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from messages import has_form
from test_generate import Stub

pytest.importorskip("openai", reason="run by `tox -e serve`, which installs it")
pytest.importorskip("starlette", reason="run by `tox -e serve`, which installs it")
pytest.importorskip("uvicorn", reason="run by `tox -e serve`, which installs it")
pytest.importorskip("tokenizers", reason="run by `tox -e serve`, which installs it")

import openai
from letters import SPECIAL, TOKENS, make_model, make_tokenizer

from examples.serve.__main__ import main
from examples.serve.api import CHAT as CHAT_FORM
from examples.serve.api import TEXT, Api, Server
from examples.serve.logprobs import Teller
from nsa_jax.generate import Batcher, Ended, Logprobs, Written, advance, generate, start
from nsa_jax.pretrained import ChatFormat, save

ROOM, SLOTS = 600, 3
TEMPLATE = """{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}<e>
{% endfor %}<a>"""
CHAT = ChatFormat(TEMPLATE)
PROMPTS = ["cab", "dead", "a", "face\nfeed", "bad", "cafe", "deaf", "bb"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model():
    return Stub()  # each token depends on all before it


@pytest.fixture(scope="module")
def small():
    return make_model()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small, tokenizer):
    """A folder as that of a run of adopt."""
    folder = tmp_path_factory.mktemp("run")
    save(small, folder / "model", tokenizer=tokenizer, chat_format=CHAT)
    return folder


class Served:
    """A server in a thread, on a free port."""

    def __init__(self, model, tokenizer, *, chat=CHAT, delay=0.0, **settings):
        settings = dict(slots=SLOTS, max_length=ROOM) | settings
        self.batcher = Batcher(model, tokenizer=tokenizer, sampling=("temperature", "top_p"), **settings)
        self.step, self.delay = self.batcher.step, delay
        self.batcher.step = self._slow_step
        logprobs = settings.get("logprobs")
        api = Api(self.batcher, tokenizer, chat, name="small", max_length=ROOM, logprobs=logprobs)
        self.server = Server(api, port=0, log_level="warning")

    def _slow_step(self):
        time.sleep(self.delay)
        return self.step()

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.until(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    @staticmethod
    def until(holds):
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def complete(self, prompt="cab", **options):
        options = dict(model="small", max_tokens=40, temperature=0) | options
        return self.client.completions.create(prompt=prompt, **options)

    def ask(self, *texts, **options):
        """Questions and answers in turn."""
        messages = [
            dict(role="user" if n % 2 == 0 else "assistant", content=text) for n, text in enumerate(texts)
        ]
        options = dict(model="small", max_tokens=40, temperature=0) | options
        return self.client.chat.completions.create(messages=messages, **options)


@pytest.fixture(scope="module")
def served(model, tokenizer):
    with Served(model, tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    """The text that `generate` writes behind a prompt."""

    def of(prompt, count=40, **options):
        ids = np.array([tokenizer.encode(prompt, add_special_tokens=False).ids])
        new = generate(model, ids, max_new_tokens=count, max_length=ROOM, **options)
        return tokenizer.decode(np.asarray(new.tokens)[0, : int(new.lengths[0])].tolist())

    return of


def test_models_are_listed_and_another_is_not_found(served):
    assert [each.id for each in served.client.models.list()] == ["small"]
    assert served.client.models.retrieve("small").owned_by == "nsa_jax"
    for call in (lambda: served.client.models.retrieve("large"), lambda: served.complete(model="large")):
        with pytest.raises(openai.NotFoundError, match="model must be 'small', got 'large'") as error:
            call()
        assert error.value.code == "model_not_found"


def test_a_text_is_that_of_generate(served, expected):
    found = served.complete("cab")
    (choice,) = found.choices

    assert choice.text == expected("cab")
    assert (choice.finish_reason, found.model, found.object) == ("length", "small", "text_completion")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 40, 43)
    for prompt in ([2, 0, 1], ["cab"], [[2, 0, 1]]):  # many clients send lists of prompts, of one, too
        assert served.complete(prompt).choices[0].text == choice.text
    assert len(served.complete(max_tokens=None).choices[0].text) <= 16
    hot = dict(temperature=1.5, top_p=0.9)
    assert served.complete(seed=7, **hot).choices[0].text == expected("cab", key=7, **hot)
    texts = {served.complete(**hot).choices[0].text for _ in range(4)}
    assert len(texts) > 1  # seeds are drawn


def test_a_text_is_streamed(served, expected):
    chunks = list(served.complete("cab", stream=True, stream_options=dict(include_usage=True)))

    *pieces, end, usage = chunks
    assert "".join(each.choices[0].text for each in pieces) == expected("cab")
    assert [each.choices[0].finish_reason for each in (*pieces, end)] == [None] * len(pieces) + ["length"]
    assert len(pieces) >= 1 + 40 // 8
    assert (usage.choices, usage.usage.completion_tokens) == ([], 40)
    assert len({each.id for each in chunks}) == 1


def test_a_conversation_is_answered_whole_and_streamed(served, expected):
    prompt = "<u>cab<e>\n<a>bad<e>\n<u>dad<e>\n<a>"
    whole = served.ask("cab", "bad", "dad")
    opening, *pieces, end = served.ask("cab", "bad", "dad", stream=True)

    assert whole.choices[0].message.content == expected(prompt)
    assert whole.choices[0].message.role == opening.choices[0].delta.role == "assistant"
    assert whole.usage.prompt_tokens == 3 * 3 + 3 * 3 + 1
    assert "".join(each.choices[0].delta.content for each in pieces) == expected(prompt)
    assert {each.choices[0].delta.role for each in pieces} == {None}
    assert (end.choices[0].finish_reason, end.object) == ("length", "chat.completion.chunk")
    parts = [dict(type="text", text="c"), dict(type="text", text="ab")]
    assert served.ask(parts).choices[0].message == served.ask("cab").choices[0].message


def test_an_answer_goes_on_to_the_end_token_or_as_long_as_there_is_room(model, tokenizer, expected):
    free = expected("<u>cab<e>\n<a>", 500)
    letter = free[9]
    with Served(model, tokenizer, chat=ChatFormat(TEMPLATE, (TOKENS.index(letter),))) as served:
        found = served.ask("cab", max_tokens=None)
    assert found.choices[0].message.content == free[: free.index(letter) + 1]
    assert found.choices[0].finish_reason == "stop"
    with Served(model, tokenizer) as served:
        assert served.ask("cab", max_tokens=None).usage.total_tokens == ROOM


def test_eight_clients_at_once(served, expected):
    async def one(client, number, prompt):
        options = dict(model="small", prompt=prompt, max_tokens=30 + number, temperature=0)
        if number % 2:
            return (await client.completions.create(**options)).choices[0].text
        stream = await client.completions.create(stream=True, **options)
        return "".join([each.choices[0].text async for each in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, *each) for each in enumerate(PROMPTS)))

    texts = asyncio.run(all_of_them())

    assert texts == [expected(prompt, 30 + number) for number, prompt in enumerate(PROMPTS)]
    served.until(lambda: not served.server.api._going)


@pytest.mark.parametrize("where", ["streamed", "whole", "waiting"])
def test_a_client_that_leaves_gives_its_place_back(model, tokenizer, expected, where):
    with Served(model, tokenizer, slots=1, delay=0.05) as served:
        submit, submitted = served.batcher.submit, []
        served.batcher.submit = lambda *x, **y: submitted.append(submit(*x, **y)) or submitted[-1]
        first = served.complete(max_tokens=550, stream=True) if where != "whole" else None
        if where == "streamed":
            next(first)
            first.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                served.client.with_options(timeout=0.5).completions.create(
                    model="small", prompt="bad", max_tokens=550
                )
        served.until(lambda: submitted[-1].ended)

        assert submitted[-1].ended == Ended.CANCELLED
        assert len(submitted[-1].tokens) < (1 if where == "waiting" else 550)
        served.delay = 0
        assert served.complete("bad").choices[0].text == expected("bad")
        if where == "waiting":
            assert "".join(each.choices[0].text for each in first) == expected("cab", 550)
        served.until(lambda: not served.server.api._going)
        assert served.batcher.running == served.batcher.waiting == 0


def test_stop_strings_end_a_text_before_them(served, expected):
    free = expected("cab")
    for stop in (free[5:8], [free[20:23], "zzz", free[9:11]]):
        cut = min(free.index(each) for each in ([stop] if isinstance(stop, str) else stop) if each in free)
        found = served.complete(stop=stop)
        pieces = list(served.complete(stop=stop, stream=True))

        assert found.choices[0].text == "".join(each.choices[0].text for each in pieces) == free[:cut]
        assert found.choices[0].finish_reason == pieces[-1].choices[0].finish_reason == "stop"
        assert found.usage.completion_tokens < 40


def test_a_full_queue_is_status_429_and_disturbs_nothing(model, tokenizer, expected):
    with Served(model, tokenizer, slots=1, max_waiting=0, delay=0.02) as served:
        stream = served.complete(max_tokens=100, stream=True)
        first = next(stream).choices[0].text
        with pytest.raises(openai.RateLimitError, match="the queue must have room, got 0 requests") as error:
            served.complete()
        assert error.value.code == "queue_full"
        rest = "".join(each.choices[0].text for each in stream)
        assert first + rest == expected("cab", 100)
        assert served.complete().choices[0].text == expected("cab")


def test_logprobs_are_those_of_generate(model, tokenizer):
    """In both forms, whole and streamed; of fewer of the likeliest tokens than the server can give."""
    ids = np.array([tokenizer.encode("cab", add_special_tokens=False).ids])
    session = start(model, ids, max_length=ROOM, logprobs=3)
    new = advance(session, 12)[1]
    chosen, tokens, top = (np.asarray(x)[0] for x in new.logprobs)
    texts = [TOKENS[token] for token in np.asarray(new.tokens)[0].tolist()]
    likeliest = [[TOKENS[token] for token in row] for row in tokens[:, :2].tolist()]
    shown = [0 if text in SPECIAL else len(text) for text in texts]
    starts = np.cumsum([0, *shown])[:-1].tolist()

    with Served(model, tokenizer, logprobs=3, chunk_size=5) as served:
        options = dict(max_tokens=12, logprobs=2)
        whole = served.complete(**options).choices[0].logprobs
        pieces = [each.choices[0].logprobs for each in served.complete(stream=True, **options)]
        pieces = [each for each in pieces if each is not None]
        assert len(pieces) > 1
        for found in (whole, *pieces):
            assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs)
        joined = {
            name: [x for piece in pieces for x in getattr(piece, name)] for name in whole.model_fields_set
        }
        assert joined == whole.model_dump()
        assert whole.tokens == texts
        assert whole.text_offset == starts
        np.testing.assert_allclose(whole.token_logprobs, chosen, rtol=1e-6)
        for found, names, values in zip(whole.top_logprobs, likeliest, top, strict=True):
            assert list(found) == names
            np.testing.assert_allclose(list(found.values()), values[:2], rtol=1e-6)

        talk = dict(max_tokens=12, logprobs=True)
        none = served.ask("cab", **talk).choices[0].logprobs.content
        some = served.ask("cab", top_logprobs=2, **talk).choices[0].logprobs.content
        streamed = served.ask("cab", top_logprobs=2, stream=True, **talk)
        parts = [each.choices[0].logprobs for each in streamed]
        assert [x for part in parts if part is not None for x in part.content] == some
        assert [each.top_logprobs for each in none] == [[]] * 12
        assert [each.logprob for each in none] == [each.logprob for each in some]
        for each in some:
            assert each.bytes == list(each.token.encode())
            assert [x.logprob for x in each.top_logprobs] == sorted(
                (x.logprob for x in each.top_logprobs), reverse=True
            )
            assert each.logprob == each.top_logprobs[0].logprob  # the text is greedy

        with pytest.raises(openai.BadRequestError, match="logprobs must be from 0 to 3, got 4"):
            served.complete(logprobs=4)
        with pytest.raises(openai.BadRequestError, match="top_logprobs must come with logprobs=true"):
            served.ask("cab", top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match="top_logprobs must be from 0 to 3, got 9"):
            served.ask("cab", logprobs=True, top_logprobs=9)
        assert served.complete(max_tokens=12).choices[0].logprobs is None


class Bytes:
    """A token for each byte. As some decoders, it drops the space before the first word."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_tokens_that_are_parts_of_characters_are_told_of_where_these_begin():
    text = " a\N{GRINNING FACE} b"
    tokens, teller, found = list(text.encode()), Teller(Bytes(), 3), []
    for part in (tokens[:4], tokens[4:]):  # in the middle of a character
        count, likeliest = len(part), np.tile([0x80, 0x81, ord("c")], (len(part), 1))
        logprobs = Logprobs(np.zeros(count), likeliest, np.tile([-1.0, -2.0, -3.0], (count, 1)))
        found += teller.tell(Written(part, None, logprobs))

    assert [each.text for each in found] == [" ", "a", *"\ufffd" * 4, " ", "b"]
    assert [each.start for each in found] == [0, 0, 1, 1, 1, 1, 2, 3]  # of what the decoder writes
    shown = [TEXT.logprobs(found), CHAT_FORM.logprobs(found)]
    assert shown[0]["top_logprobs"] == [{"\ufffd": -1.0, "c": -3.0}] * 8
    assert [each["bytes"] for each in shown[1]["content"]][1:3] == [[97], None]


BAD = {
    "temperature": (dict(temperature="hot"), "temperature must be of type int or float, got 'hot'"),
    "negative": (dict(temperature=-1), "temperature must be at least 0"),
    "top_p": (dict(temperature=1, top_p=2.0), "top_p must be above 0 and at most 1, got 2"),
    "max_tokens": (dict(max_tokens=0), "max_tokens must be at least 1, got 0"),
    "bool": (dict(max_tokens=True), "max_tokens must be of type int, got True"),
    "room": (dict(max_tokens=ROOM), "prompt and new tokens must fit the cache, got 3 . 600 tokens"),
    "stop": (dict(stop=[3]), "stop must be a sequence of sequences of token ids, got .3."),
    "stop2": (dict(stop=["a", ""]), "stop must have no empty string"),
    "n": (dict(n=2), "n must be 1 here, got 2"),
    "logprobs": (dict(logprobs=3), "logprobs must be left out, got 3. Start the server with --logprobs"),
    "logprobs of a chat": (dict(logprobs=True), "logprobs must be of type int, got True"),
    "suffix": (dict(suffix="x"), "a field must be one of .*, got 'suffix'"),
    "seed": (dict(seed=2**70), "key must be at most"),
    "empty": (dict(prompt=""), "prompt must be .P. with P at least 1"),
    "ids": (dict(prompt=[1.5]), "prompt must be an integer array"),
    "several": (dict(prompt=["a", "b"]), "prompt must be one text, or the ids of one, got a list of 2"),
    "several of ids": (dict(prompt=[[1], [2]]), "prompt must be one text, .*, got a list of 2"),
}


@pytest.mark.parametrize(("bad", "told"), BAD.values(), ids=BAD)
def test_bad_fields_are_status_400(served, bad, told):
    with pytest.raises(openai.BadRequestError, match=told) as error:
        served.complete(**bad)
    assert error.value.type == "invalid_request_error"
    assert has_form(error.value.body["message"]), error.value.body


BAD_TALK = {
    "role": ([dict(content="a")], "a message must have a role and a content of text"),
    "image": (
        [dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])],
        "a message must have a role and a content of text",
    ),
    "kind": (["hello"], "a message must have a role and a content of text, got 'hello'"),
    "none": (None, "a request must have 'prompt' of /v1/completions or 'messages' of /v1/chat/completions"),
}


@pytest.mark.parametrize(("messages", "told"), BAD_TALK.values(), ids=BAD_TALK)
def test_bad_messages_are_status_400(served, messages, told):
    with pytest.raises(openai.BadRequestError, match=told) as error:
        served.client.chat.completions.create(model="small", messages=messages)
    assert has_form(error.value.body["message"]), error.value.body


def test_a_model_without_a_template_has_no_conversations(model, tokenizer, expected):
    with Served(model, tokenizer, chat=ChatFormat()) as served:
        with pytest.raises(openai.BadRequestError, match="a conversation needs a chat template, got a model"):
            served.ask("cab")
        assert served.complete().choices[0].text == expected("cab")


RAW = {
    "no JSON": ("/completions", b"{", 400, "a request must be JSON"),
    "too deep": ("/completions", b"[" * 100_000, 400, "a request must be JSON"),
    "a list": ("/completions", b"[]", 400, "a request must be an object of JSON, got list"),
    "half of a pair": (
        "/completions",
        rb'{"model": "small", "prompt": "half \ud83d"}',
        400,
        r"a prompt must be Unicode, got '\ud83d' (surrogates not allowed)",
    ),
    "half of a pair in a chat": (
        "/chat/completions",
        rb'{"model": "small", "messages": [{"role": "user", "content": "\ude00"}]}',
        400,
        r"a prompt must be Unicode, got '\ude00'",
    ),
    "another path": ("/embeddings", b"{}", 404, "a path must be one of the API, got 'Not Found'"),
    "another method": ("/completions", None, 405, "a path must be one of the API, got 'Method Not Allowed'"),
}


@pytest.mark.parametrize(("path", "body", "status", "told"), RAW.values(), ids=RAW)
def test_what_no_client_sends_is_an_error_of_the_same_form(served, path, body, status, told):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(served.url + path, body)
    found = json.load(error.value)["error"]
    assert error.value.code == status
    assert found["message"].startswith(told)
    assert has_form(found["message"])
    assert found["type"] == "invalid_request_error"


def test_a_device_that_fails_is_status_500_and_an_event_of_a_stream(model, tokenizer):
    with Served(model, tokenizer) as served:
        served.step = lambda: 1 / 0
        with pytest.raises(openai.InternalServerError, match="must be able to write, got ZeroDivisionError"):
            served.complete()
        with pytest.raises(openai.APIError, match="must be able to write, got ZeroDivisionError"):
            list(served.complete(stream=True))


def test_a_server_that_is_stopped_while_it_writes_says_so(model, tokenizer):
    """To those that it writes for and to those that wait."""
    found = {}
    with Served(model, tokenizer, slots=2, delay=0.05) as served:

        def whole(name):
            try:
                served.complete(max_tokens=500)
            except openai.APIError as error:
                found[name] = error

        stream = served.complete(max_tokens=500, stream=True)
        next(stream)
        threads = [threading.Thread(target=whole, args=(name,)) for name in ("written", "waiting")]
        for thread in threads:
            thread.start()
        served.until(lambda: served.batcher.running == 2 and served.batcher.waiting == 1)
        served.server.should_exit = True
        with pytest.raises(openai.APIError, match="the server must be running, got a request to stop"):
            list(stream)
        for thread in threads:
            thread.join(60)
    assert {name: error.status_code for name, error in found.items()} == dict(written=503, waiting=503)


BAD_COMMANDS = {
    "source": (["{path}/none"], "source must be a folder, a .gguf file or the name of a repository"),
    "slots": (["{path}", "--slots=0"], "slots must be at least 1, got 0"),
    "room": (["{path}", "--max-length=2"], "prompt and new tokens must fit the cache, got 1 [+] 2 tokens"),
}


@pytest.mark.parametrize(("arguments", "told"), BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_a_bad_command_is_one_line_and_exit_code_2(saved, capsys, arguments, told):
    try:
        code = main([each.format(path=saved) for each in arguments])
    except SystemExit as end:
        code = end.code

    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert line.startswith("examples.serve: ")
    assert has_form(line), line
    assert re.search(told, line), line


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_what_was_saved_and_ends_by_a_signal(saved, small, tokenizer, number):
    command = [sys.executable, "-m", "examples.serve", str(saved), "--port=0", "--max-length=64"]
    process = subprocess.Popen([*command, "--name=small"], stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            text = client.completions.create(model="small", prompt="cab", max_tokens=20, temperature=0)
            process.send_signal(number)
        ids = generate(small, np.array([[2, 0, 1]]), max_new_tokens=20, max_length=64).tokens[0]
        assert text.choices[0].text == tokenizer.decode(ids.tolist())
        assert process.wait(60) == (130 if number == signal.SIGINT else -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
