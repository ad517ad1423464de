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

# Of the selection loss that teaches an indexer, or the compressor of keys.
TARGETS: tuple[Any, ...] = ("dense", "selected")
LEARNS = "d_selector.", "d_compressor_key."


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
    scores = []
    for module in (twins.exact, twins.same):
        with torch.no_grad():
            scores.append(module.block_scores(x.to(module.query_proj.kernel.dtype), rows_ids))
    # Queries and keys are already rounded to the dtype of x when the scores are taken.
    eps = torch.finfo(x.dtype).eps
    return Selection.of(scores[0], scores[1], rows_ids, positions, config, eps=eps)


def torch_results(
    module: nsa_torch_ref.NSAAttention, x: Tensor, cotangent: Tensor, taught: bool, **where: Any
) -> dict[str, Tensor]:
    """Output and gradients by name, in the dtype of the module; if taught, also those of selection losses."""
    dtype = module.query_proj.kernel.dtype
    x = x.to(dtype).requires_grad_()
    leaves = {"x": x, **dict(module.named_parameters())}

    def gradients(of: Tensor, upstream: Tensor | None) -> dict[str, Tensor]:
        found = torch.autograd.grad(of, list(leaves.values()), upstream, materialize_grads=True)
        return {f"d_{name}": value for name, value in zip(leaves, found, strict=True)}

    out = module(x, **where)
    results = {"out": out.detach(), **gradients(out, cotangent.to(dtype))}
    for target in TARGETS if taught else ():
        _, loss = module(x, distil=target, **where)
        learns, others = split(gradients(loss, None))
        results |= named_loss(target, loss.detach(), learns, torch.cat(others))
    return results


def split(gradients: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Those of what a selection loss teaches by name, and all others, flat."""
    part = next(part for part in LEARNS if any(name.startswith(part) for name in gradients))
    learns = {name: value for name, value in gradients.items() if name.startswith(part)}
    return learns, [value.reshape(-1) for name, value in gradients.items() if name not in learns]


def named_loss(target: str, loss: Any, learns: dict[str, Any], others: Any) -> dict[str, Any]:
    """A selection loss and its gradients by name; those of what it does not teach are zero, in one."""
    gradients = learns | {"d_others": others}
    return {f"{target} loss": loss, **{f"{target} {name}": value for name, value in gradients.items()}}


def reordered_results(
    module: nsa_torch_ref.NSAAttention, x: Tensor, cotangent: Tensor, taught: bool, **where: Any
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
    results = torch_results(module, permute("x", x, order), permute("out", cotangent, order), taught, **where)
    return {name: permute(name.removeprefix("d_"), value, back) for name, value in results.items()}


def jax_results(
    graph: Any,
    taught: bool,
    parameters: nnx.State,
    rest: nnx.State,
    x: jax.Array,
    cotangent: jax.Array,
    block_indices: jax.Array,
    segment_ids: jax.Array | None,
) -> dict[str, jax.Array]:
    """The same by `nsa_jax`; "free out" and "blocks" are what it selects for itself."""

    def layer(parameters: nnx.State, x: jax.Array, **given: Any) -> Any:
        return nnx.merge(graph, parameters, rest)(x, segment_ids=segment_ids, **given)

    def named(d_parameters: nnx.State, d_x: jax.Array) -> dict[str, jax.Array]:
        of_parameters = {f"d_{name}": leaf.get_value() for name, leaf in by_path(d_parameters).items()}
        return {"d_x": d_x, **of_parameters}

    out, pull = jax.vjp(functools.partial(layer, block_indices=block_indices), parameters, x)
    results = {"out": out, **named(*pull(cotangent))}
    whole = nnx.merge(graph, parameters, rest)
    for target in TARGETS if taught else ():

        def loss_of(parameters: nnx.State, x: jax.Array, target: Any = target) -> jax.Array:
            return layer(parameters, x, block_indices=block_indices, distil=target)[1]

        loss, pulled = jax.value_and_grad(loss_of, argnums=(0, 1))(parameters, x)
        learns, others = split(named(*pulled))
        results |= named_loss(target, loss, learns, jnp.concatenate(others))
    blocks = whole.inspect(x, segment_ids=segment_ids).block_indices
    return results | {"free out": layer(parameters, x), "blocks": blocks}


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
    given = x, cotangent, case.taught
    expected, same = (torch_results(module, *given, **where) for module in (twins.exact, twins.same))
    reordered = reordered_results(twins.same, *given, **where)
    same = {name: farther(value, reordered[name], expected[name]) for name, value in same.items()}
    target = convert.jax_device(device)
    tensors = (x, cotangent, selection.block_indices.int(), segment_ids)
    arrays = jax.tree.map(functools.partial(convert.to_jax, device=target), tensors)
    graph, parameters, rest = cast(Any, nnx.split)(twins.jax, nnx.Param, ...)
    with jax.default_device(target):
        found = jax.jit(functools.partial(jax_results, graph, case.taught))(parameters, rest, *arrays)
    found = {name: convert.to_torch(value, device) for name, value in found.items()}

    rows = selection.judge(case.name, label, found.pop("blocks"))
    for side, free in ((expected, expected["out"]), (same, same["out"]), (found, found["free out"])):
        side["free out"] = selection.comparable(free)
    return rows + [
        judge(case.name, label, name, found[name], same[name], expected[name]) for name in expected
    ]
