"""How far a model's distributions of next tokens are from a teacher's: never are there logits of all tokens.

As in `token_loss`, the forward pass keeps the log-sum-exps of both, and the backward pass computes the logits
of a chunk again.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nsa_jax.array_checks import check_arrays
from nsa_jax.array_typing import Array, Float
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
from nsa_jax.sharding.manual import vary, varying_axes


def token_divergences(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D vocab"],
    teacher_x: Float[Array, "B T E"],
    teacher_kernel: Float[Array, "E vocab"],
) -> Float[Array, "B T"]:
    """Computes the KL divergence of `softmax(x @ kernel)` from `softmax(teacher_x @ teacher_kernel)`.

    It is the sum over the vocabulary of `q (log q - log p)` with the teacher's `q`, see Hinton et al.
    (arXiv:1503.02531), without an array of `[B, T, vocab]` in the forward or in the backward pass.

    Args:
      x: what the last layer and norm give.
      kernel: the output projection; the transposed embedding in a model that ties them.
      teacher_x: what those of the teacher give for the same tokens, in a width of its own.
      teacher_kernel: its output projection.

    Returns:
      Divergences in nats, in float32 (float64 for float64 inputs).

    Raises:
      TypeError: an argument is not an array, or of the wrong kind of dtype.
      ValueError: shapes do not fit.

    Numerics:
      The products of each model have operands of the dtype of its `x`; logits, softmax and sums, also that of
      the gradient of `kernel`, are float32 (float64 for float64 inputs).

    Gradients:
      For `x` and `kernel`. None reaches the teacher.
    """
    check_arrays(token_divergences, x=x, kernel=kernel, teacher_x=teacher_x, teacher_kernel=teacher_kernel)
    kernels = [
        next(products.columns(each, jnp.asarray(of).astype(each.dtype)))
        for each, of in ((x, kernel), (teacher_x, teacher_kernel))
    ]

    def run(tokens: Sequence[Array], kernels: Sequence[Array], axes: tuple[str, ...]) -> Array:
        return _divergences(tokens[0], kernels[0], tokens[1], kernels[1], axes)

    return on_devices(run, (x, teacher_x), kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _divergences(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D vocab"],
    teacher_x: Float[Array, "B T E"],
    teacher_kernel: Float[Array, "E vocab"],
    axes: tuple[str, ...],
) -> Float[Array, "B T"]:
    """The divergences on a device that holds some columns of the kernels, if `axes` divide them."""
    return _forward(x, kernel, teacher_x, teacher_kernel, axes)[0]


def _forward(x, kernel, teacher_x, teacher_kernel, axes):
    def of_chunk(chunk):
        found = [logits(each, of) for each, of in zip(chunk, (kernel, teacher_kernel), strict=True)]
        lse = [log_sum_exp(each, axes) for each in found]
        own, taught = (each - of[..., None] for each, of in zip(found, lse, strict=True))
        return summed(jnp.exp(taught) * (taught - own), axes), *lse

    chunks = num_chunks(x, kernel, teacher_kernel)
    found = jax.lax.map(of_chunk, (cut(x, chunks), cut(teacher_x, chunks)))
    divergences, *lse = (joined(each, x.shape[1]) for each in found)
    return divergences, (x, kernel, teacher_x, teacher_kernel, *lse)


def _backward(axes, residuals, d_divergences):
    x, kernel, teacher_x, teacher_kernel, lse, teacher_lse = residuals

    def of_chunk(d_kernel, chunk):
        x, teacher_x, lse, teacher_lse, d_divergences = chunk
        share = jnp.exp(logits(x, kernel) - lse[..., None])
        taught = jnp.exp(logits(teacher_x, teacher_kernel) - teacher_lse[..., None])
        d_logits = ((share - taught) * d_divergences[..., None]).astype(x.dtype)
        d_x = product("btv,dv->btd", d_logits, kernel)
        d_kernel += product("btd,btv->dv", x, d_logits)
        return d_kernel, d_x.astype(x.dtype)

    chunks = num_chunks(x, kernel, teacher_kernel)
    given = [cut(each, chunks) for each in (x, teacher_x, lse, teacher_lse, d_divergences)]
    zeros = vary(jnp.zeros(kernel.shape, lse.dtype), varying_axes(kernel))
    d_kernel, d_x = jax.lax.scan(of_chunk, zeros, given)
    return joined(d_x, x.shape[1]), d_kernel.astype(kernel.dtype), None, None


_divergences.defvjp(_forward, _backward)
