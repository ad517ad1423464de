"""Pallas's interpreter looks for races of loads, stores and copies; `watch` adds what products read.

It takes a product for done when it starts. On a GPU a product reads shared memory until it is waited for, and
a place of a pipeline that is freed earlier may be filled again meanwhile. So what a product reads is checked
twice: when it starts, and when it is waited for.
"""

import collections
import functools
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory


def watch() -> None:
    """Makes the interpreter check them, for the rest of the process."""
    start, wait = gpu_callbacks.wgmma, gpu_callbacks.wgmma_accumulator_deref
    running: dict[Any, list[list[tuple]]] = collections.defaultdict(list)  # by warpgroup, the oldest first

    def check(thread, reads):
        memory = gpu_callbacks._get_shared_memory()
        if memory.detect_races:
            for key, access, source_info in reads:
                # Products see what a warpgroup stored only behind a fence, as copies do: by another clock.
                with memory.lock:
                    clocks = memory.clocks[thread]
                    clocks.inc(memory.thread_to_vc_position(thread))
                    clock = clocks.async_smem_clock.copy()
                gpu_callbacks.get_races().check_read(thread, clock, key, access, source_info=source_info)

    @functools.wraps(start)
    def started(*, thread, source_info=None, **given):
        reads = []
        for name in "ab":
            key = shared_memory.HostAllocationKey.from_array(given[f"{name}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(given[f"{name}_transforms"])
            access = gpu_callbacks._get_shared_memory().access(key, jax.tree.map(int, transforms))
            reads.append((key, access, source_info))
        check(thread, reads)
        running[thread].append(reads)
        return start(thread=thread, source_info=source_info, **given)

    @functools.wraps(wait)
    def waited(*, thread, wait_n, **given):
        still = wait_n or 0  # without a number all are waited for
        products = running[thread]
        while len(products) > still:
            check(thread, products.pop(0))
        return wait(thread=thread, wait_n=wait_n, **given)

    gpu_callbacks.wgmma = gpu_callbacks.fail_on_exception(started)
    gpu_callbacks.wgmma_accumulator_deref = gpu_callbacks.fail_on_exception(waited)
