"""`NSAAttention.prefill` and `decode_step` against a PyTorch layer that recomputes every prefix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import Tensor

from nsa_jax import nn
from parity import cases, convert, layers
from parity.budget import Row, judge


def torch_rows(module: torch.nn.Module, x: Tensor, case: cases.DecodeCase) -> tuple[Tensor, Tensor]:
    """Outputs at the prompts' tokens and at the decoded ones, row after row: [sum, D] each."""
    x = x.to(module.query_proj.kernel.dtype)
    prompts, steps = [], []
    with torch.no_grad():
        for row, length in enumerate(case.prompt_lengths):
            prompts.append(module(x[row : row + 1, :length])[0])
            steps.append(module.decode(x[row : row + 1, : length + case.num_steps], length)[0])
    return torch.cat(prompts), torch.cat(steps)


def jax_rows(
    layer: nn.NSAAttention, x: jax.Array, lengths: jax.Array, *, case: cases.DecodeCase
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`prefill` in chunks, `decode_step` in a scan: [B, prompt, D], [B, steps, D] and the cache's lengths."""
    padded = max(case.prompt_lengths)
    chunk = padded if case.chunk is None else case.chunk
    cache = layer.init_cache(x.shape[0], padded + case.num_steps)
    prompts = []
    for start in range(0, padded, chunk):
        piece = x[:, start : min(start + chunk, padded)]
        num_tokens = jnp.clip(lengths - start, 0, piece.shape[1])
        out, cache = layer.prefill(piece, cache, num_tokens=num_tokens)
        prompts.append(out)

    graph, state = nnx.split(layer)
    places = lengths[:, None] + jnp.arange(case.num_steps)
    tokens = jnp.take_along_axis(x, places[:, :, None], axis=1)

    def step(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        out, cache = nnx.merge(graph, state).decode_step(token[:, None], cache)
        return cache, out[:, 0]

    cache, steps = jax.lax.scan(step, cache, tokens.swapaxes(0, 1))
    return jnp.concatenate(prompts, axis=1), steps.swapaxes(0, 1), cache.lengths


def compare(case: cases.DecodeCase, dtype: torch.dtype, device: str, implementation: str | None) -> list[Row]:
    """Outputs of the prompts and of the steps, where every selection of the query is determined."""
    label = str(dtype).removeprefix("torch.")
    twins = layers.build(case.layer, dtype, device, implementation)
    ends = [length + case.num_steps for length in case.prompt_lengths]
    shape = (len(ends), max(ends), case.layer.in_features)
    x = cases.draw(cases.random_generator(case.name), shape, dtype, device)

    expected, same = (torch_rows(module, x, case) for module in (twins.exact, twins.same))
    target = convert.jax_device(device)
    lengths = torch.tensor(case.prompt_lengths, dtype=torch.int32, device=device)
    arrays = (convert.to_jax(tensor, target) for tensor in (x, lengths))
    with jax.default_device(target):
        found = nnx.jit(functools.partial(jax_rows, case=case))(twins.jax, *arrays)
    prompts, steps, final = (convert.to_torch(each, device) for each in found)

    prompts = torch.cat([prompts[row, :length] for row, length in enumerate(case.prompt_lengths)])
    steps = steps.flatten(0, 1)
    determined = layers.selection_of(twins, x, None).determined.all(dim=-1)
    rows = []
    decoded = list(zip(case.prompt_lengths, ends, strict=True))
    prefilled = [(0, length) for length in case.prompt_lengths]
    for part, (quantity, spans) in enumerate({"prefill out": prefilled, "decode out": decoded}.items()):
        keep = torch.cat([determined[row, slice(*span)] for row, span in enumerate(spans)])
        kept = ((prompts, steps)[part][keep], same[part][keep], expected[part][keep])
        rows.append(judge(case.name, label, quantity, *kept))
        open_tokens = (~keep).sum().item()
        rows.append(Row(case.name, label, f"{quantity}, undetermined tokens", open_tokens, keep.numel() / 2))
    wrong = sum(end != length for end, length in zip(ends, final.tolist(), strict=True))
    return [*rows, Row(case.name, label, "cache lengths", wrong, 0)]
