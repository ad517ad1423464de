"""How the programs of a team wait for each other within a launch: a counter in memory that each adds to.

The programs of a team have consecutive numbers, and every GPU that we know starts programs in the order of
their numbers (CUDA does not promise it). So all programs of the first unfinished team are running, if the GPU
has places for as many programs as a team has, which `tiles.step_sizes` sees to. This team ends, and the next
one is the first: no program waits for ever.
"""

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """Adds one to a counter, when all that this program has stored can be seen by those who wait for it."""
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_for(counter, number):
    """Waits until so many have arrived; what they stored can then be loaded."""
    while tl.atomic_add(counter, 0, sem="acquire") < number:
        pass
    tl.debug_barrier()
