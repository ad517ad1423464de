"""The part of a row that a device holds, and how it gets what it needs from the other devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.config import NSAConfig
from nsa_jax.layout import Run, Runs
from nsa_jax.parallel.devices import Devices
from nsa_jax.parallel.order import Order, runs_per_device, shortest_chunk
from nsa_jax.sharding.explicit import HEADS, Axes


class Shards(NamedTuple):
    """How a row lies on the devices of an axis of the mesh.

    A run is a chunk of the row: consecutive tokens that lie together. Runs are counted in the order of the
    row, from 0 to `num_runs - 1`.

    Attributes:
      devices: the devices, which send each other what they hold.
      order: which runs a device holds.
      chunk: tokens of a run.
    """

    devices: Devices
    order: Order
    chunk: int

    @classmethod
    def of(cls, devices: Devices, order: Order, num_tokens: int, config: NSAConfig) -> "Shards":
        """Describes rows of which each device has `num_tokens` tokens.

        Raises:
          ValueError: the order is unknown, or the chunks are too short or do not divide.
        """
        runs = runs_per_device(order)
        chunk, stride, shortest = num_tokens // runs, config.compression_stride, shortest_chunk(config)
        if num_tokens % runs or chunk % stride:
            raise ValueError(
                f"the tokens of a device must be {runs} {'chunks' if runs > 1 else 'chunk'} of a multiple of "
                f"compression_stride = {stride} tokens, got {num_tokens} tokens. Pad the end of the rows to "
                "padded_length."
            )
        if chunk < shortest:
            raise ValueError(
                "a chunk must have at least max(window_size, compression_block_size) - 1 = "
                f"{shortest} tokens, got {chunk}. Use fewer devices, or pad the rows to padded_length."
            )
        return cls(devices, order, chunk)

    @property
    def runs_here(self) -> int:
        """Number of runs of each device."""
        return runs_per_device(self.order)

    @property
    def num_runs(self) -> int:
        """Number of runs of a row."""
        return self.devices.count * self.runs_here

    def numbers(self) -> Int32[Array, " runs"]:
        """The numbers of the runs of this device."""
        first = self.devices.index()
        if self.runs_here == 1:
            return first[None]
        return jnp.stack([first, self.num_runs - 1 - first])

    def runs(self, halo: int | None = None) -> Runs:
        """Where the tokens of this device stand in the row, as `query_positions`."""
        firsts = self.numbers() * self.chunk
        runs = tuple(Run(self.chunk, firsts[run]) for run in range(self.runs_here))
        return Runs(runs, divisor=self.chunk, halo=halo)

    def split(self, x: Array) -> Array:
        """Cuts an array `[B, entries, ...]` of this device into equal parts, one for each run."""
        return x.reshape(x.shape[0], self.runs_here, x.shape[1] // self.runs_here, *x.shape[2:])

    def gather(self, *arrays: Array) -> tuple[Array, ...]:
        """Gathers arrays with the same number of entries for each run, in the order of the row.

        They travel side by side in one message, because XLA has one gather under way at a time. The transpose
        is one reduce-scatter.

        Args:
          *arrays: `[B, runs, entries, ..., X]`, the entries of the runs of this device; alike but for `X`.

        Returns:
          `[B, num_runs * entries, ..., X]` for each, on every device.
        """
        mine = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)
        every = self.devices.all_gather(mine)  # the runs of device 0 first
        if self.runs_here == 2:
            every = jnp.concatenate([every[:, ::2], every[:, ::-2]], axis=1)
        every = every.reshape(every.shape[0], -1, *every.shape[3:])
        if len(arrays) == 1:
            return (every,)
        ends = np.cumsum([x.shape[-1] for x in arrays])[:-1]
        return tuple(jnp.split(every, ends, axis=-1))

    def stretches(
        self, pairs: Sequence[tuple[tuple[Float[Array, "B T K H"], Float[Array, "B T K V"]], int]]
    ) -> list[tuple[Float[Array, "B runs halo+chunk K H"], Float[Array, "B runs halo+chunk K V"]]]:
        """Puts the last tokens of the run before in front of each run of this device.

        Args:
          pairs: `((keys, values), halo)`: how many tokens of the run before each pair of arrays needs.

        Returns:
          Keys and values of the halo and of the run; zeros in the halo of the first run of the row.
        """
        split = [(self.split(key), self.split(value), halo) for (key, value), halo in pairs]
        # One message for each direction: keys beside values, the halos of all pairs one after another.
        tails = [
            jnp.concatenate([x[:, :, self.chunk - halo :] for x in (key, value)], axis=-1)
            for key, value, halo in split
        ]
        received, found = self._from_the_run_before(jnp.concatenate(tails, axis=2)), []
        for key, value, halo in split:
            before, received = received[:, :, :halo], received[:, :, halo:]
            width = key.shape[-1]
            longer_key = jnp.concatenate([before[..., :width], key], axis=2)
            longer_value = jnp.concatenate([before[..., width:], value], axis=2)
            found.append((longer_key, longer_value))
        return found

    def _from_the_run_before(self, x: Array) -> Array:
        """What the device that holds the run before has in the place of each run; zeros for the first run."""
        if x.shape[2] == 0:
            return x
        last = self.devices.count - 1
        up = [(i, i + 1) for i in range(last)]
        before_first = self.devices.permute(x[:, 0], up)
        if self.runs_here == 1:
            return before_first[:, None]
        # The second runs count down: that of the last device follows its own first run.
        down = [(after, before) for before, after in up]
        before_second = self.devices.permute(x[:, 1], down)
        at_turn = self.devices.index() == last
        return jnp.stack([before_first, jnp.where(at_turn, x[:, 0], before_second)], axis=1)


def over_axis(function: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """Runs a function on the shards of tokens, in a `shard_map` over an axis of the mesh in context.

    Its first argument, any arrays, is the same on every device. All others, and its result, are arrays
    `[B, T, ...]`, of which each device has some tokens; on explicit axes also the batch rows and heads that
    it holds.

    Raises:
      ValueError: as in `devices_along` and `nsa_jax.sharding.explicit.per_shard`; or the tokens do not
        divide, or rows or heads lie on the axis already.
    """
    devices = devices_along(axis)
    tokens = PartitionSpec(None, axis)
    # Without a jit, JAX compiles each instruction of a shard_map alone, and XLA crashes (0.11.2, on CPUs).

    def call(same, *spread):
        for x in jax.tree.leaves(spread):
            if x.shape[1] % devices:
                raise ValueError(
                    f"the devices of a context axis must divide the tokens of a row, got {devices} devices "
                    f"along {axis!r} and {x.shape[1]} tokens. Pad the end of the rows, see "
                    "nsa_jax.parallel.padded_length."
                )
        mesh = jax.sharding.get_abstract_mesh()
        axes = Axes.of({"operands": spread}, tokens=axis)
        if axes is None and axis in mesh.explicit_axes:  # every device holds all of the operands
            axes = Axes(mesh, batch=None, heads=None, tokens=axis)
        if axes is not None:
            if axis in jax.tree.leaves((axes.batch, axes.heads)):
                raise ValueError(
                    f"a context axis must spread tokens alone, got rows over {axes.batch} and heads over "
                    f"{axes.heads} beside tokens over {axis!r}. Use other axes for rows and heads."
                )

            def specs_in(axes: Axes) -> tuple[Any, ...]:
                return (jax.tree.map(lambda _: PartitionSpec(), same), *(axes.specs(x) for x in spread))

            names = {axis, *mesh.explicit_axes}
            results = axes.spec(HEADS + 1)
            run = jax.jit(
                jax.shard_map(function, in_specs=specs_in(axes), out_specs=results, axis_names=names)
            )
            # On an auto axis XLA places the tokens.
            placed = axes if axis in mesh.explicit_axes else axes._replace(tokens=None)
            return run(*placed.place((same, *spread), specs_in(placed)))
        specs = (PartitionSpec(), *[tokens] * len(spread))
        run = jax.jit(jax.shard_map(function, in_specs=specs, out_specs=tokens, axis_names={axis}))
        return run(same, *spread)

    return call


def devices_along(axis: str) -> int:
    """The number of devices along an axis of the mesh in context.

    Raises:
      TypeError: the axis is not one name.
      ValueError: there is no mesh in context, it lacks the axis, or a `shard_map` has mapped it already.
    """
    if not isinstance(axis, str):
        raise TypeError(f"context_axis must be the name of one axis, got {axis!r}. Pass a string.")
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        raise ValueError(
            f"context_axis must be an axis of the mesh in context, got {axis!r} and "
            f"{f'the axes {mesh.axis_names}' if mesh.axis_names else 'no mesh'}. Set a mesh with this axis: "
            "jax.set_mesh(mesh)."
        )
    if axis in mesh.manual_axes:
        raise ValueError(
            f"a layer with context_axis opens a shard_map of its own, got {axis!r} inside of one over this "
            "axis. Call the layer outside, or nsa_jax.parallel.context_attention inside."
        )
    return mesh.shape[axis]
