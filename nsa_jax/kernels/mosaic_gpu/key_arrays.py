"""What the kernels of the keys' gradients read and write, beside items and ranges."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.mosaic_gpu.rows import pad_heads
from nsa_jax.kernels.mosaic_gpu.sizes import ROWS, gathered_rows, row_numbers
from nsa_jax.kernels.mosaic_gpu.tiles import LOG2_E, f32, whole_tiles
from nsa_jax.kernels.mosaic_gpu.unstable import Ref
from nsa_jax.kernels.triton.backward import Backward
from nsa_jax.kernels.triton.selected.items import BlockItems


class KeyArrays(NamedTuple):
    """The arrays of a call as the kernels read them.

    Attributes:
      query, d_out: with as many heads of a KV head as rows are copied for a token.
      key, value: with more keys at the end of a row, so that copies stay inside.
      numbers: of each token its log-sum-exps in base 2, negative deltas and gates; one more token masks.
      heads: query heads of a KV head.
      num_keys: keys of a row.
      gated: whether each row has a gate.
    """

    query: Float[Array, "B T K*rows H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    d_out: Float[Array, "B T K*rows V"]
    numbers: Float[Array, "B T+1 K numbers"]
    heads: int
    num_keys: int
    gated: bool

    @classmethod
    def of(
        cls,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        given: Backward,
        delta: Float[Array, "B T N"],
        *,
        aligned: bool,
    ) -> "KeyArrays":
        """From the arguments of `triton.selected.backward_key`, or of `triton.ranges.backward_key`.

        `aligned` says whether every block begins at a multiple of 8 keys, as steps of ranges do.
        """
        num_keys, num_kv_heads = key.shape[1:3]
        heads = query.shape[2] // num_kv_heads
        rows = gathered_rows(heads)
        if aligned:
            key, value = whole_tiles(key), whole_tiles(value)
        else:  # then loads are not clipped at the end of the row
            key, value = (jnp.pad(x, ((0, 0), (0, ROWS), (0, 0), (0, 0))) for x in (key, value))
        lse = jnp.where(given.lse == -jnp.inf, jnp.inf, given.lse.astype(f32) * LOG2_E)
        gate = given.gate
        fields = [(lse, jnp.inf), (-delta, 0)] + ([] if gate is None else [(gate, 0)])

        def arrange(array, beyond):
            batch, length, _ = array.shape
            array = array.astype(f32).reshape(batch, length, num_kv_heads, heads)
            pad = ((0, 0), (0, 1), (0, 0), (0, rows - heads))
            return jnp.pad(array, pad, constant_values=beyond)

        numbers = jnp.concatenate([arrange(*field) for field in fields], axis=-1)
        more = row_numbers(rows, gate is not None) - numbers.shape[-1]
        numbers = jnp.pad(numbers, ((0, 0), (0, 0), (0, 0), (0, more)))
        query, d_out = (pad_heads(x, num_kv_heads, rows) for x in (query, given.d_out))
        return cls(query, key, value, d_out, numbers, heads, num_keys, gate is not None)

    def sums(self, items: BlockItems, *, block_size: int, aligned: bool) -> "KeySums":
        """Shapes of what the kernel writes; d_key and d_value may have more keys than there are."""
        partials = max(items.num_partials, 1)
        written = -(-self.num_keys // 8) * 8 if aligned else self.num_keys

        def part(x):
            return jax.ShapeDtypeStruct((partials, block_size, x.shape[3]), f32)

        def whole(x):
            return jax.ShapeDtypeStruct((x.shape[0], written, *x.shape[2:]), x.dtype)

        return KeySums(part(self.key), part(self.value), whole(self.key), whole(self.value))


class KeySums(NamedTuple):
    """What the items write; what no item writes is undefined.

    Attributes:
      part_key, part_value: float32 partial sums of the items with a slot.
      d_key, d_value: gradients of the keys of all other items, in the keys' dtype.
    """

    part_key: Float[Array, "slots block H"]
    part_value: Float[Array, "slots block V"]
    d_key: Float[Array, "B S K H"]
    d_value: Float[Array, "B S K V"]


class QueryParts(NamedTuple):
    """Which parts of the queries' gradients a call stores: those of some KV heads and a range of queries.

    Attributes:
      slots: selected blocks R of a query; `items.tokens` are `token R + slot`.
      heads: KV heads, counted over all rows of the batch.
      queries: length of the range.
      first: the first `b K + k`, and the first query.
      into: references to what `KeySums` has, so that several calls fill it.
    """

    slots: int
    heads: int
    queries: int
    first: Int32[Array, " 2"]
    into: tuple[Ref, ...]
