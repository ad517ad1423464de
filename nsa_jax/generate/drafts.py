"""Drafts: guesses of the next tokens, which one step of the model then verifies together.

The tokens stay those of a session without drafts. Each is drawn from the model's own logits, with the key of
its number, as always; a draft only spares a step if it is the token that is drawn. So nothing depends on how
good the drafts are but time. Only the order in which a step adds up its sums may be another one. (With the
rule of arXiv:2211.17192 the distribution stays, and not each token.) A model that drafts draws with the same
keys, which makes it agree more often.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Int32
from nsa_jax.cache import rewinding
from nsa_jax.generate import checks, history
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.options import Options
from nsa_jax.generate.prepared import prepared_parts
from nsa_jax.generate.rows import Rows, chosen, prefill_in_chunks
from nsa_jax.generate.structure import Structure
from nsa_jax.option_checks import check_int
from nsa_jax.sharding import explicit

MOST = rewinding.LONGEST_WAY_BACK  # all drafts of a step may be refused; its first place is no draft


@dataclasses.dataclass(frozen=True)
class LookUp:
    """Drafts from the row itself: what came after the same tokens the last time, as if it went on repeating.

    It is for texts that repeat what they have: answers that quote their document, edited code.

    Attributes:
      num_tokens: largest number of drafts in a step, 1 .. 7.
      match: number of newest tokens that must have come before, at least 1.

    Raises:
      TypeError, ValueError: a number is not an int, or out of range.
    """

    num_tokens: int = 4
    match: int = 3

    def __post_init__(self) -> None:
        check_int(low=1, high=MOST, num_tokens=self.num_tokens)
        check_int(low=1, match=self.match)


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts by another model, which costs little beside the one that it drafts for.

    It reads all tokens, too, and has a cache of its own. It draws as the session says, but without penalties.

    Attributes:
      model: a `Decoder` of the same vocabulary.
      num_tokens: number of drafts in a step, 1 .. 7.

    Raises:
      TypeError: `model` is no `Decoder`, or `num_tokens` not an int.
      ValueError: `num_tokens` is out of range.
    """

    model: Decoder
    num_tokens: int = 4

    def __post_init__(self) -> None:
        checks.check_model(self.model)
        check_int(low=1, high=MOST, num_tokens=self.num_tokens)


def drafter(drafts: Any, vocab_size: int | None) -> "_ByLookUp | _ByModel | None":
    """What makes the drafts that `start` is asked for. Raises TypeError or ValueError."""
    if drafts is None:
        return None
    if isinstance(drafts, LookUp):
        return _ByLookUp(int(drafts.num_tokens), int(drafts.match))
    if not isinstance(drafts, DraftModel):
        raise TypeError(
            f"drafts must be a LookUp or a DraftModel, got {type(drafts).__name__}. Pass LookUp()."
        )
    other = getattr(drafts.model, "vocab_size", None)
    if None not in (other, vocab_size) and other != vocab_size:
        raise ValueError(
            f"a DraftModel must have the vocabulary of the model, got {other} and {vocab_size} tokens. "
            "Pass one that was made for the same tokenizer."
        )
    structure, parameters = prepared_parts(drafts.model)
    return _ByModel(parameters, structure, int(drafts.num_tokens))


def check_caches(model: Decoder, drafts: Any, max_length: int) -> None:
    """Raises TypeError unless the caches can take back what is refused: those of the model and the drafts."""
    if drafts is None:
        return
    for each in (model, drafts.model) if isinstance(drafts, DraftModel) else (model,):
        made = functools.partial(each.init_cache, 1, max_length)
        rewinding.each_cache(lambda cache: cache, jax.eval_shape(made))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _ByLookUp:
    """`LookUp` as a program takes it. The text is all that it needs, so it keeps nothing."""

    num_tokens: int = dataclasses.field(metadata=dict(static=True))
    match: int = dataclasses.field(metadata=dict(static=True))

    def begin(self, *_: Any) -> None:
        pass

    def rewind(self, *_: Any) -> None:
        pass

    def propose(
        self, rows: Rows, most: Int32[Array, " B"], _: Options
    ) -> tuple[Int32[Array, "B D"], Int32[Array, " B"], None]:
        """Up to `most` drafts of each row, their number, and nothing to keep. A row with -1 takes no step."""
        count = rows.held + rows.pending
        if rows.history.shape[1] <= self.match:
            return jnp.zeros((len(count), self.num_tokens), jnp.int32), jnp.zeros_like(count), None
        newest = history.read(rows.history, count - self.match, self.match)
        size = rows.history.shape[1] - self.match
        same = jnp.ones((len(count), size), bool)
        for number in range(self.match):
            same &= rows.history[:, number : number + size] == newest[:, number, None]
        place = jnp.arange(size, dtype=jnp.int32)
        is_before = place < count[:, None] - self.match
        last = jnp.where(same & is_before, place, -1).max(axis=1)
        first = last + self.match
        period = jnp.maximum(count - first, 1)[:, None]  # what came after it, and then the same again
        places = first[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32) % period
        found = jnp.where(last >= 0, self.num_tokens, 0)
        return jnp.take_along_axis(rows.history, places, axis=1), jnp.clip(most, 0, found), None


class _Drafting(NamedTuple):
    """What a model that drafts holds of each row: a cache, and how many tokens are in it.

    It lacks the newest one or two tokens of a row with a pending token, and none of any other.
    """

    cache: Any
    held: Int32[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _ByModel:
    """`DraftModel` as a program takes it."""

    parameters: tuple[Array, ...]
    structure: Structure = dataclasses.field(metadata=dict(static=True))
    num_tokens: int = dataclasses.field(metadata=dict(static=True))

    @property
    def _model(self) -> Decoder:
        return self.structure.model(self.parameters)

    def begin(self, prompts: Array, lengths: Array, max_length: int, prefill_chunk: int) -> _Drafting:
        """Reads the prompts."""
        model = self._model
        cache = model.init_cache(len(prompts), max_length)
        _, cache = prefill_in_chunks(model, prompts, lengths, cache, prefill_chunk)
        return _Drafting(cache, lengths.astype(jnp.int32))

    def append(self, rows: Rows, text: Array, counts: Array, prefill_chunk: int) -> _Drafting:
        """Reads the first `counts` tokens of a turn, of which a pending one is the first."""
        model, drafting = self._model, rows.drafting
        missing = jnp.where(counts > 0, rows.held - drafting.held, 0)  # 1 if all of the last drafts agreed
        token = history.read(rows.history, drafting.held, 1)
        _, cache = model.decode_step(token, drafting.cache, num_tokens=missing)
        _, cache = prefill_in_chunks(model, text, counts, cache, prefill_chunk)
        return _Drafting(cache, drafting.held + missing + counts)

    def propose(
        self, rows: Rows, most: Int32[Array, " B"], options: Options
    ) -> tuple[Int32[Array, "B D"], Int32[Array, " B"], _Drafting]:
        """Up to `most` drafts of each row, their number, and the cache with all of them but the last."""
        model, drafting = self._model, rows.drafting
        missing = jnp.where(most >= 0, rows.held + rows.pending - drafting.held, 0)
        tokens = history.read(rows.history, drafting.held, 2)
        logits, cache = model.decode_step(tokens, drafting.cache, num_tokens=missing)
        last = jnp.maximum(missing - 1, 0)[:, None, None]
        logits = jnp.take_along_axis(explicit.by_rows(logits), last, axis=1)[:, 0]
        counts = jnp.clip(most, 0, self.num_tokens)
        rows = rows._replace(seen=None, written=None)

        def draft(logits: Array, token: Array, number: Any) -> Array:
            return chosen(rows._replace(token=token, drawn=rows.drawn + number), options, logits)[0]

        def step(carry: Any, number: Any) -> Any:
            """Appends the newest draft, number 1 at first, and makes the next one."""
            token, cache = carry
            more = (number < counts).astype(jnp.int32)
            logits, cache = model.decode_step(token[:, None], cache, num_tokens=more)
            following = draft(explicit.by_rows(logits[:, 0]), token, number)
            return (following, cache), following

        first = draft(logits, rows.token, 0)
        numbers = jnp.arange(1, self.num_tokens, dtype=jnp.int32)
        (_, cache), others = jax.lax.scan(step, (first, cache), numbers)
        held = drafting.held + missing + jnp.maximum(counts - 1, 0)
        drafts = jnp.concatenate([first[:, None], others.T], axis=1)
        return drafts, counts, _Drafting(cache, held)

    def rewind(self, drafting: _Drafting, held: Int32[Array, " B"]) -> _Drafting:
        """Takes back what is behind the first `held` tokens of a row."""
        back = jnp.maximum(drafting.held - held, 0)
        return _Drafting(rewinding.rewind_each(drafting.cache, back), drafting.held - back)
