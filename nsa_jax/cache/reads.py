"""How much a decode step reads: counted, and as the paper expects it."""

from typing import NamedTuple

from nsa_jax import layout
from nsa_jax.array_typing import Array, Int32
from nsa_jax.config import NSAConfig


class Reads(NamedTuple):
    """Keys that each branch gathered, per query and KV head; one compressed key counts one."""

    cmp: Int32[Array, "B T K"]
    slc: Int32[Array, "B T K"]
    win: Int32[Array, "B T K"]


def expected_reads(length: int, config: NSAConfig) -> int:
    """Reads of one decode step at `length` tokens by the paper: `((S - l)//d + 1) + n l' + min(w, S)`.

    The formula behind Table 4. It charges `n` whole blocks where fewer exist and where the last is partial,
    so it bounds what `Reads` counts, and may exceed `length` tokens by far.
    """
    selected = config.num_selected_blocks * config.selection_block_size
    return layout.num_compression_blocks(length, config) + selected + min(config.window_size, length)
