"""Run by test_partition with eight host devices: decoding by plain `jit` on `xla`, against one device.

Rows are sharded over `data`; heads, the inner width of the MLP and the vocabulary over `tensor`. All is in
float64, so that no rounding decides between two tokens or two blocks.
"""

import dataclasses
import functools
import re
from unittest import mock

import fewer_collections  # noqa: F401
import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sharded_modules import drawn

from nsa_jax.config import NSAConfig
from nsa_jax.generate import Generation, generate, prepare
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
BATCH, VOCAB, PROMPT, NEW = 4, 64, 300, 24
MESSAGES = "all-(gather|reduce|to-all)|collective-permute|reduce-scatter"


CONFIG = TransformerConfig(
    vocab_size=VOCAB, model_dim=32, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=32,
    nsa=NSA, dtype="float64", param_dtype="float64",
)  # fmt: skip


def make(config: TransformerConfig, sharding: dict[str, str] | None = None) -> Transformer:
    return drawn(lambda: Transformer(config, sharding=sharding, rngs=nnx.Rngs(0)), scale=0.15)


def joined(model: Transformer) -> list[nnx.Module]:
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, Joined)]


def place(mesh: jax.sharding.Mesh, x: jax.Array | np.ndarray) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, BOTH if x.ndim > 2 else ROWS))


# Two parts of each prompt, of more tokens than `xla` works on at a time.
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (BATCH, PROMPT), np.int32)
LENGTHS = np.array((PROMPT, 13, 3, 290), np.int32)
written = functools.partial(
    generate, max_new_tokens=NEW, prefill_chunk=280, temperature=1.0, top_k=20, top_p=0.9, eos_id=3,
    key=jax.random.key(5, impl="rbg"),
)  # fmt: skip


@functools.cache
def written_alone() -> Generation:
    """What one device writes."""
    found = written(make(CONFIG), TOKENS, lengths=LENGTHS)
    assert len(np.unique(found.tokens)) > NEW // 2, "too few tokens to tell right from wrong"
    return found


def decoding() -> None:
    """On auto axes; on explicit ones with parameters that each device has, without the mesh in context.

    There a dense model is enough: nothing is divided, and its logits tell whether its words are right.
    """
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = make(CONFIG, SHARDING)
    spread = {
        x.sharding.spec for x in jax.tree.leaves(nnx.state(model)) if not x.sharding.is_fully_replicated
    }
    assert len(spread) > 3, spread
    found = written(model, place(mesh, TOKENS), lengths=place(mesh, LENGTHS))
    jax.tree.map(np.testing.assert_array_equal, found, written_alone())
    assert len(joined(prepare(model))) == 2  # as `generate` does
    assert not are_whole(split(model)[1])

    whole = make(dataclasses.replace(CONFIG, attention="dense"))
    copies = nnx.clone(whole)
    on_all = NamedSharding(jax.make_mesh((2, 4), ("data", "tensor")), PartitionSpec())
    nnx.update(copies, jax.device_put(nnx.state(copies), on_all))
    assert joined(prepare(copies))  # as `generate` does
    assert are_whole(split(copies)[1])
    found = generate(copies, TOKENS[:, :9], max_new_tokens=NEW).tokens
    logits = jax.jit(Transformer.__call__)(whole, np.concatenate([TOKENS[:, :9], found], axis=1))
    np.testing.assert_array_equal(found, np.asarray(logits)[:, 8:-1].argmax(-1))
    print("decoding: ok")


def prepared() -> None:
    """Each device joins its own columns, and what it then computes needs no messages of its own."""
    side_by_side, programs = joining._side_by_side, []

    def recorded(*arrays, **options):
        compiled = side_by_side.lower(*arrays, **options).compile()
        programs.append(compiled.as_text())
        return compiled(*arrays)

    whole = make(CONFIG)
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
        kernels = [np.asarray(getattr(whole.layers[0].attention, f"{name}_proj").kernel) for name in names]
        for shard in attention.kernel[...].addressable_shards:
            rows, columns = shard.index
            found = np.asarray(shard.data)
            device = (columns.start or 0) // found.shape[1]
            own = [np.split(kernel, 4, axis=1)[device].reshape(32, -1) for kernel in kernels]
            own = np.concatenate([*own, whole.layers[0].attention.gate.kernel_in[...]], axis=1)[rows]
            np.testing.assert_array_equal(found[:, : own.shape[1]], own)
            assert not found[:, own.shape[1] :].any()
        assert [x.kernel.shape for x in (attention, mlp)] == [(32, 4 * 128), (32, 4 * 256)]

        with jax.set_mesh(mesh):
            x = jax.device_put(np.ones((BATCH, 1, 32)), NamedSharding(mesh, ROWS))
            step = nnx.jit(lambda joined, gate, x: gate.of_hidden(joined(x)["gate"]))
            text = step.lower(attention, ready.layers[0].attention.gate, x).compile().as_text()
        assert ("data" in sharding.values()) == bool(re.search(MESSAGES, text))  # a gather of rows: FSDP
    assert len(programs) == 6
    assert not any(re.search(MESSAGES, text) for text in programs)

    with jax.set_mesh(mesh):  # explicit axes, over which rows of the kernels are divided, too
        found = written(ready, place(mesh, TOKENS), lengths=place(mesh, LENGTHS))
    jax.tree.map(np.testing.assert_array_equal, found, written_alone())

    with jax.set_mesh(mesh):
        ready = prepare(make(CONFIG, SHARDING | {"kv_heads": None}))
    assert [name for name, _ in ready.layers[0].attention.joined.parts] == ["query_proj", "gate"]
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])):
        assert len(joined(prepare(make(CONFIG, SHARDING)))) == 2  # its type names axes, too
    print("prepared: ok")


if __name__ == "__main__":
    with jax.enable_x64(True):
        decoding()
        prepared()
