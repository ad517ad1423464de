"""Parts that a user could bring: a rotary function, a compressor and a gate, in both frameworks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import Tensor

from nsa_jax.array_typing import DType

QUARTER_TURN = 0.25  # radians a token: exact in binary, so that angles are the same in both frameworks


def jax_rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns the first two dimensions and leaves the others: partial rotary."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    angle = QUARTER_TURN * positions[:, :, None].astype(wide.dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = wide[..., 0], wide[..., 1]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned, wide[..., 2:]], axis=-1).astype(x.dtype)


def torch_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """The twin of `jax_rotary`, as a complex product."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    angle = QUARTER_TURN * positions[:, :, None].to(wide.dtype)
    pairs = torch.view_as_complex(wide[..., :2].contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((torch.view_as_real(pairs), wide[..., 2:]), dim=-1).to(x.dtype)


class JaxCompressor(nnx.Module):
    """A weighted sum of the tokens of a block, by softmax weights for each dimension."""

    def __init__(self, head_dim, config, *, param_dtype, rngs):
        self.weights = nnx.Param(rngs.params.normal((config.compression_block_size, head_dim), param_dtype))

    def __call__(self, blocks: jax.Array) -> jax.Array:
        """[B, m, l, K, H] to [B, m, K, H]."""
        return (blocks * jax.nn.softmax(self.weights[...], axis=0)[:, None]).sum(axis=2)


class TorchCompressor(torch.nn.Module):
    """The twin of `JaxCompressor`."""

    def __init__(self, head_dim, config):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(config.compression_block_size, head_dim))

    def forward(self, blocks: Tensor) -> Tensor:
        """[B, m, l, K, H] to [B, m, K, H]."""
        return torch.einsum("bmlkh,lh->bmkh", blocks, self.weights.softmax(dim=0))


class JaxGate(nnx.Module):
    """Linear, with a softmax over the branches."""

    def __init__(self, in_features, num_heads, *, param_dtype, rngs):
        self.kernel_in = nnx.Param(rngs.params.normal((in_features, num_heads, 3), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, N, 3]."""
        return jax.nn.softmax(jnp.einsum("btd,dng->btng", x, self.kernel_in[...], precision="highest"))


class TorchGate(torch.nn.Module):
    """The twin of `JaxGate`."""

    def __init__(self, in_features, num_heads):
        super().__init__()
        self.kernel_in = torch.nn.Parameter(torch.randn(in_features, num_heads, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, N, 3]."""
        return torch.tensordot(x, self.kernel_in, dims=1).softmax(dim=-1)


TORCH: dict[str, Any] = dict(rotary=torch_rotary, compressor=TorchCompressor, gate=TorchGate)


def in_jax(param_dtype: DType) -> dict[str, Any]:
    """The twins of `TORCH`, with parameters of this dtype."""
    compressor, gate = (functools.partial(part, param_dtype=param_dtype) for part in (JaxCompressor, JaxGate))
    return dict(rotary=jax_rotary, compressor=compressor, gate=gate)
