"""A stack of NSA layers under `nnx.scan`: traced and compiled as one layer, however many there are.

    python -m examples.scan_layers

The parameters of all layers lie in one module, stacked along a new first axis: line (1) creates them, line
(2) runs them, and line (3) makes the backward pass recompute each layer instead of storing what is inside.

`nsa_jax.model.Transformer` keeps a list of layers all the same, because it also decodes; with `scan_layers`
its forward pass stacks them. A decode step writes a few tokens into the cache of each layer, in place. Under
a scan the caches of all layers would be stacked inputs and outputs of it, and every step would copy them
whole. So scan the layers for training where compiling a deep model takes too long, and decode with a list:
`unstacked` gives its layers.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.command_line import Parser, command, missing_package, progress
from nsa_jax.config import NSAConfig
from nsa_jax.nn import NSAAttention

try:
    import optax
except ImportError as missing:
    raise SystemExit(missing_package("examples.scan_layers", missing, "train")) from missing

WIDTH, HEADS, KV_HEADS, BATCH, LENGTH = 32, 4, 1, 2, 64
# Blocks in proportion to sequences of 64 tokens; real ones keep the defaults of the paper.
CONFIG = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=3,
    window_size=8,
)


class Layer(nnx.Module):
    """Pre-norm attention and MLP on a residual stream."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = NSAAttention(HEADS, WIDTH, num_kv_heads=KV_HEADS, config=CONFIG, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), jax.nn.silu, nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream after this layer, `[B, T, WIDTH]`."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ScannedLayers(nnx.Module):
    """`depth` layers, one after the other.

    Args:
      depth: number of layers.
      remat: whether the backward pass recomputes each layer.
      rngs: source of the initial parameters, other ones in each layer.
    """

    def __init__(self, depth: int, *, remat: bool = True, rngs: nnx.Rngs):
        create = nnx.split_rngs(splits=depth)(nnx.vmap(lambda rngs: Layer(rngs=rngs)))
        self.layers = create(rngs)  # (1)
        self.depth, self.remat = depth, remat

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream after all layers, `[B, T, WIDTH]`."""
        run = nnx.remat(Layer.__call__) if self.remat else Layer.__call__  # (3)
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)  # (2)

    def unstacked(self) -> list[Layer]:
        """The same layers one by one, with copies of their parameters."""
        graph, stacked = nnx.split(self.layers)
        return [
            nnx.merge(graph, jax.tree.map(lambda parameter: parameter[number], stacked))  # noqa: B023 (at once)
            for number in range(self.depth)
        ]


def loss_of(layers: ScannedLayers, x: jax.Array, target: jax.Array) -> jax.Array:
    """Mean squared distance of what the layers make of `x` from `target`."""
    return jnp.square(layers(x) - target).mean()


@nnx.jit
def train_step(layers: ScannedLayers, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array) -> jax.Array:
    """One step of the optimizer; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(layers, x, target)
    optimizer.update(layers, gradients)
    return loss


@command("examples.scan_layers")
def main(argv: Sequence[str] | None = None) -> int:
    """Compiles and runs a training step of two depths and prints the seconds that each took."""
    Parser(prog="python -m examples.scan_layers", description=__doc__).parse_args(argv)
    x, target = jax.random.normal(jax.random.key(0), (2, BATCH, LENGTH, WIDTH))
    for depth in (2, 6):
        layers = ScannedLayers(depth, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layers, optax.adam(1e-3), wrt=nnx.Param)
        progress(f"{depth} layers: compiling the training step")
        begin = time.perf_counter()
        first = float(train_step(layers, optimizer, x, target))
        seconds = time.perf_counter() - begin
        last = float(train_step(layers, optimizer, x, target))
        print(f"{depth} layers: compiled in {seconds:.1f} s, loss {first:.3f} -> {last:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
