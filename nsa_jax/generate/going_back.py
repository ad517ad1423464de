"""Sessions that go back: by a few tokens, or to a checkpoint. No token is read again for that."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_checks import check_integers, on_host
from nsa_jax.array_typing import Array, Int
from nsa_jax.cache import rewinding
from nsa_jax.generate import history, penalties
from nsa_jax.generate.ends import Ended
from nsa_jax.generate.rows import Rows
from nsa_jax.generate.session import Session, check_session
from nsa_jax.generate.structure import Structure
from nsa_jax.option_checks import check_int
from nsa_jax.sharding import explicit

MOST = rewinding.LONGEST_WAY_BACK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Checkpoint:
    """What a session cannot find again in its caches when it goes back, a pytree. `checkpoint` makes one.

    Those are the rings, which hold about `w + l` tokens in a layer of NSA, and the logits, counters and
    tokens of each row.

    Attributes:
      rows: all arrays of the session's rows but those that hold every token; None in their places.
    """

    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Number of bytes that it holds of each row."""
        leaves = jax.tree.leaves(self.rows)
        return sum(x.size * x.dtype.itemsize for x in leaves) // len(self.rows.token)


def rewind(session: Session, num_tokens: int | Int[Array | np.ndarray, " B"]) -> Session:
    """Takes back the newest tokens of each row, to write others in their place.

    A row that had ended goes on. The tokens that are drawn next have numbers of their own, so those drawn
    with a temperature differ from those taken back. A `presence_penalty` still counts these.

    The session that is passed is used up.

    Args:
      session: the newest session.
      num_tokens: how many tokens to take back, of all rows or of each: 0 .. 7, the `step_capacity` of a cache
        less one, and one less of a row that has drawn none since its prompt or turn. They count from the
        longest that the cache of the row has been: fewer are left after another `rewind`, and after drafts
        that were refused. A row keeps its first token. For longer ways back, see `checkpoint`.

    Returns:
      The session with shorter rows. Where the host does not have the values, inside `jit` and on a GPU, a row
      that cannot go back so far stays as it is.

    Raises:
      TypeError: an argument has the wrong type, or the model's caches are not those of `nsa_jax.cache`.
      ValueError: shapes do not fit, the session is used up, or the model's caches have a smaller
        `step_capacity` than 8; or, where the host has the values, a number is out of range.
    """
    check_session(session)
    rows, batch = session.rows, len(session.rows.token)
    if isinstance(num_tokens, jax.Array | np.ndarray):
        check_integers(num_tokens=num_tokens)
        if num_tokens.shape != (batch,):
            raise ValueError(
                f"num_tokens must be one number, or one for each row, got {num_tokens.shape=} and {batch=}. "
                "Pass an array [B]."
            )
    else:
        check_int(low=0, high=MOST, num_tokens=num_tokens)
        num_tokens = np.full(batch, num_tokens)
    counts = on_host(num_tokens)
    with jax.ensure_compile_time_eval():  # a program that is traced may hold a session of known values
        most = None if on_host(rows.held) is None else np.asarray(_most(rows))
    if counts is not None and most is not None and ((counts < 0) | (counts > most)).any():
        raise ValueError(
            f"num_tokens must be at least 0 and at most {most.tolist()}, got {counts.tolist()}. Pass fewer, "
            "or go back to a checkpoint."
        )
    of_session = session.structure, session.parameters, session.options.drafts
    return dataclasses.replace(session, rows=_rewind(*of_session, rows, num_tokens))


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="rows")
def _rewind(structure: Structure, parameters: Any, drafts: Any, rows: Rows, num_tokens: Array) -> Rows:
    # Nothing runs, but it raises if the caches are made for shorter steps than the way back.
    step = structure.model(parameters).decode_step
    tokens = jnp.broadcast_to(rows.token[:, None], (len(rows.token), rewinding.LONGEST_STEP))
    jax.eval_shape(step, tokens, rows.cache, num_tokens=rows.held)
    num_tokens, _ = explicit.alike(num_tokens=jnp.asarray(num_tokens, jnp.int32), held=rows.held)
    num_tokens = jnp.where((num_tokens >= 0) & (num_tokens <= _most(rows)), num_tokens, 0)
    # The newest token that is left is one that the next step appends, as its logits are not known any more.
    goes = num_tokens > 0
    held = jnp.where(goes, rows.held + rows.pending - num_tokens - 1, rows.held)
    left = held + 1
    rows = rows._replace(
        cache=rewinding.rewind_each(rows.cache, rows.held - held),
        token=jnp.where(goes, history.read(rows.history, held, 1)[:, 0], rows.token),
        pending=rows.pending | goes,
        held=held,
        turn=jnp.where(goes, jnp.minimum(rows.turn, left), rows.turn),
        ended=jnp.where(goes, Ended.NO, rows.ended),
    )
    if rows.seen is not None:
        anew = penalties.marked(jnp.zeros_like(rows.seen), rows.history, left)
        rows = rows._replace(seen=jnp.where(goes[:, None], anew, rows.seen))
    if rows.drafting is not None:
        rows = rows._replace(drafting=drafts.rewind(rows.drafting, held))
    return rows


def _most(rows: Rows) -> Array:
    """How many tokens each row can take back: as many as its rings hold beside what a step reads."""
    left = MOST - (rows.furthest - rows.held)
    return jnp.maximum(jnp.minimum(left, rows.held) - ~rows.pending, 0)


def checkpoint(session: Session) -> Checkpoint:
    """Remembers where a session is, so that `rewind_to` can go back there.

    It costs a copy of the rings and of what is kept beside the caches, `Checkpoint.row_bytes` for each row,
    and not of whole caches as in `repeat`: the tokens of a row stay in them while it goes on.

    Args:
      session: the newest session. It can still be used.

    Returns:
      The checkpoint.

    Raises:
      TypeError: `session` is none, or the model's caches are not those of `nsa_jax.cache`.
      ValueError: the session is used up.
    """
    check_session(session)
    return Checkpoint(jax.tree.map(jnp.copy, _remembered(session.rows, session.max_length)))


def rewind_to(session: Session, past: Checkpoint) -> Session:
    """Goes back to a checkpoint, from any later state of the same session.

    What is written then is what would have been written at the checkpoint: keys and counters are those of
    then, too. The session that is passed is used up; the checkpoint is not.

    Args:
      session: the newest session.
      past: a checkpoint of it, or of the session that it was made of by `extend`, `advance` or `stream`.

    Returns:
      The session as it was.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the session is used up, or it does not begin with the tokens of the checkpoint. Inside `jit`
        that is not checked, and what is written behind another beginning is meaningless.
    """
    check_session(session)
    if not isinstance(past, Checkpoint):
        raise TypeError(f"past must be a Checkpoint, got {type(past).__name__}. Call checkpoint.")
    like = jax.eval_shape(functools.partial(_remembered, room=session.max_length), session.rows)
    if _form(past.rows) != _form(like):
        raise ValueError(
            "past must be of this session, got one of another number of rows, size, model or options. Call "
            "checkpoint."
        )
    same = _begins_alike(session.rows, past.rows)
    if not isinstance(same, jax.core.Tracer) and not np.asarray(same).all():
        raise ValueError(
            "session must begin with the tokens of the checkpoint, got other ones in rows "
            f"{np.flatnonzero(~np.asarray(same)).tolist()}. Pass a checkpoint of its own past."
        )
    return dataclasses.replace(session, rows=_recall(session.rows, past.rows))


@jax.jit
def _begins_alike(now: Rows, then: Rows) -> Array:
    """Whether each row has all tokens that it had then."""
    count = then.held + then.pending
    place = jnp.arange(then.history.shape[1], dtype=jnp.int32)
    differs = (now.history != then.history) & (place < count[:, None])
    return ~differs.any(axis=1) & (now.held >= then.held) & (now.held + now.pending >= count)


@functools.partial(jax.jit, donate_argnums=0)
def _recall(now: Rows, then: Rows) -> Rows:
    def recalled(now: Any, then: Any) -> Any:
        return rewinding.each_cache(rewinding.recalled, now, then)

    drafting = then.drafting
    if drafting is not None:
        drafting = drafting._replace(cache=recalled(now.drafting.cache, drafting.cache))
    return then._replace(cache=recalled(now.cache, then.cache), drafting=drafting)


def _remembered(rows: Rows, room: int) -> Rows:
    """The rows without what stays in their caches, which have `room` tokens each."""

    def of(caches: Any) -> Any:
        return rewinding.each_cache(lambda cache: rewinding.forgetful(cache, room), caches)

    drafting = rows.drafting
    if drafting is not None:
        drafting = drafting._replace(cache=of(drafting.cache))
    return rows._replace(cache=of(rows.cache), drafting=drafting)


def _form(rows: Rows) -> Any:
    leaves, tree = jax.tree.flatten(rows)
    return tree, [(x.shape, x.dtype) for x in leaves]
