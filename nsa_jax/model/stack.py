"""The layers of a forward pass, one after the other or, where neighbours are alike, as a scan over them.

A scan is traced and compiled as one layer. It needs the parameters of its layers in one array each, so a
program copies them first; the model keeps its list of layers, which decode steps want.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_typing import Array, Float, Float32, Int
from nsa_jax.model.layer import DecoderLayer
from nsa_jax.nn.distillation import Target
from nsa_jax.nn.parameters import by_path, listed
from nsa_jax.remat import SAVED_NAMES

# What the backward pass finds stored of a layer, by `TransformerConfig.remat`: only its input, or more.
_POLICIES = {True: None, "attention": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)}


class Step(NamedTuple):
    """A layer, and what it is given beside the residual stream; the losses that it gives are added up."""

    layer: DecoderLayer
    block_indices: Int[Array, "B T K R"] | None
    distil: Target | None


def run_layers(
    steps: Sequence[Step],
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"] | None,
    segment_ids: Int[Array, "B T"] | None,
    *,
    remat: Any,
    scan: bool,
) -> tuple[Float[Array, "B T D"], list[Float32[Array, "..."]]]:
    """Applies the layers; returns what comes out of the last one, and the selection losses."""
    losses = list[Array]()
    for _, alike in itertools.groupby(steps, key=_structure) if scan else ((None, [step]) for step in steps):
        group = list(alike)
        run = functools.partial(_run, positions, segment_ids, group[0].distil)
        if len(group) > 1:
            x, loss = _scanned(run, group, x, remat)
        else:
            run = nnx.remat(run, policy=_POLICIES[remat]) if remat else run
            x, loss = run(group[0].layer, x, group[0].block_indices)
        losses += [] if loss is None else [loss]
    return x, losses


def _run(positions: Any, segment_ids: Any, distil: Target | None, layer: Any, x: Array, blocks: Any) -> Any:
    return layer(x, positions, segment_ids, blocks, distil=distil)


def _scanned(run: Any, group: Sequence[Step], x: Array, remat: Any) -> tuple[Array, Array | None]:
    """`run` for each layer of the group, whose losses are stacked."""
    graph, states = nnx.graphdef(group[0].layer), [nnx.state(step.layer) for step in group]
    inputs = states, [step.block_indices for step in group]
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *zip(*inputs, strict=True))

    def of_layer(x: Array, given: Any) -> tuple[Array, Array | None]:
        state, blocks = given
        layer = nnx.merge(graph, state)
        held = _variables(layer)
        found = run(layer, x, blocks)
        _check_unchanged(held, _variables(layer))
        return found

    if remat:  # a scan keeps XLA from undoing it, so that nothing else has to
        of_layer = jax.checkpoint(of_layer, policy=_POLICIES[remat], prevent_cse=False)
    return jax.lax.scan(of_layer, x, stacked)


def _variables(layer: DecoderLayer) -> dict[str, Any]:
    """The values of all variables but parameters, by their paths."""
    named = by_path(nnx.state(layer, nnx.Not(nnx.Param)))
    return {name: variable.get_value() for name, variable in named.items()}


def _check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if a variable was added or set: a scan would lose it."""
    changed = [name for name, value in after.items() if value is not before.get(name)]
    if changed:
        raise NotImplementedError(
            f"layers that are scanned must not change their variables, got new values of {listed(changed)}. "
            "Leave scan_layers out, or call eval() of what changes them."
        )


def _structure(step: Step) -> Any:
    """What layers that are scanned together have in common."""
    graph, state = nnx.split(step.layer)
    blocks = None if step.block_indices is None else step.block_indices.shape
    return graph, [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)], blocks
