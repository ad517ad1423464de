"""Checks of the arguments of a step: shapes and dtypes at trace time, values if they are concrete."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from nsa_jax import arguments, layout
from nsa_jax.array_checks import annotations_of, bind_shapes, check_dtypes, check_values
from nsa_jax.array_typing import Array, DType, Int
from nsa_jax.compression import Compress, Compression, ResidualMLP, Rotation, check_compress
from nsa_jax.config import LONGEST, Branch, NSAConfig, check_config
from nsa_jax.layout import NSACache, TokenKeysValues
from nsa_jax.layout.quantised import LARGEST, check_kept_dtype, is_quantised
from nsa_jax.option_checks import check_dtype, check_int, dtype_name


def check_operands(
    step: Callable[..., Any],
    cache: NSACache,
    query: Array,
    tokens: TokenKeysValues,
    gates: Array | None,
    num_tokens: Array | None,
    block_indices: Array | None,
) -> dict[str, int]:
    """Raises TypeError or ValueError unless the arguments of `step` fit together and fit the cache.

    Returns:
      The size of each letter in the annotations.
    """
    check_kind(cache)
    if not isinstance(tokens, TokenKeysValues):
        raise TypeError(
            f"tokens must be TokenKeysValues, got {type(tokens).__name__}. Build them with "
            "TokenKeysValues(...)."
        )
    holders = dict(cache=cache, tokens=tokens)
    _check_window(cache, tokens)
    arrays = dict(query=query, gates=gates, num_tokens=num_tokens, block_indices=block_indices)
    sizes = check_arrays(step, holders, **arrays)
    _check_branches(cache, tokens, gates)
    arguments.check_some_choice(block_indices, cache.branches(gates))
    return sizes


def check_arrays(
    step: Callable[..., Any], holders: Mapping[str, Any], **arrays: Array | None
) -> dict[str, int]:
    """Raises unless the arrays of a step, with those in its cache, fit together by their annotations.

    Args:
      step: the step, or any function; its annotations are those of `arrays`.
      holders: its cache, and other tuples of arrays that have annotations.
      **arrays: its other arrays.

    Returns:
      The size of each letter in the annotations.

    Raises:
      TypeError: an array is of another kind or dtype.
      ValueError: rows, heads, dims or lengths differ.
    """
    annotations, held = dict(annotations_of(step)), dict[str, Any]()
    for prefix, holder in holders.items():
        for name, annotation in annotations_of(type(holder)).items():
            annotations[f"{prefix}.{name}"], held[f"{prefix}.{name}"] = annotation, getattr(holder, name)
    sizes = bind_shapes(annotations, held | arrays)
    if "query" in arrays:
        arguments.check_heads(sizes)
        check_some_token(arrays["query"])
    rounded = [f"{prefix}.{name}" for prefix, x in holders.items() for name in _check_quantised(x)]
    check_dtypes(annotations, {name: x for name, x in (held | arrays).items() if name not in rounded})
    return sizes


def _check_quantised(holder: Any) -> list[str]:
    """The arrays in 8 bits. Raises ValueError unless all that can be are, in one dtype, or none is."""
    given = {name for name in holder._fields if getattr(holder, name) is not None}
    scales = {name for name in holder._fields if name.endswith("_scale")}
    if not scales & given:
        return []
    names = sorted(scale.removesuffix("_scale") for scale in scales)
    lacking = [name for name in names if (name in given) != (f"{name}_scale" in given)]
    dtypes = sorted({getattr(holder, name).dtype.name for name in names if name in given})
    if lacking or len(dtypes) > 1 or not is_quantised(dtypes[0]):
        raise ValueError(
            f"a cache with scales must have keys and values in one dtype of {tuple(LARGEST)} and a scale of "
            f"each, got {dtypes} and {lacking} without the other. Pass what init_cache gives."
        )
    return names


def check_lengths(lengths: Array, max_length: int, num_new: int, num_tokens: Int[Array, " B"] | None) -> None:
    """Raises ValueError if the host knows lengths or counts that are out of range, see `on_host`."""
    check_values(0, max_length, **{"cache.lengths": lengths})
    check_values(0, num_new, num_tokens=num_tokens)


def check_some_token(query: Any) -> None:
    """Raises ValueError if a step has no token."""
    if query.shape[1] < 1:
        raise ValueError(f"a step must have at least one token, got {query.shape=}. Skip the call.")


def check_kind(cache: Any) -> None:
    """Raises TypeError or ValueError unless `cache` is one of an NSA layer."""
    if not isinstance(cache, NSACache):
        raise TypeError(
            f"the cache of a layer must be an NSACache, got {type(cache).__name__}. Pass what the layer's "
            "init_cache gives, or one element of a model's caches."
        )
    rings = dict(key=cache.key_win_ring, value=cache.value_win_ring)
    if len(missing := [name for name, ring in rings.items() if ring is None]) == 1:
        raise ValueError(
            f"a cache must have both window rings or neither, got one without {missing[0]}s. Pass what "
            "init_cache gives."
        )
    compressed = cache.key_cmp, cache.value_cmp, cache.key_raw_ring, cache.value_raw_ring
    if len({x is None for x in compressed}) > 1:
        raise ValueError(
            "a cache must have all arrays of the compressed branch or none, got some that are None. Pass "
            "what init_cache gives."
        )


def check_layer_cache(
    cache: Any,
    *,
    batch: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    config: NSAConfig,
    branches: tuple[Branch, ...],
    share_keys_values: bool,
) -> None:
    """Raises TypeError or ValueError unless `cache` is of a layer of these sizes and has `batch` rows."""
    check_kind(cache)
    check_arrays(check_layer_cache, dict(cache=cache))
    of_layer = dict(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim)
    check_sizes(cache.key_slc, cache.value_slc, of_layer)
    if (cache.key_cmp is None) == ("cmp" in branches):
        raise ValueError(
            f"a cache must have the branches of its layer, got one with key_cmp {_given(cache.key_cmp)} for "
            f"a layer with {branches}. Call init_cache of this layer."
        )
    if "win" not in branches and cache.key_win_ring is not None:
        raise ValueError(
            f"a cache must have the branches of its layer, got one with window rings for a layer with "
            f"{branches}. Call init_cache of this layer."
        )
    if "win" in branches and cache.shares_keys_values != share_keys_values:
        raise ValueError(
            "a cache must share keys and values if and only if its layer does, got share_keys_values="
            f"{cache.shares_keys_values} for a layer with {share_keys_values}. Call init_cache of this layer."
        )
    check_rows(cache.key_slc, batch)
    step_capacity(cache, config)


def check_compression(compress: Compress | None, cache: NSACache, config: NSAConfig) -> None:
    """Raises TypeError or ValueError unless `compress` is a function, or data that fit the cache."""
    if cache.key_cmp is None:
        if compress is not None:
            raise ValueError(
                "compress must be None for a cache without a compressed branch, got one. Leave it out, or "
                "call init_cache with all branches."
            )
        return
    check_compress(compress)
    if not isinstance(compress, Compression):
        return
    dims = dict(key=cache.key_slc.shape[-1], value=cache.value_slc.shape[-1])
    for name, dim in dims.items():
        mlp = getattr(compress, name)
        if mlp is None:
            continue
        if not isinstance(mlp, ResidualMLP):
            raise TypeError(
                f"the {name} of a compression must be a ResidualMLP or None, got {type(mlp).__name__}. Pass "
                "a function instead of the Compression."
            )
        size, units = config.compression_block_size, jnp.size(mlp.bias_in)
        expected = [(size, dim), (size * dim, units), (units,), (units, dim), (dim,)]
        if (found := [x.shape for x in mlp]) != expected:
            raise ValueError(
                f"the {name} MLP of a compression must have arrays of shapes {expected} for blocks of {size} "
                f"tokens, got {found}. Make it for this cache and config."
            )
        dtypes = sorted({x.dtype.name for x in mlp})
        if len(dtypes) > 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
            raise ValueError(f"the arrays of an MLP must share one floating dtype, got {dtypes}. Cast them.")
    if compress.rotation is not None:
        _check_rotation(compress.rotation, dims["key"])


def _check_rotation(rotation: Any, key_dim: int) -> None:
    """Raises TypeError or ValueError unless `rotation` can rotate keys of `key_dim`."""
    if not isinstance(rotation, Rotation):
        raise TypeError(
            f"the rotation of a compression must be a Rotation or None, got {type(rotation).__name__}. Pass "
            "a function instead of the Compression."
        )
    shapes, dtypes = zip(*((jnp.shape(x), jnp.result_type(x).name) for x in rotation[:2]), strict=True)
    shape, *_ = shapes
    if len(set(shapes)) > 1 or len(shape) != 1 or 2 * shape[0] > key_dim or dtypes != ("int32", "float32"):
        raise ValueError(
            f"a rotation must have int32 ticks and a float32 rest of at most {key_dim // 2} pairs for keys "
            f"of width {key_dim}, got {' and '.join(dtypes)} of shapes {shapes}. Make it with Rotation.of, "
            "of at most one frequency for each pair of dimensions."
        )


def check_sizes(key: Array, value: Array, of_layer: dict[str, int]) -> None:
    """Raises ValueError unless a cache's keys and values have the heads and dims of its layer."""
    of_cache = dict(num_kv_heads=key.shape[2], key_dim=key.shape[3], value_dim=value.shape[3])
    if of_cache != of_layer:
        raise ValueError(
            f"a cache must have the heads and dims of its layer, got {of_cache} for {of_layer}. Call "
            "init_cache of this layer."
        )


def check_rows(key: Array, batch: int) -> None:
    """Raises ValueError unless a cache's keys have `batch` rows."""
    if key.shape[0] != batch:
        raise ValueError(
            f"a cache must have as many rows as the input, got {key.shape[0]} for {batch}. Call "
            f"init_cache with batch={batch}."
        )


def step_capacity(cache: NSACache, config: NSAConfig) -> int:
    """Returns how many tokens a decode step may append at most: as many as a row holds if there is no ring.

    Raises:
      ValueError: the cache was made with another config.
    """
    check_config(config)
    sizes = [(config.window_size, cache.key_win_ring), (config.compression_block_size, cache.key_raw_ring)]
    rings = [(size, ring.shape[1]) for size, ring in sizes if ring is not None]
    capacities = {length - size + 1 for size, length in rings} or {cache.max_length}
    blocks = None if cache.key_cmp is None else cache.key_cmp.shape[1]
    expected_blocks = None if blocks is None else layout.num_compression_blocks(cache.max_length, config)
    if len(capacities) > 1 or min(capacities) < 1 or blocks != expected_blocks:
        raise ValueError(
            "a step must be given the config of its cache, got a cache with rings of "
            f"{' and '.join(str(length) for _, length in rings)} tokens and {blocks} compression blocks for "
            f"{config}. Call init_cache with this config."
        )
    return min(capacities)


def _check_branches(cache: NSACache, tokens: TokenKeysValues, gates: Array | None) -> None:
    """Raises ValueError unless cache, tokens and gates are of the same branches."""
    if any((x is None) != (cache.key_cmp is None) for x in (tokens.key_cmp, tokens.value_cmp)):
        raise ValueError(
            "tokens must have key_cmp and value_cmp if and only if their cache has a compressed branch, got "
            f"key_cmp {_given(tokens.key_cmp)} and value_cmp {_given(tokens.value_cmp)} for a cache with "
            f"key_cmp {_given(cache.key_cmp)}. Call init_cache with the branches of the tokens."
        )
    count = 1 if gates is None else gates.shape[3]
    least = 1 + (cache.key_cmp is not None) + (cache.key_win_ring is not None)
    most = least + (cache.key_win_ring is None)  # a window may share keys and values
    if not least <= count <= most or (gates is not None and count == 1):
        raise ValueError(
            f"gates must be [B, T, N, {most}], one for each branch of the cache, and None for one alone, got "
            f"{'None' if gates is None else f'shape {tuple(gates.shape)}'}. Pass the weights of cmp, slc and "
            "win, without those of a branch that is absent."
        )


def _given(array: Array | None) -> str:
    return "None" if array is None else "given"


def _check_window(cache: NSACache, tokens: TokenKeysValues) -> None:
    """Raises ValueError unless cache and tokens agree on whether the branches share keys and values."""
    given = [name for name in ("key_win", "value_win") if getattr(tokens, name) is not None]
    if len(given) != (0 if cache.shares_keys_values else 2):
        raise ValueError(
            "tokens must have key_win and value_win unless their cache shares keys and values, got "
            f"{given} with share_keys_values={cache.shares_keys_values}. Call init_cache with the one that "
            "fits."
        )


def check_new_cache(dtype: DType, **sizes: int) -> None:
    """Raises TypeError or ValueError unless a cache can have these sizes and this dtype."""
    check_int(low=1, high=LONGEST, **{name: x for name, x in sizes.items() if not export.is_symbolic_dim(x)})
    check_kept_dtype(dtype=dtype)


def check_raw_dtype(dtype: DType, raw_dtype: DType | None, branches: Sequence[Branch]) -> DType:
    """The dtype of what awaits compression in a new cache. Raises ValueError unless that is known."""
    if raw_dtype is not None:
        check_dtype(raw_dtype=raw_dtype)
    if not is_quantised(dtype):
        if raw_dtype is not None and dtype_name(raw_dtype) != dtype_name(dtype):
            raise ValueError(
                "raw_dtype must be dtype in a cache that is not quantised, got "
                f"{dtype_name(raw_dtype)} and {dtype_name(dtype)}. Leave it out."
            )
        return dtype
    if raw_dtype is None and "cmp" in branches:
        raise ValueError(
            f"raw_dtype must be given for a quantised cache, got None and dtype {dtype_name(dtype)}. Pass "
            "the dtype of queries and new tokens."
        )
    return jnp.float32 if raw_dtype is None else raw_dtype  # if None, of arrays that the cache lacks


def check_room(lengths: Array, max_length: int, num_new: int, num_tokens: Int[Array, " B"] | None) -> None:
    """Raises ValueError if a row is known to have no room for its new tokens."""
    remedy = "Call init_cache with a larger max_length."
    if num_tokens is None and num_new > max_length:
        raise ValueError(f"a prompt must fit the cache, got {num_new} tokens and {max_length=}. {remedy}")
    held, wanted = _known(lengths), np.full(1, num_new) if num_tokens is None else _known(num_tokens)
    if held is None or wanted is None:
        return
    held, wanted = held.astype(np.int64), np.broadcast_to(wanted.astype(np.int64), held.shape)
    if ((wanted < 0) | (wanted > num_new)).any():
        raise ValueError(
            f"num_tokens must be within 0 .. T, got {wanted.tolist()} with T={num_new}. Pass how many "
            "tokens of each row are real."
        )
    if (held < 0).any():
        raise ValueError(
            f"the lengths of a cache must be at least 0, got {held.tolist()}. Pass what init_cache or an "
            "earlier step gave."
        )
    if (held + wanted > max_length).any():
        raise ValueError(
            f"a prompt must fit the cache, got {wanted.tolist()} tokens for rows that hold "
            f"{held.tolist()} of {max_length=}. {remedy}"
        )


def _known(counts: Array) -> np.ndarray | None:
    """The values of counts, also from a GPU; None while tracing, or if other processes have them."""
    if isinstance(counts, jax.core.Tracer):
        return None
    if isinstance(counts, jax.Array) and not (counts.is_fully_addressable or counts.is_fully_replicated):
        return None
    return np.asarray(counts)
