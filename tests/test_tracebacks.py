"""The traceback of a user's mistake: few frames of ours between the call and the check that refuses it."""

import pathlib
import traceback

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import NSAConfig, cache, generate, nn
from nsa_jax.model import Transformer, TransformerConfig

HOUSE = str(pathlib.Path(nsa_jax.__file__).parent)
MOST = 3  # frames between the call and the check
CONFIG = NSAConfig()
QUERY, KEY, COMPRESSED = (jnp.ones((1, *shape, 16)) for shape in ((64, 4), (64, 2), (3, 2)))
GATES = jnp.ones((1, 64, 4, 3))


@pytest.fixture(scope="module")
def held():
    sizes = dict(num_kv_heads=2, key_dim=16, value_dim=16, dtype="float32")
    return cache.init_cache(1, 64, config=CONFIG, **sizes)


@pytest.fixture(scope="module")
def layer():
    return nn.NSAAttention(4, 32, num_kv_heads=2, head_dim=8, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(vocab_size=10, num_layers=1, model_dim=32, num_heads=4, num_kv_heads=2)
    return Transformer(config, rngs=nnx.Rngs(0))


def native(**more):
    operands = (QUERY, COMPRESSED, COMPRESSED, KEY, KEY, KEY, KEY, GATES)
    return nsa_jax.native_sparse_attention(*operands, **{"config": CONFIG, **more})


MISTAKES = {
    "config": lambda **_: native(config=None),
    "shape": lambda **_: nsa_jax.window_attention(QUERY, KEY[..., :8], KEY, config=CONFIG),
    "scale": lambda **_: native(scale="a"),
    "name": lambda **_: native(implementation="fast"),
    "not here": lambda **_: native(implementation="triton"),
    "gates": lambda **_: nsa_jax.gated_sum(QUERY, QUERY, QUERY, GATES[:, :3]),
    "step": lambda held, **_: cache.decode_step(
        held, QUERY, cache.TokenKeysValues(*[KEY] * 6), GATES, config=CONFIG, compress=cache.Compression()
    ),
    "layer": lambda layer, **_: layer(jnp.ones((1, 4, 31))),
    "layer's step": lambda layer, held, **_: layer.decode_step(jnp.ones((1, 1, 32)), held),
    "model": lambda model, **_: model(jnp.ones((1, 3))),
    "generate": lambda model, **_: generate.generate(model, np.ones((1, 3)), max_new_tokens=4),
    "count": lambda model, **_: generate.generate(model, np.ones((1, 3), int), max_new_tokens=-4),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_few_frames_lie_between_a_call_and_its_check(mistake, held, layer, model):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        mistake(held=held, layer=layer, model=model)

    ours = [frame for frame in traceback.extract_tb(error.tb) if frame.filename.startswith(HOUSE)]
    assert 1 <= len(ours) <= MOST + 2, [frame.name for frame in ours]
