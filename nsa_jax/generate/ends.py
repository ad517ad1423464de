"""Why a row writes no more."""

import enum


class Ended(enum.IntEnum):
    """Why a row of a session has ended; the values of `Continuation.ended`.

    Attributes:
      NO: it has not; `advance` adds tokens to it.
      END_TOKEN: its newest token is an end token.
      FULL: the cache has no room for its newest token, or had none for those of `extend`.
      NOT_FINITE: its logits hold NaN or infinity, so no token could be chosen. `extend` may give it more
        tokens, but what is in the cache stays there.
    """

    NO = 0
    END_TOKEN = 1
    FULL = 2
    NOT_FINITE = 3
