"""Compiles once, warms up, then samples in turns: what is compared ran in the same minutes."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# A first run this long counts as a sample: page faults hardly matter in it, and another costs minutes.
LONG_RUN_S = 20.0
# Least length of a sample on a GPU. The host queues calls ahead, as a training loop does. Until the first one
# begins, the GPU waits for it: some 0.8 ms where a program launches 50 kernels, a fifth of such a call.
GPU_SAMPLE_S = 0.25


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled function with the arguments that it was compiled for.

    Attributes:
      call: the compiled function.
      arguments: what `run` gives it.
      compile_s: seconds of tracing, lowering and compiling.
      peak_bytes: temporary memory, `memory_analysis().temp_size_in_bytes`: beside arguments and results.
      all_bytes: memory of arguments, results and what is temporary, on each device.
    """

    call: Callable[..., Any]
    arguments: Sequence[Any]
    compile_s: float
    peak_bytes: int
    all_bytes: int

    @property
    def fields(self) -> dict[str, Any]:
        """What a row says of it."""
        return {"compile_s": self.compile_s, "peak_bytes": self.peak_bytes}

    def start(self) -> Any:
        """One call, not waited for."""
        return self.call(*self.arguments)

    def run(self) -> Any:
        """One call, waited for."""
        return jax.block_until_ready(self.start())


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one function in milliseconds, in the order taken."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The figure that is reported."""
        return statistics.median(self.samples_ms)

    @property
    def fields(self) -> dict[str, Any]:
        """What a row says of it; percentiles are linear between the samples."""
        p20, p80 = np.percentile(self.samples_ms, (20, 80)).tolist()
        return dict(median_ms=self.median_ms, p20_ms=p20, p80_ms=p80, samples=len(self.samples_ms))

    def divided_by(self, count: int) -> "Timing":
        """The timing of one of `count` equal parts of what was timed."""
        return Timing(tuple(sample / count for sample in self.samples_ms))


def compile_for(function: Callable[..., Any], arguments: Sequence[Any], donate: Any = None) -> Compiled:
    """Compiles `function` ahead of time for `arguments`; runs nothing."""
    begin = time.perf_counter()
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    if memory is None:
        return Compiled(compiled, arguments, seconds, 0, 0)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.temp_size_in_bytes
    return Compiled(compiled, arguments, seconds, peak, memory.argument_size_in_bytes + results + peak)


def least_sample_s() -> float:
    """Of a sample of calls that the host need not wait for one by one."""
    return GPU_SAMPLE_S if jax.default_backend() == "gpu" else 0.0


def seconds_of(run: Callable[[], Any], calls: int = 1) -> float:
    """Wall-clock seconds of one of `calls` calls in a row, of which the last is waited for."""
    begin = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def measure[K: Hashable](
    runs: Mapping[K, Callable[[], Any]],
    *,
    budget_s: float,
    sample_s: float = 0.0,
    min_samples: int = 3,
    max_samples: int = 50,
    max_rounds: int = 50,
) -> dict[K, Timing]:
    """Times each of `runs`, interleaved.

    Each is warmed up once, which says how many samples fit into `budget_s`. They are spread over as many
    rounds as the slowest has samples, at most `max_rounds`, so that every round has samples of each.
    With `sample_s` a sample is a row of calls that together take this long. A second call tells how many they
    are, because the first may load the program.
    """
    samples: dict[K, list[float]] = {}
    wanted: dict[K, int] = {}
    calls: dict[K, int] = {}
    for name, run in runs.items():
        first = seconds_of(run)
        samples[name] = [first] if first >= LONG_RUN_S else []
        if sample_s and not samples[name]:
            first = seconds_of(run)
        calls[name] = max(1, math.ceil(sample_s / max(first, 1e-9)))
        fitting = int(budget_s / max(first * calls[name], 1e-9))
        wanted[name] = min(max(fitting, min_samples), max_samples) - len(samples[name])
    rounds = max(min(max_rounds, *wanted.values()), 1)
    for turn in range(rounds):
        for name, run in runs.items():
            for _ in range(wanted[name] * turn // rounds, wanted[name] * (turn + 1) // rounds):
                samples[name].append(seconds_of(run, calls[name]))
    return {name: Timing(tuple(1e3 * second for second in taken)) for name, taken in samples.items()}
