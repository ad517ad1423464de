"""`python -m nsa_jax.chat`: each answer is that of the whole conversation, and whatever ends one is said."""

import itertools
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import has_form, refused
from test_generate import Stub

pytest.importorskip("safetensors", reason="chat needs the extra `pretrained`")
pytest.importorskip("tokenizers", reason="chat needs the extra `pretrained`")
pytest.importorskip("jinja2", reason="chat needs the extra `pretrained`")

from letters import TOKENS, make_model, make_tokenizer

from nsa_jax.chat import __main__ as command
from nsa_jax.chat import conversation as conversations
from nsa_jax.chat.conversation import Conversation, ConversationError
from nsa_jax.generate import generate
from nsa_jax.pretrained import ChatFormat, save

ROOM = 64
TEMPLATE = """{% for message in messages %}<{{ message.role[0] }}>{{ message.content | trim }}{{ eos_token }}
{% endfor %}<a>"""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model():
    return Stub()  # each token depends on all before it


OPEN = ChatFormat(TEMPLATE, (), dict(eos_token="<e>"))  # no token ends an answer


def continued(model, ids, room, end=None):
    """What `generate` writes behind these tokens."""
    new = generate(model, np.array([ids]), max_new_tokens=room - len(ids), max_length=room, eos_id=end)
    return np.asarray(new.tokens)[0, : int(new.lengths[0])].tolist()


@pytest.fixture(scope="module")
def ending(model, tokenizer):
    """A chat format, with an end token that the first answer has; that answer; and the tokens of it all."""
    for end in "abcdef":
        ids = tokenizer.encode(f"<u>cab{end}\n<a>", add_special_tokens=False).ids
        new = continued(model, ids, ROOM, TOKENS.index(end))
        if new[-1] == TOKENS.index(end) and 4 < len(new) < 30:
            return ChatFormat(TEMPLATE, (TOKENS.index(end),), dict(eos_token=end)), end, new, ids + new
    raise AssertionError("no end token comes")


@pytest.fixture
def started(monkeypatch):
    """How often a prompt was read from its beginning."""
    calls, start = [], conversations.start
    monkeypatch.setattr(conversations, "start", lambda *x, **y: calls.append(x) or start(*x, **y))
    return calls


def test_each_answer_is_that_of_the_whole_conversation(model, tokenizer, ending, started):
    """And what was said before is not read again."""
    chat, end, first, tokens = ending
    conversation = Conversation(model, tokenizer, chat, max_length=ROOM)
    assert "".join(conversation.ask("cab")) == tokenizer.decode(first)

    tokens = [*tokens, *tokenizer.encode(f"\n<u>bad{end}\n<a>").ids]  # the answer has its end token already

    second = "".join(itertools.islice(conversation.ask("bad"), 3))

    expected = continued(model, tokens, ROOM, TOKENS.index(end))
    assert second == tokenizer.decode(expected[: 1 + 8 + 8])
    assert len(started) == 1


@pytest.mark.parametrize("trim", [" | trim", ""])
def test_white_space_that_ends_an_answer_is_not_read_twice(model, tokenizer, started, trim):
    """Nor its end token, whether or not the template trims; that of SmolLM2 and Qwen2 does not."""
    end = TOKENS.index("<e>")
    chat = ChatFormat(TEMPLATE.replace(" | trim", trim), (end,), dict(eos_token="<e>"))
    conversation = Conversation(model, tokenizer, chat, max_length=ROOM)
    assert "".join(conversation.ask("ee")) == "cbebb\n"
    tokens = tokenizer.encode("<u>ee<e>\n<a>").ids
    tokens += [*continued(model, tokens, ROOM, end), *tokenizer.encode("\n<u>da<e>\n<a>").ids]

    second = "".join(itertools.islice(conversation.ask("da"), 2))

    assert second == tokenizer.decode(continued(model, tokens, ROOM, end)[: 1 + 8])
    assert len(started) == 1


def test_an_answer_that_was_stopped_is_closed_before_the_next_question(model, tokenizer, started):
    """A piece may still come, and what came is remembered."""
    conversation = Conversation(model, tokenizer, OPEN, max_length=ROOM)
    answer = []
    for text in conversation.ask("cab"):
        answer.append(text)
        conversation.stop()
    assert len(answer) == 2
    tokens = tokenizer.encode("<u>cab<e>\n<a>").ids
    new = continued(model, tokens, ROOM)[: 1 + 8]
    assert "".join(answer) == tokenizer.decode(new)
    tokens += [*new, *tokenizer.encode("<e>\n<u>da<e>\n<a>").ids]

    text = next(conversation.ask("da"))

    assert text == tokenizer.decode(continued(model, tokens, ROOM)[:1])
    assert len(started) == 1


def test_stop_while_the_question_is_read_gives_the_first_token(model, tokenizer, monkeypatch):
    conversation = Conversation(model, tokenizer, OPEN, max_length=ROOM)
    read = conversations.start
    monkeypatch.setattr(conversations, "start", lambda *x, **y: [conversation.stop(), read(*x, **y)][1])

    assert len(list(conversation.ask("cab"))) == 1


def test_a_template_that_rewrites_the_past_is_read_again(model, tokenizer, started):
    chat = ChatFormat("<u>{{ messages[-1].content }}<e>\n<a>")  # forgets all but the last question
    conversation = Conversation(model, tokenizer, chat, max_length=ROOM)
    answers = []
    for question in ("cab", "bad"):
        pieces = conversation.ask(question)
        answers.append(next(pieces))
        conversation.stop()
        answers[-1] += "".join(pieces)

    prompts = [tokenizer.encode(f"<u>{question}<e>\n<a>").ids for question in ("cab", "bad")]
    assert answers == [tokenizer.decode(continued(model, ids, ROOM)[:9]) for ids in prompts]
    assert len(started) == 2


def test_without_a_template_the_text_is_continued(model, tokenizer):
    conversation = Conversation(model, tokenizer, ChatFormat(), max_length=ROOM)
    pieces = conversation.ask("cab")
    first = next(pieces)
    conversation.stop()
    first += "".join(pieces)
    tokens = tokenizer.encode("cab").ids
    tokens += [*continued(model, tokens, ROOM)[:9], *tokenizer.encode("da").ids]

    assert next(conversation.ask("da")) == tokenizer.decode(continued(model, tokens, ROOM)[:1])
    with refused(ValueError, "a system message must come with a chat template, got 'Be kind.'"):
        Conversation(model, tokenizer, ChatFormat(), max_length=ROOM, system="Be kind.")


def test_a_full_conversation_says_so_and_another_begins(model, tokenizer):
    conversation = Conversation(model, tokenizer, OPEN, max_length=ROOM, system="ab")
    tokens = tokenizer.encode("<s>ab<e>\n<u>cab<e>\n<a>").ids

    for _ in range(2):
        found = []
        with pytest.raises(ConversationError, match=r"got 64 tokens and --max-length=64\. Start") as told:
            found.extend(conversation.ask("cab"))
        assert has_form(str(told.value))
        assert "".join(found) == tokenizer.decode(continued(model, tokens, ROOM))
    with pytest.raises(ConversationError, match="got 73 tokens and --max-length=64"):
        next(conversation.ask("b" * 64))
    with pytest.raises(ConversationError, match="must be shorter than --max-length, got 64 tokens"):
        next(conversation.ask("b" * 55))
    next(conversation.ask("b" * 54))  # fits


def test_a_question_that_is_no_unicode_says_so_and_another_begins(model, tokenizer):
    """A terminal whose bytes are not UTF-8 gives halves of surrogate pairs, which no tokenizer takes."""
    conversation = Conversation(model, tokenizer, OPEN, max_length=ROOM)
    with refused(ConversationError, r"a question must be Unicode, got '\\udcff' \(surrogates not allowed\)"):
        list(conversation.ask("cab\udcff"))

    with refused(ConversationError, "must be shorter than --max-length, got 64 tokens"):
        list(conversation.ask("cab"))


def test_a_token_that_the_model_does_not_have_is_named(small):
    """A question with it ended the program."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<x>"])
    conversation = Conversation(small, tokenizer, OPEN, max_length=ROOM)

    told = f"a question must have tokens of the model alone, got '<x>' beyond its vocabulary of {len(TOKENS)}"
    with refused(ConversationError, told):
        list(conversation.ask("cab<x>"))

    with refused(ConversationError, "must be shorter than --max-length, got 64 tokens"):
        list(conversation.ask("cab"))


def test_logits_that_are_not_finite_are_said(model, tokenizer):
    broken = Stub()
    broken.table[...] = jnp.full_like(broken.table[...], jnp.nan)
    with refused(ConversationError, "the logits must be finite"):
        list(Conversation(broken, tokenizer, OPEN, max_length=ROOM).ask("cab"))


@pytest.fixture(scope="module")
def small():
    return make_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small, tokenizer):
    path = tmp_path_factory.mktemp("run") / "model"  # as in the folder of a run of adopt
    save(small, path, tokenizer=tokenizer, chat_format=OPEN)
    return path.parent


def typed(monkeypatch, *lines):
    """Answers of `input`; an exception is raised."""
    left = iter([*lines, EOFError])

    def read(prompt):
        line = next(left)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_the_command_answers_and_ends_with_its_input(folder, small, tokenizer, monkeypatch, capsys):
    """Ctrl-C where nothing is written is an empty line."""
    typed(monkeypatch, "cab", " ", KeyboardInterrupt, "cab")

    assert command.main([str(folder), "--max-length=40", "--temperature=0"]) == 0

    printed = capsys.readouterr()
    answer = tokenizer.decode(continued(small, tokenizer.encode("<u>cab<e>\n<a>").ids, 40))
    assert printed.out == f"{answer}\n\n{answer}\n\n"
    lines = printed.err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "nsa_jax.chat: a conversation must be shorter than --max-length"
    ] * 2


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_answer_and_twice_the_program(folder, monkeypatch, capsys, times):
    ask, before = Conversation.ask, signal.getsignal(signal.SIGINT)

    def interrupted(self, question):
        for number, text in enumerate(ask(self, question)):
            if number < times:
                signal.raise_signal(signal.SIGINT)
            yield text

    monkeypatch.setattr(Conversation, "ask", interrupted)
    typed(monkeypatch, "cab")

    code = command.main([str(folder), "--temperature=0", "--max-length=40"])

    printed = capsys.readouterr()
    assert code == (0 if times == 1 else 130)
    assert len(printed.out.removesuffix("\n\n")) <= 9
    assert printed.err == ("" if times == 1 else "\nnsa_jax.chat: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_real_process_reads_a_pipe(folder):
    command_line = [
        sys.executable,
        "-m",
        "nsa_jax.chat",
        str(folder / "model"),
        "--max-length=30",
        "--top-p=0.9",
    ]
    done = subprocess.run(command_line, input="cab\n", capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("> ")
    assert len(done.stdout) > 10
    assert done.stderr.startswith("nsa_jax.chat: a conversation must be shorter than --max-length, got 30")
    assert done.stderr.count("\n") == 1


BAD = {
    "unfinished": (["{unfinished}"], "must be finished, got '.*' without its model. Run the command"),
    "tokenizer": (["{folder}"], "a model must have a tokenizer, got '.*' with none that is known"),
    "sampling": (["{run}", "--temperature=0", "--top-p=0.5"], "top_p must come with a temperature above 0"),
}


@pytest.mark.parametrize(("arguments", "told"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_one_line_and_exit_code_2(folder, tmp_path, monkeypatch, capsys, arguments, told):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    unfinished = tmp_path / "unfinished"
    (unfinished / "model").mkdir(parents=True)  # killed while it was saved
    (unfinished / "settings.json").touch()
    typed(monkeypatch, "cab")

    names = dict(folder=tmp_path, run=folder, unfinished=unfinished)
    assert command.main([each.format(**names) for each in arguments]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nsa_jax.chat: ")
    assert has_form(line), line
    assert re.search(told, line), line


def test_a_device_without_room_is_one_line(folder, monkeypatch, capsys):
    def fails(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore lines")

    monkeypatch.setattr(command, "talk", fails)

    assert command.main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search("got 'RESOURCE_EXHAUSTED: Out of memory'. Use a smaller --max-length", line), line
    assert has_form(line), line
