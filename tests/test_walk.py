"""The walk of a decoding token: the frames of a step are those that `docs/architecture.md` lists."""

import pathlib
import re
import traceback

import jax.numpy as jnp
import pytest
from flax import nnx

pytest.importorskip("jax_triton", reason="installed by `tox -e test`", exc_type=ImportError)

import nsa_jax
from nsa_jax import dispatch
from nsa_jax.generate import generate
from nsa_jax.kernels.triton.decode import step
from nsa_jax.model import Transformer, TransformerConfig

HOUSE = pathlib.Path(nsa_jax.__file__).parent
ROW = re.compile(r"\| \d* ?\| `(.+?)` \| `(?:\w+\.)?(.+?)`")


def test_frames_of_a_step_are_the_rows_of_the_table(monkeypatch):
    def stop(*_, **__):
        raise StopIteration

    def choose(operation, *_, **__):
        return dispatch.Choice("triton" if operation == "decode_step" else "xla", "", ())

    monkeypatch.setattr(step, "decode_step", stop)
    monkeypatch.setattr(dispatch, "choose", choose)
    sizes = dict(vocab_size=8, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1, head_dim=16)
    model = Transformer(TransformerConfig(**sizes), rngs=nnx.Rngs(0))
    with pytest.raises(StopIteration) as stopped:
        generate(model, jnp.ones((1, 40), jnp.int32), max_new_tokens=4)

    frames = [(pathlib.Path(x.filename), x.name) for x in traceback.extract_tb(stopped.tb)]
    ours = [(file.relative_to(HOUSE).as_posix(), name) for file, name in frames if HOUSE in file.parents]
    page = (pathlib.Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    table = ROW.findall(page.partition("## The walk of a decoding token")[2].partition("\n## ")[0])
    assert len(table) == 13
    assert ours[ours.index(table[0]) :] == table[:-1]
