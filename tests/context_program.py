"""Run by test_parallel with sixteen host devices, in float64: rows on several devices against one device.

Prints the name of each check that passed.
"""

import dataclasses
import functools

import fewer_collections  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from cases import OVERLAPPING, PACKED
from cases import Runs as Sequences
from flax import nnx
from jax.experimental import checkify
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from programs import disagreements
from sharded_modules import drawn

from nsa_jax import attention, layout
from nsa_jax.compression import Compression, ResidualMLP, Rotation, compress_blocks
from nsa_jax.nn import NSAAttention
from nsa_jax.parallel import (
    context_attention,
    context_selection,
    from_zigzag,
    padded_length,
    to_zigzag,
)
from nsa_jax.parallel.order import Order

FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}
TOKENS = PartitionSpec(None, "context")
CONFIG = OVERLAPPING
# So many heads that a device's few tokens make more than 128 rows: for fewer, `xla` compiles a second way.
BATCH, LONGEST, HEADS, KV_HEADS, DIMS = 2, 192, 12, 2, dict(key=4, value=6)
ROTATION = Rotation.of(np.array([1.0, 0.1], np.float32))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows and the devices that share them.

    Attributes:
      devices: number of devices.
      length: tokens of a row, before they are padded.
      order: order of the tokens.
      sequences: those of packed rows; None if every row is one sequence.
      shift: the first rotary position, if positions are passed; else None.
    """

    devices: int
    length: int
    order: Order = "zigzag"
    sequences: tuple[Sequences, ...] | None = None
    shift: int | None = None

    def index_arrays(self) -> dict[str, np.ndarray]:
        found = {}
        if self.sequences is not None:
            found["segment_ids"] = np.array(
                [[i for i, n in row for _ in range(n)] for row in self.sequences], np.int32
            )
        if self.shift is not None:
            positions = np.arange(self.length, dtype=np.int32)[None].repeat(BATCH, axis=0)
            if self.sequences is not None:
                positions = np.asarray(layout.sequence_positions(found["segment_ids"]))
            found["positions"] = positions + np.int32(self.shift)
        return found

    def as_packed(self, operands: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Operands and index arrays of packed rows of `LONGEST` tokens, so that all share one program."""
        positions = np.arange(self.length, dtype=np.int32)[None].repeat(BATCH, axis=0)
        index_arrays = dict(segment_ids=np.ones_like(positions)) | self.index_arrays()
        if self.shift is None:
            index_arrays["positions"] = np.asarray(layout.sequence_positions(index_arrays["segment_ids"]))
        missing = LONGEST - self.length
        return jax.tree.map(
            lambda x: np.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))), [operands, index_arrays]
        )

    def spread(self, x: np.ndarray) -> np.ndarray:
        """Pads the rows and puts their tokens in order."""
        missing = padded_length(self.length, self.devices, CONFIG, self.order) - self.length
        x = np.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return x if self.order == "contiguous" else to_zigzag(x, self.devices)

    def collect(self, x) -> np.ndarray:
        x = np.asarray(x)
        return (x if self.order == "contiguous" else from_zigzag(x, self.devices))[:, : self.length]


def draw(length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(length)
    operands = dict(query=random.standard_normal((BATCH, length, HEADS, DIMS["key"])))
    for branch in ("cmp", "slc", "win"):
        for kind, dim in DIMS.items():
            operands[f"{kind}_{branch}"] = random.standard_normal((BATCH, length, KV_HEADS, dim))
    gates = random.uniform(size=(BATCH, length, HEADS, 3))
    return operands | dict(
        gates=gates, cotangent=random.standard_normal((BATCH, length, HEADS, DIMS["value"]))
    )


def draw_weights() -> tuple[ResidualMLP, ResidualMLP]:
    random, size = np.random.default_rng(0), CONFIG.compression_block_size

    def mlp(dim: int) -> ResidualMLP:
        shapes = (size, dim), (size * dim, 5), (5,), (5, dim), (dim,)
        return ResidualMLP(*(0.3 * random.standard_normal(shape) for shape in shapes))

    return mlp(DIMS["key"]), mlp(DIMS["value"])


def on_one_device(weights, operands, index_arrays):
    operands, ids = dict(operands), index_arrays["segment_ids"]
    windows = [layout.token_windows(operands.pop(x), CONFIG, ids) for x in ("key_cmp", "value_cmp")]
    first = layout.first_tokens(index_arrays["positions"], CONFIG, ids)
    key_cmp, value_cmp = compress_blocks(Compression(*weights, ROTATION), *windows, first)
    settings = dict(config=CONFIG, segment_ids=ids, query_positions=layout.default_runs(LONGEST, LONGEST))
    blocks = attention.select_blocks(operands["query"], key_cmp, **settings)
    operands |= dict(key_cmp=key_cmp, value_cmp=value_cmp, block_indices=blocks)
    return attention.native_sparse_attention(**operands, **settings), blocks


def on_many_devices(rows: Rows, weights, operands, index_arrays):
    def local(weights, operands, index_arrays):
        compress = Compression(*weights, ROTATION)
        settings = dict(compress=compress, config=CONFIG, axis="context", order=rows.order, **index_arrays)
        to_select = (operands[x] for x in ("query", "key_cmp", "value_cmp"))
        return context_attention(**operands, **settings), context_selection(*to_select, **settings)

    mesh = Mesh(np.array(jax.devices()[: rows.devices]), ("context",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), TOKENS, TOKENS
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=TOKENS)(weights, operands, index_arrays)


def program(attend):
    def run(weights, operands, index_arrays):
        operands, cotangent = dict(operands), operands["cotangent"]
        del operands["cotangent"]
        out, pull_back, blocks = jax.vjp(lambda *x: attend(*x, index_arrays), weights, operands, has_aux=True)
        return blocks, dict(out=out), *pull_back(cotangent)

    return jax.jit(run, compiler_options=FAST_TO_COMPILE)


_one_device = program(on_one_device)


def check_rows(rows: Rows) -> None:
    """Values, selections and every gradient equal those of one device, and repeat bit for bit."""
    weights, operands, index_arrays = draw_weights(), draw(rows.length), rows.index_arrays()
    blocks, out, d_weights, d_operands = _one_device(weights, *rows.as_packed(operands))
    blocks, *by_token = (x[:, : rows.length] for x in (blocks, *(out | d_operands).values()))
    expected = blocks, dict(zip(out | d_operands, by_token, strict=True)), d_weights
    run = program(functools.partial(on_many_devices, rows))
    spread = jax.tree.map(rows.spread, (operands, index_arrays))
    found, again = (run(weights, *spread) for _ in range(2))

    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    blocks, out, d_weights, d_operands = found
    np.testing.assert_array_equal(rows.collect(blocks), expected[0])
    by_token = {name: rows.collect(x) for name, x in (out | d_operands).items()}
    assert disagreements(by_token, expected[1]) == {}
    named = [
        {str(path): x for path, x in jax.tree.leaves_with_path(tree)} for tree in (d_weights, expected[2])
    ]
    assert disagreements(*named) == {}
    assert all(np.any(np.asarray(x)) for x in (*by_token.values(), *named[0].values()))


def check_order_is_what_was_declared() -> None:
    """Under checkify, tokens in another order than the declared one are an error; otherwise nothing is."""
    rows = Rows(2, 48, sequences=(((1, 30), (2, 18)),) * BATCH, shift=5)
    x = np.ones((BATCH, 48, 1, 2))

    @functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_TO_COMPILE)
    @checkify.checkify
    def select(declared: Order, index_arrays):
        def local(x, index_arrays):
            settings = dict(config=CONFIG, axis="context", order=declared)
            return context_selection(x, x, x, compress=Compression(), **settings, **index_arrays)

        mesh = Mesh(np.array(jax.devices()[:2]), ("context",), axis_types=(AxisType.Auto,))
        return jax.shard_map(local, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS)(x, index_arrays)

    def told(order: Order, declared: Order, *names: str) -> str | None:
        spread = dataclasses.replace(rows, order=order).spread
        error, _ = select(declared, {name: spread(rows.index_arrays()[name]) for name in names})
        return error.get()

    positions = "positions must count the tokens of each sequence one by one in {} order, got a step of"
    ids = "each non-zero segment id must be one contiguous run of a row in {} order, got id"
    assert positions.format("zigzag") in told("contiguous", "zigzag", "positions")
    assert positions.format("contiguous") in told("zigzag", "contiguous", "positions")
    assert ids.format("zigzag") in told("contiguous", "zigzag", "segment_ids", "positions")
    assert told("zigzag", "zigzag", "segment_ids", "positions") is None
    assert told("zigzag", "zigzag", "positions") is not None  # they begin anew with the second sequence


def out_and_gradients(layer, per_token, cotangent):
    graph, state = nnx.split(layer)

    @functools.partial(jax.jit, compiler_options=FAST_TO_COMPILE)
    def run(state, per_token, cotangent):
        out, pull_back = jax.vjp(lambda state: attend_packed(nnx.merge(graph, state), per_token), state)
        return out, pull_back(cotangent)[0]

    return run(state, per_token, cotangent)


@functools.cache
def layer_alone():
    """Arrays of tokens, a cotangent, and output and gradients of the layer on one device."""
    random, length = np.random.default_rng(0), 45
    sequences = ((1, 20), (2, 25)), ((5, 33), (0, 2), (1, 10))
    per_token = dict(
        x=random.standard_normal((BATCH, length, 12)),
        segment_ids=Rows(1, length, sequences=sequences).index_arrays()["segment_ids"],
    )
    cotangent = random.standard_normal((BATCH, length, 12))
    return per_token, cotangent, *out_and_gradients(drawn(make_layer), per_token, cotangent)


def check_layer() -> None:
    """A layer with a context axis gives the values and gradients that it gives on one device.

    In contiguous order, on auto axes. On explicit ones the losses of train_mesh_program tell whether
    gradients are right.
    """
    per_token, cotangent, out, gradients = layer_alone()
    rows = Rows(4, cotangent.shape[1], "contiguous")
    mesh = jax.make_mesh((2, 4, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, PartitionSpec("data", "context"))
        arrays = jax.tree.map(lambda x: jax.device_put(rows.spread(x), where), (per_token, cotangent))
        options = dict(context_axis="context", context_order=rows.order)
        options |= dict(sharding=dict(heads="tensor", kv_heads="tensor"))
        layer = drawn(functools.partial(make_layer, **options))
        found, found_gradients = out_and_gradients(layer, *arrays)

    results = {"out": rows.collect(found)}, {"out": out}
    for named, state in zip(results, (found_gradients, gradients), strict=True):
        named |= {str(path): np.asarray(x.get_value()) for path, x in nnx.to_flat_state(state)}
    assert disagreements(*results) == {}
    assert np.any(results[0]["out"])


def check_any_placement() -> None:
    """A layer takes operands spread over some axes or none, on axes of any type, also without `jit`.

    With `jit` it is traced: check_layer has values on auto axes, train_mesh_program on explicit ones.
    """
    per_token, _, out, _ = layer_alone()
    rows, explicit, auto = Rows(2, out.shape[1], "zigzag"), AxisType.Explicit, AxisType.Auto
    one, two = ("context",), ("data", "context")
    placements = [
        (nnx.eval_shape, one, (explicit,), ()),
        (nnx.eval_shape, one, (auto,), (None, "context")),
        (lambda call: call, two, (explicit, auto), ("data",)),
        (nnx.eval_shape, two, (auto, explicit), ("data", "context")),
    ]
    for run, names, types, spec in placements:
        mesh = jax.make_mesh((2,) * len(names), names, axis_types=types)
        with jax.set_mesh(mesh):
            spread = NamedSharding(mesh, PartitionSpec(*spec))
            arrays = {name: jax.device_put(rows.spread(x), spread) for name, x in per_token.items()}
            layer = drawn(lambda: make_layer(context_axis="context"))
            if run is nnx.eval_shape:
                assert run(attend_packed, layer, arrays).shape == rows.spread(out).shape
                continue
            found = run(attend_packed)(layer, arrays)
            in_order = from_zigzag(found, 2)
        assert in_order.sharding.is_equivalent_to(found.sharding, found.ndim), (types, spec)
        assert disagreements({"out": rows.collect(found)}, {"out": out}) == {}, (types, spec)


class Turning(nnx.Module):
    """A function of positions with a parameter, in the place of a rotary embedding."""

    def __init__(self):
        self.rate = nnx.Param(jnp.linspace(0.1, 1, 4, dtype=jnp.float64))

    def __call__(self, heads, positions):
        return heads * (1 + jnp.sin(positions[..., None] * self.rate[...]))[:, :, None]


def make_layer(**options):
    return NSAAttention(
        24, 12, num_kv_heads=2, head_dim=4, value_dim=3, config=CONFIG, param_dtype=jnp.float64,
        use_bias=True, normalize_qk=True, rotary=Turning(), rngs=nnx.Rngs(0), **options,
    )  # fmt: skip


def attend_packed(layer, per_token):
    return layer(per_token["x"], segment_ids=per_token["segment_ids"])


# The last one holds the turn of the zigzag, where a device has both chunks.
SEQUENCES = tuple((*row, (11, LONGEST - sum(tokens for _, tokens in row))) for row in PACKED)
CHECKS = {
    "8 devices, packed": functools.partial(check_rows, Rows(8, LONGEST, sequences=SEQUENCES, shift=-4)),
    "declared order": check_order_is_what_was_declared,
    "layer, any placement": check_any_placement,
    "layer on three axes": check_layer,
}


def main() -> None:
    with jax.enable_x64(True):
        for name, check in CHECKS.items():
            check()
            print(name, flush=True)


if __name__ == "__main__":
    main()
