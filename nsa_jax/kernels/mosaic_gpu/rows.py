"""How the rows of a tile, query tokens times heads of a KV head, lie in memory and reach shared memory.

With 8 rows a token or more, a copy takes one token, from the array as it is. Fewer rows than 8 cannot be
copied alone, because tiles in shared memory are 8 rows high: there the queries are brought into the order
`[B, K, T rows, H]` first.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nsa_jax.array_typing import Array, Float, Int32
from nsa_jax.kernels.mosaic_gpu.sizes import CONSUMERS, FEWEST_GATHERED, ROWS, padded_rows, tile_tokens


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of all tiles.

    Attributes:
      batch: rows of the batch.
      num_queries: tokens of each.
      kv_heads: K.
      heads: query heads of a KV head.
      of_token: rows of a token: `heads` as a power of two, at least 4.
      tiles: tiles of a KV head.
    """

    batch: int
    num_queries: int
    kv_heads: int
    heads: int
    of_token: int
    tiles: int

    @classmethod
    def of(cls, query: Float[Array, "B T N H"], num_kv_heads: int) -> "Rows":
        """The rows of these queries."""
        batch, num_queries, num_heads = query.shape[:3]
        heads = num_heads // num_kv_heads
        tiles = -(-num_queries // tile_tokens(heads))
        return cls(batch, num_queries, num_kv_heads, heads, padded_rows(heads), tiles)

    @property
    def padded(self) -> int:
        """Rows of a KV head, those of tokens beyond the last included."""
        return self.tiles * CONSUMERS * ROWS

    @property
    def by_token(self) -> bool:
        """Whether a copy takes one token."""
        return self.of_token >= FEWEST_GATHERED

    @property
    def copies(self) -> int:
        """Copies that fill a buffer of 64 rows."""
        return ROWS // self.of_token if self.by_token else 1

    def shape(self, dim: int) -> tuple[int, ...]:
        """Of an array like the queries, as the kernel writes it."""
        if self.by_token:
            return (self.batch, self.padded // self.of_token, self.kv_heads * self.of_token, dim)
        return (self.batch, self.kv_heads, self.padded, dim)

    def arrange(self, array: Float[Array, "B T N H"]) -> Array:
        """An array like the queries, as the kernel reads it."""
        array = pad_heads(array, self.kv_heads, self.of_token)
        if self.by_token:
            return array
        dim, more = array.shape[3], self.padded // self.of_token - self.num_queries
        array = array.reshape(self.batch, self.num_queries, self.kv_heads, self.of_token, dim)
        array = jnp.pad(array.swapaxes(1, 2), ((0, 0), (0, 0), (0, more), (0, 0), (0, 0)))
        return array.reshape(self.batch, self.kv_heads, self.padded, dim)

    def restore(self, array: Array) -> Float[Array, "B T N V"]:
        """The inverse of `arrange`, for what the kernel wrote."""
        dim, tokens = array.shape[-1], self.padded // self.of_token
        if self.by_token:
            array = array.reshape(self.batch, tokens, self.kv_heads, self.of_token, dim)
        else:
            array = array.reshape(self.batch, self.kv_heads, tokens, self.of_token, dim).swapaxes(1, 2)
        array = array[:, : self.num_queries, :, : self.heads]
        return array.reshape(self.batch, self.num_queries, self.kv_heads * self.heads, dim)

    def restore_numbers(self, array: Float[Array, "B K rows"]) -> Float[Array, "B T N"]:
        """The same for one number a row."""
        array = array.reshape(self.batch, self.kv_heads, -1, self.of_token).swapaxes(1, 2)
        array = array[:, : self.num_queries, :, : self.heads]
        return array.reshape(self.batch, self.num_queries, self.kv_heads * self.heads)

    def arrange_numbers(self, array: Float[Array, "B T N"], beyond: float) -> Float[Array, "B K rows"]:
        """The inverse of `restore_numbers`: `beyond` for rows without a head, and after the last token."""
        array = array.reshape(*array.shape[:2], self.kv_heads, self.heads).swapaxes(1, 2)
        more = self.padded // self.of_token - self.num_queries
        pad = [(0, 0), (0, 0), (0, more), (0, self.of_token - self.heads)]
        array = jnp.pad(array, pad, constant_values=beyond)
        return array.reshape(self.batch, self.kv_heads, self.padded)

    def repeat(self, array: Int32[Array, "B T"]) -> Int32[Array, "B rows"]:
        """One number a row from one a token; -1 for tokens beyond the last."""
        more = self.padded // self.of_token - self.num_queries
        return jnp.repeat(jnp.pad(array, ((0, 0), (0, more)), constant_values=-1), self.of_token, axis=1)

    def load(self, source: Any, b: Any, head: Any, first: Any, to: Any, barrier: Any) -> None:
        """Starts the copies of the 64 rows from `first` on. In place of tokens beyond the last, the last."""
        if not self.by_token:
            plgpu.copy_gmem_to_smem(source.at[b, head, pl.ds(first, ROWS)], to, barrier)
            return
        for i in range(self.copies):
            token = jnp.minimum(first // self.of_token + i, self.num_queries - 1)
            heads = pl.ds(head * self.of_token, self.of_token)
            mine = pl.ds(i * self.of_token, self.of_token)
            plgpu.copy_gmem_to_smem(source.at[b, token, heads], to.at[mine], barrier)

    def store(self, source: Any, to: Any, b: Any, head: Any, first: Any) -> None:
        """Starts the copies of 64 rows into an array of `shape`."""
        if not self.by_token:
            plgpu.copy_smem_to_gmem(source, to.at[b, head, pl.ds(first, ROWS)])
            return
        for i in range(self.copies):
            heads = pl.ds(head * self.of_token, self.of_token)
            mine = pl.ds(i * self.of_token, self.of_token)
            plgpu.copy_smem_to_gmem(source.at[mine], to.at[b, first // self.of_token + i, heads])


def pad_heads(array: Float[Array, "B T N H"], num_kv_heads: int, rows: int) -> Float[Array, "B T K*rows H"]:
    """The same with `rows` heads for every KV head; those that it does not have are 0."""
    batch, tokens, num_heads, dim = array.shape
    heads = num_heads // num_kv_heads
    if heads == rows:
        return array
    array = array.reshape(batch, tokens, num_kv_heads, heads, dim)
    array = jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, rows - heads), (0, 0)))
    return array.reshape(batch, tokens, num_kv_heads * rows, dim)
