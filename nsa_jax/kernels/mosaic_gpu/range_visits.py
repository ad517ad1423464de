"""The steps of tiles whose queries see ranges of keys, computed where `visits` would load lists of them.

A tile takes all steps of `keys` keys that one of its queries sees, for both consumers. As there, those that
may need a mask come first: at either end of the ranges. Then those that all its queries see whole.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from nsa_jax.kernels.mosaic_gpu.sizes import CONSUMERS
from nsa_jax.kernels.mosaic_gpu.visits import MEMBER_BITS, TilePlace
from nsa_jax.kernels.triton.ranges.edges import Edges


@dataclasses.dataclass(frozen=True)
class RangeVisits:
    """Has the methods of `VisitLists`.

    Attributes:
      edges: what is known of the ranges; queries are the tokens of whole rows.
      num_queries, num_keys: of a row.
      tokens: queries of a tile.
      keys: keys of a step.
    """

    edges: Edges
    num_queries: int
    num_keys: int
    tokens: int
    keys: int

    def num_fills(self, at: TilePlace) -> Any:
        """Number of fills of a tile."""
        return self._steps(at)[0]

    def fill(self, at: TilePlace, place: Any) -> Any:
        """As an entry of `VisitLists.fills`."""
        _, masked, low, begin, free_begin, free_end = self._steps(at)
        inside = jnp.where(place < masked, place - low + free_end, place - masked + free_begin)
        step = jnp.where(place < low, begin + place, inside)
        return (step * self.keys << CONSUMERS) + ((1 << CONSUMERS) - 1)

    def num_visits(self, at: TilePlace, warpgroup: Any) -> tuple[Any, Any]:
        """Number of visits of a warpgroup, and how many of them may need a mask."""
        count, masked, *_ = self._steps(at)
        return count, jnp.maximum(masked, 1)

    def visit(self, at: TilePlace, warpgroup: Any, number: Any) -> Any:
        """As an entry of `VisitLists.visits`: all queries visit all fills."""
        members = ((1 << self.tokens // CONSUMERS) - 1) << MEMBER_BITS
        return number | np.uint32(members).view(np.int32)

    def _steps(self, at: TilePlace) -> tuple[Any, ...]:
        """Steps of a tile, how many may need a mask, how many of these come before those without.

        Then the first step of all, the first one without a mask, and the end of these.
        """
        first = at[2] * self.tokens
        some_from, all_to = self._range(first)
        all_from, some_to = self._range(jnp.minimum(first + self.tokens, self.num_queries) - 1)
        begin = lax.div(some_from, self.keys)
        count = jnp.maximum(lax.div(some_to + (self.keys - 1), self.keys) - begin, 1)
        free_begin, free_end = lax.div(all_from + (self.keys - 1), self.keys), lax.div(all_to, self.keys)
        free = jnp.maximum(free_end - free_begin, 0)
        masked = count - free
        return count, masked, jnp.where(free > 0, free_begin - begin, masked), begin, free_begin, free_end

    def _range(self, token: Any) -> tuple[Any, Any]:
        """The keys `start .. end - 1` that a token sees."""
        edges = self.edges
        past = jnp.maximum(token + (1 - edges.size + edges.stride), 0)
        end = jnp.minimum(lax.div(past, edges.stride), self.num_keys)
        return (jnp.zeros_like(end) if edges.window is None else jnp.maximum(end - edges.window, 0)), end
