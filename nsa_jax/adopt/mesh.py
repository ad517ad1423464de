"""The devices that a stage trains on, and what each of them holds."""

import argparse
import contextlib
import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from nsa_jax.adopt.command_line import InputError
from nsa_jax.array_typing import Int
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.model.abstract import abstract_transformer, fill, parameters
from nsa_jax.nn.parameters import sharding_of

SHARDING = {"model": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Among how many devices what is divided. Their product is the number of devices.

    Attributes:
      data: the rows of a step.
      fsdp: rows again, and each parameter with its optimizer state.
      tensor: heads, and the inner width of the MLP.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Reads `data=2,fsdp=4`; axes that are left out have size 1."""
        names = [field.name for field in dataclasses.fields(cls)]
        pairs = [part.partition("=")[::2] for part in text.split(",")]
        known = all(name in names and size.isdecimal() and int(size) > 0 for name, size in pairs)
        if not known or len(dict(pairs)) < len(pairs):
            raise argparse.ArgumentTypeError(
                f"must be AXIS=SIZE pairs of different axes among {', '.join(names)}, got {text!r}. Pass for "
                "example fsdp=4."
            )
        return cls(**{name: int(size) for name, size in pairs})

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor

    def check(self, batch: int) -> None:
        """Raises InputError unless the devices exist and the rows of a step divide among them."""
        if batch % (self.data * self.fsdp):
            raise InputError(
                f"--batch must be a multiple of data x fsdp = {self.data * self.fsdp}, got {batch}. Pass "
                "another batch or mesh."
            )
        if self.devices > len(jax.local_devices()):
            raise InputError(
                f"--mesh must not have more devices than there are, got {self.devices} for "
                f"{len(jax.local_devices())}. Pass smaller sizes."
            )

    def in_context(self) -> contextlib.AbstractContextManager[Any]:
        """A context with the mesh of the first devices; with none on one device."""
        if self.devices == 1:
            return contextlib.nullcontext()
        sizes = dataclasses.asdict(self)
        types, devices = (AxisType.Explicit,) * len(sizes), jax.local_devices()[: self.devices]
        return jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices))

    def check_model(self, config: TransformerConfig) -> None:
        """Raises InputError unless the parameters divide among the devices."""
        for axis, size, of in (
            ("fsdp", config.model_dim, "dimensions of the model"),
            ("tensor", config.num_kv_heads, "KV heads"),
            ("tensor", config.mlp_width, "dimensions inside the MLP"),
        ):
            if size % getattr(self, axis):
                raise InputError(
                    f"--mesh must divide the model, got {axis}={getattr(self, axis)} for {size} {of}. Pass a "
                    "divisor."
                )

    def spread(self, model: Transformer) -> Transformer:
        """The model with its parameters where the mesh in context has them."""
        return (
            model if self.devices == 1 else _moved(model, abstract_transformer(model.config, **self.of_model))
        )

    def gathered(self, model: Transformer) -> Transformer:
        """A model of this mesh on the first device; outside of the context of the mesh."""
        return model if self.devices == 1 else _moved(model, abstract_transformer(model.config))

    @property
    def of_model(self) -> dict[str, Any]:
        """What a `Transformer` gets on the mesh in context."""
        return {} if self.devices == 1 else {"sharding": SHARDING}

    def place(self, rows: Int[Any, "B T"]) -> Int[Any, "B T"]:
        """Rows of a step, each where its device needs it, on the mesh in context."""
        if self.devices == 1:
            return rows
        return jax.device_put(rows, NamedSharding(jax.sharding.get_mesh(), P(("data", "fsdp"))))

    def share(self, tree: Any) -> Any:
        """A tree of arrays, those that are not divided on all devices of the mesh in context."""
        if self.devices == 1:
            return jax.device_put(tree, jax.local_devices()[0])  # as the parameters are
        everywhere = NamedSharding(jax.sharding.get_mesh(), P())
        return jax.tree.map(
            lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere), tree
        )


def bound(model: Transformer) -> Transformer:
    """Binds the arrays to a device, as those that a step returns are: else JAX compiles for them again."""
    nnx.update(model, jax.device_put(nnx.state(model), jax.local_devices()[0]))
    return model


def _moved(model: Transformer, like: Transformer) -> Transformer:
    """The parameters of a model, where those of an abstract one have their place."""
    wanted = parameters(like)
    # Given the device itself, JAX keeps an array typed as on its mesh, and nothing can compute with it.
    alone = SingleDeviceSharding(jax.local_devices()[0])
    for name, value in parameters(model).items():
        wanted[name] = jax.device_put(value, sharding_of(wanted[name]) or alone)
    fill(like, wanted)
    return like


ONE_DEVICE = Mesh()
