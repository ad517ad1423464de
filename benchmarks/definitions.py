"""What the gate compares with: dense attention under explicit masks, from the definitions alone.

Arrays come by name, keys and values whole, all that belongs to a query for those at `positions` alone. They
are computed with in `dtype`, their own if that is None. A few queries are taken at a time, so that their
logits have room beside a measured program. From long rows the keys are taken that the mask of a query shows.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import layers
from benchmarks.inputs import KEYS_VALUES, LAYERS, Shape, of_query
from nsa_jax.array_typing import Array, Bool, Float, Int
from nsa_jax.config import NSAConfig
from nsa_jax.nn import rotate

MOST_LOGITS = 1 << 25  # at a time, or numbers of taken keys: 256 MB in float64, and a few arrays of this size
LONGEST_WHOLE = 1 << 16  # rows of more keys are not multiplied whole where a query sees few of them

OF_KEYS = (*KEYS_VALUES, "key", "value")

type Arrays = Mapping[str, Any]
type Scalar = float | Float[Array, ""]


class Queries(NamedTuple):
    """The queries of a call, and how to differentiate.

    Attributes:
      positions: their tokens, `[T]`.
      blocks: what they select, `[B, T, K, R]`; None where they select nothing.
      uncentred: 1 for the gradient as if the sum of a softmax were a constant, else 0.
    """

    positions: Int[Array, "T"]
    blocks: Int[Array, "B T K R"] | None
    uncentred: Scalar


@functools.partial(jax.jit, static_argnames=("operation", "shape", "dtype"))
def results(
    x: Arrays, positions: Int[Array, "T"], blocks: Int[Array, "B T K R"] | None, uncentred: Scalar = 0.0, *,
    operation: str, shape: Shape, dtype: str | None = None,
) -> dict[str, Array]:  # fmt: skip
    """`out`, and the `lse` of a branch, of the queries at `positions`."""
    queries = Queries(positions, blocks, uncentred)
    return dict(zip(("out", "lse"), _results(operation, cast(x, dtype), queries, shape), strict=False))


@functools.partial(jax.jit, static_argnames=("names", "operation", "shape", "dtype"))
def gradients(
    x: Arrays, cotangents: Arrays, positions: Int[Array, "T"], blocks: Int[Array, "B T K R"] | None,
    uncentred: Scalar, *, names: tuple[str, ...] | None = None, operation: str, shape: Shape,
    dtype: str | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients of arrays by name, for cotangents of the queries at `positions`; others have none.

    They are those of all arrays, or of `names` alone.

    The gradient of a logit is `p (d_out . value - delta)`, which is zero where a query sees one key. An
    `uncentred` one is `p (d_out . value)`, as large as what is rounded there.
    """
    run = functools.partial(results, operation=operation, shape=shape)
    x, cotangents = cast(x, dtype), cast(cotangents, dtype)
    moved = wide({name: x[name] for name in names or x})
    found, pull_back = jax.vjp(lambda moved: run({**x, **moved}, positions, blocks, uncentred), moved)
    given = {name: cotangents.get(name, jnp.zeros_like(result)) for name, result in found.items()}
    (by_name,) = pull_back({name: given[name].astype(result.dtype) for name, result in found.items()})
    return {name: gradient.astype(dtype or x[name].dtype) for name, gradient in by_name.items()}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def importance(
    x: Arrays, positions: Int[Array, "T"], *, shape: Shape, dtype: str | None = None
) -> Float[Array, "B T K M"]:
    """Eq. 8-10: probabilities of compressed blocks, weighted by the tokens shared with a selection block."""
    x = cast(x, dtype)
    key, config = x["key_cmp"].astype(x["query"].dtype), shape.config
    visible = _visible("compressed_attention", positions, key.shape[1], config)[None, :, None, None]
    per_block = _softmax(_logits(x["query"], key), visible)[0].sum(axis=3)
    num_blocks = -(-shape.length // config.selection_block_size)
    start, block = jnp.arange(key.shape[1]) * config.compression_stride, jnp.arange(num_blocks)
    first = jnp.maximum(start[:, None], block * config.selection_block_size)
    last = jnp.minimum(
        start[:, None] + config.compression_block_size, (block + 1) * config.selection_block_size
    )
    weight = jnp.maximum(last - first, 0) / config.compression_stride
    return jnp.einsum("btkc,cm->btkm", per_block, weight.astype(per_block.dtype), precision="highest")


@functools.partial(jax.jit, static_argnames=("operation", "shape"))
def layer_operands(x: Arrays, *, operation: str, shape: Shape) -> dict[str, Array]:
    """What a layer gives to its operation, for all tokens."""
    layer, given = _layer(operation, x, shape), x["x"]
    if operation == "layer":
        return layer.operands(given)._asdict()
    index = jnp.arange(shape.length)[None]
    query, key = (rotate(project(given), index) for project in (layer.query_proj, layer.key_proj))
    return {"query": query, "key": key, "value": layer.value_proj(given)}


def cast(x: Arrays, dtype: str | None) -> dict[str, Array]:
    """Floats in this dtype, but keys and values, which are cast where they are used: in it they are large."""
    return {
        name: y if dtype is None or name in OF_KEYS or not jnp.issubdtype(y.dtype, jnp.floating)
        else y.astype(dtype)
        for name, y in x.items()
    }  # fmt: skip


def wide(x: Arrays) -> dict[str, Array]:
    """Keys and values in float64: their gradients are sums over all queries, and add up in it."""
    return {name: y.astype(float) if name in OF_KEYS else y for name, y in x.items()}


def _results(operation: str, x: Arrays, queries: Queries, shape: Shape) -> tuple[Array, ...]:
    if operation in LAYERS:
        return (_layer_rows(operation, x, queries, shape),)
    if operation == "gated_sum":
        outs = enumerate(("out_cmp", "out_slc", "out_win"))
        return (sum(x["gates"][..., i, None] * x[name] for i, name in outs),)
    if operation == "native_sparse_attention":
        parts = {"cmp": "compressed_attention", "slc": "selected_attention", "win": "window_attention"}
        branches = {"gates": x["gates"]}
        for branch, part in parts.items():
            own = {"query": x["query"], "key": x[f"key_{branch}"], "value": x[f"value_{branch}"]}
            branches[f"out_{branch}"] = _results(part, own, queries, shape)[0]
        return _results("gated_sum", branches, queries, shape)
    key, value = (next(x[name] for name in x if name.startswith(kind)) for kind in ("key", "value"))
    return _attend(operation, x["query"], key, value, queries, shape)


def _attend(
    operation: str, query: Array, key: Array, value: Array, queries: Queries, shape: Shape
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    (batch, length, heads, _), config = query.shape, shape.config
    most = _most_visible(operation, key.shape[1], config)

    @jax.checkpoint
    def of_one(query: Array, position: Array, chosen: Array | None) -> tuple[Array, Array]:
        visible = _visible(operation, position[None], key.shape[1], config)
        if operation == "selected_attention":
            assert chosen is not None
            key_block = jnp.arange(key.shape[1]) // config.selection_block_size
            visible = visible & (chosen[..., None] == key_block).any(axis=-2)
        seen_key, seen_value = key, value
        shown = jnp.broadcast_to(visible, (batch, key.shape[2], key.shape[1]))
        if most < key.shape[1]:
            seen_key, seen_value, shown = _shown(key, value, shown, most)
        own_key, own_value = seen_key.astype(query.dtype), seen_value.astype(query.dtype)
        weights, lse = _softmax(_logits(query[:, None], own_key), shown[:, None, :, None])
        out = jnp.einsum("btkgs,bskv->btkgv", weights, own_value, precision="highest")
        return out.reshape(batch, heads, -1), lse.reshape(batch, heads)

    taken = key.shape[2] * max(key.shape[-1], value.shape[-1]) if most < key.shape[1] else 0
    at_once = max(MOST_LOGITS // max(batch * most * max(heads, taken), 1), 1)
    by_token = functools.partial(jnp.moveaxis, source=1, destination=0)
    chosen = jax.tree.map(by_token, queries.blocks)
    rows = (by_token(query), queries.positions, chosen)
    found = jax.lax.map(lambda row: of_one(*row), rows, batch_size=0 if at_once >= length else at_once)
    out, lse = (jnp.moveaxis(x, 0, 1) for x in found)
    # This is zero. Its gradient adds `p delta` to that of a logit: the sum of the softmax is constant then.
    change = queries.uncentred * (lse - jax.lax.stop_gradient(lse))
    change = jnp.where(lse > -jnp.inf, change, 0).astype(out.dtype)[..., None]
    return out + jax.lax.stop_gradient(out) * change, lse


def _layer_rows(operation: str, x: Arrays, queries: Queries, shape: Shape) -> Float[Array, "B T D"]:
    operands = wide(layer_operands(x, operation=operation, shape=shape))
    rows = {name: y[:, queries.positions] if of_query(name) else y for name, y in operands.items()}
    return _layer(operation, x, shape).out_proj(_results(LAYERS[operation], rows, queries, shape)[0])


def _layer(operation: str, x: Arrays, shape: Shape) -> Any:
    values = tuple(x[name] for name in layers.parameters(operation, shape))
    return layers.merged(operation, "", shape, values)


def _visible(operation: str, positions: Array, num_keys: int, config: NSAConfig) -> Bool[Array, "T S"]:
    t, s = positions[:, None], jnp.arange(num_keys)
    if operation == "compressed_attention":
        return s * config.compression_stride + config.compression_block_size - 1 <= t
    if operation == "window_attention":
        return (s <= t) & (s > t - config.window_size)
    return s <= t


def _most_visible(operation: str, num_keys: int, config: NSAConfig) -> int:
    """The most keys that a query sees; all of them in a row that is multiplied whole."""
    if num_keys <= LONGEST_WHOLE:
        return num_keys
    selected = config.num_selected_blocks * config.selection_block_size
    most = {"selected_attention": selected, "window_attention": config.window_size}
    return min(most.get(operation, num_keys), num_keys)


def _shown(
    key: Array, value: Array, visible: Bool[Array, "B K S"], most: int
) -> tuple[Array, Array, Bool[Array, "B K most"]]:
    """Of keys and values those that a query sees, at most `most`, and which of these places hold one."""
    counted = jnp.cumsum(visible, axis=-1, dtype=jnp.int32)
    find = functools.partial(jnp.searchsorted, v=jnp.arange(1, most + 1, dtype=jnp.int32))
    index = jax.vmap(jax.vmap(find))(counted)  # of the first that is seen, the second, ...; then S
    place = jnp.moveaxis(index, 2, 1)[..., None]
    key, value = (jnp.take_along_axis(x, place, axis=1, mode="clip") for x in (key, value))
    return key, value, index < visible.shape[-1]


def _logits(query: Array, key: Array) -> Float[Array, "B T K G S"]:
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    return jnp.einsum("btkgh,bskh->btkgs", grouped, key, precision="highest") * query.shape[-1] ** -0.5


def _softmax(logits: Array, visible: Array) -> tuple[Array, Array]:
    masked = jnp.where(visible, logits, -1e30)  # finite, so that an empty row has finite gradients
    weights = jnp.where(visible, jax.nn.softmax(masked, axis=-1), 0)
    return weights, jnp.where(visible.any(axis=-1), jax.nn.logsumexp(masked, axis=-1), -jnp.inf)
