"""The operations on random operands: `nsa_jax.attention` (or its oracle) beside `nsa_torch_ref`."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

import nsa_torch_ref
from nsa_jax import attention, reference
from nsa_jax.convert import block_indices_from_ranges
from nsa_torch_ref import masks
from nsa_torch_ref.attention import place_queries
from parity import cases, convert
from parity.blocks import Selection
from parity.budget import Row, judge, largest
from parity.ranges import draw_ranges

OPERANDS = ("query", "key_cmp", "value_cmp", "key_slc", "value_slc", "key_win", "value_win", "gates")
BRANCHES = {"cmp": "compressed_attention", "slc": "selected_attention", "win": "window_attention"}


def candidate(implementation: str | None) -> types.SimpleNamespace:
    """The operations under test: the oracle for "reference", otherwise what the dispatch gives."""
    names = (*BRANCHES.values(), "select_blocks", "native_sparse_attention")
    if implementation == "reference":
        return types.SimpleNamespace(**{name: getattr(reference, name) for name in names})
    bind = functools.partial(functools.partial, implementation=implementation)
    return types.SimpleNamespace(**{name: bind(getattr(attention, name)) for name in names})


def draw_operands(case: cases.OperationCase, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Operands by name, in the order of `native_sparse_attention`.

    Queries are doubled, which sharpens the softmax and spreads the scores.
    """
    generator = cases.random_generator(case.name)
    queries, heads, kv_heads = cases.num_queries(case), case.num_heads, case.num_kv_heads
    lengths = dict(
        cmp=masks.num_compression_blocks(case.length, cast(Any, case.config)),
        slc=case.length,
        win=case.length,
    )
    shapes = {"query": (queries, heads, case.key_dim)}
    for branch, length in lengths.items():
        shapes[f"key_{branch}"] = (length, kv_heads, case.key_dim)
        shapes[f"value_{branch}"] = (length, kv_heads, case.value_dim)
    shapes["gates"] = (queries, heads, 3)
    operands = {
        name: cases.draw(generator, (case.batch, *shape), dtype, device) for name, shape in shapes.items()
    }
    operands["query"] = 2 * operands["query"]
    if case.tied:
        operands["query"] = operands["query"].round()
        operands["key_cmp"] = torch.ones_like(operands["key_cmp"])
    return operands


def draw_cotangents(case: cases.OperationCase, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """A random cotangent for each differentiated output."""
    generator = cases.random_generator(case.name + " cotangents")
    shape = (case.batch, cases.num_queries(case), case.num_heads)
    outputs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        f"{name} out": ((*shape, case.value_dim), dtype) for name in (*BRANCHES, "pinned")
    }
    outputs |= {f"{name} lse": (shape, torch.float32) for name in BRANCHES}
    return {name: cases.draw(generator, *drawn, device) for name, drawn in outputs.items()}


def torch_results(
    operands: dict[str, Tensor],
    pinned: Tensor,
    chosen: Tensor,
    cotangents: dict[str, Tensor],
    where: dict[str, Any],
) -> dict[str, Tensor]:
    """Outputs and gradients by name, in the operands' dtype; "free out" has the blocks `chosen` by score."""
    operands = {name: operand.detach().requires_grad_() for name, operand in operands.items()}
    results: dict[str, Tensor] = {}

    def record(name: str, outputs: dict[str, Tensor], inputs: tuple[str, ...]) -> None:
        results.update({f"{name} {output}": value.detach() for output, value in outputs.items()})
        upstream = [cotangents[f"{name} {output}"].to(value.dtype) for output, value in outputs.items()]
        leaves = [operands[each] for each in inputs]
        gradients = torch.autograd.grad(list(outputs.values()), leaves, upstream, materialize_grads=True)
        results.update({f"{name} d_{each}": value for each, value in zip(inputs, gradients, strict=True)})

    for branch, function in BRANCHES.items():
        inputs = ("query", f"key_{branch}", f"value_{branch}")
        more = (pinned,) if branch == "slc" else ()
        out, lse = getattr(nsa_torch_ref, function)(*(operands[each] for each in inputs), *more, **where)
        record(branch, {"out": out, "lse": lse}, inputs)
    whole = functools.partial(nsa_torch_ref.native_sparse_attention, *operands.values(), **where)
    record("pinned", {"out": whole(block_indices=pinned)}, OPERANDS)
    results["free out"] = whole(block_indices=chosen).detach()
    return results


def jax_results(
    functions: types.SimpleNamespace,
    operands: dict[str, jax.Array],
    block_indices: jax.Array,
    cotangents: dict[str, jax.Array],
    query_positions: jax.Array | None,
    segment_ids: jax.Array | None,
    **where: Any,
) -> dict[str, jax.Array]:
    """The same by `nsa_jax`; "free out" and "blocks" are what it selects for itself."""
    where["segment_ids"] = segment_ids
    results: dict[str, jax.Array] = {}

    def record(name: str, outputs: tuple[str, ...], function: Callable[..., Any], inputs: tuple[str, ...]):
        values, pull = jax.vjp(function, *(operands[each] for each in inputs))
        leaves, tree = jax.tree.flatten(values)
        named = {f"{name} {output}": value for output, value in zip(outputs, leaves, strict=True)}
        upstream = [cotangents[each].astype(value.dtype) for each, value in named.items()]
        gradients = pull(jax.tree.unflatten(tree, upstream))
        results.update(named, **{f"{name} d_{each}": x for each, x in zip(inputs, gradients, strict=True)})

    # Alone, the compressed branch cannot tell how long the row is: say so where queries are a part of it.
    alone = dict(where, query_positions=query_positions)
    length, queries = operands["key_slc"].shape[1], operands["query"].shape[1]
    if query_positions is None and queries != length:
        last = jnp.arange(length - queries, length, dtype=jnp.int32)
        alone["query_positions"] = jnp.broadcast_to(last, operands["query"].shape[:2])
    for branch, function in BRANCHES.items():
        operation = functools.partial(getattr(functions, function), **alone)
        if branch == "slc":
            operation = functools.partial(operation, block_indices=block_indices)
        record(branch, ("out", "lse"), operation, ("query", f"key_{branch}", f"value_{branch}"))
    whole = functools.partial(functions.native_sparse_attention, query_positions=query_positions, **where)
    record("pinned", ("out",), functools.partial(whole, block_indices=block_indices), OPERANDS)
    results["free out"] = whole(*(operands[name] for name in OPERANDS))
    results["blocks"] = functions.select_blocks(operands["query"], operands["key_cmp"], **alone)
    return results


def compare(
    case: cases.OperationCase, dtype: torch.dtype, device: str, implementation: str | None
) -> list[Row]:
    """All rows of a case: each branch alone, the whole with a pinned selection, the whole that selects.

    The free output is compared where the selection is determined in every KV head.
    """
    label = str(dtype).removeprefix("torch.")
    operands = draw_operands(case, dtype, device)
    exact = {name: operand.double() for name, operand in operands.items()}
    cotangents = draw_cotangents(case, dtype, device)
    segment_ids, query_positions = cases.segment_rows(case, device), cases.positions(case, device)
    rows_ids, rows_positions = place_queries(operands["query"], case.length, segment_ids, query_positions)
    static: dict[str, Any] = dict(config=case.config, scale=case.scale)
    where = dict(static, segment_ids=rows_ids, query_positions=rows_positions)

    scores, same_scores = (
        nsa_torch_ref.importance_scores(each["query"], each["key_cmp"], **where) for each in (exact, operands)
    )
    selection = Selection.of(scores, same_scores, rows_ids, rows_positions, case.config)
    if case.tied:
        selection = dataclasses.replace(selection, determined=torch.ones_like(selection.determined))
    pinned, pinned_for_jax, rows = selection.block_indices, selection.block_indices.int(), []
    if case.ranges is not None:
        ranges, pinned = draw_ranges(case)
        pinned = pinned.to(device)
        pinned_for_jax = convert.to_torch(converted(case, ranges), device)
        wrong = (pinned_for_jax != pinned).any(dim=-1).sum().item()
        rows.append(Row(case.name, label, "blocks from ranges", wrong, 0))
    expected = torch_results(exact, pinned, selection.block_indices, cotangents, where)
    same = torch_results(operands, pinned, selection.block_indices, cotangents, where)

    target = convert.jax_device(device)
    arguments = jax.tree.map(
        functools.partial(convert.to_jax, device=target),
        (operands, pinned_for_jax, cotangents, query_positions, segment_ids),
    )
    with jax.default_device(target):
        found = jax.jit(functools.partial(jax_results, candidate(implementation), **static))(*arguments)
    found = {name: convert.to_torch(value, device) for name, value in found.items()}

    rows += selection.judge(case.name, label, found.pop("blocks"))
    for results in (expected, same, found):
        results["free out"] = selection.comparable(results["free out"])
    terms = cancelling_terms(case, exact, cotangents)
    for name in expected:
        rows.append(
            judge(case.name, label, name, found[name], same[name], expected[name], terms.get(name, 0.0))
        )
    return rows


def converted(case: cases.OperationCase, ranges: Tensor) -> jax.Array:
    """Block indices of ranges by the converter of `nsa_jax`."""
    return block_indices_from_ranges(
        convert.to_jax(ranges),
        layout=cast(Any, case.ranges),
        config=case.config,
        num_kv_heads=case.num_kv_heads if case.ranges == "BTn2" else None,
    )


def cancelling_terms(
    case: cases.OperationCase, operands: dict[str, Tensor], cotangents: dict[str, Tensor]
) -> dict[str, float]:
    """The size of what cancels in the gradients through a branch in which no query sees more than one key.

    A softmax over one key is constant. The gradients of its query and key are differences of equal terms
    `cotangent . value`, times a key or a query: what remains of them is the rounding of those terms.
    """
    most_seen = dict(
        cmp=operands["key_cmp"].shape[1], slc=case.length, win=min(case.config.window_size, case.length)
    )
    scale = case.key_dim**-0.5 if case.scale is None else case.scale
    terms = {}
    for name in (*BRANCHES, "pinned"):
        gate = largest(operands["gates"]) if name == "pinned" else 1.0
        branches = tuple(BRANCHES) if name == "pinned" else (name,)
        equal = {
            branch: scale * gate * largest(cotangents[f"{name} out"]) * largest(operands[f"value_{branch}"])
            for branch in branches
            if most_seen[branch] <= 1
        }
        for branch, term in equal.items():
            terms[f"{name} d_key_{branch}"] = case.value_dim * term * largest(operands["query"])
        if len(equal) == len(branches):
            largest_term = max(term * largest(operands[f"key_{branch}"]) for branch, term in equal.items())
            terms[f"{name} d_query"] = case.value_dim * largest_term
    return terms
