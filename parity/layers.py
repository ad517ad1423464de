"""`nsa_jax.nn.NSAAttention` with the weights of its PyTorch twin: outputs, gradients, block sets."""

import copy
import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import Tensor

import nsa_torch_ref
from nsa_jax import nn
from nsa_jax.nn.parameters import by_path
from nsa_torch_ref.attention import place_queries
from parity import cases, convert, own_parts
from parity.blocks import Selection
from parity.budget import Row, farther, judge


@dataclasses.dataclass(frozen=True)
class Twins:
    """One layer three times: PyTorch in float64 and in the case's dtype, JAX in that dtype, equal weights."""

    exact: nsa_torch_ref.NSAAttention
    same: nsa_torch_ref.NSAAttention
    jax: nn.NSAAttention


def build(case: cases.LayerCase, dtype: torch.dtype, device: str, implementation: str | None) -> Twins:
    """Random twins. All parameters are drawn, also those that a new layer sets to zero."""
    generator = cases.random_generator(case.name)
    arguments: dict[str, Any] = dict(
        num_heads=case.num_heads,
        in_features=case.in_features,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        value_dim=case.value_dim,
        config=case.config,
        compression=case.compression,
        use_bias=case.use_bias,
        **case.options,
    )
    param_dtype = jnp.dtype(str(dtype).removeprefix("torch."))
    torch_parts: dict[str, Any] = own_parts.TORCH if case.own_parts else {}
    jax_parts: dict[str, Any] = own_parts.in_jax(param_dtype) if case.own_parts else {}
    same = nsa_torch_ref.NSAAttention(**arguments, **torch_parts).to(device)
    for name, parameter in same.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        drawn *= parameter.shape[0] ** -0.5 if "kernel" in name else 0.5
        drawn += 1 if name.endswith("_norm.scale") else 0
        # Large queries spread the scores, as doubled queries do in `operations`.
        drawn *= 3 if name in ("query_proj.kernel", "query_norm.scale") else 1
        parameter.data = drawn.to(dtype).to(device)
    twin = nnx.eval_shape(
        lambda: nn.NSAAttention(
            **arguments,
            **jax_parts,
            param_dtype=param_dtype,
            precision="highest",
            implementation=cast(Any, implementation),
            rngs=nnx.Rngs(0),
        )
    )
    with jax.default_device(convert.jax_device(device)):
        nn.load_weights(twin, convert.weights_of(same))
    return Twins(copy.deepcopy(same).double(), same, twin)


def selection_of(twins: Twins, x: Tensor, segment_ids: Tensor | None) -> Selection:
    """What the reference layer selects for x [B, T, D], and where that is determined."""
    config = twins.exact.config
    rows_ids, positions = place_queries(x, x.shape[1], segment_ids, None)
    scale = twins.exact.scale
    where = dict(config=config, segment_ids=rows_ids, query_positions=positions, scale=scale)
    scores = []
    for module in (twins.exact, twins.same):
        with torch.no_grad():
            operands = module.operands(x.to(module.query_proj.kernel.dtype), rows_ids)
            scores.append(nsa_torch_ref.importance_scores(*operands[:2], **where))
    # Queries and keys are already rounded to the dtype of x when the scores are taken.
    eps = torch.finfo(x.dtype).eps
    return Selection.of(scores[0], scores[1], rows_ids, positions, config, eps=eps)


def torch_results(
    module: nsa_torch_ref.NSAAttention, x: Tensor, cotangent: Tensor, **where: Any
) -> dict[str, Tensor]:
    """Output and gradients by name, in the dtype of the module."""
    dtype = module.query_proj.kernel.dtype
    x = x.to(dtype).requires_grad_()
    out = module(x, **where)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, [x, *parameters], cotangent.to(dtype), materialize_grads=True)
    named = {f"d_{name}": value for name, value in zip(("x", *names), gradients, strict=True)}
    return {"out": out.detach(), **named}


def reordered_results(
    module: nsa_torch_ref.NSAAttention, x: Tensor, cotangent: Tensor, **where: Any
) -> dict[str, Tensor]:
    """`torch_results` with the model width in another order, so that projections sum in another order."""
    order = torch.arange(x.shape[-1], device=x.device).flip(0).roll(x.shape[-1] // 3)
    back = order.argsort()

    def permute(name: str, value: Tensor, by: Tensor) -> Tensor:
        if name in ("x", "out") or name.startswith("out_proj"):
            return value.index_select(-1, by)
        return (
            value.index_select(0, by) if name.endswith("_proj.kernel") or name == "gate.kernel_in" else value
        )

    module = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        parameter.data = permute(name, parameter.data, order)
    results = torch_results(module, permute("x", x, order), permute("out", cotangent, order), **where)
    return {name: permute(name.removeprefix("d_"), value, back) for name, value in results.items()}


def jax_results(
    graph: Any,
    parameters: nnx.State,
    rest: nnx.State,
    x: jax.Array,
    cotangent: jax.Array,
    block_indices: jax.Array,
    segment_ids: jax.Array | None,
) -> dict[str, jax.Array]:
    """The same by `nsa_jax`; "free out" and "blocks" are what it selects for itself."""

    def layer(parameters: nnx.State, x: jax.Array, **pinned: jax.Array) -> jax.Array:
        return nnx.merge(graph, parameters, rest)(x, segment_ids=segment_ids, **pinned)

    out, pull = jax.vjp(functools.partial(layer, block_indices=block_indices), parameters, x)
    d_parameters, d_x = pull(cotangent)
    gradients = {f"d_{name}": leaf.get_value() for name, leaf in by_path(d_parameters).items()}
    blocks = nnx.merge(graph, parameters, rest).inspect(x, segment_ids=segment_ids).block_indices
    return {"out": out, "d_x": d_x, **gradients, "free out": layer(parameters, x), "blocks": blocks}


def compare(case: cases.LayerCase, dtype: torch.dtype, device: str, implementation: str | None) -> list[Row]:
    """All rows of one case: the layer with a pinned selection, and its output where it selects for itself."""
    label = str(dtype).removeprefix("torch.")
    twins = build(case, dtype, device, implementation)
    generator = cases.random_generator(case.name + " data")
    shape = (case.batch, case.length, case.in_features)
    x, cotangent = (cases.draw(generator, shape, dtype, device) for _ in range(2))
    segment_ids = cases.segment_rows(case, device)
    selection = selection_of(twins, x, segment_ids)

    where = dict(segment_ids=segment_ids, block_indices=selection.block_indices)
    expected, same = (torch_results(module, x, cotangent, **where) for module in (twins.exact, twins.same))
    reordered = reordered_results(twins.same, x, cotangent, **where)
    same = {name: farther(value, reordered[name], expected[name]) for name, value in same.items()}
    target = convert.jax_device(device)
    tensors = (x, cotangent, selection.block_indices.int(), segment_ids)
    arrays = jax.tree.map(functools.partial(convert.to_jax, device=target), tensors)
    graph, parameters, rest = cast(Any, nnx.split)(twins.jax, nnx.Param, ...)
    with jax.default_device(target):
        found = jax.jit(functools.partial(jax_results, graph))(parameters, rest, *arrays)
    found = {name: convert.to_torch(value, device) for name, value in found.items()}

    rows = selection.judge(case.name, label, found.pop("blocks"))
    for side, free in ((expected, expected["out"]), (same, same["out"]), (found, found["free out"])):
        side["free out"] = selection.comparable(free)
    return rows + [
        judge(case.name, label, name, found[name], same[name], expected[name]) for name in expected
    ]
