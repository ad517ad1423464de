"""Small modules, made without compiling their initialisers, and their parameters by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.model import TransformerConfig

NSA = NSAConfig(compression_block_size=4, compression_stride=2, selection_block_size=4, window_size=5)
MODEL = TransformerConfig(vocab_size=11, num_layers=2, model_dim=12, num_heads=4, num_kv_heads=2, nsa=NSA)


def abstract(module: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """A module that has shapes and dtypes but no values, so nothing is compiled."""
    return nnx.eval_shape(lambda: module(*arguments, **settings, rngs=nnx.Rngs(0)))


def named(state: nnx.State) -> dict[str, Any]:
    """Values of a state by their paths joined with dots."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def randomised(module: nnx.Module, scale: float = 1.0, *, seed: int = 0) -> Any:
    """An abstract module with standard normal parameters, those of matrices times `scale`."""
    graph, state = nnx.split(module)
    rng = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(state):
        like: jax.ShapeDtypeStruct = variable.get_value()
        factor = 1 if len(like.shape) == 1 else scale
        variable.set_value(jnp.asarray((factor * rng.standard_normal(like.shape)).astype(like.dtype)))
    return nnx.merge(graph, state)
