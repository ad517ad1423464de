"""Checks that rows have the order that was declared, under `jax.experimental.checkify`."""

import jax.numpy as jnp
from jax.experimental import checkify

from nsa_jax import layout
from nsa_jax.array_typing import Array, Int
from nsa_jax.parallel.order import Order


def check_declared(
    positions: Int[Array, "B S"] | None, segment_ids: Int[Array, "B S"] | None, order: Order
) -> None:
    """Checks whole rows, put in order as declared: it does nothing outside of `checkify`.

    Args:
      positions: rotary positions, which must count the tokens of a sequence one by one; or None.
      segment_ids: sequence of each token, each non-zero id in one run; or None.
      order: the declared order, for the message.
    """
    if segment_ids is not None:
        returning = layout.returning_ids(segment_ids)
        checkify.debug_check(
            (returning == 0).all(),
            f"each non-zero segment id must be one contiguous run of a row in {order} order, got id "
            "{id} in several runs. Sort the tokens with nsa_jax.parallel.to_zigzag, or declare their order.",
            id=jnp.max(jnp.abs(returning)),
        )
    if positions is None:
        return
    together = jnp.bool(True)
    if segment_ids is not None:
        together = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    steps = jnp.where(together, positions[:, 1:] - positions[:, :-1], 1)
    checkify.debug_check(
        (steps == 1).all(),
        f"positions must count the tokens of each sequence one by one in {order} order, got a step of "
        "{step}. Sort the tokens with nsa_jax.parallel.to_zigzag, or declare their order.",
        step=steps.reshape(-1)[jnp.argmax(jnp.abs(steps - 1))],
    )
