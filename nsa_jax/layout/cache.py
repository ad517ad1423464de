"""The arrays that decoding keeps for a layer, that a step is given, and that it counts."""

from typing import Any, NamedTuple

from nsa_jax.array_typing import Array, Bool, Float, Float32, Int32
from nsa_jax.config import BRANCHES, Branch


class NSACache(NamedTuple):
    """Keys and values of one NSA layer for `B` sequences of different lengths.

    `nsa_jax.cache.init_cache` makes an empty one. Each row holds one sequence. Token `s` lies in slot `s` of
    the selection arrays and in slot `s mod size` of a ring. Nothing beyond the length of the row is ever
    read.

    If the branches share keys and values, these are stored once: the window branch reads the last tokens of
    the selection arrays, and the window rings are None. The arrays of a branch that a layer does not have are
    None, too.

    Keys and values may be quantised: in int8 or float8_e4m3fn, with a scale for every token and head that
    multiplies it. All but the rings of what awaits compression then are, and every step reads them rounded,
    those of its own tokens too.

    Attributes:
      key_slc: rotated keys of the selected branch; `S` is the capacity `max_length`.
      value_slc: values of the selected branch.
      key_cmp: compressed and then rotated keys of the complete compression blocks.
      value_cmp: compressed values.
      key_win_ring: rotated keys of the last `w + step_capacity - 1` tokens; None if keys and values are
        shared.
      value_win_ring: values of the same tokens.
      key_raw_ring: keys of the last `l + step_capacity - 1` tokens before rotation, which await compression.
      value_raw_ring: values of the same tokens.
      lengths: number of tokens in each row.
      overflowed: whether a row was ever given more tokens than it had room for.
      kept: what the selector of the layer keeps of each token: any tree of arrays `[B, S, ...]`, in slot `s`
        that of token `s`. None for selection by importance, which needs the compressed keys alone.
      key_slc_scale: scales of `key_slc`, and so on; None if the cache is not quantised.
      value_slc_scale: of `value_slc`.
      key_cmp_scale: of `key_cmp`.
      value_cmp_scale: of `value_cmp`.
      key_win_ring_scale: of `key_win_ring`.
      value_win_ring_scale: of `value_win_ring`.
    """

    key_slc: Float[Array, "B S K H"]
    value_slc: Float[Array, "B S K V"]
    key_cmp: Float[Array, "B C K H"] | None
    value_cmp: Float[Array, "B C K V"] | None
    key_win_ring: Float[Array, "B window K H"] | None
    value_win_ring: Float[Array, "B window K V"] | None
    key_raw_ring: Float[Array, "B raw K H"] | None
    value_raw_ring: Float[Array, "B raw K V"] | None
    lengths: Int32[Array, " B"]
    overflowed: Bool[Array, " B"]
    kept: Any = None
    key_slc_scale: Float32[Array, "B S K"] | None = None
    value_slc_scale: Float32[Array, "B S K"] | None = None
    key_cmp_scale: Float32[Array, "B C K"] | None = None
    value_cmp_scale: Float32[Array, "B C K"] | None = None
    key_win_ring_scale: Float32[Array, "B window K"] | None = None
    value_win_ring_scale: Float32[Array, "B window K"] | None = None

    @property
    def max_length(self) -> int:
        """Largest number of tokens that a row can hold."""
        return self.key_slc.shape[1]

    @property
    def shares_keys_values(self) -> bool:
        """Whether the window branch, if there is one, reads the keys and values of the selected branch."""
        return self.key_win_ring is None

    def branches(self, gates: Float[Array, "B T N branches"] | None) -> tuple[Branch, ...]:
        """The branches of a step that has these gates, one for each branch; None for one alone."""
        if gates is None:
            return ("slc",)
        if gates.shape[3] == len(BRANCHES):
            return BRANCHES
        return ("slc", "win") if self.key_cmp is None else ("cmp", "slc")


# A ring is never full. Its rows end only where int32 indices do.
ENDLESS = 2**31 - 1


class DenseCache(NamedTuple):
    """Keys and values of one dense or window layer for `B` sequences of different lengths.

    `nsa_jax.cache.init_dense_cache` makes an empty one. Each row holds one sequence. Token `s` lies in slot
    `s mod S`. Slots without a token are never read.

    Attributes:
      key: rotated keys.
      value: values.
      lengths: number of tokens in each row, those that a ring has overwritten included.
      overflowed: whether a row was ever given more tokens than it had room for.
      key_scale: scales of `key` in a quantised cache, see `NSACache`; else None.
      value_scale: of `value`.
    """

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    lengths: Int32[Array, " B"]
    overflowed: Bool[Array, " B"]
    key_scale: Float32[Array, "B S K"] | None = None
    value_scale: Float32[Array, "B S K"] | None = None

    def ring_window(self, window_size: int | None) -> int | None:
        """`window_size` if the arrays are a ring; None for shorter arrays, or if a query sees all tokens."""
        return None if window_size is None or self.key.shape[1] < window_size else window_size

    def max_length(self, window_size: int | None) -> int:
        """Largest number of tokens that a row can hold; 2^31 - 1 for a ring, which is never full."""
        return self.key.shape[1] if self.ring_window(window_size) is None else ENDLESS


class TokenKeysValues(NamedTuple):
    """Keys and values of new tokens.

    Attributes:
      key_cmp: keys of the compressed branch, neither compressed nor rotated yet; None without that branch.
      value_cmp: values of the compressed branch, not compressed yet; None without that branch.
      key_slc: rotated keys of the selected branch.
      value_slc: values of the selected branch.
      key_win: rotated keys of the window branch; None without that branch, or if it shares those of the
        selected branch.
      value_win: values of the window branch; None where `key_win` is.
    """

    key_cmp: Float[Array, "B T K H"] | None
    value_cmp: Float[Array, "B T K V"] | None
    key_slc: Float[Array, "B T K H"]
    value_slc: Float[Array, "B T K V"]
    key_win: Float[Array, "B T K H"] | None = None
    value_win: Float[Array, "B T K V"] | None = None
