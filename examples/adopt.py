"""From a dense model to one of NSA on a CPU: `nsa_jax.adopt` with short rows, small blocks and few steps.

    python -m examples.adopt SOURCE --text FILES... --output RUN

It takes the options of that command; only the defaults differ.
"""

import sys

from nsa_jax.adopt import __main__ as adopt

# A query attends 96 of 512 tokens. There is no compression, but its sizes must suit the blocks.
BLOCKS = dict(block=16, n=6, l=16, d=8)
STEPS = dict(length=512, batch=2, distil_steps=20, sparse_steps=6, warmup=3)
MEASURED = dict(rows=4, needles=1)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return adopt.main(arguments, dtype="float32", **BLOCKS, **STEPS, **MEASURED)


if __name__ == "__main__":
    sys.exit(main())
