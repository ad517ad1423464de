"""Generation in one compiled program: prefill, then a loop that does not return to the host for each token.

When the loop ends depends on the data, and each test for the end is a round trip to the host. So a
`while_loop` tests once per chunk, and a chunk is a loop with a fixed number of steps. Finished rows take part
in the remaining steps but write nothing; what the last chunk computes beyond the end is cut off.

The first token is drawn from the logits of the prompt. Each step feeds the token that the previous one drew.
So a call for one token ends after the prefill, and its time is the time to the first token.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_typing import Array, Bool, Int, Int32, PRNGKeyArray
from nsa_jax.config import LONGEST
from nsa_jax.generate import buckets, checks
from nsa_jax.generate.sampling import sample
from nsa_jax.option_checks import check_int
from nsa_jax.sharding import explicit


class Decoder(Protocol):
    """The methods that `generate` needs of a model, such as `nsa_jax.model.Transformer`.

    The model must also be an `nnx.Module`. `generate` passes `num_tokens` by its name, all other arguments by
    position. If the model has an int `vocab_size`, `generate` refuses prompts with ids that are not below it,
    where the host has their values.
    """

    def init_cache(self, batch: int, max_length: int) -> Any:
        """Makes an empty cache for `batch` rows of at most `max_length` tokens."""

    def prefill(
        self, tokens: Int[Array, "B T"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Appends prompts; returns the logits `[B, vocab]` after the last real token, and the cache."""

    def decode_step(
        self, tokens: Int[Array, "B 1"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Appends a token to the rows with `num_tokens` 1; returns logits `[B, 1, vocab]` and the cache."""


class Generation(NamedTuple):
    """Result of `generate`.

    Attributes:
      tokens: new tokens of each row, without the prompt. A row that ended early has `pad_id` after its
        `eos_id`.
      lengths: number of new tokens of each row, `eos_id` included; `max_new_tokens` for a row without it.
    """

    tokens: Int32[Array, "B new"]
    lengths: Int32[Array, " B"]


class _Loop(NamedTuple):
    """The state of the loop.

    `token` is the newest token of each row, number `step` counted from 1. It is not in the cache yet.
    """

    cache: Any
    token: Int32[Array, " B"]
    tokens: Int32[Array, "B max_length"]
    lengths: Int32[Array, " B"]
    done: Bool[Array, " B"]
    step: Int32[Array, ""]


class _Sampling(NamedTuple):
    """Sampling parameters. They are traced, so that other values need no other program.

    Only None does, because it leaves out the operations of that parameter.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None

    @classmethod
    def make(cls, temperature: float, top_k: int | None, top_p: float | None) -> "_Sampling":
        # Converted to one type each: a NumPy scalar, or 1 for 1.0, would need another program.
        top_k = None if top_k is None else int(top_k)
        return cls(float(temperature), top_k, None if top_p is None else float(top_p))


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
    eos_id: int | None = None,
    pad_id: int = 0,
    key: int | PRNGKeyArray = 0,
    chunk_size: int = 8,
    prefill_chunk: int | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    Calls of similar sizes share a compiled program: `P` and `max_new_tokens` are rounded up to buckets, to
    the next multiple of 64 or by at most an eighth. There is one program for each combination of

    * the structure of the model and the number of rows,
    * the bucket of `P` and the capacity of the cache,
    * `chunk_size` and `prefill_chunk`,
    * which of `temperature`, `top_k`, `top_p` and `eos_id` are used.

    The values of the last four do not matter, and neither does `max_new_tokens` if `max_length` is given. For
    each new size JAX also compiles the slice of the result, and the padding of prompts that are not NumPy
    arrays, in milliseconds.

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
      eos_id: token that ends a row, and is its last one; None for no such token. An id that the vocabulary
        does not have ends no row.
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

    Returns:
      `Generation(tokens, lengths)`.

    Raises:
      TypeError: an argument has the wrong type, or `model` lacks a method or its `num_tokens`.
      ValueError: a prompt is empty or longer than the cache, the cache is too small for the new tokens, an
        argument is out of range, or `top_k` or `top_p` is given without a temperature; or an id is not in the
        vocabulary, where the host has its value: in NumPy arrays and in JAX arrays on a CPU. Nothing runs
        then.

    Examples:
      >>> generate(model, prompts, max_new_tokens=64, temperature=0.8, top_p=0.95, key=1).tokens
    """
    checks.check_model(model)
    tokens, counts = checks.check_prompts(prompts, lengths, getattr(model, "vocab_size", None))
    checks.check_sampling(temperature, top_k, top_p)
    checks.check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    check_int(high=LONGEST // 2, max_new_tokens=max_new_tokens)
    if prefill_chunk is not None:
        checks.check_counts(prefill_chunk=prefill_chunk)
    checks.check_tokens(eos_id, pad_id)
    checks.check_room(counts, max_new_tokens, max_length)
    batch, width, max_new_tokens = len(tokens), buckets.bucketed(tokens.shape[1]), int(max_new_tokens)
    if max_length is not None:  # no wider than prompts and cache require
        width = min(width, max(tokens.shape[1], int(max_length)))
    part = min(prefill_chunk or buckets.prefill_chunk(batch, width), width)
    capacity = int(max_length or width + buckets.bucketed(max_new_tokens))
    graphdef, state = nnx.split(model)
    new = _run(
        graphdef,
        state,
        _widened(tokens, -(-width // part) * part),
        counts,
        checks.check_key(key, batch),
        _Sampling.make(temperature, top_k, top_p) if temperature else _Sampling(None, None, None),
        None if eos_id is None else int(eos_id),
        int(pad_id),
        max_new_tokens,
        max_length=capacity,
        chunk_size=min(int(chunk_size), capacity),
        prefill_chunk=int(part),
    )
    return Generation(new.tokens[:, :max_new_tokens], new.lengths)


def _widened(prompts: Array | np.ndarray, width: int) -> Array | np.ndarray:
    """Pads the prompts with zeros on the right. NumPy arrays stay on the host and need no program."""
    pad = jnp.pad if isinstance(prompts, jax.Array) else np.pad
    return pad(prompts, ((0, 0), (0, width - prompts.shape[1])))


@functools.partial(jax.jit, static_argnames=("graphdef", "max_length", "chunk_size", "prefill_chunk"))
def _run(
    graphdef,
    state,
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
) -> Generation:
    """`generate` with `max_length` columns of tokens, which is always enough."""
    model = nnx.merge(graphdef, state)
    prompts, lengths, keys = explicit.alike(prompts=prompts, lengths=lengths, keys=keys)
    batch = prompts.shape[0]

    def draw(loop: _Loop, cache: Any, logits: Array) -> _Loop:
        """Draws the next token from `logits` and adds it to the rows that have not ended."""
        keys_now = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.step)
        token = sample(explicit.by_rows(logits), keys_now, **sampling._asdict())
        lengths = loop.lengths + ~loop.done
        done = loop.done | (lengths >= max_new_tokens)
        if eos_id is not None:
            done |= token == eos_id
        # The last chunk may run beyond the last column.
        tokens = loop.tokens.at[:, loop.step].set(token, mode="drop")
        return _Loop(cache, token, tokens, lengths, done, loop.step + 1)

    def step(_, loop: _Loop) -> _Loop:
        real = (~loop.done).astype(jnp.int32)
        logits, cache = model.decode_step(loop.token[:, None], loop.cache, num_tokens=real)
        return draw(loop, cache, logits[:, -1])

    logits, cache = _prefill(model, prompts, lengths, model.init_cache(batch, max_length), prefill_chunk)
    none = jnp.zeros_like(lengths, jnp.int32)  # one number a row, on the device of the row
    start = _Loop(
        cache=cache,
        token=none,
        tokens=jnp.broadcast_to(none[:, None], (batch, max_length)),
        lengths=none,
        done=none > 0,
        step=jnp.zeros((), jnp.int32),
    )
    end = jax.lax.while_loop(
        lambda loop: ~loop.done.all(),
        lambda loop: jax.lax.fori_loop(0, chunk_size, step, loop),
        draw(start, cache, logits),
    )
    written = jnp.arange(max_length, dtype=jnp.int32) < end.lengths[:, None]
    return Generation(jnp.where(written, end.tokens, pad_id), end.lengths)


def _prefill(model: Decoder, prompts, lengths, cache, chunk: int) -> tuple[Array, Any]:
    """Logits after the last token of each prompt, in as many equal chunks as the longest prompt needs."""
    if chunk == prompts.shape[1]:
        return model.prefill(prompts, cache, num_tokens=lengths)

    def extend(carry):
        first, last_logits, cache = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompts, first, chunk, axis=1)
        logits, cache = model.prefill(tokens, cache, num_tokens=jnp.clip(lengths - first, 0, chunk))
        has_last = (first < lengths) & (lengths <= first + chunk)
        return first + chunk, jnp.where(has_last[:, None], logits, last_logits), cache

    longest = lengths.max()
    logits, extended = jax.eval_shape(lambda: model.prefill(prompts[:, :chunk], cache, num_tokens=lengths))
    cache = jax.tree.map(explicit.like, cache, extended)
    start = jnp.zeros((), jnp.int32), jnp.zeros_like(logits), cache
    _, logits, cache = jax.lax.while_loop(lambda carry: carry[0] < longest, extend, start)
    return logits, cache
