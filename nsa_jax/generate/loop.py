"""Generation in one compiled program: prefill, then a loop that never returns to the host for a token.

The end depends on the data, and each question whether it has come is a round trip to the host. So a
`while_loop` asks once a chunk, and a chunk is a loop of a fixed number of steps. A finished row goes along
through the steps and writes nothing; what the last chunk computes beyond the end is cut off.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_typing import Array, Bool, Float, Int, Int32, PRNGKeyArray
from nsa_jax.generate import checks
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
    """What goes around the loop; `logits` are those of the token that comes next."""

    cache: Any
    logits: Float[Array, "B vocab"]
    tokens: Int32[Array, "B steps"]
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
    prompts: Int[Array, "B P"],
    *,
    lengths: Int[Array, " B"] | None = None,
    max_new_tokens: int,
    max_length: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    pad_id: int = 0,
    key: int | PRNGKeyArray = 0,
    chunk_size: int = 32,
    prefill_chunk: int | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    One program is compiled for each structure of the model, shape of `prompts`, value of `max_new_tokens`,
    `max_length`, `chunk_size` and `prefill_chunk`, and choice of which of `temperature`, `top_k`, `top_p` and
    `eos_id` are in use; their values and the rest do not matter.

    Args:
      model: an `nnx.Module` with the methods of `Decoder`.
      prompts: token ids, padded on the right with any ids.
      lengths: tokens of each prompt, 1 .. `P`; `P` by default.
      max_new_tokens: most tokens to add to a row.
      max_length: capacity of the cache in tokens, prompt and new ones together; `P + max_new_tokens` by
        default.
      temperature: 0 takes the most likely token, others divide the logits before drawing.
      top_k: draws from the `k` most likely tokens only.
      top_p: draws from the fewest tokens that together have this probability.
      eos_id: token that ends a row.
      pad_id: what stands behind the end of a row that ended early.
      key: a seed, a typed key of `jax.random.key`, or one such key a row. From a seed or a single key each
        row gets its own, by its index. A row depends on its own prompt and key alone.
      chunk_size: steps between two questions whether all rows have ended.
      prefill_chunk: prompt tokens prefilled at once; all by default, fewer bound the memory.

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
    prompts, lengths = checks.check_prompts(prompts, lengths)
    checks.check_sampling(temperature, top_k, top_p)
    checks.check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    batch, width = prompts.shape
    if prefill_chunk is not None:
        checks.check_counts(prefill_chunk=prefill_chunk)
    checks.check_tokens(eos_id, pad_id)
    max_length = checks.check_room(lengths, width, max_new_tokens, max_length)
    graphdef, state = nnx.split(model)
    return _run(
        graphdef,
        state,
        prompts,
        lengths,
        checks.check_key(key, batch),
        _Sampling.make(temperature, top_k, top_p) if temperature else _Sampling(None, None, None),
        None if eos_id is None else int(eos_id),
        int(pad_id),
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        chunk_size=min(chunk_size, max_new_tokens),
        prefill_chunk=width if prefill_chunk is None else min(prefill_chunk, width),
    )


@functools.partial(
    jax.jit, static_argnames=("graphdef", "max_new_tokens", "max_length", "chunk_size", "prefill_chunk")
)
def _run(
    graphdef,
    state,
    prompts,
    lengths,
    keys,
    sampling,
    eos_id,
    pad_id,
    *,
    max_new_tokens,
    max_length,
    chunk_size,
    prefill_chunk,
) -> Generation:
    model = nnx.merge(graphdef, state)
    batch = prompts.shape[0]
    steps = -(-max_new_tokens // chunk_size) * chunk_size

    def step(_, loop: _Loop) -> _Loop:
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, loop.step)
        token = sample(loop.logits, step_keys, **sampling._asdict())
        done = loop.done | (loop.step + 1 >= max_new_tokens)
        if eos_id is not None:
            done |= token == eos_id
        logits, cache = model.decode_step(token[:, None], loop.cache, num_tokens=(~done).astype(jnp.int32))
        return _Loop(
            cache=cache,
            logits=logits[:, -1],
            tokens=jax.lax.dynamic_update_slice_in_dim(loop.tokens, token[:, None], loop.step, axis=1),
            lengths=loop.lengths + ~loop.done,
            done=done,
            step=loop.step + 1,
        )

    logits, cache = _prefill(model, prompts, lengths, model.init_cache(batch, max_length), prefill_chunk)
    start = _Loop(
        cache=cache,
        logits=logits,
        tokens=jnp.zeros((batch, steps), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        step=jnp.zeros((), jnp.int32),
    )
    end = jax.lax.while_loop(
        lambda loop: ~loop.done.all(), lambda loop: jax.lax.fori_loop(0, chunk_size, step, loop), start
    )
    written = jnp.arange(max_new_tokens) < end.lengths[:, None]
    return Generation(jnp.where(written, end.tokens[:, :max_new_tokens], pad_id), end.lengths)


def _prefill(model: Decoder, prompts, lengths, cache, chunk: int) -> tuple[Array, Any]:
    """Logits after each prompt's last token; chunks of one size, so that they share one compiled body."""
    width = prompts.shape[1]
    if chunk == width:
        return model.prefill(prompts, cache, num_tokens=lengths)
    chunks = jnp.pad(prompts, ((0, 0), (0, -width % chunk))).reshape(len(prompts), -1, chunk).swapaxes(0, 1)
    firsts = jnp.arange(0, width, chunk, dtype=jnp.int32)

    def extend(carry, inputs):
        last_logits, cache = carry
        tokens, first = inputs
        logits, cache = model.prefill(tokens, cache, num_tokens=jnp.clip(lengths - first, 0, chunk))
        has_last = (first < lengths) & (lengths <= first + chunk)
        return (jnp.where(has_last[:, None], logits, last_logits), cache), None

    logits, _ = jax.eval_shape(lambda: model.prefill(chunks[0], cache, num_tokens=lengths))
    carry = (jnp.zeros(logits.shape, logits.dtype), cache)
    return jax.lax.scan(extend, carry, (chunks, firsts))[0]
