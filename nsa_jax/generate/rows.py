"""What a generation holds of its rows, and the pure functions that begin, extend and advance it.

`generate` and sessions are made of these. Each is traced into one program, in which nothing returns to the
host for each token. When the loop ends depends on the data, and each test for the end is a round trip to the
host. So a `while_loop` tests once per chunk, and a chunk is a loop with a fixed number of steps. Rows that
have ended or have as many tokens as were asked for take part in the remaining steps, but write nothing.

The first token after a prompt is drawn from the logits of the prompt. Each step feeds the token that was
drawn before, so the newest token of a row is not in the cache.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Bool, Float, Int32, PRNGKeyArray
from nsa_jax.cache import rewinding
from nsa_jax.generate import checks, ends, history, logprobs, penalties
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.ends import Ended
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.options import Options, Sampling
from nsa_jax.generate.sampling import sample
from nsa_jax.sharding import explicit


class Rows(NamedTuple):
    """What a generation holds of each row.

    Attributes:
      cache: keys and values of all tokens but a pending one.
      logits: logits of the next token of the rows that have none pending.
      token: newest token, of the prompt or drawn.
      pending: whether that token is drawn, and not yet in the cache.
      held: number of tokens in the cache.
      drawn: number of tokens drawn so far, in all turns. It numbers the keys.
      ended: why it writes no more, see `Ended`.
      keys: key of the row. Its token number `n` is drawn by `fold_in(key, n)`.
      turn: number of tokens before those that were drawn in this turn.
      furthest: largest number of tokens that the cache has had. It says how much its rings still hold.
      seen: tokens that the row has had, given or drawn; None without a repetition penalty.
      written: tokens that were drawn; None without a presence penalty.
      history: all tokens of the row, given and drawn, the pending one too, then anything: `[B, S + 1]` for
        caches of `S` tokens; None in `generate`.
      drafting: what drafts are made with, see `drafts`; None without them.
    """

    cache: Any
    logits: Float[Array, "B vocab"]
    token: Int32[Array, " B"]
    pending: Bool[Array, " B"]
    held: Int32[Array, " B"]
    drawn: Int32[Array, " B"]
    ended: Int32[Array, " B"]
    keys: PRNGKeyArray
    turn: Int32[Array, " B"]
    furthest: Int32[Array, " B"]
    seen: Bool[Array, "B vocab"] | None
    written: Bool[Array, "B vocab"] | None
    history: Any = None
    drafting: Any = None


class New(NamedTuple):
    """Tokens that were added to the rows, in a buffer, their number, and their log-probabilities or None."""

    tokens: Int32[Array, "B columns"]
    lengths: Int32[Array, " B"]
    logprobs: Logprobs | None


class Loop(NamedTuple):
    """The state of the loop: the rows, what is new in them, and how many steps it has taken."""

    rows: Rows
    new: New
    steps: Int32[Array, ""]


def begin(
    model: Decoder,
    prompts: Int32[Array, "B P"],
    lengths: Int32[Array, " B"],
    keys: PRNGKeyArray,
    options: Options,
    *,
    max_length: int,
    prefill_chunk: int,
    cache_dtype: str | None,
    keeps_history: bool = False,
) -> Rows:
    """Rows that hold their prompts, before the first token is drawn; nothing, if the prompts have width 0."""
    prompts, lengths, keys = explicit.alike(prompts=prompts, lengths=lengths, keys=keys)
    of_cache: dict[str, Any] = {} if cache_dtype is None else dict(dtype=cache_dtype)
    cache = model.init_cache(prompts.shape[0], max_length, **of_cache)
    logits, cache = prefill_in_chunks(model, prompts, lengths, cache, prefill_chunk)
    none = jnp.zeros_like(lengths, jnp.int32)  # one number a row, on the device of the row
    held, last = none + lengths.astype(jnp.int32), none
    if prompts.shape[1]:
        last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    logits = _nan_for_unknown_ids(model, explicit.by_rows(logits), prompts, lengths)
    sampling, drafting = options.sampling, None
    if options.drafts is not None:
        drafting = options.drafts.begin(prompts, lengths, max_length, prefill_chunk)
    had = jnp.zeros_like(logits, bool)
    return Rows(
        cache=cache,
        logits=logits,
        token=last.astype(jnp.int32),
        pending=none > 0,
        held=held,
        drawn=none,
        ended=none,
        keys=keys,
        turn=held,
        furthest=held,
        seen=None if sampling.repetition_penalty is None else penalties.marked(had, prompts, lengths),
        written=None if sampling.presence_penalty is None else had,
        history=history.begun(prompts, lengths, max_length) if keeps_history else None,
        drafting=drafting,
    )


def append(
    model: Decoder,
    rows: Rows,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    options: Options,
    *,
    max_length: int,
    prefill_chunk: int,
    any_pending: bool = True,
) -> Rows:
    """Appends the pending token of a row and the first `counts` of `tokens`, to rows that get some.

    `T + 1` must be a multiple of `prefill_chunk`. With `any_pending=False`, for rows of which none has a
    pending token, `T` must be.
    """
    text, wanted, _ = explicit.alike(tokens=tokens, counts=counts, held=rows.held)
    if any_pending:  # that token comes before those of the turn
        behind = jnp.concatenate([rows.token[:, None], text], axis=1)
        text = jnp.where(rows.pending[:, None], behind, jnp.roll(behind, -1, axis=1))
        wanted = jnp.where(wanted > 0, wanted + rows.pending, 0)
    fits = rows.held + wanted <= max_length
    wanted = jnp.where(fits, wanted, 0)
    given = wanted > 0
    logits, cache = prefill_in_chunks(model, text, wanted, rows.cache, prefill_chunk)
    logits = _nan_for_unknown_ids(model, explicit.by_rows(logits), text, wanted)
    last = jnp.take_along_axis(text, jnp.maximum(wanted - 1, 0)[:, None], axis=1)[:, 0]
    if rows.drafting is not None:
        rows = rows._replace(drafting=options.drafts.append(rows, text, wanted, prefill_chunk))
    if rows.history is not None:
        rows = rows._replace(history=history.written(rows.history, text, rows.held, wanted))
    if rows.seen is not None:
        rows = rows._replace(seen=penalties.marked(rows.seen, text, wanted))
    return rows._replace(
        cache=cache,
        logits=jnp.where(given[:, None], logits, rows.logits),
        token=jnp.where(given, last.astype(jnp.int32), rows.token),
        pending=rows.pending & ~given,
        held=rows.held + wanted,
        turn=jnp.where(given, rows.held + wanted, rows.turn),
        furthest=jnp.maximum(rows.furthest, rows.held + wanted),
        ended=jnp.where(given, Ended.NO, jnp.where(fits, rows.ended, Ended.FULL)),
    )


def advance(
    model: Decoder,
    rows: Rows,
    options: Options,
    limit: Int32[Array, " B"] | int,
    *,
    max_length: int,
    columns: int,
    chunk_size: int,
    fixed_steps: int | None = None,
) -> Loop:
    """Adds up to `limit` tokens to each row that has not ended.

    A row with a pending token has its tokens in columns `1 .. lengths` of the buffer, any other row from
    column 0 on. Without drafts, a column is thus a draw that all rows take part in.

    With `fixed_steps` it takes so many steps, whether rows still want tokens or not. The host then has
    nothing to wait for, and can hand over the next program while this one runs.
    """

    def draw(loop: Loop, logits: Array, asked: Bool[Array, " B"]) -> Loop:
        """Draws the next token from `logits` and adds it to the rows that are `asked` for one."""
        rows, new, logits = loop.rows, loop.new, explicit.by_rows(logits)
        token, finite = chosen(rows, options, logits)
        drawn = asked & finite
        rows = _taken(rows, options, token, drawn)
        full = drawn & (rows.held >= max_length) & (rows.ended == Ended.NO)
        ended = jnp.where(full, Ended.FULL, rows.ended)
        rows = rows._replace(ended=jnp.where(asked & ~finite, Ended.NOT_FINITE, ended))
        found = None if options.logprobs is None else logprobs.of_token(logits, token, options.logprobs)
        column = loop.steps if options.drafts is None else new.lengths + was_pending
        tokens, reports = jax.tree.map(
            lambda buffer, x: _put(buffer, column, x), (new.tokens, new.logprobs), (token, found)
        )
        return loop._replace(rows=rows, new=New(tokens, new.lengths + drawn, reports))

    def going(loop: Loop) -> Bool[Array, " B"]:
        return (loop.rows.ended == Ended.NO) & (loop.new.lengths < limit)

    def step(_, loop: Loop) -> Loop:
        rows, real = loop.rows, going(loop)
        count = real.astype(jnp.int32)
        logits, cache = model.decode_step(rows.token[:, None], rows.cache, num_tokens=count)
        held, pending = rows.held + count, rows.pending & ~real
        furthest = jnp.maximum(rows.furthest, held)
        rows = rows._replace(cache=cache, held=held, pending=pending, furthest=furthest)
        return draw(loop._replace(rows=rows, steps=loop.steps + 1), logits[:, -1], real)

    def step_with_drafts(_, loop: Loop) -> Loop:
        """Appends the pending token and drafts behind it; draws after each as long as the drafts agree."""
        rows, real = loop.rows, going(loop)
        # A last token is drawn behind the drafts, for which a row needs no room.
        most = jnp.minimum(limit - loop.new.lengths, max_length - rows.held) - 1
        drafts, counts, drafting = options.drafts.propose(rows, jnp.where(real, most, -1), options)
        given = jnp.where(real, 1 + counts, 0)
        tokens = jnp.concatenate([rows.token[:, None], drafts], axis=1)
        logits, cache = model.decode_step(tokens, rows.cache, num_tokens=given)

        def verify(number: Any, loop: Loop) -> Loop:
            """Draws behind the first `number` drafts where these were drawn, too."""
            rows = loop.rows
            agrees = rows.held == before + number  # of all tokens before this one
            agrees &= (number == 0) | (rows.token == tokens[:, number])
            asked = agrees & (number < given) & going(loop)
            rows = rows._replace(held=rows.held + asked, pending=rows.pending & ~asked)
            return draw(loop._replace(rows=rows), logits[:, number], asked)

        before = rows.held
        loop = loop._replace(rows=rows._replace(furthest=jnp.maximum(rows.furthest, before + given)))
        loop = jax.lax.fori_loop(0, tokens.shape[1], verify, loop._replace(steps=loop.steps + 1))
        cache = rewinding.rewind_each(cache, given - (loop.rows.held - before))
        drafting = options.drafts.rewind(drafting, loop.rows.held)
        return loop._replace(rows=loop.rows._replace(cache=cache, drafting=drafting))

    options = dataclasses.replace(options, sampling=_beside(rows, options.sampling))
    was_pending, none = rows.pending.astype(jnp.int32), jnp.zeros_like(rows.held)
    tokens = jnp.broadcast_to(none[:, None], (none.size, columns))
    reports = None if options.logprobs is None else _empty_reports(rows, columns, options.logprobs)
    start = Loop(rows, New(tokens, none, reports), jnp.zeros((), jnp.int32))
    body = step
    if options.drafts is not None:
        # A chunk would go on when drafts have brought all tokens already.
        body, chunk_size = step_with_drafts, 1
    start = draw(start, rows.logits, going(start) & ~rows.pending)
    if fixed_steps is not None:
        return jax.lax.fori_loop(0, fixed_steps, body, start) if fixed_steps else start
    return jax.lax.while_loop(
        lambda loop: going(loop).any(),
        lambda loop: jax.lax.fori_loop(0, chunk_size, body, loop),
        start,
    )


def _put(buffer: Array, column: Int32[Array, ""] | Int32[Array, " B"], x: Array) -> Array:
    """Writes `x [B, ...]` to a column of a buffer, or of each row; nowhere if there is no such column."""
    if column.ndim == 0:
        return buffer.at[:, column].set(x, mode="drop")  # the last chunk may run beyond the last column
    return jax.vmap(lambda row, column, x: row.at[column].set(x, mode="drop"))(buffer, column, x)


def padded(new: New, pad_id: Int32[Array, ""] | int) -> New:
    """Writes `pad_id` behind the tokens of each row, and 0 behind what belongs to them."""
    real = jnp.arange(new.tokens.shape[1], dtype=jnp.int32) < new.lengths[:, None]

    def masked(x: Array, fill: Array | int) -> Array:
        return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, fill)

    reports = jax.tree.map(lambda x: masked(x, 0), new.logprobs)
    return New(masked(new.tokens, pad_id), new.lengths, reports)


def _beside(rows: Rows, sampling: Sampling) -> Sampling:
    """Sampling parameters of which those of each row are on the device of the row."""
    each = {name: jnp.asarray(x) for name, x in sampling._asdict().items() if np.ndim(x)}
    *placed, _ = explicit.alike(**each, held=rows.held)
    return sampling._replace(**dict(zip(each, placed, strict=True)))


def chosen(rows: Rows, options: Options, logits: Array) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """The next token of each row, and whether it means anything: whether there is a finite largest logit."""
    keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.drawn)
    if options.logits_hook is not None:
        hooked = options.logits_hook(logits, rows.token, rows.drawn)
        checks.check_hooked(hooked, logits)
        logits = hooked
    parameters = options.sampling._asdict()
    repetition, presence = (parameters.pop(f"{name}_penalty") for name in ("repetition", "presence"))
    if rows.seen is not None:
        logits = penalties.repetition(logits, rows.seen, repetition)
    if rows.written is not None:
        logits = penalties.presence(logits, rows.written, presence)
    return sample(logits, keys, **parameters), jnp.isfinite(logits.max(axis=-1))


def _taken(rows: Rows, options: Options, token: Int32[Array, " B"], drawn: Bool[Array, " B"]) -> Rows:
    """Makes `token` the newest one of the rows where it was `drawn`, and ends those that it ends."""
    ended, tokens = rows.ended, rows.history
    if tokens is not None:
        tokens = history.written(tokens, token[:, None], rows.held, drawn.astype(jnp.int32))
    if options.stop is not None:
        longest = options.stop.shape[1]
        first = rows.held + 1 - longest
        place = first[:, None] + jnp.arange(longest, dtype=jnp.int32)
        newest = history.read(tokens, first, longest)
        newest = jnp.where(place < rows.turn[:, None], ends.NOT_YET, newest)
        ended = jnp.where(drawn & ends.is_stopped(newest, options.stop), Ended.STOP, ended)
    if options.eos_id is not None:
        ended = jnp.where(drawn & ends.is_end(token, options.eos_id), Ended.END_TOKEN, ended)
    seen, written = (
        None if had is None else penalties.marked(had, token[:, None], drawn)
        for had in (rows.seen, rows.written)
    )
    return rows._replace(
        token=jnp.where(drawn, token, rows.token),
        pending=rows.pending | drawn,
        drawn=rows.drawn + drawn,
        ended=ended,
        seen=seen,
        written=written,
        history=tokens,
    )


def _empty_reports(rows: Rows, columns: int, count: int) -> Logprobs:
    """Buffers for the log-probabilities of new tokens, on the devices of the rows."""

    def empty(x: Array) -> Array:
        return jnp.broadcast_to(jnp.zeros_like(x)[:, None], (len(x), columns, *x.shape[1:]))

    return jax.tree.map(empty, logprobs.of_token(rows.logits, rows.token, count))


def _nan_for_unknown_ids(
    model: Decoder, logits: Array, tokens: Int32[Array, "B T"], counts: Int32[Array, " B"]
) -> Float[Array, "B vocab"]:
    """Logits that are NaN in rows with a token outside the vocabulary, if the model has a `vocab_size`.

    A model need not notice such a token: a negative id counts from the end of an embedding, and an embedding
    of NaN may lie outside all windows.
    """
    size = getattr(model, "vocab_size", None)
    if size is None:
        return logits
    real = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts[:, None]
    bad = (real & ((tokens < 0) | (tokens >= size))).any(axis=1)
    return jnp.where(bad[:, None], jnp.nan, logits)


def prefill_in_chunks(model: Decoder, prompts, lengths, cache, chunk: int) -> tuple[Array, Any]:
    """Logits after the last token of each prompt, in as many equal chunks as the longest prompt needs."""
    if chunk == prompts.shape[1]:
        return model.prefill(prompts, cache, num_tokens=lengths)
    if prompts.shape[1] == 0:
        one = jnp.zeros((len(prompts), 1), prompts.dtype)
        logits, extended = jax.eval_shape(lambda: model.prefill(one, cache, num_tokens=lengths))
        return jnp.zeros_like(logits), jax.tree.map(explicit.like, cache, extended)

    def extend(carry):
        first, last_logits, cache = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompts, first, chunk, axis=1)
        logits, cache = model.prefill(tokens, cache, num_tokens=jnp.clip(lengths - first, 0, chunk))
        has_last = (first < lengths) & (lengths <= first + chunk)
        return first + chunk, jnp.where(has_last[:, None], logits, last_logits), cache

    longest = lengths.max()
    logits, extended = jax.eval_shape(lambda: model.prefill(prompts[:, :chunk], cache, num_tokens=lengths))
    cache = jax.tree.map(explicit.like, cache, extended)
    start = jnp.zeros((), jnp.int32), jnp.zeros_like(logits), cache
    _, logits, cache = jax.lax.while_loop(lambda carry: carry[0] < longest, extend, start)
    return logits, cache
