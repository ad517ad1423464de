"""Good calls of what goes on from a session, of a `Batcher`, and of what measures a model by running it."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from bad_calls import NO_KEY, ROOM, TRANSFORMER, VOCAB, Call, zeros_of
from bad_values import Counts, Kind, Of, Whole
from token_table import TokenTable

from nsa_jax import evaluate, generate

HELD = 3  # tokens of each row
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")


def going_on(function, **more: Any) -> Call:
    """A call of what takes a session, which the host knows; it gives the arrays of its result."""

    def called(**given):
        found = function(**given)
        return jax.tree.leaves(found.session if isinstance(found, generate.Stream) else found)

    return Call(called, like=function, session=(SESSION, Of()), **more)


def running(function, **more: Any) -> Call:
    """A call of what runs a model, which would take seconds: wrong values alone."""
    return Call(
        lambda model, **given: function(made(model), **given),
        like=function, model=TRANSFORMER, only_wrong=True, **more,
    )  # fmt: skip


class OfEachRow(Counts):
    """A number for each row, where one for all is right, too."""

    def wrong(self, value, rng):
        number = ("scalar", "int 2^40")
        return {label: bad for label, bad in super().wrong(value, rng).items() if label not in number}


def made(model: Any) -> Any:
    return model.make() if model is TRANSFORMER else model


def batcher(model=TRANSFORMER, slots=2, **given) -> generate.Batcher:
    return generate.Batcher(made(model), slots, **dict(max_length=ROOM) | given)


TABLE = TokenTable(VOCAB)  # quick to trace
PROMPTS = np.zeros((2, HELD), np.int32)
BEGUN = jax.eval_shape(lambda: generate.start(TRANSFORMER.make(), PROMPTS, max_length=ROOM, temperature=1.0))
SESSION = zeros_of(BEGUN)
SESSION = dataclasses.replace(
    SESSION, rows=SESSION.rows._replace(**dict.fromkeys(("held", "furthest"), np.full(2, HELD, np.int32)))
)
NEEDLES = evaluate.Needles((8,), (0.2, 0.8), 1, np.zeros((1, 2), int), 0.1)
PAST = zeros_of(jax.eval_shape(lambda: generate.checkpoint(SESSION)))
TOKENIZER = None, Kind({"str": "a", "int": 3, "list": [], "nan": math.nan})
NO_IDS = {"str": "a", "int": 3, "nan": math.nan, "dict": {}, "list of str": ["a"], "list of float": [1.5]}
NO_IDS |= {"empty": [], "rank": [[1]], "ragged": [[1], [1, 2]], "negative": [-1], "unknown": [VOCAB]}
NO_IDS |= {"huge": [2**40]}
IDS = [1, 2], Kind(NO_IDS, error=(TypeError, ValueError))
NO_INTS = {"str": "a", "int": 3, "nan": math.nan, "dict": {}, "float": [1.5], "bool": [True], "text": ["a"]}
NO_INTS |= {"negative": [-1], "huge": [2**40], "10^400": [10**400]}
NO_INTS = Kind(NO_INTS, error=(TypeError, ValueError))
NO_NAMES = Kind(
    {"str": "top_k", "int": 3, "nan": math.nan, "unknown": ["a"], "number": [3], "alone": ["top_k"]},
    error=(TypeError, ValueError),
)
DEPTHS = {"str": "a", "nan": math.nan, "0": 0, "above": [1.5], "below": [-0.1], "empty": [], "text": ["a"]}

CALLS = {
    "advance": going_on(generate.advance, steps=2),
    "extend": going_on(
        generate.extend,
        free="T",
        lengths=(np.full(2, 4, np.int32), Counts(axes=("B",), high=4)),
        sizes=dict(T=4),
    ),
    "repeat": going_on(generate.repeat, count=2),
    "gather": going_on(generate.gather, rows=(np.array([0, 1, 0]), Counts(axes=("M",), free=("M",), high=1))),
    "checkpoint": going_on(generate.checkpoint),
    "rewind_to": going_on(generate.rewind_to, past=PAST),
    "rewind of a session": going_on(generate.rewind, num_tokens=(1, Whole(low=0))),
    "rewind of a session by rows": going_on(
        generate.rewind, num_tokens=(np.ones(2, np.int32), OfEachRow(axes=("B",), high=HELD - 1))
    ),
    "stream": going_on(generate.stream, tokenizer=TOKENIZER),
    "DraftModel": Call(
        lambda model, num_tokens: generate.DraftModel(made(model), num_tokens).num_tokens,
        like=generate.DraftModel,
        model=(TRANSFORMER, Of()),
        num_tokens=4,
    ),
    "Batcher": Call(
        lambda **given: batcher(**given).row_bytes,
        like=generate.Batcher.__init__,
        model=TRANSFORMER,
        slots=2,
        max_waiting=(3, Whole(low=0)),
        sampling=(("temperature",), NO_NAMES),
        tokenizer=TOKENIZER,
        prefill_chunk=(10, Whole(low=2)),
    ),
    "Batcher.submit": Call(
        lambda **given: batcher(TABLE, sampling=SAMPLING).submit(**given).tokens,
        like=generate.Batcher.submit,
        prompt=IDS,
        prefix=(None, Of()),
        key=(0, Kind({name: key for name, key in NO_KEY.items() if name != "keys"})),  # one key
    ),
    "Batcher.read_prefix": Call(
        lambda tokens: batcher(TABLE).read_prefix(tokens).length,
        like=generate.Batcher.read_prefix,
        tokens=IDS,
    ),
    "TokenPairs": Call(
        lambda **given: evaluate.TokenPairs(**given).chance,
        like=evaluate.TokenPairs,
        names=([1, 2], NO_INTS),
        values=([3, 4], NO_INTS),
        length=1,
        keys=1,
    ),
    "Needles.merged": Call(lambda parts: NEEDLES.merged(parts).depths, like=evaluate.Needles.merged, parts=2),
    "find_needles": running(
        evaluate.find_needles,
        task=(evaluate.TokenPairs([1, 2], [3, 4]), Of()),
        free="tokens",
        sizes=dict(tokens=5),
        lengths=([8], NO_INTS),
        depths=(2, Kind(DEPTHS, error=(TypeError, ValueError))),
        asked=1,
        start=([1], NO_INTS),
        seed=(0, Whole(low=0)),
    ),
    "block_recall": running(evaluate.block_recall),
}
