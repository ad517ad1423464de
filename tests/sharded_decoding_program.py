"""Run by test_partition with eight host devices: decoding by plain `jit` on `xla`, against one device.

Rows are sharded over `data`; heads, the inner width of the MLP and the vocabulary over `tensor`. Most is in
float64, so that no rounding decides between two tokens or two blocks.
"""

import dataclasses
import re
from unittest import mock

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
from nsa_jax.nn import joined as joining
from nsa_jax.nn.joined import Joined

NSA = NSAConfig(
    compression_block_size=4, compression_stride=2, selection_block_size=8, num_selected_blocks=4,
    window_size=8,
)  # fmt: skip
SHARDING = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
BOTH, ROWS = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
BATCH, VOCAB, PROMPT, NEW = 4, 64, 40, 24
MESSAGES = "all-(gather|reduce|to-all)|collective-permute|reduce-scatter"


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
    assert len(joined(prepare(model))) == 2  # as `generate` does
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

    def written(model, tokens):
        _, held = model.prefill(tokens[:, :16], model.init_cache(BATCH, PROMPT, dtype="int8"))
        return model.decode_step(tokens[:, 16:17], held)

    expected, found = (nnx.jit(written)(*x) for x in ((whole, prompts), (model, place(prompts))))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=200 * np.finfo(np.float64).eps)
    assert sum(x.dtype == np.int8 for x in jax.tree.leaves(found)) == 6
    print("decoding: ok")


def prepared() -> None:
    """Each device joins its own columns, and what it then computes needs no messages of its own."""
    side_by_side, programs = joining._side_by_side, []

    def recorded(*arrays, **options):
        programs.append(side_by_side.lower(*arrays, **options).compile().as_text())
        return side_by_side(*arrays, **options)

    whole = make(CONFIG)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (BATCH, PROMPT)).astype(np.int32)
    expected = generate(whole, prompts, max_new_tokens=NEW).tokens
    for kind, sharding in (
        (AxisType.Auto, SHARDING),
        (AxisType.Explicit, SHARDING),
        (AxisType.Explicit, SHARDING | {"model": "data"}),
    ):
        mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh), mock.patch.object(joining, "_side_by_side", recorded):
            model = make(CONFIG, sharding)
            ready = prepare(model)
        attention, mlp = (part.joined for part in (ready.layers[0].attention, ready.layers[0].mlp))
        names = (
            "query",
            *(f"{what}_{branch}" for branch in ("cmp", "slc", "win") for what in ("key", "value")),
        )
        kernels = [getattr(whole.layers[0].attention, f"{name}_proj").kernel[...] for name in names]
        for shard in attention.kernel[...].addressable_shards:
            rows, columns = shard.index
            device = (columns.start or 0) // shard.data.shape[1]
            own = [np.split(kernel, 4, axis=1)[device].reshape(32, -1) for kernel in kernels]
            own = np.concatenate([*own, whole.layers[0].attention.gate.kernel_in[...]], axis=1)[rows]
            np.testing.assert_array_equal(shard.data[:, : own.shape[1]], own)
            assert not shard.data[:, own.shape[1] :].any()
        assert [x.kernel.shape for x in (attention, mlp)] == [(32, 4 * 128), (32, 4 * 256)]

        on_mesh = jax.device_put(prompts, NamedSharding(mesh, ROWS))
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(generate(ready, on_mesh, max_new_tokens=NEW).tokens, expected)
            x = jax.device_put(np.ones((BATCH, 1, 32)), NamedSharding(mesh, ROWS))
            step = nnx.jit(lambda joined, gate, x: gate.of_hidden(joined(x)["gate"]))
            text = step.lower(attention, ready.layers[0].attention.gate, x).compile().as_text()
        assert ("data" in sharding.values()) == bool(re.search(MESSAGES, text))  # a gather of rows: FSDP
    assert len(programs) == 6
    assert not any(re.search(MESSAGES, text) for text in programs)

    with jax.set_mesh(mesh):
        ready = prepare(make(CONFIG, SHARDING | {"kv_heads": None}))
    assert [name for name, _ in ready.layers[0].attention.joined.parts] == ["query_proj", "gate"]
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])):
        assert len(joined(prepare(make(CONFIG, SHARDING)))) == 2  # its type names axes, too
    print("prepared: ok")


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
        prepared()
        in_16_bits()
