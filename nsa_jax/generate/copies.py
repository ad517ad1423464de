"""Copies of the rows of a session: several texts from one beginning, and other rows in other places."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, Int
from nsa_jax.generate import checks
from nsa_jax.generate.options import Sampling
from nsa_jax.generate.rows import Rows
from nsa_jax.generate.session import Session, check_session
from nsa_jax.option_checks import LARGEST_INT
from nsa_jax.sharding import explicit


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
    check_session(session)
    checks.check_counts(count=count)
    index = np.arange(len(session.rows.token) * count, dtype=np.int32)
    return _gathered(session, index // count, index % count)


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
    check_session(session)
    index = checks.check_index(rows, len(session.rows.token))
    return _gathered(session, index, None)


def _gathered(session: Session, index: Array | np.ndarray, copy: np.ndarray | None) -> Session:
    """The session of the rows of these numbers; `copy` numbers those that are taken from one."""
    checks.check_rows_first(session.rows.cache, len(session.rows.token))
    sampling = session.options.sampling
    each = {name: x for name, x in sampling._asdict().items() if np.ndim(x)}
    taken, each = _gather(session.rows, each, index, copy)
    options = dataclasses.replace(session.options, sampling=sampling._replace(**each))
    return dataclasses.replace(session, rows=taken, options=options)


def replaced(session: Session, number: int, row: Rows, sampling: Sampling) -> Session:
    """Puts a row, alone in its `Rows`, and its sampling parameters, in place of row `number`.

    The session is used up: its arrays are donated, and no other row is copied.
    """
    held = (session.rows, session.options.sampling)
    rows, sampling = _replace(held, (row, sampling), np.int32(number))
    return dataclasses.replace(
        session, rows=rows, options=dataclasses.replace(session.options, sampling=sampling)
    )


@functools.partial(jax.jit, donate_argnums=0)
def _replace(held, row, number):
    """The arrays `held`, in which `row` takes the place of the row of this number."""

    def replace(x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(x, new[0].astype(x.dtype), number, axis=0)

    return jax.tree.map(replace, held, row)


@jax.jit
def _gather(held: Rows, each, index, copy) -> tuple[Rows, Any]:
    """The rows of these numbers. Those that are a copy, number 1 and more, get keys of their own."""

    def take(x: Array) -> Array:
        sharding = jax.typeof(x).sharding
        how = dict(out_sharding=sharding) if sharding.mesh.explicit_axes else {}
        return x.at[index].get(mode="clip", **how)

    taken, each = jax.tree.map(take, (held, each))
    if copy is None:
        return taken, each
    # No token has this number, so no draw uses the key that the copies' keys are made of.
    families = jax.vmap(jax.random.fold_in, (0, None))(taken.keys, LARGEST_INT)
    families, copy = explicit.alike(families=families, copy=copy)
    own = jax.vmap(jax.random.fold_in)(families, copy)
    return taken._replace(keys=jnp.where(copy > 0, own, taken.keys)), each
