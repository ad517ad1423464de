"""Sizes of the pieces in which the `xla` implementation works; any choice gives the same answer."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """What changes the speed, of the program and of its compilation, and the memory only.

    Attributes:
      query_chunk: query tokens that are worked on at a time.
      key_tile: keys of one tile of a chunk, where these are looped over.
      one_tile: most keys that the windows of a chunk cover, or that a short row has, to be taken at once
        instead: 1024 hold the paper's window.
      widest_tile: how many times wider a tile is where queries are few, as in a decode step. 16 times 256 are
        the compressed keys of 64k tokens in the paper's configuration.
      dense_blocks: a row of at most that many times the selected blocks is attended under a mask: that takes
        as many products as looking the blocks up.
      selected_chunk: query tokens whose (token, block) pairs are grouped by block at a time.
      pairs_per_item: (token, block) pairs of one block that share one matrix product.
      items_per_step: such products done at once.
      partial_floats: most floats in the partial results of a chunk; 32 MiB in float32, about what a
        last-level cache holds.
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


DEFAULT = Tiles()
