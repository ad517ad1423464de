"""A layer's calls on tokens that are spread over an axis of the mesh in context."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nsa_jax import layout
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.nn.checks import check_array
from nsa_jax.nn.parameters import by_path
from nsa_jax.nn.parts import CompressorFunction, compress
from nsa_jax.nn.rotary import RotaryFunction, turn
from nsa_jax.parallel import Order, from_zigzag, to_zigzag, token_indices
from nsa_jax.parallel.order import check_order, on_whole_rows
from nsa_jax.parallel.shards import devices_along, over_axis


@dataclasses.dataclass(frozen=True)
class ContextAxis:
    """The axis over which the tokens of a row are spread.

    Attributes:
      name: name of the axis.
      order: order of the tokens on its devices.
    """

    name: str
    order: Order

    @classmethod
    def given(cls, name: str | None, order: Order) -> "ContextAxis | None":
        """The options of a layer; None without an axis.

        Raises:
          TypeError: the axis is not a name.
          ValueError: the order is unknown.
        """
        check_order(order)
        if name is not None and not isinstance(name, str):
            raise TypeError(
                f"context_axis must be the name of one axis, got {type(name).__name__}. Pass a string."
            )
        return None if name is None else cls(name, order)

    def positions(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None
    ) -> Int32[Array, "B T"]:
        """Index of each token in its own sequence, in the order of the axis."""
        devices = devices_along(self.name)
        if segment_ids is None:
            index = jnp.asarray(token_indices(x.shape[1], devices, self.order))
            return jnp.broadcast_to(index[None], x.shape[:2])
        if self.order == "contiguous":
            return on_whole_rows(layout.sequence_positions, segment_ids)
        return to_zigzag(on_whole_rows(layout.sequence_positions, from_zigzag(segment_ids, devices)), devices)

    def run(
        self,
        operation: Callable[..., Array],
        operands: tuple[Array, ...],
        per_token: Mapping[str, Array | None],
        compressors: tuple[CompressorFunction, CompressorFunction],
        rotary: RotaryFunction,
        **settings: Any,
    ) -> Array:
        """Runs an operation of `nsa_jax.parallel` in a `shard_map` over the axis.

        Args:
          operation: `context_attention` or `context_selection`.
          operands: its operands.
          per_token: its optional arrays of tokens.
          compressors: modules or functions that compress keys and values.
          rotary: a module or function that rotates compressed keys.
          **settings: its other arguments.

        Raises:
          NotImplementedError: a module changes its state, of which each device would have another.
          TypeError: something per token is not an array.
        """
        for name, x in per_token.items():
            if x is not None:
                check_array(name, x)
        # Modules enter as arrays: a shard_map may not close over any that lie on its mesh.
        names = ("compressor_key", "compressor_value", "rotary")
        graph, state = nnx.split(dict(zip(names, (*compressors, rotary), strict=True)))

        def local(state, operands, per_token):
            held = _values(state)  # the modules may share their variables with the state
            modules: dict[str, Any] = nnx.merge(graph, state)
            compress_keys, compress_values, rotary = (modules[name] for name in names)

            def compress_both(key_windows, value_windows, first_positions):
                key_cmp = turn(rotary, compress(compress_keys, key_windows), first_positions)
                return key_cmp, compress(compress_values, value_windows)

            where = dict(axis=self.name, order=self.order)
            result = operation(*operands, **per_token, compress=compress_both, **where, **settings)
            _check_unchanged(held, _values(nnx.state(modules)))
            return result

        return over_axis(local, self.name)(state, operands, dict(per_token))


def _values(state: nnx.State) -> dict[str, Any]:
    """The values of all variables, by their paths."""
    return {name: variable.get_value() for name, variable in by_path(state).items()}


def _check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if a variable was added or set."""
    changed = [name for name, value in after.items() if value is not before.get(name)]
    if changed:
        raise NotImplementedError(
            "compressors and rotary of a layer with a context_axis must not change their variables, got new "
            f"values of {changed}. Call their eval(), or build the layer without context_axis."
        )
