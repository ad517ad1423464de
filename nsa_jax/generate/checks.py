"""Checks of the arguments of `generate` and of sessions before anything runs; values only if concrete."""

import inspect
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_checks import check_ids, check_integers, check_values, on_host
from nsa_jax.array_typing import Array, PRNGKeyArray
from nsa_jax.config import LONGEST
from nsa_jax.generate.keys import is_keys, mappable
from nsa_jax.layout.quantised import LARGEST
from nsa_jax.option_checks import LARGEST_INT, check_dtype_among, check_function, check_int, dtype_name


def check_model(model: Any) -> None:
    """Raises TypeError unless the model is a module with the methods of `Decoder`, `num_tokens` a keyword."""
    methods = ("init_cache", "prefill", "decode_step")
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    if missing:
        raise TypeError(
            f"model must have the methods of Decoder, got {type(model).__name__} without "
            f"{', '.join(missing)}. Pass an nsa_jax.model.Transformer, or add them."
        )
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model must be an nnx.Module, got {type(model).__name__}. Make it one, and pass an instance."
        )
    for name in methods[1:]:
        signature = inspect.signature(getattr(model, name))
        if not _takes(signature, "num_tokens"):
            raise TypeError(
                f"{name} of a Decoder must take num_tokens as a keyword, got {type(model).__name__}.{name}"
                f"{signature}. Name the argument num_tokens."
            )


def check_cache_dtype(model: Any, cache_dtype: Any) -> str | None:
    """The name of a dtype of caches. Raises TypeError or ValueError unless the model can make them."""
    if cache_dtype is None:
        return None
    check_dtype_among(tuple(LARGEST), "quantised", cache_dtype=cache_dtype)
    signature = inspect.signature(model.init_cache)
    if not _takes(signature, "dtype"):
        raise TypeError(
            "a model must have init_cache(batch, max_length, *, dtype) for a cache_dtype, got "
            f"{type(model).__name__}.init_cache{signature}. Add the keyword, or leave cache_dtype out."
        )
    return dtype_name(cache_dtype)


def check_prompts(
    prompts: Any, lengths: Any, vocab_size: int | None
) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Returns prompts and lengths as int32, on the host or the device where they were.

    Raises:
      TypeError: one is not an array of integers.
      ValueError: shapes do not fit, a length is out of range, or the host knows that an id is not in the
        vocabulary, if that is known.
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
    if vocab_size is not None:
        check_ids("prompts", prompts, lengths, vocab_size)
    return prompts, lengths


def check_prompt(vocab_size: int | None, **named: Any) -> np.ndarray:
    """Returns the ids of one prompt as int32 on the host. Raises TypeError or ValueError."""
    ((name, prompt),) = named.items()
    if not isinstance(prompt, (jax.Array, np.ndarray, Sequence)) or isinstance(prompt, str):
        raise TypeError(f"{name} must be token ids, got {type(prompt).__name__}. Pass a list or an array.")
    try:
        ids = np.asarray(prompt)
    except ValueError:
        raise ValueError(f"{name} must be one sequence of ids, got {prompt!r}. Pass a flat list.") from None
    if ids.ndim != 1 or not ids.size:
        raise ValueError(
            f"{name} must be [P] with P at least 1, got shape {ids.shape}. Pass the ids of one prompt."
        )
    check_integers(**{name: ids})
    if vocab_size is not None:
        check_ids(name, ids[None], None, vocab_size)
    return ids.astype(np.int32)


def check_room(lengths: Array | np.ndarray, max_new_tokens: int, max_length: int | None) -> None:
    """Raises ValueError unless every prompt and its new tokens fit into `max_length`, if that is given."""
    if max_length is None:
        return
    check_int(low=1, high=LONGEST, max_length=max_length)
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


def check_parts(prefill_chunk: Any) -> None:
    """Raises TypeError or ValueError unless it is None or a positive int."""
    if prefill_chunk is not None:
        check_counts(prefill_chunk=prefill_chunk)


def check_turn(
    tokens: Any, lengths: Any, batch: int, vocab_size: int | None
) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Returns the tokens of `extend` and their numbers as int32. Raises TypeError or ValueError."""
    tokens = _integers("tokens", tokens, "Pad to one length and call np.array")
    if tokens.ndim != 2 or len(tokens) != batch or not tokens.size:
        raise ValueError(
            f"tokens must be [batch, T] with T at least 1, got shape {tokens.shape} and {batch=}. Pass a row "
            "for each of the session, and lengths of 0 for those that get none."
        )
    lengths = np.full(batch, tokens.shape[1]) if lengths is None else lengths
    lengths = _integers("lengths", lengths, "Call np.array")
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths must be one number per row, got {lengths.shape=} and {batch=}. Pass an array [B]."
        )
    check_values(0, tokens.shape[1], lengths=lengths)
    if vocab_size is not None:
        check_ids("tokens", tokens, lengths, vocab_size)
    return tokens, lengths


def check_turn_fits(held: Array, pending: Array, counts: Array | np.ndarray, max_length: int) -> None:
    """Raises ValueError if the host knows that a row has no room for its tokens."""
    before, waiting, more = (on_host(x) for x in (held, pending, counts))
    if before is None or waiting is None or more is None:
        return
    after = np.where(more > 0, before + waiting + more, 0)
    if after.max() > max_length:
        raise ValueError(
            f"the tokens of a row must fit the cache, got {after.tolist()} with the new ones and "
            f"{max_length=}. Call start with a larger max_length, or shorten them."
        )


def check_index(rows: Any, batch: int) -> Array | np.ndarray:
    """Returns numbers of rows as int32. Raises TypeError or ValueError."""
    rows = _integers("rows", rows, "Call np.array")
    if rows.ndim != 1 or not rows.size:
        raise ValueError(f"rows must be a vector of at least one number, got {rows.shape=}. Pass [M].")
    check_values(0, batch - 1, rows=rows)
    return rows


def check_rows_first(cache: Any, batch: int) -> None:
    """Raises ValueError unless the first axis of every array of the cache is that of the rows."""
    if strange := [x.shape for x in jax.tree.leaves(cache) if x.shape[:1] != (batch,)]:
        raise ValueError(
            f"the arrays of a cache must have the rows first, got {strange} and {batch=}. Make init_cache of "
            "the model give such arrays."
        )


def check_counts(**counts: Any) -> None:
    """Raises TypeError or ValueError unless all are positive ints."""
    check_int(low=1, **counts)


def check_tokens(eos_id: Any, pad_id: Any) -> int | np.ndarray | None:
    """Returns `eos_id` as an int, an array if it is a sequence, or None.

    Raises TypeError unless `pad_id` and all of `eos_id` are ints. ValueError if an `eos_id` is negative.
    """
    several = isinstance(eos_id, Sequence | np.ndarray) and not isinstance(eos_id, str) and np.ndim(eos_id)
    for each in eos_id if several else [] if eos_id is None else [eos_id]:
        check_int(eos_id=each)
        if each < 0:
            raise ValueError(f"eos_id must be at least 0, got {each}. Pass None for no end token.")
    check_int(low=-LARGEST_INT - 1, pad_id=pad_id)
    if not several:
        return None if eos_id is None else int(eos_id)
    if not len(eos_id):
        raise ValueError(f"a sequence of eos_id must have at least one id, got {eos_id}. Pass None for none.")
    return np.asarray(eos_id, np.int32)


def check_stop(stop: Any) -> Sequence[Sequence[int]]:
    """Returns stop sequences. Raises TypeError or ValueError unless each is a sequence of some ids."""
    is_sequence = [isinstance(x, Sequence) and not isinstance(x, str) for x in (stop, *_listed(stop))]
    if not all(is_sequence):
        raise TypeError(
            f"stop must be a sequence of sequences of token ids, got {stop!r}. Pass lists of ids; "
            "strings are for the submit of a Batcher."
        )
    if not stop or not all(stop):
        raise ValueError(f"stop must have no empty sequence, got {stop!r}. Pass None for no stop sequence.")
    for tokens in stop:
        for token in tokens:
            check_int(low=0, stop=token)
    return stop


def check_stop_of_request(stop: Any, tokenizer: Any) -> tuple[list[list[int]], list[str]]:
    """Returns stop sequences and stop strings. Raises TypeError or ValueError unless each is one of them."""
    if stop is None:
        return [], []
    if isinstance(stop, str):
        raise TypeError(f"stop must be a sequence of strings or token ids, got {stop!r}. Pass a list of it.")
    strings = [each for each in _listed(stop) if isinstance(each, str)]
    if not all(strings):
        raise ValueError(f"stop must have no empty string, got {stop!r}. Leave it out.")
    if strings and tokenizer is None:
        raise ValueError(
            f"stop strings must come with a tokenizer, got {strings} and tokenizer=None. Build the Batcher "
            "with one, or pass token ids."
        )
    sequences = [each for each in stop if not isinstance(each, str)] if strings else stop
    if sequences or not strings:
        check_stop(sequences)
    return [list(map(int, each)) for each in sequences], strings


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, Sequence) and not isinstance(x, str) else []


def check_reports(logprobs: Any, logits_hook: Any) -> None:
    """Raises TypeError or ValueError unless each is None or of its kind."""
    if logprobs is not None:
        check_int(low=0, logprobs=logprobs)
    if logits_hook is not None:
        check_function(logits_hook=logits_hook)


def check_hooked(hooked: Any, logits: Array) -> None:
    """Raises TypeError or ValueError unless a hook gave logits for those that it was given."""
    if not isinstance(hooked, jax.Array):
        raise TypeError(f"logits_hook must return logits, got {type(hooked).__name__}. Give back an array.")
    if hooked.shape != logits.shape:
        raise ValueError(
            f"logits_hook must return logits of shape {logits.shape}, got {hooked.shape}. Set the logits "
            "of tokens to exclude to -inf."
        )


def check_keys(keys: Any, batch: int) -> None:
    """Raises TypeError or ValueError unless `keys` are typed keys, one for each row."""
    if not is_keys(keys):
        raise TypeError(f"keys must be typed keys, got {type(keys).__name__}. Use jax.random.key(seed).")
    if keys.shape != (batch,):
        raise ValueError(
            f"keys must be one for each row, got {keys.shape=} and {batch=}. Use jax.random.split."
        )


def check_key(key: Any, batch: int) -> PRNGKeyArray:
    """Returns a threefry key per row: from that of the row, or from a single key or seed and its index."""
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):
        check_int(low=-(2**63), high=2**63 - 1, key=key)
        key = jax.random.key(int(key))
    if not is_keys(key):
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
    check_integers(**{name: values})
    return values.astype(jnp.int32)
