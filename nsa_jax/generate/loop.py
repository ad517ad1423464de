"""Generation in one compiled program: prefill, then the loop of `rows`, to its end.

A call for one token ends after the prefill, and its time is the time to the first token. What the last chunk
of steps computes beyond the end is cut off.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nsa_jax.array_typing import Array, DType, Int, Int32, PRNGKeyArray
from nsa_jax.config import LONGEST
from nsa_jax.generate import buckets, checks, rows
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.ends import check_chosen
from nsa_jax.generate.options import Options
from nsa_jax.generate.options import Sampling as _Sampling
from nsa_jax.generate.prepared import prepare, prepared_parts
from nsa_jax.generate.structure import are_whole, split
from nsa_jax.option_checks import check_int


class Generation(NamedTuple):
    """Result of `generate`.

    Attributes:
      tokens: new tokens of each row, without the prompt, then `pad_id`. Only the first `lengths` are the
        model's; in a row that was never finite all are `pad_id`.
      lengths: number of new tokens of each row, `eos_id` included; `max_new_tokens` for a row that has not
        ended.
      ended: why the row has ended, as a number of `Ended`; 0 for a row that has not. It is `END_TOKEN`
        behind an `eos_id`, and `NOT_FINITE` where no token could be chosen.
    """

    tokens: Int32[Array, "B new"]
    lengths: Int32[Array, " B"]
    ended: Int32[Array, " B"]

    def check(self) -> "Generation":
        """Refuses rows that ended because no token could be chosen. Waits for the device.

        It is a method of the result, not an option of `generate`, because `generate` returns before the
        device has written anything, and inside `jit` never knows: there, return the result, and check it
        outside.

        Returns:
          The same result, where all rows are fine.

        Raises:
          ValueError: rows have ended with `Ended.NOT_FINITE`; the message has their numbers.
          TypeError: it is called inside `jit`.
        """
        check_chosen(self.ended)
        return self


def generate(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "B P"],
    *,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    max_new_tokens: int,
    max_length: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | Sequence[int] | None = None,
    pad_id: int = 0,
    key: int | PRNGKeyArray = 0,
    chunk_size: int = 8,
    prefill_chunk: int | None = None,
    cache_dtype: DType | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    Calls of similar sizes share a compiled program: `P` and `max_new_tokens` are rounded up to buckets, to
    the next multiple of 64 or by at most an eighth. There is one program for each combination of

    * the structure of the model and the number of rows,
    * the bucket of `P` and the capacity of the cache,
    * `chunk_size`, `prefill_chunk` and `cache_dtype`,
    * which of `temperature`, `top_k`, `top_p` and `eos_id` are used.

    The values of the last four do not matter, and neither does `max_new_tokens` if `max_length` is given. For
    each new size JAX also compiles the slice of the result, and the padding of prompts that are not NumPy
    arrays, in milliseconds.

    Each call begins by preparing the model, if it is not: within its program, or before it if the model is
    divided over devices, which takes longer. For many calls with a divided model, pass what `prepare(model)`
    returns. Otherwise the memory of the device holds the kernels of `prepare` beside those of the model for
    the time of the call. If it has no room, pass what `prepare(model, donate=True)` returns.

    Args:
      model: an `nnx.Module` with the methods of `nsa_jax.generate.Decoder`, such as
        `nsa_jax.model.Transformer`.
      prompts: token ids, padded on the right with any ids.
      lengths: number of tokens of each prompt, 1 .. `P`; `P` by default.
      max_new_tokens: largest number of tokens to add to a row, at most 2^29.
      max_length: exact capacity of the cache in tokens, prompt and new tokens together. By default the sum of
        the two buckets; the cache is then up to an eighth and 126 tokens per row larger than needed.
      temperature: divides the logits before drawing; 0 takes the most likely token instead.
      top_k: draws only from the `k` most likely tokens. Needs a temperature above 0, and so does `top_p`.
      top_p: draws only from the smallest set of most likely tokens with at least this probability together.
      eos_id: token that ends a row, and is its last one, or several such tokens; None for none. An id that
        the vocabulary does not have ends no row.
      pad_id: token that fills a row after its end.
      key: a seed, a typed key of `jax.random.key`, or one such key for each row. From a seed or a single key,
        each row gets its own key by its index. A row depends only on its own prompt and key, so two calls
        with one key draw the same tokens, and also two calls without a key.
      chunk_size: number of steps between two tests whether all rows have ended. A test costs about 11 us on
        an H100. Whole chunks run, so up to `chunk_size - 1` steps of the last chunk are wasted. More than the
        cache has room for count as that many.
      prefill_chunk: number of prompt tokens of a row that are prefilled at once, which bounds the memory.
        Chunks beyond the longest prompt are skipped. By default equal parts with at most about 8192 tokens of
        all rows together, but not less than 512 tokens of a row.
      cache_dtype: "int8" or "float8_e4m3fn" for caches of half the bytes of bfloat16, which round keys and
        values, see `nsa_jax.cache.init_cache`; None for the dtype of the model.

    Returns:
      `Generation(tokens, lengths, ended)`. A row for which no token can be chosen ends there, and `ended`
      says so; `generate(...).check()` refuses it.

    Raises:
      TypeError: an argument has the wrong type, or `model` lacks a method or its `num_tokens`.
      ValueError: a prompt is empty or longer than the cache, the cache is too small for the new tokens, an
        argument is out of range, or `top_k` or `top_p` is given without a temperature; or an id is not in the
        vocabulary, where the host has its value: in NumPy arrays and in JAX arrays on a CPU. Nothing runs
        then. Elsewhere the row of such an id ends with `NOT_FINITE`, without a token.

    Examples:
      >>> generate(model, prompts, max_new_tokens=64, temperature=0.8, top_p=0.95, key=1).tokens
    """
    checks.check_model(model)
    tokens, counts = checks.check_prompts(prompts, lengths, getattr(model, "vocab_size", None))
    sampling = _Sampling.make(temperature, top_k, top_p)
    checks.check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    check_int(high=LONGEST // 2, max_new_tokens=max_new_tokens)
    checks.check_parts(prefill_chunk)
    cache_dtype = checks.check_cache_dtype(model, cache_dtype)
    options = Options.make(sampling, eos_id, pad_id)
    checks.check_room(counts, max_new_tokens, max_length)
    max_new_tokens, width = int(max_new_tokens), buckets.width(tokens.shape[1], max_length)
    capacity = int(max_length or width + buckets.bucketed(max_new_tokens))
    chunk = buckets.chunk(len(tokens), width, prefill_chunk)
    structure, parameters = split(model)
    if not (join := are_whole(parameters)):  # a program does not know how they are divided over auto axes
        structure, parameters = prepared_parts(model, (structure, parameters))
    new = _run(
        structure,
        parameters,
        buckets.widened(tokens, -(-width // chunk) * chunk),
        counts,
        checks.check_key(key, len(tokens)),
        options.sampling,
        options.eos_id,
        options.pad_id,
        max_new_tokens,
        max_length=capacity,
        chunk_size=min(int(chunk_size), capacity),
        prefill_chunk=chunk,
        cache_dtype=cache_dtype,
        join=join,
    )
    return new._replace(tokens=new.tokens[:, :max_new_tokens])


@functools.partial(
    jax.jit,
    static_argnames=("structure", "max_length", "chunk_size", "prefill_chunk", "cache_dtype", "join"),
)
def _run(
    structure,
    parameters,
    prompts,
    lengths,
    keys,
    sampling,
    eos_id,
    pad_id,
    max_new_tokens,
    *,
    max_length,
    chunk_size,
    prefill_chunk,
    cache_dtype,
    join,
) -> Generation:
    """`generate` with `max_length` columns of tokens, which is always enough."""
    model, options = structure.model(parameters), Options(sampling, eos_id, pad_id)
    model = prepare(model) if join else model
    sizes: dict[str, Any] = dict(max_length=max_length, prefill_chunk=prefill_chunk, cache_dtype=cache_dtype)
    start = rows.begin(model, prompts, lengths, keys, options, **sizes)
    sizes = dict(max_length=max_length, columns=max_length, chunk_size=chunk_size)
    advanced, new, _ = rows.advance(model, start, options, max_new_tokens, **sizes)
    return Generation(rows.padded(new, pad_id).tokens, new.lengths, advanced.ended)
