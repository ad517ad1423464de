"""Which token or sequence of tokens ends a row, and why a row has ended."""

import enum
from collections.abc import Collection, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Bool, Int, Int32


class Ended(enum.IntEnum):
    """Why a row of a session, or a request, has ended; the values of `ended` in results.

    Attributes:
      NO: it has not; `advance` adds tokens to it.
      END_TOKEN: its newest token is an end token.
      FULL: the cache has no room for its newest token, or had none for those of `extend`.
      NOT_FINITE: its logits hold NaN or infinity, or all tokens are excluded, so no token could be chosen.
        `extend` may give it more tokens, but what is in the cache stays there. So does a row end that was
        given an id outside the vocabulary, where the host did not see it.
      STOP: its newest tokens are a stop sequence, or its text has a stop string.
      ENOUGH: it has its `max_new_tokens`. Only requests of a `Batcher` end so.
      CANCELLED: it was cancelled, or has an `error`. Only requests of a `Batcher` end so.
    """

    NO = 0
    END_TOKEN = 1
    FULL = 2
    NOT_FINITE = 3
    STOP = 4
    ENOUGH = 5
    CANCELLED = 6


NOT_YET, ANY, NEVER = -1, -1, -2  # no token has these ids


def stop_table(stop: Sequence[Sequence[int]]) -> np.ndarray:
    """Stop sequences as one array, to which those of similar sizes have the same shape.

    Number and length are rounded up to powers of two: a sequence begins with `ANY` token, and those that are
    not there have tokens that `NEVER` come.
    """
    rows, columns = _power_of_two(len(stop)), _power_of_two(max(map(len, stop)))
    table = np.full((rows, columns), NEVER, np.int32)
    for row, tokens in zip(table, stop, strict=False):
        row[:] = [ANY] * (columns - len(tokens)) + [int(token) for token in tokens]
    return table


def is_end(token: Int32[Array, " B"], eos_id: Int[Array, ""] | Int[Array, " E"] | int) -> Bool[Array, " B"]:
    """Whether a token is the end token, or one of several."""
    return token == eos_id if jnp.ndim(eos_id) == 0 else (token[:, None] == jnp.asarray(eos_id)).any(axis=1)


def is_stopped(newest: Int32[Array, "B L"], stop: Int32[Array, "S L"]) -> Bool[Array, " B"]:
    """Whether the newest tokens, the oldest first, are a stop sequence."""
    same = (newest[:, None] == stop[None]) | (stop == ANY)[None]
    return same.all(axis=2).any(axis=1)


def end_of(tokens: list[int], end_tokens: Collection[int], stop: Iterable[list[int]]) -> Ended:
    """Why the newest of these tokens ends a text, on the host; an end token counts before a sequence."""
    if tokens[-1] in end_tokens:
        return Ended.END_TOKEN
    return Ended.STOP if any(tokens[-len(sequence) :] == sequence for sequence in stop) else Ended.NO


def check_chosen(ended: Int32[Array | np.ndarray, " B"]) -> None:
    """Raises ValueError if rows have ended because no token could be chosen; TypeError while tracing."""
    if isinstance(ended, jax.core.Tracer):
        raise TypeError(
            "check must be called on values, got an array that is traced. Call it on what the jitted "
            "function returns."
        )
    if rows := np.flatnonzero(np.asarray(ended) == Ended.NOT_FINITE).tolist():
        raise ValueError(
            f"the logits of all rows must be finite, got NaN or infinity in rows {rows}. Check the model and "
            "the ids in these rows."
        )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
