"""The ceiling: the best rates of this machine, and the least time that each operation can take on it.

`floor_ms` is the larger of flops over the measured matmul rate and bytes over the measured copy bandwidth.
Flops are those of the matrix products over the *visible* (query, key) pairs; bytes are every argument read
once and every result written once, which no implementation can avoid. Softmax, masks and repeated loads do
not count. The measured copy is larger than any cache, so operands that stay in a cache can beat a floor set
by bytes.

`python -m benchmarks.roofline` prints both rates of this machine; its last line is JSON.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import layers, records
from benchmarks.command_line import Parser, add_dtype, command
from benchmarks.inputs import ARGUMENTS, LAYERS, Shape, key, tensor_dtype, tensor_shape
from nsa_jax.array_typing import Array
from nsa_jax.config import NSAConfig

ATTENTION_OF_BRANCH = ("compressed_attention", "selected_attention", "window_attention")


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Measured rates of one machine in one dtype."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, cost: "Cost") -> float:
        """Least milliseconds for this cost."""
        return 1e3 * max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s)

    def __str__(self) -> str:
        return f"copy {self.bytes_per_s / 1e9:.1f} GB/s, matmul {self.flops_per_s / 1e9:.0f} GFLOP/s"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Arithmetic and traffic that an operation cannot avoid."""

    flops: int
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def measure_ceiling(dtype: str, *, matmul_size: int | None = None, copy_bytes: int | None = None) -> Ceiling:
    """Copy bandwidth (read + write) and rate of a square matmul, each the best of 7 runs."""
    on_cpu = jax.default_backend() == "cpu"
    matmul_size = matmul_size or (2048 if on_cpu else 16384)
    copy_bytes = copy_bytes or (1 << 28 if on_cpu else 1 << 32)
    # Products of float32 inputs have float32 accuracy everywhere in this package, so here too.
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    matrix = jax.random.normal(key("matrix"), (matmul_size, matmul_size)).astype(dtype)
    seconds = _best_s(lambda _: multiply(matrix, matrix), None)
    # Into the donated array itself: the page faults of a new one would be timed, too.
    copy = jax.jit(lambda words: words + 1, donate_argnums=0)
    words = jnp.zeros(copy_bytes // 4, jnp.uint32)
    return Ceiling(2 * words.nbytes / _best_s(copy, words), 2 * matmul_size**3 / seconds)


class Run(records.Run):
    """A run that measures the ceiling first, on one configuration."""

    def __init__(self, options: argparse.Namespace, config: NSAConfig):
        super().__init__(options)
        self.config, self.ceiling = config, measure_ceiling(options.dtype)
        print(f"ceiling in {options.dtype}: {self.ceiling}\nconfig {config}", flush=True)


def visible_pairs(operation: str, length: int, config: NSAConfig) -> int:
    """(query, key) pairs of an attention in one head over a sequence of `length` tokens."""
    return int(_visible_keys(operation, np.arange(length, dtype=np.int64), config).sum())


def cost(operation: str, mode: str, shape: Shape) -> Cost:
    """Unavoidable flops and bytes of a forward (`fwd`), a backward (`bwd`) or both (`fwd_bwd`)."""
    if mode == "fwd_bwd":
        return cost(operation, "fwd", shape) + cost(operation, "bwd", shape)
    if operation in LAYERS:
        return _cost_of_layer(operation, mode, shape)
    inputs = ARGUMENTS[operation]
    if mode == "fwd":
        moved = _bytes(inputs, shape) + _bytes(_results(operation), shape)
    else:
        gradients = tuple(name for name in inputs if name != "block_indices")
        moved = _bytes((*inputs, "out", *gradients), shape)
    return Cost(_flops(operation, mode, shape), moved)


def decode_cost(
    operation: str, reads: Mapping[str, np.ndarray], shape: Shape, cache_dtype: str | None = None
) -> Cost:
    """One decode step, the mean of those whose `reads` these are.

    Args:
      operation: the whole operation, a layer around it, or a branch alone, which appends nothing.
      reads: keys that each query gathers in each attention, `[steps, T]`.
      shape: the sizes; its length is not used.
      cache_dtype: dtype of a quantised cache, which has a scale of 4 bytes beside each key and value.

    A key that several of the `T` queries of a step see is moved once, but selected ones as often as they were
    selected. New tokens are written to each array that keeps them. A layer's parameters are read once,
    those of its compressors not at all.
    """
    attended = LAYERS.get(operation, operation)
    whole = attended == "native_sparse_attention"
    parts = ATTENTION_OF_BRANCH if whole else (attended,)
    num_new, dims = reads[parts[0]].shape[1], shape.key_dim + shape.value_dim
    keys, words, visible = 0.0, 0.0, reads["dense_attention"][:, -1]
    for part in parts:
        of_step = reads[part][:, -1]
        if part == "selected_attention":
            of_step = reads[part].sum(axis=1)
        elif part == "window_attention":
            of_step = np.minimum(of_step + num_new - 1, visible)
        keys += reads[part].sum(axis=1).mean()
        words += dims * of_step.mean()
    flops = 2 * shape.query_heads * dims * keys
    if whole or attended == "selected_attention":  # the importance multiplies compressed keys once more
        scored = reads["compressed_attention"]
        flops += 2 * shape.query_heads * shape.key_dim * scored.sum(axis=1).mean()
        words += 0 if whole else shape.key_dim * scored[:, -1].mean()
    if whole:  # the selection arrays, two rings, and a compressed pair for every stride
        words += dims * num_new * (3 + 1 / shape.config.compression_stride)
    elif attended == "dense_attention":
        words += dims * num_new
    flops, words = shape.batch * flops, shape.batch * shape.kv_heads * words
    if operation in LAYERS:
        parameters = layers.parameters(operation, shape).items()
        words += sum(x.size for name, x in parameters if not name.startswith("compressor"))
        new = dataclasses.replace(shape, length=num_new)
        flops += 2 * layers.products(operation, new)
    moved = words * jnp.dtype(shape.dtype).itemsize
    if cache_dtype is not None:
        raw = shape.batch * shape.kv_heads * dims * num_new  # await compression as they are
        saved = jnp.dtype(shape.dtype).itemsize - jnp.dtype(cache_dtype).itemsize - 2 * 4 / dims
        moved -= (words - raw) * saved
    return Cost(round(flops), round(moved))


def _visible_keys(operation: str, t: np.ndarray, config: NSAConfig) -> np.ndarray:
    """Keys that the queries at `t` see."""
    match operation:
        case "dense_attention":
            return t + 1
        case "window_attention":
            return np.minimum(t + 1, config.window_size)
        case "compressed_attention" | "select_blocks":
            return np.maximum((t + 1 - config.compression_block_size) // config.compression_stride + 1, 0)
        case "selected_attention":
            current, offset = np.divmod(t, config.selection_block_size)
            whole = np.minimum(current, config.num_selected_blocks - 1)  # the query's own block is always in
            return whole * config.selection_block_size + offset + 1
    raise ValueError(f"operation must be an attention, got {operation}. Use `cost` for the others.")


def _flops(operation: str, mode: str, shape: Shape) -> int:
    tokens = shape.batch * shape.length * shape.query_heads
    if operation == "gated_sum":  # 3 products and 2 sums; backward 3 products and 3 inner products
        return tokens * shape.value_dim * (5 if mode == "fwd" else 9)
    if operation == "native_sparse_attention":
        parts = (*ATTENTION_OF_BRANCH, "gated_sum", *(("select_blocks",) if mode == "fwd" else ()))
        return sum(_flops(part, mode, shape) for part in parts)
    pairs = shape.batch * shape.query_heads * visible_pairs(operation, shape.length, shape.config)
    if operation == "select_blocks":
        return 2 * pairs * shape.key_dim
    if mode == "fwd":  # q k, p v
        return 2 * pairs * (shape.key_dim + shape.value_dim)
    return 2 * pairs * (3 * shape.key_dim + 2 * shape.value_dim)  # q k again, dq, dk; dp, dv


def _cost_of_layer(operation: str, mode: str, shape: Shape) -> Cost:
    """Products with parameters (twice as many in a backward) and the attention; the rest counts as free."""
    passes = 1 if mode == "fwd" else 2
    flops = 2 * passes * layers.products(operation, shape)
    parameters = sum(x.size * x.dtype.itemsize for x in layers.parameters(operation, shape).values())
    tokens = _bytes(("x",), shape)
    # x and out; x, the cotangent of out, and that of x. A backward reads parameters and writes gradients.
    moved = (1 + passes) * tokens + passes * parameters
    return Cost(flops + _flops(LAYERS[operation], mode, shape), moved)


def _results(operation: str) -> tuple[str, ...]:
    if operation == "select_blocks":
        return ("block_indices",)
    return ("out", "lse") if operation in ATTENTION_OF_BRANCH else ("out",)


def _bytes(names: tuple[str, ...], shape: Shape) -> int:
    return sum(
        math.prod(tensor_shape(name, shape)) * jnp.dtype(tensor_dtype(name, shape)).itemsize for name in names
    )


def _best_s(step: Callable[[Any], Array], x: Any) -> float:
    """Fewest seconds of `x = step(x)`, waited for."""
    x = step(x).block_until_ready()
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        x = step(x).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@command("benchmarks.roofline")
def main(argv: Sequence[str] | None = None) -> int:
    """Measures the two rates."""
    parser = Parser(prog="python -m benchmarks.roofline", description=__doc__.split("\n\n")[0])
    add_dtype(parser, "float32", "of the matrices that are multiplied")
    options = parser.parse_args(argv)
    ceiling = measure_ceiling(options.dtype)
    print(f"ceiling in {options.dtype}: {ceiling}")
    rates = {"copy_gb_per_s": ceiling.bytes_per_s / 1e9, "matmul_gflop_per_s": ceiling.flops_per_s / 1e9}
    print(json.dumps({"dtype": options.dtype} | {name: round(rate, 1) for name, rate in rates.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
