"""Generation in one compiled program: prefill, then a loop that never returns to the host for a token.

The end depends on the data, and each question whether it has come is a round trip to the host. So a
`while_loop` asks once a chunk, and a chunk is a loop of a fixed number of steps. A finished row goes along
through the steps and writes nothing; what the last chunk computes beyond the end is cut off.

The first token comes from the logits of the prompt, and a step takes the token that the last one drew. So a
call for one token ends with the prefill: its time is the time to the first token.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.array_typing import Array, Bool, Int, Int32, PRNGKeyArray
from nsa_jax.generate import buckets, checks
from nsa_jax.generate.sampling import sample


class Decoder(Protocol):
    """What `generate` asks of a model, which is an `nnx.Module`; `nsa_jax.model.Transformer` is one."""

    def init_cache(self, batch: int, max_length: int) -> Any:
        """An empty cache."""

    def prefill(
        self, tokens: Int[Array, "B T"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Logits [B, vocab] after each row's last real token, and the cache with the real tokens."""

    def decode_step(
        self, tokens: Int[Array, "B 1"], cache: Any, num_tokens: Int[Array, " B"]
    ) -> tuple[Array, Any]:
        """Logits [B, 1, vocab], and the cache; rows of 0 tokens stay as they are."""


class Generation(NamedTuple):
    """New tokens of each row, and how many they are.

    Attributes:
      tokens: without the prompt; a row that ended early has `eos_id` last and `pad_id` behind it.
      lengths: number of new tokens, `eos_id` included.
    """

    tokens: Int32[Array, "B new"]
    lengths: Int32[Array, " B"]


class _Loop(NamedTuple):
    """What goes around the loop; `token`, the `step`-th new one, is not in the cache yet."""

    cache: Any
    token: Int32[Array, " B"]
    tokens: Int32[Array, "B max_length"]
    lengths: Int32[Array, " B"]
    done: Bool[Array, " B"]
    step: Int32[Array, ""]


class _Sampling(NamedTuple):
    """Traced, so that another value is no other program; None is, as it leaves its work out."""

    temperature: float | None
    top_k: int | None
    top_p: float | None

    @classmethod
    def make(cls, temperature: float, top_k: int | None, top_p: float | None) -> "_Sampling":
        # One type each: a NumPy scalar, or 1 for 1.0, would be another program.
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

    Calls of similar sizes share a program. `P` and `max_new_tokens` are rounded up to buckets of at most an
    eighth more, or multiples of 64. A program is compiled for each structure of the model, number of rows,
    bucket of `P`, capacity of the cache, `chunk_size` and `prefill_chunk`, and choice of which of
    `temperature`, `top_k`, `top_p` and `eos_id` are in use. Values do not matter, and neither does
    `max_new_tokens` where `max_length` is given. For each new size JAX still compiles the cut of the result,
    and the padding of prompts that are no NumPy array: milliseconds.

    Args:
      model: an `nnx.Module` with the methods of `Decoder`.
      prompts: token ids, padded on the right with any ids.
      lengths: tokens of each prompt, 1 .. `P`; `P` by default.
      max_new_tokens: most tokens to add to a row.
      max_length: capacity of the cache in tokens, prompt and new ones together, taken exactly. By default
        the sum of the two buckets, whose cache is up to an eighth and 126 tokens a row larger than needed.
      temperature: 0 takes the most likely token, others divide the logits before drawing.
      top_k: draws from the `k` most likely tokens only.
      top_p: draws from the fewest tokens that together have this probability.
      eos_id: token that ends a row.
      pad_id: what stands behind the end of a row that ended early.
      key: a seed, a typed key of `jax.random.key`, or one such key a row. From a seed or a single key each
        row gets its own, by its index. A row depends on its own prompt and key alone.
      chunk_size: steps between two questions whether all rows have ended. A question costs about 11 us on an
        H100; whole chunks run, so the last one takes up to `chunk_size - 1` steps for nothing.
      prefill_chunk: prompt tokens of a row prefilled at once, which bound the memory; the chunks after the
        longest prompt are left out. By default about 8192 tokens of all rows together, but at least 512
        of a row, in equal parts.

    Returns:
      `Generation(tokens, lengths)`.

    Raises:
      TypeError: an argument has the wrong type, or `model` lacks a method.
      ValueError: an empty prompt, one longer than the cache, a cache too small for the new tokens, lengths or
        another argument out of range; before anything runs.

    Example:
      >>> generate(model, prompts, max_new_tokens=64, temperature=0.8, top_p=0.95, key=1).tokens
    """
    checks.check_model(model)
    tokens, counts = checks.check_prompts(prompts, lengths)
    checks.check_sampling(temperature, top_k, top_p)
    checks.check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    if prefill_chunk is not None:
        checks.check_counts(prefill_chunk=prefill_chunk)
    checks.check_tokens(eos_id, pad_id)
    checks.check_room(counts, max_new_tokens, max_length)
    batch, width = len(tokens), buckets.bucketed(tokens.shape[1])
    if max_length is not None:  # no wider than the prompts and the cache are
        width = min(width, max(tokens.shape[1], int(max_length)))
    part = min(prefill_chunk or buckets.prefill_chunk(batch, width), width)
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
        int(max_new_tokens),
        max_length=int(max_length or width + buckets.bucketed(max_new_tokens)),
        chunk_size=int(chunk_size),
        prefill_chunk=int(part),
    )
    return Generation(new.tokens[:, :max_new_tokens], new.lengths)


def _widened(prompts: Array | np.ndarray, width: int) -> Array | np.ndarray:
    """The prompts with zeros behind them; on the host if they are there, where no program is compiled."""
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
    """As `generate`, with more columns of tokens: no prompt and its new tokens are more than `max_length`."""
    model = nnx.merge(graphdef, state)
    batch = prompts.shape[0]

    def draw(loop: _Loop, cache: Any, logits: Array) -> _Loop:
        """Adds the token that `logits` give to the rows that have not ended."""
        keys_now = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.step)
        token = sample(logits, keys_now, **sampling._asdict())
        lengths = loop.lengths + ~loop.done
        done = loop.done | (lengths >= max_new_tokens)
        if eos_id is not None:
            done |= token == eos_id
        # The last chunk may go on beyond the last column.
        tokens = loop.tokens.at[:, loop.step].set(token, mode="drop")
        return _Loop(cache, token, tokens, lengths, done, loop.step + 1)

    def step(_, loop: _Loop) -> _Loop:
        real = (~loop.done).astype(jnp.int32)
        logits, cache = model.decode_step(loop.token[:, None], loop.cache, num_tokens=real)
        return draw(loop, cache, logits[:, -1])

    logits, cache = _prefill(model, prompts, lengths, model.init_cache(batch, max_length), prefill_chunk)
    start = _Loop(
        cache=cache,
        token=jnp.zeros(batch, jnp.int32),
        tokens=jnp.zeros((batch, max_length), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
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
    """Logits after each prompt's last token; by chunks of one size, as many as the longest prompt needs."""
    if chunk == prompts.shape[1]:
        return model.prefill(prompts, cache, num_tokens=lengths)

    def extend(carry):
        first, last_logits, cache = carry
        tokens = jax.lax.dynamic_slice_in_dim(prompts, first, chunk, axis=1)
        logits, cache = model.prefill(tokens, cache, num_tokens=jnp.clip(lengths - first, 0, chunk))
        has_last = (first < lengths) & (lengths <= first + chunk)
        return first + chunk, jnp.where(has_last[:, None], logits, last_logits), cache

    longest = lengths.max()
    logits, _ = jax.eval_shape(lambda: model.prefill(prompts[:, :chunk], cache, num_tokens=lengths))
    start = jnp.zeros((), jnp.int32), jnp.zeros(logits.shape, logits.dtype), cache
    _, logits, cache = jax.lax.while_loop(lambda carry: carry[0] < longest, extend, start)
    return logits, cache
