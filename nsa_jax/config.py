"""What changes the answer: the block structure."""

import dataclasses
import numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """Block structure of Native Sparse Attention (arXiv:2502.11089, section 3); lengths are in tokens.

    Hashable, so it can be a static argument of `jax.jit`. The defaults are the paper's.

    Attributes:
      compression_block_size: `l`, tokens summarised by one compressed key.
      compression_stride: `d`, tokens between the first tokens of neighbouring compression blocks.
      selection_block_size: `l'`, tokens of one selectable block.
      num_selected_blocks: `n`, blocks that a query attends per KV head, forced ones included.
      window_size: `w`, most recent tokens of the window branch, the query's own included.
      num_initial_blocks: blocks at the start of the sequence that are always selected.
      num_local_blocks: blocks that end with the query's own and are always selected.

    Raises:
      ValueError: a value is out of range, or the sizes do not divide as the block maps need.
      TypeError: a value is not an integer.
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
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{field.name} must be an int, got {value!r}. Pass a whole number.")
            object.__setattr__(self, field.name, int(value))  # a NumPy integer is one, too
        for name in ("compression_block_size", "compression_stride", "selection_block_size", "window_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}. Pass a positive number."
                )
        if self.window_size > 2**30:  # positions are int32, and kernels add the two
            raise ValueError(
                f"window_size must be at most 2^30, got {self.window_size}. Pass the longest length."
            )
        if self.num_initial_blocks < 0:
            raise ValueError(
                f"num_initial_blocks must be at least 0, got {self.num_initial_blocks}. Pass 0 for none."
            )
        if self.num_local_blocks < 1:
            raise ValueError(
                f"num_local_blocks must be at least 1, got {self.num_local_blocks}. Pass 1 for the query's "
                "own block alone."
            )
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
