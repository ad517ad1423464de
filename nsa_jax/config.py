"""The block structure of Native Sparse Attention, and its branches."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

from nsa_jax.option_checks import check_int

# Positions are int32, and sizes such as the window are added to them.
LONGEST = 2**30

type Branch = Literal["cmp", "slc", "win"]

BRANCHES: tuple[Branch, ...] = get_args(Branch.__value__)  # in the order of the gates


@dataclasses.dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """Block structure of Native Sparse Attention (arXiv:2502.11089, section 3).

    Block sizes, stride and window are in tokens. No value may exceed 2^30. The defaults are the paper's. A
    config is hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      compression_block_size: `l`, tokens that one compressed key summarises; a multiple of
        `compression_stride`, at most `selection_block_size`.
      compression_stride: `d`, distance between the first tokens of neighbouring compression blocks; at least
        1.
      selection_block_size: `l'`, tokens of one selection block; a multiple of `compression_stride`.
      num_selected_blocks: `n`, most blocks that a query selects per KV head, the initial and local blocks
        included; at least `num_initial_blocks + num_local_blocks`.
      window_size: `w`, tokens that the window branch sees, the query's own included; at least 1.
      num_initial_blocks: number of blocks at the start of the sequence that are always selected; at least 0.
      num_local_blocks: number of blocks up to and including the query's own that are always selected; at
        least 1.

    Raises:
      TypeError: a value is not an integer.
      ValueError: a value is out of the range given above.

    Examples:
      >>> config = NSAConfig(num_selected_blocks=8, window_size=256)
    """

    compression_block_size: int = 32
    compression_stride: int = 16
    selection_block_size: int = 64
    num_selected_blocks: int = 16
    window_size: int = 512
    num_initial_blocks: int = 1
    num_local_blocks: int = 2

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_int(low=0 if field.name == "num_initial_blocks" else 1, high=LONGEST, **{field.name: value})
            object.__setattr__(self, field.name, int(value))  # NumPy integers are accepted, too
        for name in ("compression_block_size", "selection_block_size"):
            if getattr(self, name) % self.compression_stride:
                raise ValueError(
                    f"compression_stride must divide {name}, got {self.compression_stride} and "
                    f"{getattr(self, name)}. Choose a stride that divides both block sizes."
                )
        if self.compression_block_size > self.selection_block_size:
            raise ValueError(
                f"compression_block_size must not exceed selection_block_size, got "
                f"{self.compression_block_size} > "
                f"{self.selection_block_size}. Enlarge the selection blocks."
            )
        forced = self.num_initial_blocks + self.num_local_blocks
        if self.num_selected_blocks < forced:
            raise ValueError(
                f"num_selected_blocks must cover the initial and local blocks, got "
                f"{self.num_selected_blocks} < "
                f"{self.num_initial_blocks} + {self.num_local_blocks}. Raise it to at least {forced}."
            )


def check_config(config: Any) -> None:
    """Raises TypeError unless `config` is an `NSAConfig`, not, for example, the configuration of a model."""
    if not isinstance(config, NSAConfig):
        raise TypeError(
            f"config must be an NSAConfig, got {type(config).__name__}. Build one with NSAConfig(...)."
        )


def check_branches(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """Returns the branches in the order of `BRANCHES`.

    Raises:
      TypeError: `branches` is not a sequence of names.
      ValueError: a name is unknown or given twice, or the selected branch is not among them.
    """
    if isinstance(branches, str) or not isinstance(branches, Sequence):
        raise TypeError(
            f'branches must be a sequence of names, got {branches!r}. Pass a tuple, such as ("slc", "win").'
        )
    if len(set(branches)) < len(branches) or not set(branches) <= set(BRANCHES) or "slc" not in branches:
        raise ValueError(
            f'branches must be some of {BRANCHES}, each once, with "slc" among them, got {tuple(branches)}. '
            "Build DenseAttention with a window_size for a window alone."
        )
    return tuple(branch for branch in BRANCHES if branch in branches)
