"""The devices of a run, and what each of them holds."""

import argparse
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.command_line import InputError
from nsa_jax import parallel
from nsa_jax.array_typing import Array, Int
from nsa_jax.model import TransformerConfig


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Among how many devices what is divided. Their product is the number of devices.

    Attributes:
      data: the sequences of a batch.
      fsdp: sequences again, and each parameter with its optimizer state.
      tensor: heads, and the inner width of the MLP.
      context: the tokens of a sequence.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshSizes":
        """Reads `data=2,context=4`; axes that are left out have size 1."""
        names = [field.name for field in dataclasses.fields(cls)]
        pairs = [part.partition("=")[::2] for part in text.split(",")]
        known = all(name in names and size.isdecimal() and int(size) > 0 for name, size in pairs)
        if not known or len(dict(pairs)) < len(pairs):
            raise argparse.ArgumentTypeError(
                f"must be AXIS=SIZE pairs of different axes among {', '.join(names)}, got {text!r}. "
                "Pass for example data=2,context=4."
            )
        return cls(**{name: int(size) for name, size in pairs})

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor * self.context

    @property
    def arguments(self) -> dict[str, Any]:
        """What a `Transformer` gets; nothing on one device."""
        if self.devices == 1:
            return {}
        sharding = {"model": "fsdp"} | dict.fromkeys(("heads", "kv_heads", "mlp"), "tensor")
        return {"sharding": sharding} | ({"context_axis": "context"} if self.context > 1 else {})

    def check(self, *, batch: int, length: int, model: TransformerConfig) -> None:
        """Raises InputError unless the devices exist and everything divides among them."""
        if self.devices > len(jax.devices()):
            raise InputError(
                f"--mesh must not have more devices than there are, got {self.devices} for "
                f"{len(jax.devices())}. Pass smaller sizes, or on a CPU set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={self.devices}."
            )
        if jax.process_count() > 1 and self.devices < len(jax.devices()):
            raise InputError(
                f"--mesh must have the devices of all processes, got {self.devices} of {len(jax.devices())}. "
                "Pass larger sizes."
            )
        if batch % (self.data * self.fsdp):
            raise InputError(
                f"--batch must be a multiple of data x fsdp = {self.data * self.fsdp}, got {batch}. "
                "Pass another batch or mesh."
            )
        if model.num_kv_heads % self.tensor:
            raise InputError(
                f"--kv-heads must be a multiple of tensor = {self.tensor}, got {model.num_kv_heads}. "
                "Pass another number or mesh."
            )
        if model.model_dim % self.fsdp or model.mlp_width % self.tensor:
            raise InputError(
                f"--width must be a multiple of fsdp = {self.fsdp}, and the MLP's inner width of tensor = "
                f"{self.tensor}, got {model.model_dim} and {model.mlp_width}. Pass another width or mesh."
            )
        fitting = parallel.padded_length(length, self.context, model.nsa)
        if self.context > 1 and length != fitting:
            raise InputError(
                f"--length must be whole chunks for context = {self.context}, got {length}. Pass {fitting}."
            )

    def in_context(self) -> contextlib.AbstractContextManager[Any]:
        """A context with the mesh of the first devices; with none on one device."""
        if self.devices == 1:
            return contextlib.nullcontext()
        sizes = dataclasses.asdict(self)
        types = (AxisType.Explicit,) * len(sizes)
        devices = jax.devices()[: self.devices]
        return jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices))

    def where(self, abstract: Any) -> Any:
        """The shardings of a tree of abstract arrays, in the mesh in context; None on one device."""

        def of(leaf: jax.ShapeDtypeStruct) -> NamedSharding | None:
            if self.devices == 1:
                return None
            spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
            return NamedSharding(jax.sharding.get_mesh(), spec)

        return jax.tree.map(of, abstract)

    def place(self, rows: Int[np.ndarray, "rows T+1"]) -> tuple[Int[Array, "rows T"], Int[Array, "rows T"]]:
        """Bytes and the bytes that follow them, each where its device needs it, inside `in_context`."""
        inputs, labels = rows[:, :-1], rows[:, 1:]
        if self.devices == 1:
            return inputs, labels
        sequences = ("data", "fsdp") if len(rows) % (self.data * self.fsdp) == 0 else None
        spec = P(sequences, "context" if self.context > 1 else None)
        if self.context > 1:
            inputs, labels = (parallel.to_zigzag(x, self.context) for x in (inputs, labels))
        sharding = NamedSharding(jax.sharding.get_mesh(), spec)
        put = functools.partial(jax.make_array_from_callback, inputs.shape, sharding)
        return put(inputs.__getitem__), put(labels.__getitem__)

    def fetch(self, x: Array) -> np.ndarray:
        """All of an array, on the host of every process, inside `in_context`."""
        if jax.process_count() > 1:
            x = jax.jit(lambda x: x, out_shardings=NamedSharding(jax.sharding.get_mesh(), P()))(x)
        return np.asarray(x)


ONE_DEVICE = MeshSizes()
