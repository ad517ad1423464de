"""A good call, from which bad ones are made, and what several of them are given."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bad_values import Floats, Integers, Kind, Name, Of, Scale, Whole
from flax import nnx

from nsa_jax import NSAConfig, cache, model, nn

CONFIG = NSAConfig(
    compression_block_size=4,
    compression_stride=2,
    selection_block_size=4,
    num_selected_blocks=4,
    window_size=5,
)
B, T, N, K, H, V, D, C, VOCAB, ROOM = 2, 10, 4, 2, 4, 3, 12, 4, 11, 12
RNG = np.random.default_rng(0)
KEYS = jax.random.split(jax.random.key(0), B)
MODEL = dict(vocab_size=VOCAB, num_layers=1, model_dim=D, num_heads=N, num_kv_heads=K, nsa=CONFIG)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*shape: int, below: int = 3) -> np.ndarray:
    return RNG.integers(0, below, shape).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Call:
    """A good call: a function, and the value and the kind of each argument."""

    function: Callable[..., Any]
    arguments: dict[str, tuple[Any, Kind]]

    def outcome(self, name: str, value: Any) -> Any:
        """What the call gives if an argument has another value, with shapes in the place of arrays."""
        given = {key: argument for key, (argument, _) in self.arguments.items()} | {name: value}
        found = []
        jax.eval_shape(lambda: found.append(self.function(**given)))
        return jax.tree.map(_shape, found)

    def wrong(self, seed: int) -> Iterator[tuple[str, str, Any]]:
        rng = np.random.default_rng(seed)
        for name, (value, kind) in self.arguments.items():
            for label, bad in kind.wrong(value, rng).items():
                yield name, label, bad

    def same(self) -> Iterator[tuple[str, str, Any]]:
        for name, (value, kind) in self.arguments.items():
            for label, other in kind.same(value).items():
                yield name, label, other


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def abstract(make: Callable[..., nnx.Module], **options: Any) -> Callable[[], nnx.Module]:
    """A function that gives a module whose parameters are traced."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(**options, rngs=nnx.Rngs(0))))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    return lambda: nnx.merge(graph, zeros)


def method(module: Callable[[], nnx.Module], name: str) -> Callable[..., Any]:
    return lambda **given: getattr(module(), name)(**given)


def made(make: Callable[..., nnx.Module]) -> Callable[..., Any]:
    """Makes a module, and gives its parameters."""

    def call(rngs, **given):
        def parameters():
            return nnx.state(
                make(rngs=nnx.Rngs(0) if isinstance(rngs, nnx.Rngs) else rngs, **given), nnx.Param
            )

        return nnx.eval_shape(parameters)

    return call


def zeros_of(held: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), held)


def fields(of: type, prefix: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gets a tuple by its fields."""

    def call(**given):
        own = {name: given.pop(f"{prefix}.{name}") for name in of._fields}
        return function(**{prefix: of(**own)}, **given)

    return call


LAYER_SIZES = dict(num_heads=N, in_features=D, num_kv_heads=K, head_dim=H)
LAYER = abstract(nn.NSAAttention, **LAYER_SIZES, value_dim=V, config=CONFIG, implementation="xla")
DENSE = abstract(nn.DenseAttention, **LAYER_SIZES, implementation="xla")
TRANSFORMER = abstract(model.Transformer, config=model.TransformerConfig(**MODEL), implementation="xla")
HELD = zeros_of(
    jax.eval_shape(
        lambda: cache.init_cache(
            B, ROOM, num_kv_heads=K, key_dim=H, value_dim=V, config=CONFIG, dtype=jnp.float32
        )
    )
)
DENSE_OF_LAYER = zeros_of(jax.eval_shape(lambda: DENSE().init_cache(B, ROOM)))
MODEL_HELD = zeros_of(jax.eval_shape(lambda: TRANSFORMER().init_cache(B, ROOM)))
DENSE_HELD = zeros_of(
    jax.eval_shape(
        lambda: cache.init_dense_cache(B, ROOM, num_kv_heads=K, key_dim=H, value_dim=V, dtype=jnp.float32)
    )
)

OPTIONS = dict(
    config=(CONFIG, Of()), scale=(None, Scale(optional=True)), implementation=("xla", Name(optional=True))
)
PLACES = dict(
    query_positions=(np.tile(np.arange(T, dtype=np.int32), (B, 1)), Integers(True, "BT")),
    segment_ids=(np.ones((B, T), np.int32), Integers(True, "BS")),
)
QUERY = (floats(B, T, N, H), Floats(axes="BTNH"))
KEY, VALUE = (floats(B, T, K, H), Floats(axes="BSKH")), (floats(B, T, K, V), Floats(axes="BSKV", free="V"))
KEY_CMP, VALUE_CMP = (
    (floats(B, C, K, H), Floats(axes="BCKH")),
    (floats(B, C, K, V), Floats(axes="BCKV", free="V")),
)
BOUND_VALUE = (VALUE[0], Floats(axes="BSKV"))
BLOCKS = (np.tile(np.array([0, -1, -1, -1], np.int32), (B, T, K, 1)), Integers(axes="BTKR"))
GATES = (floats(B, T, N, 3), Floats(axes="BTN3"))
OUT = (floats(B, T, N, V), Floats(axes="BTNV"))
FIRST_KEY = (0, Whole(low=None))
