"""Needles: facts at chosen depths of a long text, asked for at its end, answered by greedy generation."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from nsa_jax.array_checks import check_integers
from nsa_jax.array_typing import Array, DType, Int
from nsa_jax.evaluate.table import markdown
from nsa_jax.evaluate.tasks import Question, Task
from nsa_jax.generate import Decoder, generate
from nsa_jax.option_checks import check_int, check_ints, check_number


@dataclasses.dataclass(frozen=True)
class Needles:
    """How many needles a model found, see `find_needles`. `str` gives a table in Markdown.

    Attributes:
      lengths: tokens of a prompt; the rows of `found`.
      depths: where the fact stands, from 0, the beginning of the text, to 1; the columns of `found`.
      asked: questions for each length and depth.
      found: how many of them were answered rightly.
      chance: share of right answers of a model that does not find the fact.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    asked: int
    found: Int[np.ndarray, "lengths depths"]
    chance: float

    @property
    def share(self) -> float:
        """Share of all questions that were answered rightly."""
        return float(self.found.sum()) / (self.asked * self.found.size)

    def merged(self, parts: int) -> "Needles":
        """Adds up neighbouring depths, so that `parts` of them are left.

        Raises:
          TypeError: `parts` is not an int.
          ValueError: it is below 1, or does not divide the number of depths.
        """
        check_int(low=1, parts=parts)
        if len(self.depths) % parts:
            raise ValueError(
                f"parts must divide the number of depths, got {parts} for {len(self.depths)}. Pass a divisor."
            )
        each = len(self.depths) // parts
        depths = np.reshape(self.depths, (parts, each)).mean(1).tolist()
        found = self.found.reshape(len(self.lengths), parts, each).sum(2)
        return Needles(self.lengths, tuple(depths), self.asked * each, found, self.chance)

    def __str__(self) -> str:
        """A row for each length, a column for each depth, then the sum and the chance."""
        heads = "length", *(f"{depth:.0%}" for depth in self.depths), "all", "chance"
        rows = []
        for length, found in zip(self.lengths, self.found, strict=True):
            counts = [f"{each} of {self.asked}" for each in found]
            rows.append(
                (length, *counts, f"{found.sum()} of {self.asked * found.size}", f"{self.chance:.2g}")
            )
        return markdown(heads, rows)


def find_needles(
    model: Decoder,
    task: Task,
    filler: Int[Array | np.ndarray, " tokens"],
    *,
    lengths: Sequence[int],
    depths: int | Sequence[float] = 16,
    asked: int = 1,
    batch: int = 8,
    start: Sequence[int] = (),
    seed: int = 0,
    cache_dtype: DType | None = None,
) -> Needles:
    """Hides facts in a text at each depth, asks for them at its end, and counts the right answers.

    A prompt is `start`, a stretch of the filler with the facts in it, and the question: as many tokens as its
    length says. An answer is right if the tokens that the model writes, each the most likely one, begin with
    it. The same arguments give the same prompts, so that the counts of two models can be compared. Each
    length compiles a program.

    Args:
      model: an `nnx.Module` that `nsa_jax.generate.generate` takes, in `eval()` mode.
      task: what is hidden: a `MagicNumber`, `PassKey` or `TokenPairs`, or a `Task` of your own.
      filler: token ids of a text, of which each prompt takes another stretch; repeated if it is too short.
      lengths: tokens of a prompt, the question included.
      depths: where the fact stands, each from 0 to 1; or a number of depths, which are the middles of as many
        equal parts. Other facts stand anywhere.
      asked: questions for each length and depth.
      batch: prompts that are answered together.
      start: token ids that a text begins with, such as that of its beginning.
      seed: of the questions, and of what is taken from the filler.
      cache_dtype: see `nsa_jax.generate.generate`.

    Returns:
      The counts, as `Needles`.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a number is out of range, or there is none; `filler` is empty or not one row; a length has
        no room for the facts and the question; or an answer has no token, as of an `encode` without digits.
    """
    if isinstance(task, type) or not callable(getattr(task, "draw", None)) or not hasattr(task, "chance"):
        raise TypeError(
            f"task must draw questions and know its chance, got {type(task).__name__}. Pass a Task."
        )
    check_int(low=1, asked=asked, batch=batch)
    check_int(low=0, seed=seed)
    check_ints(low=0, start=start)
    check_ints(low=1, lengths=lengths)
    if not len(lengths):
        raise ValueError(f"lengths must have at least one number, got {lengths}. Pass a length of a prompt.")
    depths, lengths = _checked_depths(depths), tuple(map(int, lengths))
    text = _checked_filler(filler)
    found = np.zeros((len(lengths), len(depths)), int)
    for row, length in enumerate(lengths):
        rng = np.random.default_rng((seed, length))
        at = np.repeat(np.arange(len(depths)), asked)
        questions = [task.draw(rng) for _ in at]
        if not all(question.answer for question in questions):  # every text begins with it
            raise ValueError(
                "an answer must have at least one token, got none. Give the task an `encode` that knows its "
                "numbers."
            )
        prompts = [
            _prompt(rng, question, text, tuple(start), length, depths[depth])
            for question, depth in zip(questions, at, strict=True)
        ]
        most = max(len(question.answer) for question in questions)
        for begin in range(0, len(at), batch):
            rows = np.stack(prompts[begin : begin + batch])
            missing = batch - len(rows)  # filled up, so that there is one shape and one program
            rows = np.pad(rows, ((0, missing), (0, 0)), mode="edge")
            # What fills a row without finite logits must be no answer, so it is no token.
            filled = generate(model, rows, max_new_tokens=most, pad_id=-1, cache_dtype=cache_dtype)
            new = np.asarray(filled.tokens).tolist()
            for question, depth, written in zip(questions[begin:], at[begin:], new, strict=False):
                found[row, depth] += tuple(written[: len(question.answer)]) == question.answer
    return Needles(lengths, depths, asked, found, float(task.chance))


def _prompt(
    rng: np.random.Generator,
    question: Question,
    text: Int[np.ndarray, " tokens"],
    start: tuple[int, ...],
    length: int,
    depth: float,
) -> Int[np.ndarray, " length"]:
    """A text with the facts in it, and the question at its end."""
    needed = len(start) + len(question.question) + sum(map(len, question.facts))
    room = length - needed
    if room < 0:
        raise ValueError(
            f"lengths must have room for the facts and the question, got {length} for {needed} tokens. Pass "
            "larger ones."
        )
    filler = np.resize(np.roll(text, -int(rng.integers(len(text)))), room)
    places = [round(depth * room), *rng.integers(0, room + 1, len(question.facts) - 1).tolist()]
    prompt, last = list(start), 0
    for place, fact in sorted(zip(places, question.facts, strict=True), key=lambda each: each[0]):
        prompt += [*filler[last:place].tolist(), *fact]
        last = place
    return np.array([*prompt, *filler[last:].tolist(), *question.question], np.int32)


def _checked_depths(depths: int | Sequence[float]) -> tuple[float, ...]:
    if isinstance(depths, Sequence) and not isinstance(depths, str):
        named = {f"depths[{i}]": depth for i, depth in enumerate(depths)}
        check_number(**named)
        for name, depth in named.items():
            if not 0 <= depth <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {depth}. Pass a share of the text.")
        if named:
            return tuple(float(depth) for depth in depths)
        depths = 0
    check_int(low=1, depths=depths)
    return tuple((i + 0.5) / depths for i in range(depths))


def _checked_filler(filler: Int[Array | np.ndarray, " tokens"]) -> Int[np.ndarray, " tokens"]:
    if not isinstance(filler, jax.Array | np.ndarray):
        raise TypeError(f"filler must be an array, got {type(filler).__name__}. Pass a jax.Array.")
    check_integers(filler=filler)
    if filler.ndim != 1 or filler.size < 1:
        raise ValueError(f"filler must be one row of token ids, got shape {filler.shape}. Pass a text.")
    return np.asarray(filler)
