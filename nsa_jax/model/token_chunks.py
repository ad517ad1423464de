"""Logits of a chunk of tokens at a time, for losses that never hold those of all tokens.

A chunk is every `chunks`-th token of all rows, not consecutive ones: so tokens that are spread over devices
stay where they are, and all devices have a share of each chunk. On explicit axes of a mesh each device takes
its own tokens and its own columns of the vocabulary, and the gradient of a kernel is added up over the
devices once. On auto axes XLA adds it up in each chunk.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nsa_jax.array_typing import Array, Float
from nsa_jax.sharding.manual import varying_alike

# Logits that exist at a time on a device: 512 MiB in float32. Each chunk also reads and writes the gradient
# of the kernel, so few are better than many.
LOGITS_AT_ONCE = 2**27


def on_devices(
    run: Callable[[Sequence[Array], Sequence[Array], tuple[str, ...]], Float[Array, "B T"]],
    tokens: Sequence[Array],
    kernels: Sequence[Float[Array, "_ vocab"]],
) -> Float[Array, "B T"]:
    """`run(tokens, kernels, axes)`, on explicit axes of a mesh by each device for what it holds.

    Args:
      run: its `axes` are those of the mesh that divide the columns of the kernels.
      tokens: arrays `[B, T, ...]`; all are divided as the first one is.
      kernels: output projections, divided as the first one is.
    """
    mesh, (rows, of_row, *_) = jax.typeof(tokens[0]).sharding.mesh, jax.typeof(tokens[0]).sharding.spec
    if not mesh.explicit_axes:
        return run(tokens, kernels, ())
    columns = jax.typeof(kernels[0]).sharding.spec[1]
    axes = columns if isinstance(columns, tuple) else () if columns is None else (columns,)
    by_token = PartitionSpec(rows, of_row)
    specs = (
        [PartitionSpec(*by_token, *(None,) * (each.ndim - 2)) for each in tokens],
        [PartitionSpec(None, columns) for _ in kernels],
    )
    given = jax.tree.map(
        lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec)), ([*tokens], [*kernels]), specs
    )

    def of_device(*given: list[Array]) -> Array:
        tokens, kernels = varying_alike(given)
        return run(tokens, kernels, axes)

    return jax.shard_map(
        of_device, mesh=mesh, in_specs=specs, out_specs=by_token, axis_names=set(mesh.explicit_axes)
    )(*given)


def logits(x: Float[Array, "B t D"], kernel: Float[Array, "D vocab"]) -> Float[Array, "B t vocab"]:
    """The logits of a chunk."""
    return product("btd,dv->btv", x, kernel)


def log_sum_exp(of: Float[Array, "B t vocab"], axes: tuple[str, ...]) -> Float[Array, "B t"]:
    """That of logits whose columns are divided over these axes."""
    most = jax.lax.pmax(of.max(-1), axes) if axes else of.max(-1)
    return jnp.log(summed(jnp.exp(of - most[..., None]), axes)) + most


def summed(of: Float[Array, "B t vocab"], axes: tuple[str, ...]) -> Float[Array, "B t"]:
    """The sum over all columns, which are divided over these axes."""
    return jax.lax.psum(of.sum(-1), axes) if axes else of.sum(-1)


def product(subscripts: str, left: Array, right: Array) -> Array:
    """An `einsum` whose sums and result are float32, or float64 for float64."""
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(subscripts, left, right, preferred_element_type=wide)


def num_chunks(x: Float[Array, "B T D"], *kernels: Float[Array, "_ vocab"]) -> int:
    """Into how many chunks the tokens are divided: few, but with few logits in each."""
    a_token = x.shape[0] * sum(kernel.shape[1] for kernel in kernels)
    at_once = max(LOGITS_AT_ONCE // max(a_token, 1), 1)
    return max(-(-x.shape[1] // at_once), 1)


def cut(x: Array, chunks: int) -> Array:
    """`[B, T, ...]` as `[chunks, B, t, ...]`: chunk `c` has the tokens `c`, `c + chunks`, and so on."""
    tokens = -(-x.shape[1] // chunks)
    widths = (0, 0), (0, chunks * tokens - x.shape[1]), *((0, 0),) * (x.ndim - 2)
    x = jnp.pad(x, widths)
    return jnp.moveaxis(x.reshape(x.shape[0], tokens, chunks, *x.shape[2:]), 2, 0)


def joined(x: Array, length: int) -> Array:
    """The tokens of all chunks in their order, `[B, T, ...]`, without what filled the chunks up."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]
