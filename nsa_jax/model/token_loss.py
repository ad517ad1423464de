"""The loss of next tokens, computed for a chunk of tokens at a time: never are there logits of all tokens.

The forward pass keeps one number a token, the log-sum-exp of its logits; the backward pass computes the
logits of a chunk again.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nsa_jax.array_checks import check_arrays, check_values
from nsa_jax.array_typing import Array, Float, Int, Int32
from nsa_jax.model.token_chunks import (
    cut,
    joined,
    log_sum_exp,
    logits,
    num_chunks,
    on_devices,
    product,
    summed,
)
from nsa_jax.nn import products
from nsa_jax.sharding.explicit import alike
from nsa_jax.sharding.manual import vary, varying_axes

NO_TARGET = -1


def next_tokens(
    tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
) -> Int32[Array, "B T"]:
    """Returns the token that follows each token in its sequence, which is what a model learns to predict.

    Args:
      tokens: token ids.
      segment_ids: sequence of each token of packed rows: each non-zero id is one contiguous run, 0 = padding.

    Returns:
      The tokens, one place earlier; -1 for the last token of a sequence, and for padding.

    Raises:
      TypeError: an argument is not an array, or does not hold integers.
      ValueError: an argument does not have two axes, or they differ in shape.
    """
    check_arrays(next_tokens, tokens=tokens, segment_ids=segment_ids)

    def following(x: Array) -> Array:
        moved = jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TARGET)
        return moved[:, : x.shape[1]]  # one too many in a row without tokens

    if segment_ids is None:
        return following(jnp.asarray(tokens, jnp.int32))
    tokens, segment_ids = alike(tokens=jnp.asarray(tokens, jnp.int32), segment_ids=jnp.asarray(segment_ids))
    same = (following(segment_ids) == segment_ids) & (segment_ids != 0)
    return jnp.where(same, following(tokens), NO_TARGET)


def token_losses(
    x: Float[Array, "B T D"], kernel: Float[Array, "D vocab"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Computes the cross entropy of each token's target under `softmax(x @ kernel)`.

    It equals `optax.softmax_cross_entropy_with_integer_labels(x @ kernel, targets)`, without an array of
    `[B, T, vocab]` in the forward or in the backward pass.

    Args:
      x: what the last layer and norm give.
      kernel: the output projection; the transposed embedding in a model that ties them.
      targets: id of the token to predict; a negative one stands for none.

    Returns:
      Losses in nats, in float32 (float64 for float64 inputs); 0 where there is no target. The loss of an id
      that the vocabulary does not have is meaningless; it is refused where the host has its value.

    Raises:
      TypeError: an argument is not an array, or of the wrong kind of dtype.
      ValueError: shapes do not fit, or an id is not in the vocabulary.

    Numerics:
      The products have operands of the dtype of `x`; logits, softmax and sums, also that of the gradient of
      `kernel`, are float32 (float64 for float64 inputs). What a token without a target holds, NaN too,
      reaches nothing.

    Gradients:
      For `x` and `kernel`.
    """
    sizes = check_arrays(token_losses, x=x, kernel=kernel, targets=targets)
    check_values(-(2**31), sizes["vocab"] - 1, targets=targets)
    kernel, _ = products.columns(x, jnp.asarray(kernel).astype(x.dtype))
    targets = jnp.asarray(targets, jnp.int32)

    def run(tokens: Sequence[Array], kernels: Sequence[Array], axes: tuple[str, ...]) -> Array:
        (x, targets), (kernel,) = tokens, kernels
        return _losses(x, kernel, targets, axes)

    return on_devices(run, (x, targets), (kernel,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _losses(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D vocab"],
    targets: Int32[Array, "B T"],
    axes: tuple[str, ...],
) -> Float[Array, "B T"]:
    """The losses on a device that holds some columns of the kernel, if `axes` divide them."""
    return _forward(x, kernel, targets, axes)[0]


def _forward(x, kernel, targets, axes):
    def of_chunk(chunk):
        x, targets = chunk
        found = logits(x, kernel)
        own = jnp.where(_is_target(targets, kernel, axes), found, 0)
        return log_sum_exp(found, axes), summed(own, axes)

    chunks = num_chunks(x, kernel)
    found = jax.lax.map(of_chunk, (cut(x, chunks), cut(targets, chunks)))
    lse, own = (joined(each, x.shape[1]) for each in found)
    return jnp.where(targets < 0, 0, lse - own), (x, kernel, targets, lse)


def _backward(axes, residuals, d_losses):
    x, kernel, targets, lse = residuals

    def of_chunk(d_kernel, chunk):
        x, targets, lse, d_losses = chunk
        share = jnp.exp(logits(x, kernel) - lse[..., None])
        has_target = (targets >= 0)[..., None]
        d_logits = (share - _is_target(targets, kernel, axes)) * d_losses[..., None]
        d_logits = jnp.where(has_target, d_logits, 0).astype(x.dtype)
        d_x = product("btv,dv->btd", d_logits, kernel)
        # NaN times 0 is NaN: the product is also kept from seeing tokens without a target.
        d_kernel += product("btd,btv->dv", jnp.where(has_target, x, 0), d_logits)
        return d_kernel, d_x.astype(x.dtype)

    chunks = num_chunks(x, kernel)
    given = [cut(each, chunks) for each in (x, targets, lse, d_losses)]
    zeros = vary(jnp.zeros(kernel.shape, lse.dtype), varying_axes(kernel))
    d_kernel, d_x = jax.lax.scan(of_chunk, zeros, given)
    return joined(d_x, x.shape[1]), d_kernel.astype(kernel.dtype), None


_losses.defvjp(_forward, _backward)


def _is_target(targets: Int32[Array, "B t"], kernel: Float[Array, "D vocab"], axes: tuple[str, ...]) -> Array:
    """Which columns of the kernel are the targets, `[B, t, vocab]`: a mask, because XLA divides a mask."""
    first = jax.lax.axis_index(axes) * kernel.shape[1] if axes else 0
    return first + jnp.arange(kernel.shape[1], dtype=jnp.int32) == targets[..., None]
