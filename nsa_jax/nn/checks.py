"""Checks of the options and inputs of layers."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_checks import check_floats, check_integers
from nsa_jax.array_typing import Array, DType
from nsa_jax.option_checks import check_dtype, check_function, check_int


def check_parameters(
    *, dtype: DType | None, param_dtype: DType, precision: Any, rngs: nnx.Rngs, **initializers: Any
) -> None:
    """Raises TypeError or ValueError unless parameters can be made and used with these options."""
    check_dtype(param_dtype=param_dtype, **({} if dtype is None else {"dtype": dtype}))
    check_precision(precision)
    check_rngs(rngs)
    check_function(**initializers)


def check_rngs(rngs: Any) -> None:
    """Raises TypeError unless parameters can be drawn from `rngs`."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs must be nnx.Rngs, got {type(rngs).__name__}. Pass nnx.Rngs(seed).")


def check_precision(precision: Any) -> None:
    """Raises ValueError unless JAX knows this precision of a product."""
    if precision is None:
        return
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda x: jnp.matmul(x, x, precision=precision), one)
    except (TypeError, ValueError):
        raise ValueError(
            f"precision must be one of jax.lax.Precision, got {precision!r}. Pass None for the default."
        ) from None


def check_dropout_rate(rate: float) -> None:
    """Raises TypeError or ValueError unless `rate` is a number from 0 to below 1."""
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise TypeError(f"dropout_rate must be a number, got {type(rate).__name__}. Pass a float.")
    if not 0 <= rate < 1:
        raise ValueError(
            f"dropout_rate must be at least 0 and below 1, got {rate}. Pass the share of the outputs to drop."
        )


def head_width(num_heads: int, in_features: int, num_kv_heads: int, head_dim: int | None) -> int:
    """Returns `head_dim` or its default, as an int.

    Raises:
      TypeError: a number is not an int.
      ValueError: head counts or widths do not divide, or the width is not positive.
    """
    check_int(num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_int(low=1, in_features=in_features)
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads must divide num_heads, got {num_kv_heads} and {num_heads}. "
            "Give each KV head the same number of query heads."
        )
    if head_dim is None and in_features % num_heads:
        raise ValueError(
            "num_heads must divide in_features unless head_dim is given, got "
            f"{num_heads} and {in_features}. Pass head_dim."
        )
    head_dim = in_features // num_heads if head_dim is None else head_dim
    check_int(low=1, head_dim=head_dim)
    return int(head_dim)


def check_array(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is an array."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}. Convert it with jnp.asarray.")


def check_inputs(
    x: Array, in_features: int, *, context_axis: str | None = None, **per_token: Array | None
) -> None:
    """Raises TypeError or ValueError unless `x` is `[B, T, in_features]`, the others are integers `[B, T]`.

    On explicit axes of a mesh, features of `x` must not be sharded, and tokens over the context axis only.
    """
    check_array("x", x)
    if x.ndim != 3 or x.shape[-1] != in_features:
        raise ValueError(
            f"x must be [batch, tokens, {in_features}], got shape {x.shape}. "
            "Add the missing axis, or create the layer with this width as in_features."
        )
    check_floats(x=x)
    tokens, features = (*jax.typeof(x).sharding.spec, None, None)[1:3]
    if features is not None or tokens not in (None, context_axis):
        raise ValueError(
            "x must be sharded by batch rows only on explicit axes of a mesh, and by tokens over a "
            f"context_axis, got an input of type {jax.typeof(x)}. Use jax.reshard to replicate its tokens "
            "and features."
        )
    for name, value in per_token.items():
        if value is None:
            continue
        check_array(name, value)
        check_integers(**{name: value})
        if value.shape != x.shape[:2]:
            raise ValueError(
                f"{name} must hold one integer for each token, got shape {value.shape} for x of shape "
                f"{x.shape}. Broadcast it to [batch, tokens]."
            )


def check_dropout_call(deterministic: Any, rngs: Any) -> None:
    """Raises TypeError unless the options of a call that concern dropout are of the right kinds."""
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(
            f"deterministic must be True, False or None, got {type(deterministic).__name__}. Pass a bool."
        )
    if rngs is not None and not isinstance(rngs, nnx.Rngs | nnx.RngStream | jax.Array):
        raise TypeError(
            f"rngs must be nnx.Rngs, a stream or a key, got {type(rngs).__name__}. Pass nnx.Rngs(seed)."
        )
