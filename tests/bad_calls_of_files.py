"""Good calls of what writes and reads models, and of what makes one from another."""

import functools
import itertools
import math
import pathlib
import tempfile
from typing import Any

import jax
from bad_calls import VALUES, VOCAB, Call
from bad_values import NO_INT, Kind, Name, Of, Real
from flax import nnx
from modules import abstract, randomised

from nsa_jax import model, pretrained

DENSE = randomised(
    abstract(
        model.Transformer,
        model.TransformerConfig(
            vocab_size=VOCAB, num_layers=2, model_dim=12, num_heads=4, num_kv_heads=2, attention="dense"
        ),
    )
)
FOLDER = tempfile.TemporaryDirectory()
_NUMBERS = itertools.count()


def _new() -> pathlib.Path:
    return pathlib.Path(FOLDER.name) / str(next(_NUMBERS))


@functools.cache
def _saved() -> tuple[pathlib.Path, pathlib.Path]:
    """A checkpoint, and a model as safetensors."""
    checkpoint, tensors = _new(), _new()
    model.save(checkpoint, DENSE, training=VALUES["training"][0])
    pretrained.save(DENSE, tensors)
    return checkpoint, tensors


def reading(function, name: str, number: int, **more: Any) -> Call:
    """A call of what reads one of the two; it is written when the first call needs it."""

    @functools.wraps(function)
    def called(**given):
        if given[name] is HERE:
            given[name] = _saved()[number]
        return jax.tree.leaves(function(**given))

    return Call(called, traced=False, **{name: (HERE, NO_PATH)}, **more)


def writing(function, name: str, **more: Any) -> Call:
    """A call of what writes into a folder, a new one each time."""

    @functools.wraps(function)
    def called(**given):
        if given[name] is HERE:
            given[name] = _new()
        return function(**given)

    return Call(called, traced=False, **{name: (HERE, NO_PATH)}, model=(DENSE, Of()), **more)


HERE = "a folder"
NO_PATH = Kind(dict(int=3, nan=math.nan, list=["a"], bytes=b"a", dict={}), error=TypeError)
NO_FIELDS = Kind(
    {"str": "a", "int": 3, "list": [3], "nan": math.nan, "a function": {"f": len}, "told": {"vocab_size": 3}},
    error=(TypeError, ValueError),
)
NO_NAMES = {"str": "a", "int": 3, "nan": math.nan}
NO_BYTES = NO_INT | {"0": 0, "negative": -3, "10^400": 10**400}
NO_MESSAGES = Kind(
    {"str": "a", "int": 3, "nan": math.nan, "names": ["a"], "number": [3], "no role": [{}], "dict": {"a": 3}},
    error=ValueError,
)
CHAT = pretrained.ChatFormat("{% for each in messages %}{{ each.role + each.content }}{% endfor %}")

CALLS = {
    "save": writing(model.save, "path"),
    "restore": reading(model.restore, "path", 0, config=(None, Of())),
    "restore_training": reading(model.restore_training, "path", 0),
    "save of pretrained": writing(
        pretrained.save,
        "folder",
        tokenizer=(None, Kind({"str": "a", "int": 3, "list": [], "nan": math.nan})),
        chat_format=(None, Of()),
        fields=({}, NO_FIELDS),
        file_bytes=(2**20, Kind(NO_BYTES)),
    ),
    "load": reading(
        pretrained.load,
        "source",
        1,
        rope_base=(None, Real(error=(TypeError, ValueError))),
        ignore=((), Kind(NO_NAMES, error=TypeError)),
    ),
    "load_chat_format": reading(pretrained.load_chat_format, "source", 1),
    "ChatFormat.prompt": Call(
        CHAT.prompt,
        like=pretrained.ChatFormat.prompt,
        messages=([dict(role="user", content="a")], NO_MESSAGES),
    ),
    "compare": Call(
        pretrained.compare,
        traced=False,
        only_wrong=True,
        free="B T",
        dense=(DENSE, Of()),
        model=(DENSE, Of()),
        stretches=2,
    ),
    "to_nsa": Call(
        pretrained.to_nsa,
        traced=False,
        model=(DENSE, Of()),
        attention=(None, Name()),
        rngs=nnx.Rngs(0),
        initial_gates=((0.1, 0.8, 0.1), VALUES["initial_gates"][1]),
    ),
}
