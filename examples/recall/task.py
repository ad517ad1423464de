"""The data: key-value pairs at the front of a sequence, filler, then queries that ask for the keys."""

import dataclasses
from typing import NamedTuple

import numpy as np

from nsa_jax.array_typing import Int32
from nsa_jax.config import NSAConfig

# What the example claims: NSA recalls, and a model that sees windows alone does not.
NEEDED_ACCURACY, WINDOW_BAR = 0.95, 0.2
# Guessing must stay well under the second.
MIN_VALUES = 10
# Sparse means that the selected blocks and the window together hold at most this part of the sequence.
MAX_READ_SHARE = 1 / 4


class Batch(NamedTuple):
    """Token ids; at each scored token the value to answer and its place in the front, -1 elsewhere."""

    tokens: Int32[np.ndarray, "B T"]
    answers: Int32[np.ndarray, "B T"]
    sources: Int32[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallTask:
    """Sizes of one sequence `k v k v ... filler ... q q q q`; keys, values and filler share no token.

    Multi-query associative recall (arXiv:2312.04927). The pairs at the front have distinct keys and
    independent, uniformly drawn values. Each query is one of those keys, and what the model predicts there is
    scored against the key's value. All keys are asked in random order, then again in another one, and so on.
    No value stands behind the front: whoever does not look there guesses, and is right once in `num_values`.

    Attributes:
      length: `T`, tokens of a sequence.
      num_pairs: pairs at the front.
      num_queries: queries at the end, all scored.
      num_keys: size of the vocabulary of keys.
      num_values: size of the vocabulary of values.
      num_fillers: size of the vocabulary of the filler.

    Raises:
      ValueError: the sizes do not fit into one another.
    """

    length: int = 256
    num_pairs: int = 32
    num_queries: int = 128
    num_keys: int = 32
    num_values: int = 16
    num_fillers: int = 16

    def __post_init__(self):
        for name in ("num_pairs", "num_queries", "num_fillers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}. Pass a positive number."
                )
        if self.num_values < MIN_VALUES:
            raise ValueError(
                f"num_values must be at least {MIN_VALUES}, so that guessing is no recall, got "
                f"{self.num_values}. Enlarge the vocabulary of values."
            )
        if self.num_keys < self.num_pairs:
            raise ValueError(
                f"num_keys must be at least num_pairs, as keys are distinct, got {self.num_keys} < "
                f"{self.num_pairs}. Enlarge the vocabulary of keys or ask for fewer pairs."
            )
        if 2 * self.num_pairs + self.num_queries > self.length:
            raise ValueError(
                f"pairs and queries must fit into the length, got 2 * {self.num_pairs} + {self.num_queries} "
                f"> {self.length}. Lengthen the sequence or ask for fewer."
            )

    @property
    def vocab_size(self) -> int:
        """Keys, then values, then fillers."""
        return self.num_keys + self.num_values + self.num_fillers

    @property
    def chance(self) -> float:
        """Accuracy of the best guess that does not look at the front."""
        return 1 / self.num_values

    @property
    def min_distance(self) -> int:
        """Tokens from the last value of the front to the first query: no query is closer to its value."""
        return self.length - self.num_queries - (2 * self.num_pairs - 1)

    def batch(self, rng: np.random.Generator, size: int, *, reach: int) -> Batch:
        """Draws `size` sequences; every query stands more than `reach` tokens behind its value."""
        front, back = 2 * self.num_pairs, self.length - self.num_queries
        keys = _permutations(rng, size, self.num_keys)[:, : self.num_pairs]
        values = self.num_keys + rng.integers(self.num_values, size=(size, self.num_pairs))
        rounds = [
            _permutations(rng, size, self.num_pairs) for _ in range(0, self.num_queries, self.num_pairs)
        ]
        asked = np.concatenate(rounds, axis=1)[:, : self.num_queries]

        tokens = self.num_keys + self.num_values + rng.integers(self.num_fillers, size=(size, self.length))
        tokens[:, 0:front:2], tokens[:, 1:front:2] = keys, values
        tokens[:, back:] = np.take_along_axis(keys, asked, axis=1)
        answers, sources = np.full_like(tokens, -1), np.full_like(tokens, -1)
        answers[:, back:] = np.take_along_axis(values, asked, axis=1)
        sources[:, back:] = 2 * asked + 1

        distance = (np.arange(self.length) - sources)[sources >= 0]
        assert distance.min() > reach, (
            f"a query stands {distance.min()} tokens behind its value, not > {reach}"
        )
        return Batch(*(array.astype(np.int32) for array in (tokens, answers, sources)))


def _permutations(rng: np.random.Generator, count: int, size: int) -> Int32[np.ndarray, "count size"]:
    return rng.permuted(np.tile(np.arange(size, dtype=np.int32), (count, 1)), axis=1)


def window_reach(nsa: NSAConfig, num_layers: int) -> int:
    """`num_layers * w`: beyond it nothing can arrive through windows alone, which carry `w - 1` each."""
    return num_layers * nsa.window_size


def check_sparse_and_far(task: RecallTask, nsa: NSAConfig, num_layers: int) -> None:
    """Raises ValueError unless windows cannot recall, and selection reads at most a quarter of the tokens."""
    read = nsa.num_selected_blocks * nsa.selection_block_size + nsa.window_size
    if read > MAX_READ_SHARE * task.length:
        raise ValueError(
            f"n l' + w must not exceed T/4, got {nsa.num_selected_blocks} * {nsa.selection_block_size} + "
            f"{nsa.window_size} = {read} > {task.length}/4. Select less or lengthen the sequence."
        )
    reach = window_reach(nsa, num_layers)
    if task.min_distance <= reach:
        raise ValueError(
            f"keys must stand further from their values than num_layers * w, got {task.min_distance} <= "
            f"{num_layers} * {nsa.window_size} = {reach}. Lengthen the sequence, or shrink the window, the "
            "pairs or the queries."
        )
