"""Where a call runs: each device computes the batch rows and heads that it holds, whatever spread them.

`explicit` axes, the type of an array says how it lies; `auto` axes, XLA decides; `manual` axes, inside a
`shard_map` of the caller; and `vmap`, whose axis becomes part of the batch. No row and no KV head needs
another, so nothing has to move.
"""

BATCH, TOKENS, HEADS = 0, 1, 2  # axes of every operand, as far as it has so many
