"""A `Transformer` that is made without computing initial parameters, to be filled with others."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from nsa_jax.array_typing import Array
from nsa_jax.model.config import TransformerConfig
from nsa_jax.model.transformer import Transformer
from nsa_jax.nn.joined import Joined
from nsa_jax.nn.parameters import by_path
from nsa_jax.nn.projections import Sharding, check_sharding


def abstract_transformer(
    config: TransformerConfig, *, sharding: Sharding | None = None, **options: Any
) -> Transformer:
    """A model with shapes in the place of arrays; with a `sharding`, these have it.

    Raises:
      TypeError, ValueError: as `Transformer`, or there is a `sharding` and no mesh in context.
    """
    check_sharding(sharding)
    if sharding and jax.sharding.get_mesh().empty:
        raise ValueError(
            f"a model with a sharding needs its mesh in context, got none for {sharding!r}. Call it "
            "inside `with jax.set_mesh(mesh):`."
        )
    made = nnx.eval_shape(lambda: Transformer(config, sharding=sharding, **options, rngs=nnx.Rngs(0)))
    return nnx.as_abstract(made) if sharding else made


def parameters(model: Transformer) -> dict[str, Any]:
    """Parameters by their names in a checkpoint: their paths, joined by dots.

    Raises:
      ValueError: the model is prepared to write text, so that it has no longer all of them.
    """
    if any(isinstance(module, Joined) for _, module in nnx.iter_modules(model)):
        raise ValueError(
            "a model must not be prepared to be saved or converted, got one that prepare made. Pass the "
            "model that it was made of."
        )
    named = by_path(nnx.state(model, nnx.Param))
    return {name: variable.get_value() for name, variable in named.items()}


def fill(model: Transformer, arrays: Mapping[str, Array]) -> None:
    """Gives an abstract model its parameters, by name. Dropout starts from seed 0."""
    state = nnx.state(model, nnx.Param)
    for name, variable in by_path(state).items():
        variable.set_value(arrays[name])
    nnx.update(model, state)
    nnx.reseed(model, default=0)
