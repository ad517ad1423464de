"""Every public callable, given a wrong value for each of its arguments, refuses it in the form of the house.

A call is its good arguments and the kind of each of them (`bad_values`). From these, a seeded generator makes
calls with one wrong argument: of another type, dtype, rank or length, negative, NaN, huge, None. Each must
raise the `TypeError` or `ValueError` of its kind, which names the argument and has the form of the house.
What a kind takes as the same value, such as an int of NumPy, must give a result of the same form.

Calls are traced with arrays of NumPy, so that their values are known and nothing is computed. Those that read
or write files are made as they are, on a model of a few hundred numbers.
"""

import zlib

import bad_calls
import bad_calls_of_files
import bad_calls_of_sessions
import jax
import pytest
from messages import has_form

import nsa_jax
from nsa_jax import cache, evaluate, generate, model, nn, parallel, pretrained

CALLS = bad_calls.CALLS | bad_calls_of_sessions.CALLS | bad_calls_of_files.CALLS


@pytest.fixture(autouse=True, scope="module")
def _tracebacks_as_they_are():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")  # filtering them takes half of the time
    yield
    jax.config.update("jax_traceback_filtering", before)


# Arguments that errors call by another name.
NAMED_AS = dict(first_key_win="first_key", context_order="order", mode="compression", nsa="config")


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_in_the_form_of_the_house(name):
    call, wrong = CALLS[name], []
    for argument, label, value, expected in call.wrong(seed_of(name)):
        try:
            call.outcome({argument: value})
        except Exception as error:
            name = argument.rpartition(".")[2]
            of_several = " + " in label or label in ("length", "above")  # sizes and counts that disagree
            named = of_several or NAMED_AS.get(name, name) in str(error)
            if not (isinstance(error, expected) and has_form(str(error)) and named):
                wrong.append(f"{argument}, {label}: {type(error).__name__}: {error}"[:300])
        else:
            wrong.append(f"{argument}, {label}: accepted")

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.same()])
def test_another_form_of_the_same_values_is_the_same_call(name):
    """All arguments that have such a form come in it at once."""
    call = CALLS[name]
    expected = call.outcome({})

    wrong = [f"{form}: {[*same]}" for form, same in call.same().items() if call.outcome(same) != expected]

    assert not wrong, "\n".join(wrong)


def test_there_are_many_calls():
    assert sum(1 for name, call in CALLS.items() for _ in call.wrong(seed_of(name))) >= 4000


# What stays out: names of types; tuples and classes that hold what a function found, and check nothing.
NOT_CALLED = {
    "nsa_jax": ("Run", "__version__"),
    "nsa_jax.nn": ("Operands", "RopeScaling", "Selection", "Selector"),
    "nsa_jax.cache": (
        "Compression",
        "DenseCache",
        "DenseStep",
        "NSACache",
        "Reads",
        "ResidualMLP",
        "Step",
        "TokenKeysValues",
    ),
    "nsa_jax.evaluate": ("BlockRecall", "Question", "Task"),
    "nsa_jax.generate": (
        *("Checkpoint", "Continuation", "Decoder", "Ended", "Generation", "Logprobs", "Piece", "Prefix"),
        *("Request", "Session", "Stream", "Tokenizer", "Written"),
    ),
    "nsa_jax.model": (),
    "nsa_jax.parallel": ("Order",),
    "nsa_jax.pretrained": ("Comparison",),
}


@pytest.mark.parametrize(
    "module", [nsa_jax, nn, cache, evaluate, generate, model, parallel, pretrained], ids=lambda x: x.__name__
)
def test_every_public_callable_has_its_bad_calls(module):
    called = {owner(call.of) for call in CALLS.values()}

    assert {name for name in module.__all__ if owner(getattr(module, name)) not in called} == {
        *NOT_CALLED[module.__name__]
    }


def owner(function):
    """A function, or the class of a method: the same name may be another function in another module."""
    return getattr(function, "__module__", None), getattr(function, "__qualname__", "").partition(".")[0]
