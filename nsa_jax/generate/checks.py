"""Checks of the arguments of `generate` before anything runs; values only if they are concrete."""

import inspect
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.array_typing import Array, PRNGKeyArray
from nsa_jax.generate.sampling import mappable


def check_model(model: Any) -> None:
    """Raises TypeError unless the model has the methods of `Decoder`, with `num_tokens` as a keyword."""
    methods = ("init_cache", "prefill", "decode_step")
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    if missing:
        raise TypeError(
            f"model must have the methods of Decoder, got {type(model).__name__} without "
            f"{', '.join(missing)}. Pass an nsa_jax.model.Transformer, or add them."
        )
    for name in methods[1:]:
        signature = inspect.signature(getattr(model, name))
        if not _takes(signature, "num_tokens"):
            raise TypeError(
                f"{name} of a Decoder must take num_tokens as a keyword, got {type(model).__name__}.{name}"
                f"{signature}. Name the argument num_tokens."
            )


def check_prompts(prompts: Any, lengths: Any) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Returns prompts and lengths as int32, on the host or the device where they were.

    Raises:
      TypeError: one is not an array of integers.
      ValueError: shapes do not fit, or a length is out of range.
    """
    prompts = _integers("prompts", prompts, "Pad to one length and call np.array")
    if prompts.ndim != 2:
        raise ValueError(f"prompts must be [batch, tokens], got shape {prompts.shape}. Add the missing axis.")
    batch, width = prompts.shape
    if not prompts.size:
        raise ValueError(
            f"a prompt must have at least one token, got {prompts.shape=}. Begin with a start token."
        )
    lengths = np.full(batch, width) if lengths is None else lengths
    lengths = _integers("lengths", lengths, "Call np.array")
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths must be one number per prompt, got {lengths.shape=} and {batch=}. Pass an array [B]."
        )
    if not isinstance(lengths, jax.core.Tracer) and ((lengths < 1) | (lengths > width)).any():
        raise ValueError(
            f"lengths must be within 1 .. {width}, the width of prompts, got {lengths.tolist()}. Pad prompts "
            "on the right, and leave out empty ones."
        )
    return prompts, lengths


def check_room(lengths: Array | np.ndarray, max_new_tokens: int, max_length: int | None) -> None:
    """Raises ValueError unless every prompt and its new tokens fit into `max_length`, if that is given."""
    if max_length is None:
        return
    check_counts(max_length=max_length)
    longest = 1 if isinstance(lengths, jax.core.Tracer) else int(lengths.max())
    if longest > max_length:
        raise ValueError(
            f"a prompt must fit the cache, got {longest} tokens and {max_length=}. "
            "Raise max_length, or cut the prompt."
        )
    if longest + max_new_tokens > max_length:
        raise ValueError(
            f"prompt and new tokens must fit the cache, got {longest} + {max_new_tokens} tokens and "
            f"{max_length=}. Raise max_length, or lower max_new_tokens."
        )


def check_counts(**counts: Any) -> None:
    """Raises TypeError or ValueError unless all are positive ints."""
    for name, count in counts.items():
        _check_int(name, count)
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}. Pass a positive number.")


def check_tokens(eos_id: Any, pad_id: Any) -> None:
    """Raises TypeError unless both are ints; `eos_id` may be None. ValueError if `eos_id` is negative."""
    if eos_id is not None:
        _check_int("eos_id", eos_id)
        if eos_id < 0:
            raise ValueError(f"eos_id must be at least 0, got {eos_id}. Pass None for no end token.")
    _check_int("pad_id", pad_id)


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raises TypeError or ValueError unless the parameters are in range and have a use."""
    for name, number in (("temperature", temperature), ("top_p", 1.0 if top_p is None else top_p)):
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}. Pass a float.")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}. Pass 0 for greedy.")
    if top_k is not None:
        check_counts(top_k=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}. Pass None to keep all tokens.")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise ValueError(
            f"top_k and top_p must come with a temperature above 0, got {temperature=}, {top_k=} and "
            f"{top_p=}. Set a temperature, or leave them out."
        )


def check_key(key: Any, batch: int) -> PRNGKeyArray:
    """Returns a threefry key per row: from that of the row, or from a single key or seed and its index."""
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):
        _check_int("key", key, bits=64)
        key = jax.random.key(int(key))
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(
            f"key must be an int or typed keys, got {type(key).__name__}. Use jax.random.key(seed)."
        )
    key = mappable(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(
            f"key must be one key, or one per prompt, got {key.shape=} and {batch=}. Use jax.random.split."
        )
    return key


def _takes(signature: inspect.Signature, keyword: str) -> bool:
    """Whether a function of this signature can be called with the keyword."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return kinds.get(keyword) in by_name or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _integers(name: str, values: Any, remedy: str) -> Array | np.ndarray:
    if not isinstance(values, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array, got {type(values).__name__}. {remedy}.")
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {values.dtype}. Pass token ids and counts as int32.")
    return values.astype(jnp.int32)


def _check_int(name: str, value: Any, bits: int = 32) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}. Pass a whole number.")
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise ValueError(f"{name} must fit into {bits} bits, got {value}. Pass a smaller number.")
