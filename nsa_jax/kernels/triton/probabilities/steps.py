"""What the kernels of block probabilities share: where their queries stand, and the steps over the keys.

A tile of queries loops over the keys of each of its sequences from the sequence's first key on, in steps of
whole selection blocks. All queries of the sequence see the first steps whole, so nothing is masked there. One
masked step runs before the loop over these, and the rest after it. With consecutive queries that one step is
nearly always enough. It also makes the copy of the queries in shared memory that wgmma then reads
(`sizes.RangeQuerySizes.peel`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nsa_jax.array_typing import Array, Int32
from nsa_jax.kernels.triton.loading import load_keys
from nsa_jax.kernels.triton.pieces import LARGEST_INT, inner
from nsa_jax.layout import Placement

type Places = tuple[Int32[Array, "B T"], Int32[Array, "B T"] | None]


def query_places(placement: Placement) -> Places:
    """Position of each query, and the first key of its sequence; None where that is key 0."""
    assert placement.first_keys.slc.known == 0, "block probabilities see the keys of whole rows"
    return placement.position, placement.sequence_start if placement.packed else None


class Tokens(NamedTuple):
    """The tokens of a tile of queries.

    Attributes:
      index: `b T + token`.
      exists: whether there is such a token.
      seen: how many keys of its sequence it sees; 0 for padding.
      begin: first key of its sequence; LARGEST_INT for padding in packed rows.
    """

    index: tl.tensor
    exists: tl.tensor
    seen: tl.tensor
    begin: tl.tensor


class Steps(NamedTuple):
    """Steps over the keys of a sequence: all queries see the first `full` whole, no query sees `past`."""

    full: tl.tensor
    past: tl.tensor


@triton.jit
def seen_keys(position, index, inside):
    """How many keys of its sequence each token or row sees."""
    return tl.load(position + index, mask=inside, other=-1) + 1


@triton.jit
def tokens_of_tile(tile, position, sequence_start, num_queries, TOKENS: tl.constexpr):
    """The `Tokens` of a `QueryTile`."""
    token = tile.first_token + tl.arange(0, TOKENS)
    index = tile.first_query + token
    exists = token < num_queries
    seen = seen_keys(position, index, exists)
    if sequence_start is None:
        begin = seen * 0
    else:
        begin = tl.load(sequence_start + index, mask=exists, other=0)
        begin = tl.where(seen > 0, begin, LARGEST_INT)
    return Tokens(index, exists, seen, begin)


@triton.jit
def steps_over(tokens, start, STEP: tl.constexpr):
    """The `Steps` for the tokens of the sequence whose first key is `start`."""
    here = (tokens.begin == start) & (tokens.seen > 0)
    high = tl.max(tl.where(here, tokens.seen, 0), 0)
    low = tl.minimum(tl.min(tl.where(here, tokens.seen, LARGEST_INT), 0), high)
    return Steps(low // STEP, (high + STEP - 1) // STEP)


@triton.jit
def next_start(tokens, start):
    """The first key of the next sequence of the tile; LARGEST_INT after the last."""
    return tl.min(tl.where(tokens.begin > start, tokens.begin, LARGEST_INT), 0)


@triton.jit
def logits_of(q, keys, start, first, PRECISION: tl.constexpr):
    """Products with the keys from `first` on, counted from the sequence's first key `start`; not scaled."""
    return inner(q, load_keys(keys, start + first), PRECISION)


@triton.jit
def is_hidden(first, seen, KEYS: tl.constexpr):
    """`[rows, KEYS]`: whether each key from `first` on comes after what each row sees."""
    return (first + tl.arange(0, KEYS))[None, :] >= seen[:, None]
