"""Attention of some rows over one tile of keys. Hidden keys have no effect, not even if they are NaN.

A weight of 0 does not hide NaN or infinity, since `0 * nan` is NaN. So such numbers are replaced by 0 in the
second operand of each product. The results that do depend on them get their NaN through the logits or
normalisers.

A row is a query token with one of the heads of a KV head: `[B, K, rows, H]`. Keys keep the layout of the
call: `[B, keys, K, H]`.
"""

from typing import NamedTuple

import jax.numpy as jnp

from nsa_jax.array_typing import Array, Bool, Float

_FEW_ROWS = 128  # most rows, of all KV heads together, that count as few
CAREFUL_TILE = 256  # keys per tile when few rows attend again, so that no copy is large


class Partial(NamedTuple):
    """Attention over some of the keys: the largest logit of each row, and the sums of the softmax."""

    largest: Float[Array, "*rows"]
    total: Float[Array, "*rows"]  # of exp(logit - largest)
    out: Float[Array, "*rows V"]  # of exp(logit - largest) * value


class Rows(NamedTuple):
    """What the backward pass knows of each row.

    Attributes:
      query: as in the forward pass.
      d_out: cotangent of the output, before it is multiplied by `gate`.
      normaliser: log-sum-exp; 0 if the row sees nothing, NaN if its delta is not finite.
      delta: `gate sum(out * d_out) - d_lse`; 0 if the row sees nothing.
      finite_query: `query` with 0 for what is not finite.
      finite_d_out: `d_out` with 0 for what is not finite.
      gate: factor of the cotangent; None for 1.
    """

    query: Float[Array, "B K rows H"]
    d_out: Float[Array, "B K rows V"]
    normaliser: Float[Array, "B K rows"]
    delta: Float[Array, "B K rows"]
    finite_query: Float[Array, "B K rows H"]
    finite_d_out: Float[Array, "B K rows V"]
    gate: Float[Array, "B K rows"] | None = None

    @classmethod
    def of(cls, query: Array, d_out: Array, lse: Array, delta: Array) -> "Rows":
        """Makes rows from these operands, and from the log-sum-exp and delta of `softmax_residuals`."""
        return cls(query, d_out, lse + 0 * delta, delta, finite(query), finite(d_out))


def product(spec: str, left: Array, right: Array, accumulate) -> Array:
    """Matrix product of two blocks, exact enough for the error budget of their dtype."""
    return jnp.einsum(spec, left, right, precision="highest", preferred_element_type=accumulate)


def accumulator(x: Array):
    """The dtype of logits and sums: float32, or float64 for float64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def attend_tile(
    query: Float[Array, "B K rows H"],
    key: Float[Array, "B keys K H"],
    value: Float[Array, "B keys K V"],
    visible: Bool[Array, "B #K rows keys"],
    scale: float,
) -> Partial:
    """Attention over the visible keys. A row that sees none has `largest` -inf and sums of 0."""
    accumulate = accumulator(query)
    poison = jnp.where(jnp.isfinite(value).all(axis=-1), jnp.zeros((), accumulate), jnp.nan)  # [B, keys, K]
    logits = all_logits(query, key) * scale + poison.swapaxes(1, 2)[:, :, None]
    logits = jnp.where(visible, logits, -jnp.inf)
    largest = logits.max(axis=-1, initial=-jnp.inf)  # there may be no key at all
    # Subtracting 0 instead of -inf keeps exp at 0, not NaN.
    weights = jnp.exp(logits - jnp.where(largest == -jnp.inf, 0, largest)[..., None])
    out = product("bkrs,bskv->bkrv", weights.astype(value.dtype), finite(value), accumulate)
    return Partial(largest, weights.sum(axis=-1), out)


def attend_few(
    query: Float[Array, "B K rows H"],
    key: Float[Array, "B keys K H"],
    value: Float[Array, "B keys K V"],
    visible: Bool[Array, "B #K rows keys"],
    scale: float,
) -> Partial:
    """`attend_tile` for few rows, such as those of a decode step, without a copy of the keys and values.

    Hidden keys and values must be finite here. If they are not, the sums are not finite either.
    """
    accumulate = accumulator(query)
    logits = jnp.where(visible, few_logits(query, key) * scale, -jnp.inf)
    largest = logits.max(axis=-1, initial=-jnp.inf)
    weights = jnp.exp(logits - jnp.where(largest == -jnp.inf, 0, largest)[..., None])
    batch, num_kv_heads, rows, num_keys = weights.shape
    wide = weights.astype(value.dtype).reshape(batch, num_kv_heads * rows, num_keys)
    out = product("bns,bsx->bnx", wide, value.reshape(batch, num_keys, -1), accumulate)
    out = out.reshape(batch, num_kv_heads, rows, num_kv_heads, -1)
    own = [out[:, head, :, head] for head in range(num_kv_heads)]
    return Partial(largest, weights.sum(axis=-1), jnp.stack(own, axis=1))


def all_logits(query: Float[Array, "B K rows H"], key: Float[Array, "B keys K H"]) -> Array:
    """Products of the rows of each KV head with its keys, `[B, K, rows, keys]`, not scaled."""
    return product("bkrh,bskh->bkrs", query, key, accumulator(query))


def few_logits(query: Float[Array, "B K rows H"], key: Float[Array, "B keys K H"]) -> Array:
    """`all_logits` for few rows. All keys must be finite.

    The keys of one KV head are not contiguous in memory, so a product per KV head would first copy them. For
    few rows it is cheaper to widen the rows to all heads, with zeros for the other heads: that is one product
    with the keys in place.
    """
    batch, num_kv_heads, rows, dim = query.shape
    own = jnp.eye(num_kv_heads, dtype=query.dtype)[None, :, None, :, None]
    wide = (query[:, :, :, None] * own).reshape(batch, num_kv_heads * rows, num_kv_heads * dim)
    logits = product("bnx,bsx->bns", wide, key.reshape(batch, key.shape[1], -1), accumulator(query))
    return logits.reshape(batch, num_kv_heads, rows, -1)


def are_few(rows: Float[Array, "B K rows H"]) -> bool:
    """Whether the rows are so few that memory limits the speed, as in a decode step, not arithmetic."""
    return rows.shape[1] * rows.shape[2] <= _FEW_ROWS


def no_keys(rows: Float[Array, "B K rows H"], value_dim: int) -> Partial:
    """Attention over no keys. Under `shard_map` it varies over the same mesh axes as the rows."""
    accumulate, shape = accumulator(rows), rows.shape[:3]
    return Partial(
        jnp.full_like(rows, -jnp.inf, accumulate, shape=shape),
        jnp.zeros_like(rows, accumulate, shape=shape),
        jnp.zeros_like(rows, accumulate, shape=(*shape, value_dim)),
    )


def merged(left: Partial, right: Partial) -> Partial:
    """Attention over the keys of both parts."""
    largest = jnp.maximum(left.largest, right.largest)
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    left_part, right_part = jnp.exp(left.largest - shift), jnp.exp(right.largest - shift)
    return Partial(
        largest,
        left.total * left_part + right.total * right_part,
        left.out * left_part[..., None] + right.out * right_part[..., None],
    )


def normalised(sums: Partial) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """`(out, lse)`; 0 and -inf for a row that has seen no key."""
    # NaN counts as seen. `largest` would not show it, because a maximum on a CPU may drop NaN.
    seen = sums.total != 0
    total = jnp.where(seen, sums.total, 1)
    out = jnp.where(seen[..., None], sums.out / total[..., None], 0)
    return out, jnp.where(seen, sums.largest + jnp.log(total), -jnp.inf)


def tile_gradients(
    rows: Rows,
    key: Float[Array, "B keys K H"],
    value: Float[Array, "B keys K V"],
    visible: Bool[Array, "B #K rows keys"],
    scale: float,
) -> tuple[Float[Array, "B K rows H"], Float[Array, "B keys K H"], Float[Array, "B keys K V"]]:
    """Contributions of the visible keys of one tile to the gradients of query, key and value."""
    accumulate = rows.normaliser.dtype
    logits = all_logits(rows.query, key) * scale
    weights = jnp.where(visible, jnp.exp(logits - rows.normaliser[..., None]), 0)
    d_weights, given = product("bkrv,bskv->bkrs", rows.d_out, value, accumulate), weights
    if rows.gate is not None:
        d_weights = d_weights * rows.gate[..., None]
        given = jnp.where(visible, weights * rows.gate[..., None], 0)
    d_logits = jnp.where(visible, weights * (d_weights - rows.delta[..., None]) * scale, 0).astype(key.dtype)
    d_query = product("bkrs,bskh->bkrh", d_logits, finite(key), accumulate)
    d_key = product("bkrs,bkrh->bskh", d_logits, rows.finite_query, accumulate)
    d_value = product("bkrs,bkrv->bskv", given.astype(value.dtype), rows.finite_d_out, accumulate)
    return d_query, d_key, d_value


def softmax_residuals(out: Array, lse: Array, d_out: Array, d_lse: Array) -> tuple[Array, Array]:
    """`lse` and `delta = sum(out * d_out) - d_lse` for the backward pass; both 0 in rows that see no key."""
    seen = lse != -jnp.inf
    delta = (out.astype(lse.dtype) * d_out.astype(lse.dtype)).sum(-1) - d_lse
    return jnp.where(seen, lse, 0), jnp.where(seen, delta, 0)


def finite(x: Array) -> Array:
    """`x` with 0 for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)
