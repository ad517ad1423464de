"""A generation that continues: begun by `start`, given more tokens by `extend`, and moved on by `advance`.

The three calls are compiled programs of their own around the functions of `rows`, of which `generate` is one
program. They take the place of the session that they are given: its caches are donated.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_typing import Array, Int, Int32, PRNGKeyArray
from nsa_jax.config import LONGEST
from nsa_jax.generate import buckets, checks, rows
from nsa_jax.generate.options import Options, Sampling
from nsa_jax.generate.rows import Decoder, Rows
from nsa_jax.option_checks import LARGEST_INT, check_int
from nsa_jax.sharding import explicit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Session:
    """The state of a generation, a pytree. `start` makes one.

    It refers to the model's parameters as they were in `start`.

    Attributes:
      rows: caches, newest tokens, counters and keys of the rows. All arrays have the rows first.
      options: how tokens are chosen, and what ends a row.
      parameters: arrays of the model.
      graphdef: structure of the model.
      max_length: capacity of a row in tokens.
      vocab_size: number of ids, by which `extend` checks tokens; None if the model does not say.
    """

    rows: Rows
    options: Options
    parameters: nnx.State
    graphdef: nnx.GraphDef = dataclasses.field(metadata=dict(static=True))
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
      tokens: new tokens of each row, then `pad_id`.
      lengths: number of new tokens of each row.
      ended: why the row has ended, as a number of `Ended`; 0 for a row that has not.
    """

    tokens: Int32[Array, "B new"]
    lengths: Int32[Array, " B"]
    ended: Int32[Array, " B"]


def start(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "B P"],
    *,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    max_length: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    pad_id: int = 0,
    key: int | PRNGKeyArray = 0,
    prefill_chunk: int | None = None,
) -> Session:
    """Begins a session: reads the prompts. `advance` then draws the first token.

    What a session writes is, token for token, what `generate` writes with the same arguments, however the
    steps are divided. Programs are compiled as for `generate`: widths of prompts share them by buckets.

    Args:
      model: see `generate`.
      prompts: token ids, padded on the right with any ids.
      lengths: number of tokens of each prompt, 1 .. `P`; `P` by default.
      max_length: capacity of a row in tokens: prompt, turns and new tokens together.
      temperature: see `generate`, as for all that follow.
      top_k: draws only from the `k` most likely tokens.
      top_p: draws only from the smallest set of most likely tokens with at least this probability.
      eos_id: token that ends a row, until `extend` gives it more tokens.
      pad_id: token that fills a row of `Continuation.tokens` after its new tokens.
      key: a seed, a typed key, or one for each row. Token number `n` of a row, counted from 0 through all its
        turns, is drawn by `jax.random.fold_in(key, n)` of the row's key.
      prefill_chunk: number of prompt tokens of a row that are prefilled at once.

    Returns:
      The session, in which nothing is drawn yet.

    Raises:
      TypeError, ValueError: as in `generate`.

    Examples:
      >>> session = start(model, prompts, max_length=4096)
      >>> session, new = advance(session, 64)
      >>> session, more = advance(extend(session, question), 64)
    """
    checks.check_model(model)
    vocab_size = getattr(model, "vocab_size", None)
    tokens, counts = checks.check_prompts(prompts, lengths, vocab_size)
    options = Options.make(Sampling.make(temperature, top_k, top_p), eos_id, pad_id)
    checks.check_parts(prefill_chunk)
    check_int(low=1, high=LONGEST, max_length=max_length)
    checks.check_room(counts, 0, max_length)
    width = buckets.width(tokens.shape[1], max_length)
    part = buckets.part(len(tokens), width, prefill_chunk)
    graphdef, parameters = nnx.split(model)
    begun = _start(
        graphdef,
        parameters,
        buckets.widened(tokens, -(-width // part) * part),
        counts,
        checks.check_key(key, len(tokens)),
        max_length=int(max_length),
        prefill_chunk=part,
    )
    return Session(begun, options, parameters, graphdef, int(max_length), vocab_size)


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
    _check_session(session)
    batch, held = len(session.rows.token), session.rows.held
    tokens, counts = checks.check_turn(tokens, lengths, batch, session.vocab_size)
    checks.check_parts(prefill_chunk)
    checks.check_turn_fits(held, session.rows.pending, counts, session.max_length)
    width = buckets.width(tokens.shape[1] + 1, session.max_length)  # a pending token comes first
    part = buckets.part(len(tokens), width, prefill_chunk)
    extended = _extend(
        session.graphdef,
        session.parameters,
        session.rows,
        buckets.widened(tokens, -(-width // part) * part - 1),
        counts,
        max_length=session.max_length,
        prefill_chunk=part,
    )
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
      The session after these tokens, and `Continuation(tokens, lengths, ended)`, with `steps` columns of
      tokens. The newest token of a row is not in its cache yet; the next call appends it.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is out of range, or the session is used up.
    """
    _check_session(session)
    checks.check_counts(steps=steps, chunk_size=chunk_size)
    check_int(high=LONGEST // 2, steps=steps)
    until = session.rows.drawn + int(steps)
    session, new = dispatch(session, until, int(steps), buckets.bucketed(int(steps)), int(chunk_size))
    return session, new._replace(tokens=new.tokens[:, : int(steps)])


def dispatch(
    session: Session, until: Int32[Array, " B"], steps: int, columns: int, chunk_size: int
) -> tuple[Session, Continuation]:
    """Adds tokens to each row until it has drawn `until`, but no more than so many decode steps bring.

    A row without a pending token gets one more, as that needs no step. There are `columns` of tokens.
    """
    advanced, new = _advance(
        session.graphdef, session.parameters, session.rows, session.options, until, steps,
        max_length=session.max_length, columns=columns, chunk_size=min(chunk_size, session.max_length),
    )  # fmt: skip
    return dataclasses.replace(session, rows=advanced), new


def repeat(session: Session, count: int) -> Session:
    """Takes each row `count` times, one behind the other: row `r` becomes the rows from `r * count` on.

    The first keeps the key of the row, the others get keys of their own, so they draw different texts.
    Prompts that begin alike are thus read once: `repeat` what they begin with, then `extend` each by its own
    rest.

    Args:
      session: the newest session. It is copied, and can still be used.
      count: number of times.

    Returns:
      The session of `B * count` rows. It has caches of its own, of `session.row_bytes` for each row.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: `count` is not positive, the session is used up, or its cache has an array without an axis
        of rows.
    """
    _check_session(session)
    checks.check_counts(count=count)
    index = np.arange(len(session.rows.token) * count, dtype=np.int32)
    checks.check_rows_first(session.rows.cache, len(session.rows.token))
    return dataclasses.replace(session, rows=_gather(session.rows, index // count, index % count))


def gather(session: Session, rows: Int[Array | np.ndarray, " M"]) -> Session:
    """Takes some rows, in any order, to drop or move them.

    A row keeps its key. One that is taken twice draws the same text twice; `repeat` gives new keys.

    Args:
      session: the newest session. It is copied, and can still be used.
      rows: numbers of the rows to take.

    Returns:
      The session of `M` rows. It has caches of its own, of `session.row_bytes` for each row.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: `rows` is not a vector, or has a number that is no row, where the host has its values; the
        session is used up, or its cache has an array without an axis of rows.
    """
    _check_session(session)
    index = checks.check_index(rows, len(session.rows.token))
    checks.check_rows_first(session.rows.cache, len(session.rows.token))
    return dataclasses.replace(session, rows=_gather(session.rows, index, None))


def _check_session(session: Any) -> None:
    """Raises TypeError unless it is a session, ValueError if a call has used up its arrays."""
    if not isinstance(session, Session):
        raise TypeError(f"session must be a Session, got {type(session).__name__}. Call start.")
    token = session.rows.token
    if isinstance(token, jax.Array) and not isinstance(token, jax.core.Tracer) and token.is_deleted():
        raise ValueError(
            "session must be the newest one, got one that extend, advance or stream has used up. Pass what "
            "they gave, or a copy that repeat or gather made before."
        )


@functools.partial(jax.jit, static_argnames=("graphdef", "max_length", "prefill_chunk"))
def _start(graphdef, parameters, prompts, lengths, keys, *, max_length, prefill_chunk) -> Rows:
    model = nnx.merge(graphdef, parameters)
    return rows.begin(model, prompts, lengths, keys, max_length=max_length, prefill_chunk=prefill_chunk)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "max_length", "prefill_chunk"), donate_argnames="held"
)
def _extend(graphdef, parameters, held, tokens, counts, *, max_length, prefill_chunk) -> Rows:
    model = nnx.merge(graphdef, parameters)
    return rows.append(model, held, tokens, counts, max_length=max_length, prefill_chunk=prefill_chunk)


@functools.partial(
    jax.jit, static_argnames=("graphdef", "max_length", "columns", "chunk_size"), donate_argnames="held"
)
def _advance(
    graphdef, parameters, held, options, until, steps, *, max_length, columns, chunk_size
) -> tuple[Rows, Continuation]:
    model = nnx.merge(graphdef, parameters)
    limit = jnp.minimum(until - held.drawn, steps + ~held.pending)
    # A row with a pending token has none in the first column.
    sizes = dict(max_length=max_length, columns=columns + 1, chunk_size=chunk_size)
    advanced, new = rows.advance(model, held, options, limit, **sizes)
    tokens = jnp.where(held.pending[:, None], new.tokens[:, 1:], new.tokens[:, :-1])
    tokens = rows.padded(tokens, new.lengths, options.pad_id)
    return advanced, Continuation(tokens, new.lengths, advanced.ended)


@jax.jit
def _gather(held: Rows, index, copy) -> Rows:
    """The rows of these numbers. Those that are a copy, number 1 and more, get keys of their own."""

    def take(x: Array) -> Array:
        sharding = jax.typeof(x).sharding
        how = dict(out_sharding=sharding) if sharding.mesh.explicit_axes else {}
        return x.at[index].get(mode="clip", **how)

    taken = jax.tree.map(take, held)
    if copy is None:
        return taken
    # No token has this number, so no draw uses the key that the copies' keys are made of.
    families = jax.vmap(jax.random.fold_in, (0, None))(taken.keys, LARGEST_INT)
    families, copy = explicit.alike(families=families, copy=copy)
    own = jax.vmap(jax.random.fold_in)(families, copy)
    return taken._replace(keys=jnp.where(copy > 0, own, taken.keys))
