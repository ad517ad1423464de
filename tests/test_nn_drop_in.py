"""The example that replaces `nnx.MultiHeadAttention` by NSA runs, and its dense decoder learns."""

import jax.numpy as jnp
import optax
from flax import nnx

from examples import drop_in


def test_both_decoders_train_and_the_dense_one_learns(capsys, monkeypatch):
    """The step with NSA is traced alone: a page of the guide trains such a decoder."""
    train = drop_in.train

    def trained(decoder):
        if type(decoder) is drop_in.DenseDecoder:
            return train(decoder)
        optimizer = nnx.Optimizer(decoder, optax.adam(1e-2), wrt=nnx.Param)
        tokens = jnp.ones((4, drop_in.LENGTH + 1), jnp.int32)
        assert nnx.eval_shape(drop_in.train_step, decoder, optimizer, tokens).shape == ()
        return [4.0, 3.0]

    monkeypatch.setattr(drop_in, "STEPS", 8)
    monkeypatch.setattr(drop_in, "train", trained)

    drop_in.main([])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["DenseDecoder", "NSADecoder"]
    for line in lines:
        _, _, first, _, last, *_ = line.split()
        assert float(last) < float(first) - 0.3
