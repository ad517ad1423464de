"""The parts of a generated token, each alone in a compiled loop: products, attention, sampling."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import timing
from benchmarks.decode.inputs import NUM_STEPS, Setting
from benchmarks.decode.loops import Decoding
from benchmarks.decode.steps import Program
from benchmarks.inputs import Shape, key
from nsa_jax import cache
from nsa_jax.array_typing import Array, Float
from nsa_jax.generate import prepare, sample
from nsa_jax.model import Transformer
from nsa_jax.nn import weights
from nsa_jax.nn.joined import projected

STEPS = 32


class Part(NamedTuple):
    """`run` takes `STEPS` steps, and each reads `bytes` at least."""

    run: Callable[[], Any]
    bytes: int


class Products(nnx.Module):
    """An attention layer that does not attend: runs all of its projections and adds them up."""

    def __init__(self, attention: Any):
        self.attention = attention

    def __call__(self, x: Float[Array, "B T D"], **_: Any) -> Float[Array, "B T D"]:
        """The layer's output, as if attention returned its inputs."""
        attention = self.attention
        made = projected(attention, x, attention.input_projections)
        query = made["query_proj"]
        for name, kv_heads in made.items():
            if name.startswith(("key", "value")):
                query += jnp.repeat(kv_heads, query.shape[2] // kv_heads.shape[2], axis=2)
        if hasattr(attention, "gate"):
            gates = attention.gate.of_hidden(made["gate"]) if "gate" in made else attention.gate(x)
            query *= gates.sum(axis=-1, keepdims=True)
        return attention.out_proj(query)


class Given(nnx.Module):
    """Replaces a projection: random numbers, without a product."""

    def __init__(self, projection: Callable[[Array], Array], x: Array):
        like = jax.eval_shape(projection, x)
        self.numbers = nnx.Param(jax.random.normal(key("given"), like.shape, like.dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T heads dim"]:
        """The same numbers for every token; they depend on `x` only so that they wait for it."""
        return self.numbers[...] + x[:, :, :1, None]


class Mean(nnx.Module):
    """Replaces the output projection: reads the whole output of the attention."""

    def __call__(self, out: Float[Array, "B T N V"]) -> Float[Array, "B T 1"]:
        """One number a token."""
        return out.mean(axis=(2, 3))[..., None]


def products(model: Transformer, batch: int, _: int) -> Part:
    """All of a token's products with weights, from the embedding to the logits, joined as in `generate`."""
    model = prepare(model)
    read = sum(x.nbytes for name, x in weights(model).items() if "compressor" not in name)
    for layer in model.layers:
        layer.attention = Products(layer.attention)
    graph, state = nnx.split(model)

    def loop(state: Any, logits: Array) -> Array:
        model = nnx.merge(graph, state)

        def step(_: Any, logits: Array) -> Array:
            # Any tokens that depend on the step before.
            return model(jnp.abs(1000 * logits[..., 0]).astype(jnp.int32) % logits.shape[-1])

        return jax.lax.fori_loop(0, STEPS, step, logits)

    logits = jnp.zeros((batch, 1, model.config.vocab_size), _logits_dtype(model))
    return Part(timing.compile_for(loop, (state, logits)).run, read)


def attention(model: Transformer, batch: int, length: int) -> Part:
    """The steps of all layers, each on a cache that holds `length` tokens a row, without projections."""
    config = model.config
    caches = jax.tree.map(_random, model.init_cache(batch, length + NUM_STEPS))
    model = nnx.merge(*nnx.split(model))  # another one with the same arrays
    x = jnp.zeros((batch, 1, config.model_dim), config.dtype)
    for layer in model.layers:
        for name, part in [*vars(layer.attention).items()]:
            if part is not None and (name == "gate" or name.endswith("_proj")):
                setattr(layer.attention, name, Mean() if name == "out_proj" else Given(part, x))
    graphs, states = zip(*(nnx.split(layer.attention) for layer in model.layers), strict=True)

    def step(held: Any, x: Array, state: Any) -> tuple[Array, Any]:
        out, held = nnx.merge(graphs[0], state).decode_step(x, held)
        return jnp.broadcast_to(out, x.shape), held

    program = Program("layer", "", step, x, lambda number: (caches[number], states[number]))
    loop = Decoding(program, Setting(Shape(batch=batch, length=length), "xla"), config.num_layers, STEPS)
    keys = cache.expected_reads(length, config.nsa) if config.attention == "nsa" else length
    dims = 2 * (config.head_dim or config.model_dim // config.num_heads)
    itemsize = jnp.dtype(config.dtype).itemsize
    read = config.num_layers * batch * keys * config.num_kv_heads * dims * itemsize
    return Part(lambda: jax.block_until_ready(loop.run()), read)


def sampling(model: Transformer, batch: int, _: int) -> Part:
    """The choice of the most likely token."""
    logits = jax.random.normal(key("logits"), (batch, model.config.vocab_size), _logits_dtype(model))
    keys = jax.random.split(jax.random.key(0), batch)

    def loop(logits: Array) -> Array:
        def step(_: Any, logits: Array) -> Array:
            return logits.at[:, 0].set(sample(logits, keys).astype(logits.dtype))

        return jax.lax.fori_loop(0, STEPS, step, logits)

    return Part(timing.compile_for(loop, (logits,)).run, logits.nbytes)


PARTS = {"products": products, "attention": attention, "sampling": sampling}


def _logits_dtype(model: Transformer) -> Any:
    return jax.eval_shape(model, jnp.zeros((1, 1), jnp.int32)).dtype


def _random(x: Array) -> Array:
    return jax.random.normal(key("cache"), x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
