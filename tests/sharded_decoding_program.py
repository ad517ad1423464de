"""Run by test_partition with eight host devices: decoding by plain `jit` on `xla`, against one device.

Rows are sharded over `data`; heads, the inner width of the MLP and the vocabulary over `tensor`. Most is in
float64, so that no rounding decides between two tokens or two blocks.
"""

import dataclasses

import fewer_collections  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sharded_modules import drawn

from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate, prepare
from nsa_jax.generate.structure import are_whole, split
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.nn.joined import Joined

NSA = NSAConfig(
    compression_block_size=4, compression_stride=2, selection_block_size=8, num_selected_blocks=4,
    window_size=8,
)  # fmt: skip
SHARDING = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
BOTH, ROWS = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
BATCH, VOCAB, PROMPT, NEW = 4, 64, 40, 24


CONFIG = TransformerConfig(
    vocab_size=VOCAB, model_dim=32, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32,
    nsa=NSA, dtype="float64", param_dtype="float64",
)  # fmt: skip


def make(config: TransformerConfig, sharding: dict[str, str] | None = None) -> Transformer:
    return drawn(lambda: Transformer(config, sharding=sharding, rngs=nnx.Rngs(0)), scale=0.15)


def joined(model: Transformer) -> list[nnx.Module]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, Joined)]


def main() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    whole = make(CONFIG)
    with jax.set_mesh(mesh):
        model = make(CONFIG, SHARDING)
    spread = {
        x.sharding.spec for x in jax.tree.leaves(nnx.state(model)) if not x.sharding.is_fully_replicated
    }
    assert len(spread) > 3, spread

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, BOTH if x.ndim > 2 else ROWS))

    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(0, VOCAB, (BATCH, PROMPT)), jnp.int32)
    lengths = jnp.asarray((PROMPT, 13, 3, 29), jnp.int32)
    settings = dict(max_new_tokens=NEW, temperature=0.7, key=5)
    expected = generate(whole, prompts, lengths=lengths, **settings)
    found = generate(model, place(prompts), lengths=place(lengths), **settings)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    assert len(np.unique(expected.tokens)) > NEW // 2, "too few tokens to tell right from wrong"
    assert not joined(prepare(model))  # its kernels are divided
    assert not are_whole(split(model)[1])

    copies = nnx.clone(whole)  # each device has all of it, and some rows
    state = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), nnx.state(copies))
    nnx.update(copies, state)
    assert joined(prepare(copies))  # as `generate` does
    assert are_whole(split(copies)[1])
    found = generate(copies, place(prompts), lengths=place(lengths), **settings)
    np.testing.assert_array_equal(found.tokens, expected.tokens)

    step = nnx.jit(Transformer.decode_step)
    held = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape)) if x.ndim > 2 else x,
        whole.init_cache(BATCH, PROMPT),
    )
    held = tuple(x._replace(lengths=lengths - 2) for x in held)
    new = prompts[:, :2]
    logits, after = step(whole, new, held)
    ours, ours_after = step(model, place(new), jax.tree.map(place, held))
    # About 200 terms of order 1 are added on the way to a logit, in another order: 200 eps.
    np.testing.assert_allclose(ours, logits, rtol=0, atol=200 * np.finfo(np.float64).eps)
    for x, y in zip(jax.tree.leaves(ours_after), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=200 * np.finfo(np.float64).eps)
        assert x.sharding.spec == (BOTH if x.ndim > 2 else ROWS), x.sharding
    print("decoding: ok")


def in_16_bits() -> None:
    """A step has the best token of float64 wherever the next best is worse by more than the budget."""
    every_block = dataclasses.replace(NSA, num_selected_blocks=PROMPT // NSA.selection_block_size)
    low = dataclasses.replace(CONFIG, nsa=every_block, dtype="bfloat16", param_dtype="bfloat16")
    high = dataclasses.replace(low, dtype="float64", param_dtype="float64")
    whole, exact = make(low), make(high)
    nnx.update(exact, jax.tree.map(lambda x: x.astype(np.float64), nnx.state(whole)))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = make(low, SHARDING)

    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (BATCH, 8)), jnp.int32)
    held = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype) if x.ndim > 2 else x,
        whole.init_cache(BATCH, PROMPT),
    )
    held = tuple(x._replace(lengths=jnp.asarray((32, 13, 3, 29), jnp.int32)) for x in held)
    step = nnx.jit(Transformer.decode_step)
    as_exact = jax.tree.map(lambda x: x.astype(np.float64) if x.ndim > 2 else x, held)
    truth, alone = (np.asarray(step(*x)[0]) for x in ((exact, tokens, as_exact), (whole, tokens, held)))
    by_rank = {1: ROWS, 2: ROWS, 4: BOTH}
    spread = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, by_rank[x.ndim])), (tokens, held))
    found = np.asarray(step(model, *spread)[0])

    eps = float(jnp.finfo(jnp.bfloat16).eps)
    budget = 2 * np.abs(alone - truth).max() + 8 * eps * np.abs(truth).max()
    assert np.abs(found - truth).max() <= budget
    second, first = np.sort(truth, axis=-1)[..., -2:].transpose(2, 0, 1)
    decided = first - second > 2 * budget
    assert decided.sum() > decided.size // 4, (decided.sum(), budget)
    np.testing.assert_array_equal(found.argmax(-1)[decided], truth.argmax(-1)[decided])
    print("decoding in 16 bits: ok")


if __name__ == "__main__":
    with jax.enable_x64(True):
        main()
        in_16_bits()
