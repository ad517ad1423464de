"""Sizes of the pieces in which the `xla` implementation works. They do not change the result."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """Sizes that change only the memory, the speed and the time of compilation.

    Attributes:
      query_chunk: query tokens that are worked on at a time.
      key_tile: keys of a tile, if a chunk loops over tiles.
      one_tile: most keys for which a chunk takes all keys at once instead: those that its windows cover, or
        those of a short row. 1024 hold the paper's window.
      widest_tile: how many times wider a tile may be if there are few queries, as in a decode step. 16 times
        256 are the compressed keys of 64k tokens in the paper's configuration.
      dense_blocks: rows of at most this many times the selected tokens are attended under a mask, which takes
        as many products as looking the blocks up.
      selected_chunk: query tokens whose (token, block) pairs are grouped by block at a time.
      pairs_per_item: most (token, block) pairs of one block that share a matrix product.
      items_per_step: matrix products that are done at once.
      partial_floats: most floats in the partial results of a chunk, or in the products of a tile of index
        keys. The default is 32 MiB in float32, about what a last-level cache holds.
    """

    query_chunk: int = 256
    key_tile: int = 256
    one_tile: int = 1024
    widest_tile: int = 16
    dense_blocks: int = 2
    selected_chunk: int = 2048
    pairs_per_item: int = 32
    items_per_step: int = 32
    partial_floats: int = 2**23


DEFAULT = Sizes()
