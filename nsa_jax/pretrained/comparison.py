"""How far an NSA model is from the dense one that it came from: losses by position, and first choices."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_checks import check_ids
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.model import Transformer
from nsa_jax.nn.checks import check_array
from nsa_jax.option_checks import check_int

CHUNK = 256  # queries whose logits are held at a time


class Comparison(NamedTuple):
    """Two models on the same tokens. Losses are nats a token.

    Attributes:
      dense_loss: mean loss of the dense model.
      loss: mean loss of the other model.
      agreement: share of tokens after which both think the same next token the most likely.
      starts: first position of each stretch of positions, counted from 0.
      dense_losses: mean loss of the dense model in each stretch.
      losses: mean loss of the other model in each stretch.
    """

    dense_loss: float
    loss: float
    agreement: float
    starts: tuple[int, ...]
    dense_losses: tuple[float, ...]
    losses: tuple[float, ...]


def compare(
    dense: Transformer, model: Transformer, tokens: Int[Array, "B T"], *, stretches: int = 8
) -> Comparison:
    """Compares two models that predict each next token of the same rows.

    One row is computed at a time, and its logits for a few hundred tokens at a time.

    Args:
      dense: the model to compare with.
      model: the other model, such as `to_nsa` returns.
      tokens: token ids, a sequence in each row. At least two in a row.
      stretches: into how many stretches of equal length the positions are divided, at most one for each.

    Returns:
      Mean losses of both, in all and by position, and how often their first choices agree.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: the vocabularies differ, `tokens` are not rows of at least two ids of it, or `stretches` is
        below 1.
    """
    for name, each in (("dense", dense), ("model", model)):
        if not isinstance(each, Transformer):
            raise TypeError(f"{name} must be a Transformer, got {type(each).__name__}. Pass a model.")
    if dense.vocab_size != model.vocab_size:
        raise ValueError(
            f"both models must have one vocabulary, got {dense.vocab_size} and {model.vocab_size} tokens. "
            "Pass a model and what was made of it."
        )
    check_array("tokens", tokens)
    check_int(low=1, stretches=stretches)
    dense._check_tokens(tokens)
    if 0 in tokens.shape or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens must be rows of at least two tokens, got shape {tokens.shape}. Pass [batch, tokens]."
        )
    check_ids("tokens", tokens, None, dense.vocab_size)
    # What stays on the device is of one row; the sums are of float64 on the host.
    graph, state = nnx.split((dense, model))
    rows = [
        jax.device_get(_compare_row(graph, state, tokens[row : row + 1], CHUNK)) for row in range(len(tokens))
    ]
    first, other, same = (np.stack(each).astype(np.float64) for each in zip(*rows, strict=True))
    parts = np.array_split(np.arange(first.shape[1]), min(stretches, first.shape[1]))
    return Comparison(
        dense_loss=float(first.mean()),
        loss=float(other.mean()),
        agreement=float(same.mean()),
        starts=tuple(int(part[0]) for part in parts),
        dense_losses=tuple(float(first[:, part].mean()) for part in parts),
        losses=tuple(float(other[:, part].mean()) for part in parts),
    )


# Not `nnx.jit`, which would return the weights of both models, with shardings for which it compiles again.
@functools.partial(jax.jit, static_argnames=("graph", "chunk"))
def _compare_row(graph: Any, state: Any, tokens: Int[Array, "1 T"], chunk: int) -> tuple[Array, ...]:
    """For each token but the last: the losses of both models, and whether their choices agree."""
    dense, model = nnx.merge(graph, state)
    states = [_hidden(each, tokens)[:, :-1] for each in (dense, model)]
    length = tokens.shape[1] - 1
    chunk = min(chunk, length)
    padding = -length % chunk

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x[0], ((0, padding), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(-1, chunk, *x.shape[1:])

    def of_chunk(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        *each, targets = arrays
        logits = [owner._logits(x[None])[0] for owner, x in zip((dense, model), each, strict=True)]
        picked = [jnp.take_along_axis(of, targets[:, None], axis=1)[:, 0] for of in logits]
        losses = [jax.nn.logsumexp(of, axis=1) - at for of, at in zip(logits, picked, strict=True)]
        return *losses, logits[0].argmax(1) == logits[1].argmax(1)

    found = jax.lax.map(of_chunk, tuple(in_chunks(x) for x in (*states, tokens[:, 1:])))
    return tuple(each.reshape(-1)[:length] for each in found)


def _hidden(model: Transformer, tokens: Int[Array, "1 T"]) -> Float[Array, "1 T D"]:
    """What comes out of the last layer. Dropout is off, in this copy of the model."""
    model.eval()
    return model._layers(tokens, None, None, None, None)[0]
