"""How a trained model recalls: which blocks it selects, how neighbours share them, which branch does it."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import inputs
from examples.recall.task import Batch, RecallTask
from examples.recall.training import SCORED_TOGETHER, score
from nsa_jax.array_typing import Array, Int
from nsa_jax.config import NSAConfig
from nsa_jax.model import Transformer

BRANCHES = ("cmp", "slc", "win")  # the order of the gates
CLOSED = -1e9  # the sigmoid of it is exactly 0

# The benchmarks measure with the paper's sizes; this is one of their lengths.
BENCHMARK_LENGTH = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """How much neighbouring tokens share their blocks, as the benchmarks define it.

    Attributes:
      selection: whose blocks.
      num_selected_blocks: `n`, which bounds the union of 4 tokens by `4 n`.
      adjacent_share: mean share of a token's blocks that the token before it selected too.
      mean_union_4: mean number of different blocks of 4 adjacent tokens.
    """

    selection: str
    num_selected_blocks: int
    adjacent_share: float
    mean_union_4: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a trained model does.

    Attributes:
      answer_block_selected: of the queries, the share whose value lies in a selected block, per layer.
      accuracy_without: accuracy with one branch gated off in all layers.
      sharing: sharing of each layer, and of the selections that the benchmarks draw.
    """

    answer_block_selected: list[float]
    accuracy_without: dict[str, float]
    sharing: list[Sharing]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Inspection":
        """Undoes `dataclasses.asdict`."""
        return cls(**(found | {"sharing": [Sharing(**one) for one in found["sharing"]]}))


def inspect(model: Transformer, task: RecallTask, batches: list[Batch]) -> Inspection:
    """Inspects a model on held-out sequences; selections on the first batch alone."""
    nsa, batch = model.config.nsa, batches[0]
    layers = _selected_blocks(*nnx.split(model), batch.tokens)
    return Inspection(
        answer_block_selected=[answer_block_selected(blocks, batch, nsa) for blocks in layers],
        accuracy_without={branch: score(without(model, branch), batches).accuracy for branch in BRANCHES},
        sharing=[
            *(_sharing(f"trained, layer {i}", blocks, nsa) for i, blocks in enumerate(layers, 1)),
            *drawn_sharing(task, nsa, model.config.num_kv_heads),
        ],
    )


def answer_block_selected(block_indices: Int[Array, "B T K R"], batch: Batch, nsa: NSAConfig) -> float:
    """Share of the queries one of whose KV heads selects the block of the value."""
    block = batch.sources // nsa.selection_block_size
    selected = (np.asarray(block_indices) == block[:, :, None, None]).any(axis=(2, 3))
    return float(selected[batch.sources >= 0].mean())


def without(model: Transformer, branch: str) -> Transformer:
    """A copy of the model that never opens the gate of `branch`; what it selects stays as it was."""
    model = nnx.clone(model)
    for layer in model.layers:
        bias = layer.attention.gate.bias_out
        bias.set_value(bias.get_value().at[:, BRANCHES.index(branch)].set(CLOSED))
    return model


def drawn_sharing(task: RecallTask, nsa: NSAConfig, num_kv_heads: int) -> list[Sharing]:
    """What the benchmarks call random, in this task's sizes and in theirs, and coherent, in theirs."""
    here = inputs.Shape(batch=SCORED_TOGETHER, length=task.length, kv_heads=num_kv_heads, config=nsa)
    there = inputs.Shape(length=BENCHMARK_LENGTH)
    named = f"benchmarks' {{}}, T = {BENCHMARK_LENGTH}".format
    return [
        _sharing("random", inputs.draw_blocks(here, "random").block_indices, nsa),
        *(
            _sharing(named(name), inputs.draw_blocks(there, name).block_indices, there.config)
            for name in inputs.DISTRIBUTIONS
        ),
    ]


def _sharing(selection: str, block_indices: Int[Array, "B T K R"] | None, nsa: NSAConfig) -> Sharing:
    assert block_indices is not None
    measured = dataclasses.asdict(inputs.overlap(block_indices))
    return Sharing(selection=selection, num_selected_blocks=nsa.num_selected_blocks, **measured)


@functools.partial(jax.jit, static_argnames="graph")
def _selected_blocks(graph, state, tokens):
    return [selection.block_indices for selection in nnx.merge(graph, state).inspect(tokens)]
