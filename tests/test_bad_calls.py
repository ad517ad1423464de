"""Every public callable, given a wrong value for each of its arguments, refuses it in the form of the house.

A call is its good arguments and the kind of each of them (`bad_values`). From these, a seeded generator makes
calls with one wrong argument: of another type, dtype, rank or length, negative, NaN, huge, None. Each must
raise the `TypeError` or `ValueError` of its kind, which names the argument and has the form of the house.
What a kind takes as the same value, such as an int of NumPy, must give a result of the same form.

Calls are traced with arrays of NumPy, so that their values are known and nothing is computed.
"""

import zlib

import jax
import pytest
from bad_calls import CALLS
from messages import has_form

import nsa_jax
from nsa_jax import cache, evaluate, generate, model, nn, parallel


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
            call.outcome(argument, value)
        except Exception as error:
            name = argument.rpartition(".")[2]
            of_several = " + " in label or label in ("length", "above")  # sizes and counts that disagree
            named = of_several or NAMED_AS.get(name, name) in str(error)
            if not (isinstance(error, expected) and has_form(str(error)) and named):
                wrong.append(f"{argument}, {label}: {type(error).__name__}: {error}"[:300])
        else:
            wrong.append(f"{argument}, {label}: accepted")

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if any(call.same())])
def test_another_form_of_the_same_value_is_the_same_call(name):
    call = CALLS[name]
    argument, (value, _) = next(iter(call.arguments.items()))
    expected = call.outcome(argument, value)

    wrong = [
        f"{name}, {label}" for name, label, value in call.same() if call.outcome(name, value) != expected
    ]

    assert not wrong, "\n".join(wrong)


def test_there_are_many_calls():
    assert sum(1 for name, call in CALLS.items() for _ in call.wrong(seed_of(name))) >= 4000


# Tuples that check nothing; and checkpoints, which have tests of their own.
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
    # Those that run a model have tests of their own, and so has a sequence of ids.
    "nsa_jax.evaluate": (
        *("BlockRecall", "Needles", "Question", "Task", "TokenPairs", "block_recall", "find_needles"),
    ),
    # Those that take a session, and batchers, have tests of their own.
    "nsa_jax.generate": (
        *("Batcher", "Checkpoint", "Continuation", "Decoder", "DraftModel", "Ended", "Generation"),
        *("Logprobs", "Piece", "Prefix", "Request", "Session", "Stream", "Tokenizer", "Written"),
        *("advance", "checkpoint", "extend", "gather", "repeat", "rewind_to", "stream"),
    ),
    "nsa_jax.model": ("restore", "restore_training", "save"),
    "nsa_jax.parallel": ("Order",),
}


@pytest.mark.parametrize(
    "module", [nsa_jax, nn, cache, evaluate, generate, model, parallel], ids=lambda x: x.__name__
)
def test_every_public_callable_has_its_bad_calls(module):
    called = {name.partition(" ")[0].partition(".")[0].partition("(")[0] for name in CALLS}

    assert set(module.__all__) - called == set(NOT_CALLED[module.__name__])
