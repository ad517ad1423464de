"""Run by test_processes as two processes with two host devices each.

Runs the example with the arguments, which joins the processes. Then decodes with a dense model, in float64,
on a mesh of four devices: batch over one axis, heads over the other. Prints tokens.
"""

import sys

import fewer_collections  # noqa: F401
import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_modules import drawn

from examples.train_lm import __main__ as example
from nsa_jax.generate import generate
from nsa_jax.model import Transformer, TransformerConfig

BATCH, LENGTH = 4, 20
CONFIG = TransformerConfig(
    vocab_size=64, num_layers=1, model_dim=16, num_heads=4, num_kv_heads=2, attention="dense",
    dtype="float64", param_dtype="float64",
)  # fmt: skip
SHARDING = {"model": None} | dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")


def decode(sharding, place) -> list[list[int]]:
    """What a model with drawn numbers generates."""
    model = drawn(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0), sharding=sharding))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, LENGTH), np.int32)
    found = generate(model, place(tokens), max_new_tokens=6).tokens
    everywhere = jax.jit(lambda x: x, out_shardings=place(None))(found)
    return np.asarray(everywhere).tolist()


def main(arguments: list[str]) -> None:
    assert example.main(arguments) == 0
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def place(rows):
        """Rows divided among the devices; without rows, where all devices have all of an array."""
        if rows is None:
            return NamedSharding(mesh, P())
        divided = NamedSharding(mesh, P("data"))
        return jax.make_array_from_callback(rows.shape, divided, lambda index: rows[index])

    with jax.set_mesh(mesh):
        tokens = decode(SHARDING, place)
    print("tokens", *tokens)
    print("devices", len(jax.devices()), len(jax.local_devices()))


if __name__ == "__main__":
    main(sys.argv[1:])
