"""What one device of several computes in context parallelism, on a single device.

The share of a device has its tokens of a row in zigzag order. What other devices would send is an operand,
and what it would send is a result; in a backward pass it is the other way round. So this is the program of
`nsa_jax.parallel.context_attention` without its messages: its time is that of a device that never waits.
`carry` takes the messages of all shares from one to the other, so the gate can compare them with one device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from benchmarks import timing
from benchmarks.inputs import Shape
from nsa_jax import attention
from nsa_jax.array_typing import Array
from nsa_jax.compression import Compression
from nsa_jax.config import NSAConfig
from nsa_jax.parallel import from_zigzag, padded_length
from nsa_jax.parallel.attention import exchanged
from nsa_jax.parallel.devices import Devices
from nsa_jax.parallel.shards import Shards

KEYS_VALUES = ("key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win")
AXIS = "context"

type Messages = list[Array]  # of one device, in the order in which its program sends them
type Route = tuple[tuple[int, int], ...] | None  # senders and receivers of a message; None: an all-gather


@dataclasses.dataclass(frozen=True)
class Absent(Devices):
    """Devices of which only one is there.

    Attributes:
      number: which one.
      received: what it receives; None for zeros.
      sent: what it sent so far.
      routes: where that would go.
    """

    number: Array
    received: Messages | None
    sent: Messages = dataclasses.field(default_factory=list)
    routes: list[Route] = dataclasses.field(default_factory=list)

    def index(self) -> Array:
        """Which device is there."""
        return self.number

    def all_gather(self, x: Array) -> Array:
        """What all devices would have."""
        return self._exchange(x, None)

    def permute(self, x: Array, pairs: Sequence[tuple[int, int]]) -> Array:
        """What the sender would have."""
        return self._exchange(x, tuple(pairs))

    def _exchange(self, x: Array, route: Route) -> Array:
        self.sent.append(x)
        self.routes.append(route)
        if self.received is not None:
            return self.received[len(self.sent) - 1]
        gathered = self.count if route is None else 1
        return jnp.zeros((x.shape[0], gathered * x.shape[1], *x.shape[2:]), x.dtype)


class Share(NamedTuple):
    """The share of one device: a `strategies.Strategy` of its own.

    Attributes:
      device: whose share it is.
      num_devices: number of devices.
    """

    device: int
    num_devices: int

    @property
    def name(self) -> str:
        """What rows and the gate call it."""
        return "share"

    @property
    def mesh_name(self) -> str:
        """What rows say of the mesh."""
        return f"{self.device} of {self.num_devices}"

    @property
    def mesh(self) -> Mesh:
        """The mesh of the device that is there."""
        return Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def gate_name(self) -> str:
        """What the gate checks in one go: the shares of all devices."""
        return f"share of {self.num_devices}"

    def refusal(self, shape: Shape, config: NSAConfig) -> str | None:
        """Why this shape cannot be spread; None if it can."""
        return not_whole_chunks(shape.length, self.num_devices, config)

    def put(self, arrays: Mapping[str, np.ndarray], config: NSAConfig) -> dict[str, Any]:
        """Puts on the device what it has and receives, and cotangents of its output and of what it sends."""
        keys = {name: arrays[name] for name in KEYS_VALUES}
        parts = [self._replace(device=i).part(keys) for i in range(self.num_devices)]
        routes, sent = exchange(jax.device_put(parts), config)
        mine = jax.device_put(self.part(arrays))
        # A time does not depend on the cotangents of messages. These have the right shapes.
        cotangents = mine.pop("cotangent"), sent[self.device]
        received = carry(routes, sent, self.device)
        return dict(operands=(mine, received, _number(self.device)), cotangents=cotangents)

    def part(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tokens of the device, on the host."""
        numbers = self.device, 2 * self.num_devices - 1 - self.device
        chunks = {name: np.split(x, 2 * self.num_devices, axis=1) for name, x in arrays.items()}
        return {name: np.concatenate([cut[i] for i in numbers], axis=1) for name, cut in chunks.items()}

    def function(self, mode: str, implementation: str, config: NSAConfig) -> Callable[..., Any]:
        """The program of a mode: a function of `operands`, in `fwd_bwd` also of `cotangents`."""
        settings: dict[str, Any] = dict(config=config, implementation=implementation)
        attend: Callable[..., Any] = functools.partial(_attend, num_devices=self.num_devices, **settings)

        def run(arrays, received, number):
            # As in the real program, where kernels know that arrays vary over a mesh.
            spec = PartitionSpec(None, AXIS)
            specs: dict[str, Any] = dict(in_specs=(spec, spec, PartitionSpec(AXIS)), out_specs=spec)
            return jax.shard_map(attend, mesh=self.mesh, **specs)(arrays, received, number)

        if mode == "fwd":
            return run

        def with_gradients(arrays, received, number, cotangents):
            fixed = {name: x for name, x in arrays.items() if name == "block_indices"}
            floats = {name: x for name, x in arrays.items() if name not in fixed}

            def call(floats, received):
                return run(floats | fixed, received, number)

            (out, sent), pull_back = jax.vjp(call, floats, received)
            gradients, of_received = pull_back(cotangents)
            return dict(out=out, **gradients), sent, of_received

        return with_gradients

    def operands(self, mode: str, there: dict[str, Any]) -> tuple[Any, ...]:
        """What the program of a mode takes, of what `put` gave."""
        return there["operands"] if mode == "fwd" else (*there["operands"], there["cotangents"])

    def compiled(
        self, mode: str, there: dict[str, Any], implementation: str, config: NSAConfig
    ) -> timing.Compiled:
        """Compiles the forward (`fwd`), or forward and backward with all gradients (`fwd_bwd`)."""
        return timing.compile_for(self.function(mode, implementation, config), self.operands(mode, there))

    def whole(
        self, arrays: Mapping[str, np.ndarray], implementation: str, config: NSAConfig
    ) -> dict[str, np.ndarray]:
        """Output and gradients of whole rows: those of the shares of all devices, which take turns."""
        devices = range(self.num_devices)
        there = [self._replace(device=i).put(arrays, config) for i in devices]
        routes, sent = exchange([x["operands"][0] for x in there], config)
        program = self.compiled("fwd_bwd", there[0], implementation, config).call
        _, returned = jax.vjp(lambda sent: [carry(routes, sent, i) for i in devices], sent)
        of_sent = jax.tree.map(jnp.zeros_like, sent)
        # Gradients go back to the blocks, then to the tokens before a chunk, then to those of a chunk.
        for _ in range(3):
            found = [program(*there[i]["operands"], (there[i]["cotangents"][0], of_sent[i])) for i in devices]
            (of_sent,) = returned([of_received for _, _, of_received in found])
        names = found[0][0]
        joined = {x: np.concatenate([np.asarray(here[x]) for here, *_ in found], axis=1) for x in names}
        return {name: from_zigzag(x, self.num_devices) for name, x in joined.items()}


def _attend(
    arrays: Mapping[str, Any],
    received: Messages,
    number: Array,
    *,
    num_devices: int,
    config: NSAConfig,
    implementation: Any,
) -> tuple[Array, Messages]:
    """`nsa_jax.parallel.context_attention` on one device.

    Args:
      arrays: by name, the tokens of this device.
      received: what the others send.
      number: which device this is, `[1]`.
      num_devices: number of devices.
      config: block structure.
      implementation: as in `context_attention`.

    Returns:
      The output for the tokens of this device, and what it sends.
    """
    operands, devices = _exchanged(arrays, received, number[0], num_devices, config)
    out = attention.native_sparse_attention(
        **{**arrays, **operands}, config=config, implementation=implementation
    )
    return out, devices.sent


def exchange(parts: Sequence[Mapping[str, Any]], config: NSAConfig) -> tuple[list[Route], list[Messages]]:
    """What each device sends, and where it goes; `parts` are the tokens of each."""
    keys = [{name: x for name, x in part.items() if name in KEYS_VALUES} for part in parts]
    send = functools.partial(_send, num_devices=len(parts), config=config)
    routes = _routes(keys[0], len(parts), config)
    # Blocks are right once the tokens before each chunk have arrived.
    sent = [send(part, None, _number(i)) for i, part in enumerate(keys)]
    received = [carry(routes, sent, i) for i in range(len(parts))]
    return routes, [send(part, received[i], _number(i)) for i, part in enumerate(keys)]


def _routes(keys: Mapping[str, Any], num_devices: int, config: NSAConfig) -> list[Route]:
    found: list[Route] = []

    def trace(keys: Mapping[str, Array]) -> None:
        found.extend(_exchanged(keys, None, _number(0)[0], num_devices, config)[1].routes)

    jax.eval_shape(trace, keys)
    return found


# One program for all devices and calls: compiling it takes longer than running it.
@functools.partial(jax.jit, static_argnames=("num_devices", "config"))
def _send(
    keys: Mapping[str, Array], received: Messages | None, number: Array, num_devices: int, config: NSAConfig
) -> Messages:
    return _exchanged(keys, received, number[0], num_devices, config)[1].sent


def carry(routes: Sequence[Route], sent: Sequence[Messages], device: int) -> Messages:
    """What a device receives of what each device sent."""
    received = []
    for number, route in enumerate(routes):
        of_each = [messages[number] for messages in sent]
        if route is None:
            received.append(jnp.concatenate(of_each, axis=1))
        else:
            senders = [sender for sender, receiver in route if receiver == device]
            received.append(of_each[senders[0]] if senders else jnp.zeros_like(of_each[0]))
    return received


def _number(device: int) -> Array:
    return jnp.full(1, device, jnp.int32)


def _exchanged(
    arrays: Mapping[str, Array],
    received: Messages | None,
    number: Array,
    num_devices: int,
    config: NSAConfig,
) -> tuple[dict[str, Any], Absent]:
    devices = Absent(AXIS, num_devices, number, received)
    shards = Shards.of(devices, "zigzag", arrays["key_slc"].shape[1], config)
    pairs = [(arrays[f"key_{branch}"], arrays[f"value_{branch}"]) for branch in ("cmp", "slc", "win")]
    return exchanged(shards, *pairs, compress=Compression(), config=config), devices


def not_whole_chunks(length: int, num_devices: int, config: NSAConfig) -> str | None:
    """Why rows of this length cannot be divided in zigzag order, and what to do; None if they can."""
    fitting = padded_length(length, num_devices, config)
    if length == fitting:
        return None
    return (
        f"the devices must get whole chunks, got {length} tokens for {num_devices}. Pass --lengths {fitting}."
    )
