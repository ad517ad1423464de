"""What decoding keeps of a layer, and what a step is given and tells: the arrays and nothing else."""

from collections.abc import Callable
from typing import NamedTuple

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32

type Compress = Callable[[Array, Array, Array], tuple[Array, Array]]


class MeanCompression(NamedTuple):
    """Compresses a block to the mean of its tokens, without rotation: data that the step kernels know."""

    def __call__(
        self,
        key_windows: Float[Array, "B m l K H"],
        value_windows: Float[Array, "B m l K V"],
        first_positions: Int[Array, "B m"],
    ) -> tuple[Float[Array, "B m K H"], Float[Array, "B m K V"]]:
        """The means, accumulated in float32 at least."""
        return key_windows.mean(axis=2), value_windows.mean(axis=2)


class NSACache(NamedTuple):
    """Keys and values of one layer for `B` sequences of differing lengths; `cache.init_cache` makes it.

    Row `b` holds one sequence. Its token `s` lies in slot `s` of the selection arrays and in slot
    `s mod size` of a ring. Nothing beyond the row's length is ever read.

    Branches that share keys and values store them once: the window branch reads the last tokens of the
    selection arrays, and its rings are None.

    Attributes:
      key_slc: rotated keys of the selection branch.
      value_slc: their values.
      key_cmp: keys of the complete compression blocks, compressed and then rotated.
      value_cmp: their values.
      key_win_ring: rotated keys of the last `w + step_capacity - 1` tokens; None if they are shared.
      value_win_ring: their values.
      key_raw_ring: keys, not rotated, of the last `l + step_capacity - 1` tokens, for the compression.
      value_raw_ring: their values.
      lengths: number of tokens of each row.
      overflowed: whether a row was ever given more tokens than it had room for.
    """

    key_slc: Float[Array, "B S K H"]
    value_slc: Float[Array, "B S K V"]
    key_cmp: Float[Array, "B C K H"]
    value_cmp: Float[Array, "B C K V"]
    key_win_ring: Float[Array, "B window K H"] | None
    value_win_ring: Float[Array, "B window K V"] | None
    key_raw_ring: Float[Array, "B raw K H"]
    value_raw_ring: Float[Array, "B raw K V"]
    lengths: Int32[Array, " B"]
    overflowed: Bool[Array, " B"]

    @property
    def max_length(self) -> int:
        """Most tokens that a row can hold."""
        return self.key_slc.shape[1]

    @property
    def shares_keys_values(self) -> bool:
        """Whether the window branch reads the keys and values of the selection branch."""
        return self.key_win_ring is None


# Most tokens of a row whose ring is never full: as many as an index counts.
ENDLESS = 2**31 - 1


class DenseCache(NamedTuple):
    """Keys and values of one dense or window layer for `B` sequences; `cache.init_dense_cache` makes it.

    Row `b` holds one sequence. Its token `s` lies in slot `s mod S`. Nothing else of a row is ever read.

    Attributes:
      key: rotated keys.
      value: their values.
      lengths: number of tokens of each row.
      overflowed: whether a row was ever given more tokens than it had room for.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    lengths: Int32[Array, " B"]
    overflowed: Bool[Array, " B"]

    def ring_window(self, window_size: int | None) -> int | None:
        """The window of a ring; None for arrays that are none, as those shorter than the window are."""
        return None if window_size is None or self.key.shape[1] < window_size else window_size

    def max_length(self, window_size: int | None) -> int:
        """Most tokens that a row can hold; a ring is never full."""
        return self.key.shape[1] if self.ring_window(window_size) is None else ENDLESS


class TokenKeysValues(NamedTuple):
    """Keys and values of new tokens; `key_cmp` and `value_cmp` neither compressed nor rotated yet.

    Those of the window branch are None if they are those of the selection branch.
    """

    key_cmp: Float[Array, "B T K H"]
    value_cmp: Float[Array, "B T K V"]
    key_slc: Float[Array, "B T K H"]
    value_slc: Float[Array, "B T K V"]
    key_win: Float[Array, "B T K H"] | None = None
    value_win: Float[Array, "B T K V"] | None = None


class Reads(NamedTuple):
    """Keys that each branch gathered, per query and KV head; one compressed key counts one."""

    cmp: Int32[Array, "B T K"]
    slc: Int32[Array, "B T K"]
    win: Int32[Array, "B T K"]
