"""Ways to spread one attention over devices: nothing, KV heads, or the tokens of a row.

All compute the same from the same arrays: the compressed keys and values, as means, and the whole operation.
`one` runs on one device. `heads` spreads KV heads by `jax.shard_map`; `heads_jit` gives arrays that are
spread in the same way to plain `jit`. `context` is `nsa_jax.parallel.context_attention` in zigzag order.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import definitions, devices, gate, inputs, programs, timing
from benchmarks.inputs import Draw, Shape, normal, of_query, tensor, tensor_shape
from benchmarks.selections import check_form
from benchmarks.verdict import Verdict, worst
from nsa_jax import attention, layout
from nsa_jax.array_typing import Array
from nsa_jax.compression import Compression, compress_blocks
from nsa_jax.config import NSAConfig
from nsa_jax.parallel import context_attention, padded_length, to_zigzag, token_indices

STRATEGIES = ("one", "heads", "heads_jit", "context")

type Arrays = Mapping[str, np.ndarray]  # by name, on the host, in the order of the row


class Strategy(NamedTuple):
    """A way to run the attention.

    Attributes:
      name: one of STRATEGIES.
      num_devices: devices that it uses.
      implementation, config: of the attention.
    """

    name: str
    num_devices: int
    implementation: Any
    config: NSAConfig

    @property
    def mesh_name(self) -> str:
        """What rows say of the mesh."""
        return "one" if self.name == "one" else f"{self.name.partition('_')[0]}={self.num_devices}"

    @property
    def mesh(self) -> Mesh:
        """The mesh, of one axis."""
        return devices.mesh(self.num_devices)

    @property
    def spec(self) -> PartitionSpec:
        """How each array lies on the mesh: tokens are axis 1, heads axis 2."""
        axes = {"one": (), "context": (None, devices.AXIS)}.get(self.name, (None, None, devices.AXIS))
        return PartitionSpec(*axes)

    def refusal(self, shape: Shape) -> str | None:
        """Why this shape cannot be spread in this way; None if it can."""
        if self.name.startswith("heads") and shape.kv_heads % self.num_devices:
            return f"{shape.kv_heads} KV heads do not divide by {self.num_devices} devices"
        fitting = padded_length(shape.length, self.num_devices, self.config)
        if self.name == "context" and shape.length != fitting:
            got = f"got {shape.length} tokens for {self.num_devices}"
            return f"the devices must get whole chunks, {got}. Pass --lengths {fitting}."
        return None

    def put(self, arrays: Arrays) -> dict[str, Array]:
        """Puts arrays on the devices, and waits: a device whose arrays come late would hold up the others."""
        there = NamedSharding(self.mesh, self.spec)
        ordered = to_zigzag if self.name == "context" else lambda x, _: x
        return jax.block_until_ready(
            {name: jax.device_put(ordered(x, self.num_devices), there) for name, x in arrays.items()}
        )

    def sampled(self, mode: str, arrays: Arrays, positions: np.ndarray) -> Arrays:
        """What the program of a mode gives, on the host: of the queries at `positions`, and of all keys."""
        found = self.compiled(mode, self.put(arrays)).run()
        found = found if mode == "fwd_bwd" else dict(out=found)
        rows: Any = slice(None)
        if self.name == "context":
            rows = np.argsort(token_indices(arrays["query"].shape[1], self.num_devices))
            positions = rows[positions]
        return {name: np.asarray(x)[:, positions if of_query(name) else rows] for name, x in found.items()}

    def attend(self, arrays: Mapping[str, Array]) -> Array:
        """The attention to arrays by name."""
        run: Any = compress_and_attend
        if self.name == "context":
            run = functools.partial(context_attention, compress=Compression(), axis=devices.AXIS)
        run = functools.partial(run, config=self.config, implementation=self.implementation)
        if self.name in ("one", "heads_jit"):
            return run(**arrays)
        local = jax.shard_map(lambda x: run(**x), mesh=self.mesh, in_specs=self.spec, out_specs=self.spec)
        return local(arrays)

    def operands(self, mode: str, arrays: dict[str, Array]) -> tuple[Any, ...]:
        """What the program of a mode takes, of what `put` gave."""
        taken = {name: x for name, x in arrays.items() if name != "cotangent"}
        return (taken,) if mode == "fwd" else (taken, arrays["cotangent"])

    def compiled(self, mode: str, arrays: dict[str, Array]) -> timing.Compiled:
        """Compiles the forward (`fwd`), or forward and backward with all gradients (`fwd_bwd`)."""

        def with_gradients(operands: dict[str, Array], cotangent: Array) -> dict[str, Array]:
            floats = {name: x for name, x in operands.items() if name != "block_indices"}
            out, pull_back = jax.vjp(lambda floats: self.attend(operands | floats), floats)
            return dict(out=out, **pull_back(cotangent)[0])

        run: Any = self.attend if mode == "fwd" else with_gradients
        return timing.compile_for(run, self.operands(mode, arrays))


def compressed(key_cmp: Array, value_cmp: Array, config: NSAConfig) -> tuple[Array, Array]:
    """Keys and values of the blocks: the means of their tokens."""
    key_windows, value_windows = (layout.token_windows(x, config) for x in (key_cmp, value_cmp))
    first = layout.first_tokens(jnp.arange(key_cmp.shape[1])[None], config)
    return compress_blocks(Compression(), key_windows, value_windows, first)


def compress_and_attend(
    *, key_cmp: Array, value_cmp: Array, config: NSAConfig, implementation: Any, **arrays: Any
) -> Array:
    """Compresses whole rows, then attends by all branches."""
    key_blocks, value_blocks = compressed(key_cmp, value_cmp, config)
    return attention.native_sparse_attention(
        key_cmp=key_blocks, value_cmp=value_blocks, **arrays, config=config, implementation=implementation
    )


@functools.lru_cache(maxsize=1)  # of a million tokens it takes a minute, and gates and rows want the same
def draw(distribution: str, implementation: str, shape: Shape) -> tuple[Draw, dict[str, np.ndarray]]:
    """Queries of a distribution, and all arrays on the host, among them a cotangent of the output.

    On the device is one large array at a time: a row of a million tokens has queries of 17 GB.
    """
    key_cmp = _tokens("key_cmp", shape)
    key_blocks = jax.jit(lambda x: compressed(x, x, shape.config)[0])(key_cmp)
    arrays = {"key_cmp": np.asarray(key_cmp), "gates": np.asarray(tensor("gates", shape))}
    arrays |= {name: np.asarray(_tokens(name, shape)) for name in inputs.KEYS_VALUES if name not in arrays}
    del key_cmp

    def choose(query: Array) -> Array:
        heads = [choose_head(query, key_blocks, k, implementation, shape) for k in range(shape.kv_heads)]
        return jnp.concatenate(heads, axis=2)

    drawn = inputs.draw_queries(shape, distribution, choose)
    query: Any = np.asarray(drawn.query)
    drawn = dataclasses.replace(drawn, query=query)
    cotangent = np.asarray(normal("cotangent", tensor_shape("out", shape), shape.dtype))
    return drawn, arrays | dict(query=query, cotangent=cotangent)


@functools.partial(jax.jit, static_argnums=(3, 4))
def choose_head(
    query: Array, key_blocks: Array, kv_head: Array | int, implementation: str, shape: Shape
) -> Array:
    """The blocks of one KV head, of whose queries the kernels want a copy of their own."""
    heads = shape.query_heads // shape.kv_heads
    query = jax.lax.dynamic_slice_in_dim(query, kv_head * heads, heads, axis=2)
    key_blocks = jax.lax.dynamic_slice_in_dim(key_blocks, kv_head, 1, axis=2)
    return programs.function("select_blocks", implementation, shape)(query, key_blocks)


def check(strategy: Strategy, shape: Shape, mode: str = "fwd_bwd") -> Verdict:
    """Compares what a mode gives with dense attention in float64, as `gate.check_program`.

    All devices get one selection: what they compress they round otherwise than one device, and where scores
    are close that decides.
    """
    drawn, arrays = draw("random", strategy.implementation, shape)
    positions = gate.sample_positions(shape.length)
    chosen, cotangent = np.asarray(drawn.block_indices), np.zeros_like(arrays["cotangent"])
    cotangent[:, positions] = arrays["cotangent"][:, positions]
    got = strategy.sampled(mode, arrays | dict(cotangent=cotangent, block_indices=chosen), positions)
    sampled = {name: x[:, positions] for name, x in arrays.items() if of_query(name) or name == "cotangent"}
    given, dense = arrays | sampled, functools.partial(_dense, shape=shape)
    blocks, compute = chosen[:, positions], gate.gradients_in_both
    verdict = gate.compare(dense, got, (given,), positions, blocks, shape.kv_heads, compute)
    return worst(verdict, check_form(chosen, np.arange(shape.length), shape.config))


@functools.partial(jax.jit, static_argnames=("names", "shape", "dtype"))
def _dense(
    arrays: Mapping[str, Array], positions: Array, blocks: Array, uncentred: Array, *,
    names: tuple[str, ...], shape: Shape, dtype: str,
) -> dict[str, Array]:  # fmt: skip
    """Of these names: `out` of the queries at `positions`, and gradients for their cotangent."""
    x = definitions.cast(arrays, dtype)

    def run(moved: Mapping[str, Array]) -> Array:
        y = {**x, **moved}
        key, value = compressed(y["key_cmp"].astype(dtype), y["value_cmp"].astype(dtype), shape.config)
        of_blocks = definitions.wide({"key_cmp": key, "value_cmp": value})
        given = {**y, **of_blocks}, positions, blocks, uncentred
        return definitions.results(*given, operation="native_sparse_attention", shape=shape)["out"]

    out, pull_back = jax.vjp(run, definitions.wide({name: x[name] for name in names if name != "out"}))
    found = dict(out=out, **pull_back(x["cotangent"])[0])
    return {name: found[name].astype(dtype) for name in names}


def _tokens(name: str, shape: Shape) -> Array:
    """Keys or values of every token; the mean of a block of compressed keys is standard normal."""
    size = tensor_shape(name.replace("cmp", "slc"), shape)
    scale = shape.config.compression_block_size**0.5 if name == "key_cmp" else 1.0
    return (scale * jax.random.normal(inputs.key(name), size)).astype(shape.dtype)
