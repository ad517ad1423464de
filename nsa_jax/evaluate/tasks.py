"""What is hidden in a text, and asked for at its end: facts of token ids."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from nsa_jax.option_checks import check_function, check_int, check_ints

type Encode = Callable[[str], Sequence[int]]

WORDS = (
    *("acorn", "anchor", "basket", "beacon", "candle", "canyon", "castle", "copper", "dragon", "feather"),
    *("forest", "garden", "hammer", "harbor", "island", "jacket", "ladder", "lantern", "marble", "meadow"),
    *("mirror", "orchard", "pepper", "ribbon", "saddle", "silver", "summit", "temple", "violin", "window"),
)


class Question(NamedTuple):
    """Facts to hide in a text, and a question about the first of them; all are token ids.

    Attributes:
      facts: each of them is put somewhere into the text, the first at the depth that is measured.
      question: what the text ends with.
      answer: what the model should write then.
    """

    facts: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


class Task(Protocol):
    """Makes questions. A task of your own is a class with these two members."""

    @property
    def chance(self) -> float:
        """Share of right answers of a model that knows the task, but does not find the fact that is asked."""

    def draw(self, rng: np.random.Generator) -> Question:
        """Draws a question."""


@dataclasses.dataclass(frozen=True)
class MagicNumber:
    """A needle: "The special magic number for copper is 71432." With several `keys`, one of them is asked.

    Chance is a random number, or of several keys one of their numbers.

    Attributes:
      encode: turns a text into token ids, without adding any for its beginning or end.
      digits: digits of a number, at least 1 and at most 9.
      keys: facts in a text, each about another word: 1 to 30.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a number is out of range.
    """

    encode: Encode
    digits: int = 5
    keys: int = 1

    def __post_init__(self):
        check_function(encode=self.encode)
        check_int(low=1, high=9, digits=self.digits)
        check_int(low=1, high=len(WORDS), keys=self.keys)

    @property
    def chance(self) -> float:
        """One in as many as a model may take for the number."""
        return 1 / self.keys if self.keys > 1 else 1 / (9 * 10 ** (self.digits - 1))

    def draw(self, rng: np.random.Generator) -> Question:
        """Draws words, and a number for each of them."""
        words = rng.choice(WORDS, self.keys, replace=False)
        numbers = [_number(rng, self.digits) for _ in words]

        def said(word: str) -> tuple[int, ...]:
            return _ids(self.encode, f" The special magic number for {word} is")

        answers = [_ids(self.encode, f" {number}") for number in numbers]
        end = _ids(self.encode, ".")
        facts = tuple(said(word) + answer + end for word, answer in zip(words, answers, strict=True))
        return Question(facts, said(words[0]), answers[0])


@dataclasses.dataclass(frozen=True)
class PassKey:
    """The pass key of arXiv:2305.16300, which the text says twice.

    Attributes:
      encode: turns a text into token ids, see `MagicNumber`.
      digits: digits of the key, at least 1 and at most 9.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a number is out of range.
    """

    encode: Encode
    digits: int = 5

    def __post_init__(self):
        check_function(encode=self.encode)
        check_int(low=1, high=9, digits=self.digits)

    @property
    def chance(self) -> float:
        """One in all numbers with so many digits."""
        return 1 / (9 * 10 ** (self.digits - 1))

    def draw(self, rng: np.random.Generator) -> Question:
        """Draws a key."""
        key = _ids(self.encode, f" {_number(rng, self.digits)}")
        question = _ids(self.encode, " The pass key is")
        again = _ids(self.encode, ". Remember it."), _ids(self.encode, " is the pass key.")
        return Question((question + key + again[0] + key + again[1],), question, key)


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """For a model without a tokenizer: after a token of `names` come `length` tokens of `values`.

    The name, again, is the question. Chance is a random draw of the values, or of several `keys` one of them.

    Attributes:
      names: token ids that stand for a fact, at least as many as `keys`; the filler should not have them.
      values: token ids of which answers consist.
      length: tokens of an answer.
      keys: facts in a text.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a number is out of range, an id is there twice, or there are fewer names than keys or fewer
        than two values.
    """

    names: Sequence[int]
    values: Sequence[int]
    length: int = 1
    keys: int = 1

    def __post_init__(self):
        check_int(low=1, length=self.length, keys=self.keys)
        for name in ("names", "values"):
            ids = getattr(self, name)
            check_ints(low=0, **{name: ids})
            if len(set(ids)) < len(ids) or len(ids) < (self.keys if name == "names" else 2):
                raise ValueError(
                    f"{name} must be different ids, at least 2 values and as many names as keys, got "
                    f"{len(set(ids))} of {len(ids)}. Pass other ids."
                )

    @property
    def chance(self) -> float:
        """One in as many as a model may take for the answer."""
        return 1 / self.keys if self.keys > 1 else 1 / len(self.values) ** self.length

    def draw(self, rng: np.random.Generator) -> Question:
        """Draws names, and values for each of them."""
        names = rng.choice(self.names, self.keys, replace=False).tolist()
        values = [tuple(rng.choice(self.values, self.length).tolist()) for _ in names]
        facts = tuple((name, *value) for name, value in zip(names, values, strict=True))
        return Question(facts, (names[0],), values[0])


def _number(rng: np.random.Generator, digits: int) -> int:
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _ids(encode: Encode, text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in encode(text))
