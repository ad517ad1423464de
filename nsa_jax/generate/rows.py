"""What a generation holds of its rows, and the pure functions that begin, extend and advance it.

`generate` and sessions are made of these. Each is traced into one program, in which nothing returns to the
host for each token. When the loop ends depends on the data, and each test for the end is a round trip to the
host. So a `while_loop` tests once per chunk, and a chunk is a loop with a fixed number of steps. Rows that
have ended or have as many tokens as were asked for take part in the remaining steps, but write nothing.

The first token after a prompt is drawn from the logits of the prompt. Each step feeds the token that was
drawn before, so the newest token of a row is not in the cache.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32, PRNGKeyArray
from nsa_jax.generate import checks, ends, logprobs, penalties
from nsa_jax.generate.ends import Ended
from nsa_jax.generate.logprobs import Logprobs
from nsa_jax.generate.options import Options, Sampling
from nsa_jax.generate.sampling import sample
from nsa_jax.sharding import explicit


class Decoder(Protocol):
    """The methods that `generate` and sessions need of a model, such as `nsa_jax.model.Transformer`.

    The model must also be an `nnx.Module`. `num_tokens` is passed by its name, all other arguments by
    position. If the model has an int `vocab_size`, ids that are not below it are refused where the host has
    their values.
    """

    def init_cache(self, batch: int, max_length: int) -> Any:
        """Makes an empty cache for `batch` rows of at most `max_length` tokens."""

    def prefill(
        self, tokens: Int[Array, "B T"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Appends prompts; returns the logits `[B, vocab]` after the last real token, and the cache."""

    def decode_step(
        self, tokens: Int[Array, "B 1"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Appends a token to the rows with `num_tokens` 1; returns logits `[B, 1, vocab]` and the cache."""


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
      recent: newest tokens drawn in this turn, for stop sequences; None without them.
      seen: tokens that the row has had, given or drawn; None without a repetition penalty.
      written: tokens that were drawn; None without a presence penalty.
    """

    cache: Any
    logits: Float[Array, "B vocab"]
    token: Int32[Array, " B"]
    pending: Bool[Array, " B"]
    held: Int32[Array, " B"]
    drawn: Int32[Array, " B"]
    ended: Int32[Array, " B"]
    keys: PRNGKeyArray
    recent: Int32[Array, "B L"] | None
    seen: Bool[Array, "B vocab"] | None
    written: Bool[Array, "B vocab"] | None


class New(NamedTuple):
    """Tokens that were added to the rows, in a buffer, their number, and their log-probabilities or None."""

    tokens: Int32[Array, "B columns"]
    lengths: Int32[Array, " B"]
    logprobs: Logprobs | None


class _Loop(NamedTuple):
    """The state of the loop: the rows, what is new in them, and the next column of its buffer."""

    rows: Rows
    new: New
    column: Int32[Array, ""]


def begin(
    model: Decoder,
    prompts: Int32[Array, "B P"],
    lengths: Int32[Array, " B"],
    keys: PRNGKeyArray,
    options: Options,
    *,
    max_length: int,
    prefill_chunk: int,
) -> Rows:
    """Rows that hold their prompts, before the first token is drawn."""
    prompts, lengths, keys = explicit.alike(prompts=prompts, lengths=lengths, keys=keys)
    cache = model.init_cache(prompts.shape[0], max_length)
    logits, cache = _prefill(model, prompts, lengths, cache, prefill_chunk)
    none = jnp.zeros_like(lengths, jnp.int32)  # one number a row, on the device of the row
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    logits, sampling, recent = explicit.by_rows(logits), options.sampling, None
    if options.stop is not None:
        recent = jnp.broadcast_to(none[:, None] + ends.NOT_YET, (none.size, options.stop.shape[1]))
    had = jnp.zeros_like(logits, bool)
    return Rows(
        cache=cache,
        logits=logits,
        token=last.astype(jnp.int32),
        pending=none > 0,
        held=lengths.astype(jnp.int32),
        drawn=none,
        ended=none,
        keys=keys,
        recent=recent,
        seen=None if sampling.repetition_penalty is None else penalties.marked(had, prompts, lengths),
        written=None if sampling.presence_penalty is None else had,
    )


def append(
    model: Decoder,
    rows: Rows,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    *,
    max_length: int,
    prefill_chunk: int,
) -> Rows:
    """Appends the pending token of a row and the first `counts` of `tokens`, to rows that get some.

    `T + 1` must be a multiple of `prefill_chunk`.
    """
    tokens, counts, _ = explicit.alike(tokens=tokens, counts=counts, held=rows.held)
    # A pending token comes before those of the turn.
    behind = jnp.concatenate([rows.token[:, None], tokens], axis=1)
    text = jnp.where(rows.pending[:, None], behind, jnp.roll(behind, -1, axis=1))
    wanted = jnp.where(counts > 0, counts + rows.pending, 0)
    fits = rows.held + wanted <= max_length
    wanted = jnp.where(fits, wanted, 0)
    given = wanted > 0
    logits, cache = _prefill(model, text, wanted, rows.cache, prefill_chunk)
    last = jnp.take_along_axis(text, jnp.maximum(wanted - 1, 0)[:, None], axis=1)[:, 0]
    if rows.recent is not None:
        rows = rows._replace(recent=jnp.where(given[:, None], ends.NOT_YET, rows.recent))
    if rows.seen is not None:
        rows = rows._replace(seen=penalties.marked(rows.seen, text, wanted))
    return rows._replace(
        cache=cache,
        logits=jnp.where(given[:, None], explicit.by_rows(logits), rows.logits),
        token=jnp.where(given, last, rows.token),
        pending=rows.pending & ~given,
        held=rows.held + wanted,
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
) -> tuple[Rows, New]:
    """Adds up to `limit` tokens to each row that has not ended.

    Columns of the buffer are draws that all rows take part in. Column 0 is the one before the first step, in
    which a row with a pending token has none; its tokens are then in columns `1 .. lengths`.
    """

    def draw(loop: _Loop, logits: Array, asked: Bool[Array, " B"]) -> _Loop:
        """Draws the next token from `logits` and adds it to the rows that are `asked` for one."""
        rows, new, logits = loop.rows, loop.new, explicit.by_rows(logits)
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.drawn)
        token, finite = _chosen(rows, options, logits, keys)
        drawn = asked & finite
        rows = _taken(rows, options, token, drawn)
        full = drawn & (rows.held >= max_length) & (rows.ended == Ended.NO)
        ended = jnp.where(full, Ended.FULL, rows.ended)
        rows = rows._replace(ended=jnp.where(asked & ~finite, Ended.NOT_FINITE, ended))
        found = None if options.logprobs is None else logprobs.of_token(logits, token, options.logprobs)
        # The last chunk may run beyond the last column.
        tokens, reports = jax.tree.map(
            lambda buffer, x: buffer.at[:, loop.column].set(x, mode="drop"),
            (new.tokens, new.logprobs),
            (token, found),
        )
        return _Loop(rows, New(tokens, new.lengths + drawn, reports), loop.column + 1)

    def going(loop: _Loop) -> Bool[Array, " B"]:
        return (loop.rows.ended == Ended.NO) & (loop.new.lengths < limit)

    def step(_, loop: _Loop) -> _Loop:
        rows, real = loop.rows, going(loop)
        count = real.astype(jnp.int32)
        logits, cache = model.decode_step(rows.token[:, None], rows.cache, num_tokens=count)
        rows = rows._replace(cache=cache, held=rows.held + count, pending=rows.pending & ~real)
        return draw(loop._replace(rows=rows), logits[:, -1], real)

    options = dataclasses.replace(options, sampling=_beside(rows, options.sampling))
    none = jnp.zeros_like(rows.held)
    tokens = jnp.broadcast_to(none[:, None], (none.size, columns))
    reports = None if options.logprobs is None else _empty_reports(rows, columns, options.logprobs)
    new = New(tokens, none, reports)
    start = _Loop(rows, new, jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(
        lambda loop: going(loop).any(),
        lambda loop: jax.lax.fori_loop(0, chunk_size, step, loop),
        draw(start, rows.logits, going(start) & ~rows.pending),
    )
    return end.rows, end.new


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


def _chosen(
    rows: Rows, options: Options, logits: Array, keys: PRNGKeyArray
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """A token for each row, and whether it means anything: whether there is a finite largest logit."""
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
    ended, recent = rows.ended, rows.recent
    if recent is not None:
        recent = jnp.where(drawn[:, None], ends.pushed(recent, token), recent)
        ended = jnp.where(drawn & ends.is_stopped(recent, options.stop), Ended.STOP, ended)
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
        recent=recent,
        seen=seen,
        written=written,
    )


def _empty_reports(rows: Rows, columns: int, count: int) -> Logprobs:
    """Buffers for the log-probabilities of new tokens, on the devices of the rows."""

    def empty(x: Array) -> Array:
        return jnp.broadcast_to(jnp.zeros_like(x)[:, None], (len(x), columns, *x.shape[1:]))

    return jax.tree.map(empty, logprobs.of_token(rows.logits, rows.token, count))


def _prefill(model: Decoder, prompts, lengths, cache, chunk: int) -> tuple[Array, Any]:
    """Logits after the last token of each prompt, in as many equal chunks as the longest prompt needs."""
    if chunk == prompts.shape[1]:
        return model.prefill(prompts, cache, num_tokens=lengths)

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
