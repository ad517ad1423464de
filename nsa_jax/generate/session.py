"""A generation that continues: begun by `start`, given more tokens by `extend`, and moved on by `advance`.

The three calls are compiled programs of their own around the functions of `rows`, of which `generate` is one
program. They take the place of the session that they are given: its caches are donated.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, DType, Int, Int32, PRNGKeyArray
from nsa_jax.config import LONGEST
from nsa_jax.generate import buckets, checks, rows
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.drafts import DraftModel, LookUp, check_caches, drafter
from nsa_jax.generate.ends import check_chosen
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.options import LogitsHook, Options, Sampling
from nsa_jax.generate.prepared import prepared_parts
from nsa_jax.generate.rows import Rows
from nsa_jax.generate.sampling import Count, Number
from nsa_jax.generate.structure import Structure
from nsa_jax.option_checks import check_int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Session:
    """The state of a generation, a pytree. `start` makes one.

    It refers to the parameters of the prepared model, as they were in `start`.

    Attributes:
      rows: caches, newest tokens, counters and keys of the rows. All arrays have the rows first.
      options: how tokens are chosen, and what ends a row.
      parameters: arrays of the prepared model.
      structure: that model without its arrays.
      max_length: capacity of a row in tokens.
      vocab_size: number of ids, by which `extend` checks tokens; None if the model does not say.
    """

    rows: Rows
    options: Options
    parameters: tuple[Array, ...]
    structure: Structure = dataclasses.field(metadata=dict(static=True))
    max_length: int = dataclasses.field(metadata=dict(static=True))
    vocab_size: int | None = dataclasses.field(metadata=dict(static=True))

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """Number of tokens of each row: its prompt, those of `extend`, and those that were drawn."""
        return self.rows.held + self.rows.pending

    @property
    def ended(self) -> Int32[Array, " B"]:
        """Why each row has ended, as a number of `Ended`; 0 for a row that has not."""
        return self.rows.ended

    @property
    def row_bytes(self) -> int:
        """Number of bytes that a row takes: what `repeat` and `gather` allocate and copy for each row."""
        leaves = jax.tree.leaves(self.rows)
        return sum(x.size * x.dtype.itemsize for x in leaves) // len(self.rows.token)


class Continuation(NamedTuple):
    """What a call of `advance` added to each row.

    Attributes:
      tokens: new tokens of each row, with those that ended it, then `pad_id`.
      lengths: number of new tokens of each row.
      ended: why the row has ended, as a number of `Ended`; 0 for a row that has not.
      logprobs: log-probabilities of the new tokens, where `start` was asked for them.
      steps: number of decode steps that it took: whole chunks, or with drafts one by one until all rows had
        their tokens.
    """

    tokens: Int32[Array, "B new"]
    lengths: Int32[Array, " B"]
    ended: Int32[Array, " B"]
    logprobs: Logprobs | None
    steps: Int32[Array, ""]

    def check(self) -> "Continuation":
        """Refuses rows that have ended because no token could be chosen, also in calls before.

        Waits for the device.

        Returns:
          The same, where all rows are fine.

        Raises:
          ValueError: rows have ended with `Ended.NOT_FINITE`; the message has their numbers.
          TypeError: it is called inside `jit`.
        """
        check_chosen(self.ended)
        return self


def check_session(session: Any) -> None:
    """Raises TypeError unless it is a session, ValueError if a call has used up its arrays."""
    if not isinstance(session, Session):
        raise TypeError(f"session must be a Session, got {type(session).__name__}. Call start.")
    token = session.rows.token
    if isinstance(token, jax.Array) and not isinstance(token, jax.core.Tracer) and token.is_deleted():
        raise ValueError(
            "session must be the newest one, got one that extend, advance or stream has used up. Pass what "
            "they gave, or a copy that repeat or gather made before."
        )


def start(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "B P"],
    *,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    max_length: int,
    temperature: Number = 0.0,
    top_k: Count | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    repetition_penalty: Number | None = None,
    presence_penalty: Number | None = None,
    logits_hook: LogitsHook | None = None,
    logprobs: int | None = None,
    eos_id: int | Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    pad_id: int = 0,
    key: int | PRNGKeyArray = 0,
    drafts: LookUp | DraftModel | None = None,
    prefill_chunk: int | None = None,
    cache_dtype: DType | None = None,
) -> Session:
    """Begins a session: reads the prompts. `advance` then draws the first token.

    What a session writes is, token for token, what `generate` writes with the same arguments, however the
    steps are divided. Programs are compiled as for `generate`: widths of prompts share them by buckets. Which
    options are given needs other programs, and so does another `logits_hook` or number of `logprobs`; the
    values of others do not, but for numbers of `eos_id`, and of stop sequences and their tokens in powers of
    two.

    The session holds the model as `prepare` makes it, which is about 60 % of its parameters once more. Other
    sessions of the same model share that. If memory is short, prepare the model yourself, and keep no other.

    `temperature` and the five parameters after it are one number for all rows, or an array with one for each.
    They apply in this order: hook, repetition, presence, temperature, `top_k`, `top_p`, `min_p`.

    Args:
      model: see `generate`.
      prompts: token ids, padded on the right with any ids.
      lengths: number of tokens of each prompt, 1 .. `P`; `P` by default.
      max_length: capacity of a row in tokens: prompt, turns and new tokens together.
      temperature: divides the logits before drawing. 0 takes the most likely token instead, also in an array.
      top_k: draws only from the `k` most likely tokens. If the temperature is the number 0, this and the next
        two are refused.
      top_p: draws only from the smallest set of most likely tokens with at least this probability.
      min_p: does not draw tokens that have less than this share of the largest probability; 0 .. 1.
      repetition_penalty: divides positive logits of the tokens that the row has had, in prompt, turns and
        text, and multiplies negative ones; above 0, and 1 changes nothing (arXiv:1909.05858).
      presence_penalty: is subtracted from the logits of the tokens that the row has written, in all turns.
      logits_hook: a pure function from the logits `[B, vocab]`, the newest token of each row `[B]` and the
        number of tokens drawn before `[B]`, to logits; `-inf` excludes a token. It is traced, and must be the
        same object each time.
      logprobs: asks for the log-probabilities of the new tokens and of so many of the likeliest in their
        places; 0 for those of the new tokens alone.
      eos_id: token that ends a row, or several such tokens, until `extend` gives it more tokens.
      stop: sequences of tokens that end a row as soon as it has written one of them in this turn.
      pad_id: token that fills a row of `Continuation.tokens` after its new tokens.
      key: a seed, a typed key, or one for each row. Token number `n` of a row, counted from 0 through all its
        turns, is drawn by `jax.random.fold_in(key, n)` of the row's key.
      drafts: lets one decode step verify several tokens: a `LookUp` of what came next before, or a
        `DraftModel`. The tokens are the same, up to the order in which sums are added; a step takes longer,
        and fewer may do.
      prefill_chunk: number of prompt tokens of a row that are prefilled at once.
      cache_dtype: see `generate`. The caches of a `DraftModel` are of its own dtype.

    Returns:
      The session, in which nothing is drawn yet.

    Raises:
      TypeError, ValueError: as in `generate`; or an array of a parameter has not one number for each row,
        `stop` is not a sequence of sequences of ids, `logits_hook` is not a function to logits, or `drafts`
        are of another kind or vocabulary, or asked of a model whose caches are not those of `nsa_jax.cache`.

    Examples:
      >>> session = start(model, prompts, max_length=4096)
      >>> session, new = advance(session, 64)
      >>> session, more = advance(extend(session, question), 64)
    """
    checks.check_model(model)
    vocab_size = getattr(model, "vocab_size", None)
    tokens, counts = checks.check_prompts(prompts, lengths, vocab_size)
    sampling = Sampling.of_rows(
        len(tokens), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
    )  # fmt: skip
    more = dict(stop=stop, drafts=drafter(drafts, vocab_size), logprobs=logprobs, logits_hook=logits_hook)
    options = Options.make(sampling, eos_id, pad_id, **more)
    if logprobs is not None and vocab_size is not None:
        check_int(high=vocab_size, logprobs=logprobs)
    checks.check_parts(prefill_chunk)
    cache_dtype = checks.check_cache_dtype(model, cache_dtype)
    check_int(low=1, high=LONGEST, max_length=max_length)
    checks.check_room(counts, 0, max_length)
    check_caches(model, drafts, max_length)
    structure, parameters = prepared_parts(model)
    keys = checks.check_key(key, len(tokens))
    width = buckets.width(tokens.shape[1], int(max_length))
    chunk = buckets.chunk(len(tokens), width, prefill_chunk)
    begun = _start(
        structure, parameters, buckets.widened(tokens, -(-width // chunk) * chunk), counts, keys, options,
        max_length=int(max_length), prefill_chunk=chunk, cache_dtype=cache_dtype,
    )  # fmt: skip
    return Session(begun, options, parameters, structure, int(max_length), vocab_size)


def empty(session: Session, sampling: Sampling, cache_dtype: str | None) -> Session:
    """A session of one row that has read nothing, of the model, options and capacity of another one."""
    options = dataclasses.replace(session.options, sampling=sampling)
    begun = _start(
        session.structure, session.parameters, np.zeros((1, 0), np.int32), np.zeros(1, np.int32),
        checks.check_key(0, 1), options, max_length=session.max_length, prefill_chunk=1,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    return dataclasses.replace(session, rows=begun, options=options)


def extend(
    session: Session,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    prefill_chunk: int | None = None,
) -> Session:
    """Appends tokens to rows, such as the next question of a conversation. Rows that have ended go on.

    The session that is passed is used up: its caches are donated. A row that gets no tokens stays as it is.

    Args:
      session: the newest session.
      tokens: token ids, padded on the right with any ids.
      lengths: number of tokens of each row, 0 .. `T`; `T` by default.
      prefill_chunk: see `generate`.

    Returns:
      The session with the tokens in it. A row without room for all of its tokens gets none, and its `ended`
      becomes `Ended.FULL`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: shapes do not fit, a length is out of range, or the session is used up; or, where the host
        has the values, an id is not in the vocabulary, or a row has no room.
    """
    check_session(session)
    batch, held = len(session.rows.token), session.rows.held
    tokens, counts = checks.check_turn(tokens, lengths, batch, session.vocab_size)
    checks.check_parts(prefill_chunk)
    checks.check_turn_fits(held, session.rows.pending, counts, session.max_length)
    width = buckets.width(tokens.shape[1] + 1, session.max_length)  # a pending token comes first
    chunk = buckets.chunk(len(tokens), width, prefill_chunk)
    return appended(session, buckets.widened(tokens, -(-width // chunk) * chunk - 1), counts, chunk)


def appended(
    session: Session,
    tokens: Int32[Array | np.ndarray, "B T"],
    counts: Int32[Array | np.ndarray, " B"],
    prefill_chunk: int,
    any_pending: bool = True,
) -> Session:
    """`extend` without its checks and buckets; `rows.append` says what the widths must be."""
    extended = _extend(
        session.structure, session.parameters, session.rows, tokens, counts, session.options,
        max_length=session.max_length, prefill_chunk=prefill_chunk, any_pending=any_pending,
    )  # fmt: skip
    return dataclasses.replace(session, rows=extended)


def advance(session: Session, steps: int, *, chunk_size: int = 8) -> tuple[Session, Continuation]:
    """Adds up to `steps` new tokens to each row that has not ended.

    The session that is passed is used up: its caches are donated. Numbers of steps share a program by
    buckets, as in `generate`.

    Args:
      session: the newest session.
      steps: largest number of tokens to add to a row, at most 2^29.
      chunk_size: see `generate`.

    Returns:
      The session after these tokens, and `Continuation(tokens, lengths, ended, logprobs, steps)`, with as
      many columns of tokens as steps were asked for. The newest token of a row is not in its cache yet; the
      next call appends it.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is out of range, or the session is used up.
    """
    check_session(session)
    checks.check_counts(steps=steps, chunk_size=chunk_size)
    check_int(high=LONGEST // 2, steps=steps)
    until = session.rows.drawn + int(steps)
    session, new = _dispatch(session, until, int(steps), buckets.bucketed(int(steps)), int(chunk_size))
    tokens, reports = jax.tree.map(lambda x: x[:, : int(steps)], (new.tokens, new.logprobs))
    return session, new._replace(tokens=tokens, logprobs=reports)


def dispatch_chunk(
    session: Session, until: Int32[Array | np.ndarray, " B"], steps: int
) -> tuple[Session, Continuation]:
    """Adds tokens to each row until it has drawn `until`, but no more than so many decode steps bring.

    A row without a pending token gets one more, as that needs no step. The steps are taken also if no row
    wants them, so that the host need not wait for the device in between, see `rows.advance`. With drafts each
    step is followed by a test, because nobody knows how many are needed.
    """
    fixed = min(steps, session.max_length) if session.options.drafts is None else None
    return _dispatch(session, until, steps, buckets.bucketed(steps + 1), 1, fixed)


def _dispatch(
    session: Session,
    until: Int32[Array | np.ndarray, " B"],
    steps: int,
    columns: int,
    chunk_size: int,
    fixed_steps: int | None = None,
) -> tuple[Session, Continuation]:
    advanced, new = _advance(
        session.structure, session.parameters, session.rows, session.options, until, steps,
        max_length=session.max_length, columns=columns, chunk_size=min(chunk_size, session.max_length),
        fixed_steps=fixed_steps,
    )  # fmt: skip
    return dataclasses.replace(session, rows=advanced), new


@functools.partial(jax.jit, static_argnames=("structure", "max_length", "prefill_chunk", "cache_dtype"))
def _start(structure, parameters, prompts, lengths, keys, options, **sizes) -> Rows:
    model = structure.model(parameters)
    return rows.begin(model, prompts, lengths, keys, options, keeps_history=True, **sizes)


@functools.partial(
    jax.jit,
    static_argnames=("structure", "max_length", "prefill_chunk", "any_pending"),
    donate_argnames="held",
)
def _extend(structure, parameters, held, tokens, counts, options, **sizes) -> Rows:
    return rows.append(structure.model(parameters), held, tokens, counts, options, **sizes)


@functools.partial(
    jax.jit,
    static_argnames=("structure", "max_length", "columns", "chunk_size", "fixed_steps"),
    donate_argnames="held",
)
def _advance(
    structure, parameters, held, options, until, steps, *, max_length, columns, chunk_size, fixed_steps
) -> tuple[Rows, Continuation]:
    model = structure.model(parameters)
    limit = jnp.minimum(until - held.drawn, steps + ~held.pending)
    sizes = dict(max_length=max_length, columns=columns + 1, chunk_size=chunk_size, fixed_steps=fixed_steps)
    advanced, new, taken = rows.advance(model, held, options, limit, **sizes)

    # A row with a pending token has none in the first column.
    def aligned(x: Array) -> Array:
        return jnp.where(held.pending.reshape(-1, *[1] * (x.ndim - 1)), x[:, 1:], x[:, :-1])

    new = new._replace(tokens=aligned(new.tokens), logprobs=jax.tree.map(aligned, new.logprobs))
    new = rows.padded(new, options.pad_id)
    return advanced, Continuation(new.tokens, new.lengths, advanced.ended, new.logprobs, taken)
