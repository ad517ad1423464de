"""What the steps through a cache declare of their operands, for explicit axes."""

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from nsa_jax.array_typing import Array, Float
from nsa_jax.compression import Compression, compress_blocks
from nsa_jax.layout import slots
from nsa_jax.sharding import HEADS
from nsa_jax.sharding.explicit import Axes, Sharing


class _Formed(NamedTuple):
    """Blocks that are formed already, in place of the function that forms them."""

    key: Float[Array, "B blocks K H"]
    value: Float[Array, "B blocks K V"]

    def __call__(self, *_: Array) -> "_Formed":
        return self


def _form_blocks(axes: Axes, operands: dict[str, Any]) -> tuple[dict[str, Any], Sharing]:
    """Forms the blocks of a step by a function: it may hold arrays, which `shard_map` takes as operands only.

    A `Compression` is such an operand, which all shards hold whole. The blocks are those of rows and heads.
    """
    compress = operands["compress"]
    if compress is None or type(compress) is Compression:  # a subclass may do something else
        return operands, STEP
    given = {name: operands[name] for name in ("cache", "tokens", "num_tokens", "config")}
    windows = PartitionSpec(axes.batch, None, None, axes.heads)
    found = axes.run(slots.windows_of_step, DENSE_STEP, given, (windows, windows, axes.spec(HEADS)))
    return operands | {"compress": _Formed(*compress_blocks(compress, *found))}, DENSE_STEP


DENSE_STEP = Sharing(results=("out", "cache"), alike=False)
STEP = DENSE_STEP._replace(shared=("compress",), before=_form_blocks)
