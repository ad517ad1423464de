"""NSA where `nnx.MultiHeadAttention` stood: one causal decoder, built with either, trained for a few steps.

    python -m examples.drop_in

What changes is the lines marked (1) and (2). NSA is causal by itself and carries rotary positions, so the
mask goes and no position embedding is needed.
"""

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
    raise SystemExit(missing_package("examples.drop_in", missing, "train")) from missing

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 32, 32, 4, 64, 20
# Blocks in proportion to sequences of 64 tokens; real ones keep the defaults of the paper.
CONFIG = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=8,
    num_selected_blocks=3,
    window_size=8,
)


class DenseDecoder(nnx.Module):
    """Embedding, one residual attention layer, one residual MLP, logits."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attention = self.make_attention(rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), jax.nn.silu, nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        )

    def make_attention(self, rngs: nnx.Rngs) -> nnx.Module:
        """The attention layer."""
        return nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)  # (1)

    def attend(self, x: jax.Array) -> jax.Array:
        """What each token collects from those before it."""
        return self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))  # (2)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token after each token."""
        x = self.embed(tokens)
        x = x + self.attend(x)
        return self.embed.attend(x + self.mlp(x))


class NSADecoder(DenseDecoder):
    """The same with Native Sparse Attention."""

    def make_attention(self, rngs: nnx.Rngs) -> nnx.Module:
        """The attention layer."""
        return NSAAttention(HEADS, WIDTH, num_kv_heads=1, config=CONFIG, rngs=rngs)  # (1)

    def attend(self, x: jax.Array) -> jax.Array:
        """What each token collects from those before it."""
        return self.attention(x)  # (2)


def loss_of(decoder: DenseDecoder, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, in nats."""
    logits = decoder(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(decoder: DenseDecoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step of the optimizer; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(decoder, tokens)
    optimizer.update(decoder, gradients)
    return loss


def train(decoder: DenseDecoder) -> list[float]:
    """Losses of `STEPS` steps on sequences that count up from a random token."""
    optimizer = nnx.Optimizer(decoder, optax.adam(1e-2), wrt=nnx.Param)
    starts = jax.random.randint(jax.random.key(0), (4, 1), 0, VOCABULARY)
    tokens = (starts + jnp.arange(LENGTH + 1)) % VOCABULARY
    return [float(train_step(decoder, optimizer, tokens)) for _ in range(STEPS)]


@command("examples.drop_in")
def main(argv: Sequence[str] | None = None) -> int:
    """Trains both decoders and prints what they reach."""
    Parser(prog="python -m examples.drop_in", description=__doc__).parse_args(argv)
    for decoder in (DenseDecoder(rngs=nnx.Rngs(0)), NSADecoder(rngs=nnx.Rngs(0))):
        progress(f"{type(decoder).__name__}: the first of {STEPS} steps compiles")
        losses = train(decoder)
        print(f"{type(decoder).__name__:12} loss {losses[0]:.3f} -> {losses[-1]:.3f} nats in {STEPS} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
