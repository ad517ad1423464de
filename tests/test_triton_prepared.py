"""What the loop of `generate` does with weights on H100s: multiply by them, and nothing else."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from modules import abstract

WHERE = "installed by `tox -e test`; not a dependency of nsa_jax"
pytest.importorskip("jax_cuda13_plugin", reason=f"needs jax-cuda13-plugin, {WHERE}", exc_type=ImportError)

import triton_compile  # noqa: E402

from nsa_jax.generate import loop  # noqa: E402
from nsa_jax.generate.structure import split  # noqa: E402
from nsa_jax.model import Transformer, TransformerConfig  # noqa: E402
from nsa_jax.model.abstract import abstract_transformer  # noqa: E402
from nsa_jax.nn import IndexerConfig  # noqa: E402

BATCH, WIDTH = 8, 256  # no other arrays are as wide as the model
CONFIG = TransformerConfig(
    vocab_size=512, num_layers=1, model_dim=WIDTH, num_heads=4, num_kv_heads=2, head_dim=64,
    branches=("slc", "win"), selector=IndexerConfig(dim=64, weighted=True), dtype="bfloat16",
)  # fmt: skip


class OwnGate(nnx.Module):
    """A user's gate, with a product of its own that XLA could join with ours."""

    def __init__(self, in_features, num_heads, *, rngs):
        dtypes = dict(dtype="bfloat16", param_dtype="bfloat16")
        self.project = nnx.Linear(in_features, 64, **dtypes, rngs=rngs)
        self.weigh = nnx.LinearGeneral(64, (num_heads, 2), **dtypes, rngs=rngs)

    def __call__(self, x):
        return nnx.sigmoid(self.weigh(nnx.relu(self.project(x))))


def in_loops(**options):
    """What the loop does to matrices as wide as the model: operations, and the shapes of their results.

    Prompts are empty: there is no prefill, which is outside of the loop.
    """
    given = dict(join=True, devices=1, by="xla", param_dtype="bfloat16", gate=None) | options
    join, devices, implementation = (given.pop(name) for name in ("join", "devices", "by"))
    config = TransformerConfig(**vars(CONFIG) | given)
    mesh = Mesh(triton_compile.mesh_of_h100s(x=devices).devices, "x", axis_types=(AxisType.Explicit,))
    if devices == 1:
        model = abstract(Transformer, config, implementation=implementation)
    else:
        sharding = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "x")
        with jax.set_mesh(mesh):
            model = abstract_transformer(config, sharding=sharding, implementation=implementation)
    structure, parameters = split(model)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), BATCH))

    def run(parameters, prompts, lengths, keys):
        return loop._run(
            structure, parameters, prompts, lengths, keys, loop._Sampling(None, None, None), None, 0, 64,
            max_length=512, chunk_size=4, prefill_chunk=64, cache_dtype=None, join=join,
        )  # fmt: skip

    prompts, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((BATCH, 0), (BATCH,)))
    if devices == 1:
        text = triton_compile.compile_for_h100(run, parameters, prompts, lengths, keys).as_text()
    else:
        rows = (x.update(sharding=NamedSharding(mesh, P())) for x in (prompts, lengths, keys))
        text = triton_compile.compile_on(mesh, run, parameters, *rows).as_text()
    return [each for each in operations(text) if each[0] in ("concatenate", "pad", "convert")]


def operations(text):
    bodies, name = {}, ""
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            bodies[name := start[1]] = []
        elif name:
            bodies[name].append(line)
    inside, todo = set(), re.findall(r"body=%([\w.-]+)", text)
    while todo:
        if (name := todo.pop()) not in inside:
            inside.add(name)
            todo += re.findall(r"(?:calls|to_apply)=%([\w.-]+)", "\n".join(bodies[name]))
    for line in (line for name in inside for line in bodies[name]):
        if found := re.search(r" = \w+\[(\d+),(\d+)\]\S* ([\w-]+)\(", line):
            shape = int(found[1]), int(found[2])
            if WIDTH in shape and math.prod(shape) > 64 * WIDTH:
                yield found[3], shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(), dict(gate=OwnGate, param_dtype="float32", by="triton")],
    ids=["", "in float32, a user's gate"],
)
def test_the_loop_copies_no_weights(options):
    assert in_loops(**options) == []


@pytest.mark.slow
def test_the_loop_of_two_that_divide_the_heads_copies_no_weights():
    own_keys = IndexerConfig(dim=64, weighted=True, shared_key=False)

    assert in_loops(devices=2, selector=own_keys, by="triton") == []


@pytest.mark.slow
def test_xla_copies_those_of_a_model_that_is_not_prepared():
    """Otherwise the test above would prove nothing, and `prepare` would not be needed."""
    joined = 256 + 4 * 128 + 64 + 2 * 64 + 64  # queries, keys and values, gate, index queries and keys
    inner = 688

    found = in_loops(join=False)

    assert sorted(found) == [
        ("concatenate", (WIDTH, joined)),
        ("concatenate", (WIDTH, 2 * inner)),
        ("pad", (704, WIDTH)),
    ]
