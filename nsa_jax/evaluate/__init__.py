"""Whether a model finds what stands far back: needles in a text, and the blocks that dense attention likes.

A loss says little about it: most tokens follow from their neighbours.
"""

from nsa_jax.evaluate.needles import Needles, find_needles
from nsa_jax.evaluate.recall import BlockRecall, block_recall
from nsa_jax.evaluate.tasks import MagicNumber, PassKey, Question, Task, TokenPairs

__all__ = [
    "BlockRecall",
    "MagicNumber",
    "Needles",
    "PassKey",
    "Question",
    "Task",
    "TokenPairs",
    "block_recall",
    "find_needles",
]
