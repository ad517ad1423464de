"""The example that replaces `nnx.MultiHeadAttention` by NSA runs, and both decoders learn."""

import functools

from flax import nnx
from modules import abstract
from selector_examples import Recent

from examples import drop_in


def test_both_decoders_learn(capsys, monkeypatch):
    """With NSA of one branch, which is quick to compile; gradients of that of the page are traced alone."""
    tokens = drop_in.jnp.zeros((4, drop_in.LENGTH + 1), int)
    decoder = abstract(drop_in.NSADecoder)
    gradients = nnx.eval_shape(nnx.grad(drop_in.loss_of), decoder, tokens)
    assert gradients["attention"]["compressor_key"]

    attention = functools.partial(drop_in.NSAAttention, branches=("slc",), selector=Recent)
    monkeypatch.setattr(drop_in, "NSAAttention", attention)
    monkeypatch.setattr(drop_in, "STEPS", 8)

    drop_in.main([])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["DenseDecoder", "NSADecoder"]
    for line in lines:
        _, _, first, _, last, *_ = line.split()
        assert float(last) < float(first) - 0.3
