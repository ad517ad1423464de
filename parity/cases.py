"""The cases: shapes, packing, positions and selections, each chosen for a way to be wrong."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa_jax.config import NSAConfig
from nsa_jax.nn import IndexerConfig, Llama3Scaling, YarnScaling

OVERLAPPING = NSAConfig(
    compression_block_size=8,
    compression_stride=4,
    selection_block_size=16,
    num_selected_blocks=4,
    window_size=24,
)
ADJOINING = NSAConfig(
    compression_block_size=8,
    compression_stride=8,
    selection_block_size=8,
    num_selected_blocks=5,
    window_size=1,
    num_initial_blocks=0,
    num_local_blocks=1,
)
EVERY_BLOCK = dataclasses.replace(OVERLAPPING, num_selected_blocks=16)
# Block sizes that GPU kernels are made for, small enough for a few hundred tokens to be sparse.
KERNEL_SIZED = NSAConfig(
    compression_block_size=16,
    compression_stride=16,
    selection_block_size=32,
    num_selected_blocks=7,
    window_size=100,
)
EQUAL_BLOCKS = NSAConfig(
    compression_block_size=64,
    compression_stride=64,
    selection_block_size=64,
    num_selected_blocks=4,
    window_size=64,
    num_initial_blocks=0,
    num_local_blocks=1,
)
WIDE_BLOCKS = NSAConfig(
    compression_block_size=128,
    compression_stride=32,
    selection_block_size=128,
    num_selected_blocks=3,
    window_size=33,
)

# Lengths at which heads of ten dimensions have pairs that are kept, interpolated and between.
YARN = YarnScaling(4.0, 24, beta_fast=3.0, beta_slow=0.2)
LLAMA3 = Llama3Scaling(8.0, 0.25, 2.0, 24)

# Block-sparse attention alone, as in MSA, and other layers that an indexer selects for.
MSA: dict[str, Any] = dict(branches=("slc",), selector=IndexerConfig(dim=6))
WEIGHTED = dict(
    branches=("slc", "win"), selector=IndexerConfig(num_heads=2, dim=6, weighted=True, normalize=True)
)
INDEXED = dict(selector=IndexerConfig(num_heads=2, dim=4, shared_key=False, slow_pairs=True))
# Two selected blocks of choice, because a selection loss of one is 0.
TWO_FREE = dataclasses.replace(OVERLAPPING, num_local_blocks=1)

# Runs of (segment id, tokens): padding at either end and between, a sequence shorter than l, a single token.
SPARSE_AND_SHORT = ((0, 3), (7, 11), (2, 5), (0, 4), (9, 80), (1, 1))
PACKED = ((0, 3), (7, 61), (2, 5), (0, 4), (9, 83), (1, 1), (4, 40), (0, 6))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationCase:
    """The four operations and their gated sum on random operands. Shape letters as in `nsa_jax`."""

    name: str
    config: NSAConfig = OVERLAPPING
    batch: int = 2
    length: int = 203
    num_queries: int | None = None  # the last of the row; None: all
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    scale: float | None = None
    runs: tuple[tuple[int, int], ...] | None = None
    query_positions: tuple[int, ...] | None = None  # the same for every row
    ranges: str | None = None  # the pinned selection arrives as [start, end) token ranges in this layout
    tied: bool = False  # compressed keys are equal and products exact: sets must agree whatever the gap


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCase:
    """`NSAAttention` with its weights moved across."""

    name: str
    config: NSAConfig = OVERLAPPING
    batch: int = 2
    length: int = 107
    num_heads: int = 4
    num_kv_heads: int = 2
    in_features: int = 24
    head_dim: int = 10
    value_dim: int = 10
    compression: str = "mlp"
    use_bias: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more arguments of both layers
    own_parts: bool = False  # those of `parity.own_parts`
    runs: tuple[tuple[int, int], ...] | None = None
    taught: bool = False  # whether to compare its selection loss, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """`NSAAttention.prefill` of right-padded prompts, then `decode_step`, against recomputing each prefix."""

    name: str
    prompt_lengths: tuple[int, ...]
    num_steps: int
    layer: LayerCase
    chunk: int | None = None  # prefill in pieces of so many tokens


OPERATION_CASES = (
    OperationCase(name="plain"),
    OperationCase(name="packed", runs=PACKED),
    OperationCase(name="last_queries_of_the_row", num_queries=37, num_kv_heads=1),
    OperationCase(
        name="packed_query_positions",
        runs=PACKED,
        query_positions=(202, -1, 3, 63, 64, 72, 73, 0, 155, 156, 157, 196, 100, -1, 80, 95),
    ),
    OperationCase(name="ranges", ranges="BTKn2", length=150),
    OperationCase(name="ranges_of_one_row", ranges="TKn2", batch=1, length=75),
    OperationCase(name="ranges_for_all_kv_heads", ranges="BTn2", length=75),
    OperationCase(name="one_head_per_kv_head", num_kv_heads=4, length=150),
    OperationCase(name="sixteen_heads_per_kv_head", num_heads=16, num_kv_heads=1, length=150, batch=1),
    OperationCase(name="odd_dims", num_heads=6, num_kv_heads=2, key_dim=7, value_dim=5, scale=0.5),
    OperationCase(name="key_192_value_128", num_heads=8, key_dim=192, value_dim=128, length=130, batch=1),
    OperationCase(name="shorter_than_a_compression_block", length=5),
    OperationCase(name="shorter_than_the_window", length=19),
    OperationCase(name="one_query", num_queries=1),
    OperationCase(name="one_token", length=1),
    OperationCase(name="adjoining_blocks", config=ADJOINING),
    OperationCase(name="every_block_selected", config=EVERY_BLOCK, length=150),
    OperationCase(name="equal_keys", length=300, tied=True),
    OperationCase(name="paper_sizes", config=NSAConfig(), length=1300, batch=1, num_heads=2, num_kv_heads=1),
)
# Each way in which a kernel cuts heads and dims into tiles.
KERNEL_CASES = (
    OperationCase(
        name="kernel_paper", config=NSAConfig(), batch=1, length=1500, num_heads=32, num_kv_heads=2,
        key_dim=128, value_dim=128,
    ),
    OperationCase(
        name="kernel_paper_192_128", config=NSAConfig(), batch=1, length=1290, num_heads=16, num_kv_heads=1,
        key_dim=192, value_dim=128,
    ),
    OperationCase(
        name="kernel_packed", config=KERNEL_SIZED, length=500, num_heads=16, num_kv_heads=2, key_dim=64,
        value_dim=64, runs=((0, 3), (7, 161), (2, 5), (0, 14), (9, 200), (1, 1), (4, 100), (0, 16)),
    ),
    OperationCase(
        name="kernel_one_head", config=KERNEL_SIZED, length=333, num_heads=3, num_kv_heads=3, key_dim=64,
        value_dim=32,
    ),
    OperationCase(
        name="kernel_two_heads_dim_80", config=KERNEL_SIZED, length=290, num_heads=4, num_kv_heads=2,
        key_dim=80, value_dim=80,
    ),
    OperationCase(
        name="kernel_four_heads_dim_96", config=EQUAL_BLOCKS, length=401, num_heads=8, num_kv_heads=2,
        key_dim=96, value_dim=96,
    ),
    OperationCase(
        name="kernel_six_heads_dim_256", config=KERNEL_SIZED, length=260, num_heads=6, num_kv_heads=1,
        key_dim=256, value_dim=256,
    ),
    OperationCase(
        name="kernel_eight_heads", config=WIDE_BLOCKS, length=700, num_heads=16, num_kv_heads=2,
        key_dim=64, value_dim=128,
    ),
    OperationCase(
        name="kernel_thirty_two_heads", config=KERNEL_SIZED, length=300, batch=1, num_heads=32,
        num_kv_heads=1, key_dim=128, value_dim=128,
    ),
    OperationCase(
        name="kernel_last_queries", config=KERNEL_SIZED, length=411, num_queries=77, num_heads=16,
        num_kv_heads=1, key_dim=64, value_dim=64,
    ),
)  # fmt: skip
LAYER_CASES = (
    LayerCase(name="layer"),
    LayerCase(name="layer_mean", compression="mean"),
    LayerCase(name="layer_packed", length=104, runs=((0, 3), (7, 41), (2, 5), (0, 4), (9, 50), (1, 1))),
    LayerCase(
        name="layer_bias_odd_dims", num_heads=3, num_kv_heads=3, head_dim=7, value_dim=5, use_bias=True
    ),
    LayerCase(name="layer_shorter_than_a_block", length=5),
    LayerCase(name="layer_kernel_sized", config=KERNEL_SIZED, length=150, head_dim=32, value_dim=16),
    LayerCase(name="layer_yarn", options=dict(rope_base=100.0, rope_scaling=YARN)),
    LayerCase(
        name="layer_normed_packed",
        length=104,
        use_bias=True,
        options=dict(
            normalize_qk=True,
            norm_epsilon=0.1,
            out_bias=False,
            scale=0.4,
            rope_base=100.0,
            rope_scaling=LLAMA3,
        ),
        runs=SPARSE_AND_SHORT,
    ),
    LayerCase(name="layer_shared", options=dict(share_keys_values=True)),
    LayerCase(
        name="layer_shared_kernel_sized",
        config=KERNEL_SIZED,
        length=150,
        head_dim=32,
        value_dim=16,
        options=dict(share_keys_values=True),
    ),
    LayerCase(name="layer_own_parts_packed", length=104, own_parts=True, runs=SPARSE_AND_SHORT),
    LayerCase(
        name="layer_importance_packed", config=TWO_FREE, length=104, runs=SPARSE_AND_SHORT, taught=True
    ),
    LayerCase(name="layer_msa", config=TWO_FREE, options=MSA, taught=True),
    LayerCase(
        name="layer_weighted_packed",
        config=TWO_FREE,
        length=104,
        options=WEIGHTED,
        runs=SPARSE_AND_SHORT,
        taught=True,
    ),
    LayerCase(name="layer_indexed", config=TWO_FREE, options=INDEXED, taught=True),
)
DECODE_CASES = (
    DecodeCase(name="decode", prompt_lengths=(70, 33), num_steps=12, layer=LayerCase(name="")),
    DecodeCase(name="decode_from_one_token", prompt_lengths=(1, 3), num_steps=36, layer=LayerCase(name="")),
    DecodeCase(
        name="decode_mean_chunked",
        prompt_lengths=(50, 61),
        num_steps=6,
        chunk=7,
        layer=LayerCase(name="", compression="mean", value_dim=6),
    ),
    DecodeCase(
        name="decode_every_block",
        prompt_lengths=(31, 40),
        num_steps=20,
        layer=LayerCase(name="", config=EVERY_BLOCK),
    ),
    DecodeCase(
        name="decode_kernel_sized",
        prompt_lengths=(150, 31),
        num_steps=9,
        layer=LayerCase(name="", config=KERNEL_SIZED, head_dim=32, value_dim=16),
    ),
    DecodeCase(
        name="decode_normed",
        prompt_lengths=(70, 33),
        num_steps=12,
        layer=LayerCase(
            name="", options=dict(normalize_qk=True, scale=0.4, rope_base=100.0, rope_scaling=YARN)
        ),
    ),
    DecodeCase(
        name="decode_shared",
        prompt_lengths=(61, 5),
        num_steps=12,
        chunk=20,
        layer=LayerCase(name="", value_dim=6, options=dict(share_keys_values=True, normalize_qk=True)),
    ),
    DecodeCase(
        name="decode_shared_kernel_sized",
        prompt_lengths=(150, 31),
        num_steps=9,
        layer=LayerCase(
            name="", config=KERNEL_SIZED, head_dim=32, value_dim=16, options=dict(share_keys_values=True)
        ),
    ),
    DecodeCase(
        name="decode_own_parts",
        prompt_lengths=(61, 5),
        num_steps=12,
        layer=LayerCase(name="", own_parts=True),
    ),
    DecodeCase(
        name="decode_msa", prompt_lengths=(70, 33), num_steps=12, layer=LayerCase(name="", options=MSA)
    ),
    DecodeCase(
        name="decode_weighted",
        prompt_lengths=(61, 5),
        num_steps=12,
        chunk=40,
        layer=LayerCase(name="", options=WEIGHTED),
    ),
    DecodeCase(
        name="decode_msa_kernel_sized",
        prompt_lengths=(260, 31),
        num_steps=9,
        layer=LayerCase(
            name="",
            config=KERNEL_SIZED,
            head_dim=32,
            value_dim=16,
            options=MSA | dict(selector=IndexerConfig(dim=32)),
        ),
    ),
    DecodeCase(
        name="decode_indexed",
        prompt_lengths=(70, 33),
        num_steps=12,
        layer=LayerCase(name="", options=INDEXED),
    ),
)
type Case = OperationCase | LayerCase | DecodeCase

CASES: dict[str, Case] = {
    case.name: case for case in (*OPERATION_CASES, *KERNEL_CASES, *LAYER_CASES, *DECODE_CASES)
}


def described(case: Case) -> str:
    """What the case compares, in one line."""
    if isinstance(case, DecodeCase):
        layer, lengths = case.layer, " and ".join(map(str, case.prompt_lengths))
        chunks = f" in chunks of {case.chunk}" if case.chunk else ""
        return f"prefill of {lengths} tokens{chunks}, then {case.num_steps} decode steps; {_of_layer(layer)}"
    if isinstance(case, LayerCase):
        packed = ", packed" if case.runs else ""
        return f"a layer and its gradients, {case.batch} x {case.length} tokens{packed}; {_of_layer(case)}"
    notes = [
        f"{num_queries(case)} queries, {case.length} keys, batch {case.batch}",
        f"{case.num_heads} heads, {case.num_kv_heads} KV",
        f"dims {case.key_dim}/{case.value_dim}",
        *(["packed"] if case.runs else []),
        *(["explicit query positions"] if case.query_positions else []),
        *([f"selection as ranges {case.ranges}"] if case.ranges else []),
        *(["equal keys"] if case.tied else []),
        _of_blocks(case.config),
    ]
    return f"operations and their gradients: {', '.join(notes)}"


def _of_layer(case: LayerCase) -> str:
    options = dict(case.options)
    branches, selector = options.pop("branches", ("cmp", "slc", "win")), options.pop("selector", None)
    parts = "own parts" if case.own_parts else f"{case.compression} compression"
    notes = [
        f"{case.num_heads} heads, {case.num_kv_heads} KV",
        f"dims {case.head_dim}/{case.value_dim}",
        parts if "cmp" in branches else " + ".join(branches),
        *([f"an indexer of {selector.num_heads} x {selector.dim}"] if selector else []),
        *(["weighted"] if selector and selector.weighted else []),
        *(["biases"] if case.use_bias else []),
        *(["its selection loss"] if case.taught else []),
        *options,
        _of_blocks(case.config),
    ]
    return ", ".join(notes)


def _of_blocks(config: NSAConfig) -> str:
    sizes = (config.compression_block_size, config.compression_stride, config.selection_block_size)
    return "l/d/l'/n/w " + "/".join(map(str, (*sizes, config.num_selected_blocks, config.window_size)))


def random_generator(name: str) -> torch.Generator:
    """The same numbers for the same case, on every machine and device."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def draw(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Normal numbers, rounded to `dtype` once; both sides take these as exact."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def segment_rows(case: OperationCase | LayerCase, device: str) -> Tensor | None:
    """[B, S]: the runs of the case, each row starting with another one."""
    if case.runs is None:
        return None
    assert sum(tokens for _, tokens in case.runs) == case.length, case.name
    rows = []
    for row in range(case.batch):
        runs = case.runs[2 * row :] + case.runs[: 2 * row]
        rows.append([name for name, tokens in runs for _ in range(tokens)])
    return torch.tensor(rows, dtype=torch.int32, device=device)


def num_queries(case: OperationCase) -> int:
    """T."""
    if case.query_positions is not None:
        return len(case.query_positions)
    return case.length if case.num_queries is None else case.num_queries


def positions(case: OperationCase, device: str) -> Tensor | None:
    """[B, T] explicit query positions, None for the default."""
    if case.query_positions is None:
        return None
    return torch.tensor([case.query_positions] * case.batch, dtype=torch.int32, device=device)
