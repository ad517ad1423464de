"""How the programs of a team wait for each other within a launch: each adds 1 to a counter in memory.

The programs of a team have consecutive numbers, and every GPU that we know starts programs in the order of
their numbers (CUDA does not promise it). `sizes.step_sizes` makes no team larger than what the GPU can run at
once, so all programs of the first unfinished team are running. That team ends, then the next one is the
first: no program waits for ever.
"""

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """Adds 1 to a counter; programs that see it also see all that this program has stored before."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_for(counter, number):
    """Waits until `number` arrivals are counted; what was stored before them can then be loaded."""
    while tl.atomic_add(counter, 0, sem="acquire") < number:
        pass
    tl.debug_barrier()
