"""A model made ready to write text: what a layer multiplies its input by is one kernel.

A decode step is little but products, which in one kernel take less time than in several. XLA joins them by
itself, but anew in each step, as it converts parameters to the dtype of the computation and pads them.
"""

import collections
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nsa_jax.array_typing import Array
from nsa_jax.generate.checks import check_model
from nsa_jax.generate.decoder import Decoder
from nsa_jax.generate.structure import Structure, is_concrete, split
from nsa_jax.model import Transformer
from nsa_jax.model.layer import DecoderLayer, GatedMLP
from nsa_jax.nn import Compressor, DenseAttention, Gate, NSAAttention
from nsa_jax.nn.joined import is_joined, join
from nsa_jax.option_checks import check_flag

# With a `dtype` they compute in it alone, so that their parameters may as well be stored in it.
_OF_ONE_DTYPE = (nnx.Embed, nnx.Linear, nnx.LinearGeneral, Compressor, Gate)


def prepare[Model: Decoder](model: Model, *, donate: bool = False) -> Model:
    """Makes a model that writes the same text in less time, with fewer and larger products.

    In each attention layer of a `Transformer`, one kernel takes the place of all those by which the input is
    multiplied: of the queries, the keys and values of all branches, the first product of a `Gate`, and an
    `Indexer`. Another is for the two products of the MLP with its input. Its inner width becomes a multiple
    of 128 on each device, by zeros. Kernels, tables and their biases are stored in the dtype of the
    computation. No value changes by that, but sums may be added up in another order.

    `generate`, `start` and `Batcher` prepare what they are given. Do it yourself to save memory. Its joined
    kernels are copies: of each layer `D * F` numbers, where F are the columns that were joined, filled up to
    a multiple of 128. In large models that is about 60 % of all numbers. What was neither joined, widened
    nor converted is shared with `model`.

    `nsa_jax.model.save` and `nsa_jax.pretrained` refuse a prepared model. Keep the other one, or its
    checkpoint.

    Args:
      model: see `generate`. It stays as it is.
      donate: whether to free the arrays that have been replaced, layer by layer, so that those of one layer
        at a time exist twice. `model` cannot be used then, nor what shares them with it.

    Returns:
      The prepared model. Your own modules are left alone, also beside ours in one layer. Of kernels that are
      divided over devices alike, each device joins its own columns. Under `jit` that is done on explicit axes
      only. A model that is prepared, or not exactly a `Transformer`, is returned as it is.

    Raises:
      TypeError: `model` is no `nnx.Module` with the methods of `Decoder`, or `donate` is not a bool.

    Examples:
      >>> model = prepare(model)
      >>> session = start(model, prompts, max_length=4096)
    """
    check_model(model)
    check_flag(donate=donate)
    if type(model) is not Transformer or any(map(is_joined, _parts(model))):
        return model
    prepared: Any = nnx.clone(model)
    for old in _improve(prepared):
        if donate:
            kept = set(map(id, jax.tree.leaves(nnx.state(prepared))))  # another layer may still read it
            for array in filter(is_concrete, old):
                if id(array) not in kept and not array.is_deleted():
                    array.delete()
    return prepared


def prepared_parts(
    model: Decoder, parts: tuple[Structure, tuple[Array, ...]] | None = None
) -> tuple[Structure, tuple[Array, ...]]:
    """Structure and arrays of a prepared model: the same as before, while anything still holds those.

    `parts` are what `split` gives of the model, where that is known: it takes 10 ms of processor time.
    """
    structure, arrays = parts or split(model)
    with _LOCK:
        for _ in range(len(_SHARED)):
            shared = _SHARED.popleft()
            alive = tuple(array for each in shared.prepared if (array := each()) is not None)
            if len(alive) < len(shared.prepared):
                continue  # it was dropped
            _SHARED.append(shared)
            if shared.is_of(structure, arrays):
                return shared.structure, alive
        made = prepare(model)
        if made is model:
            return structure, arrays
        found = split(made)
        if all(map(is_concrete, arrays)):
            _SHARED.append(_Shared(structure, _weak(arrays), found[0], _weak(found[1])))
        return found


class _Shared(NamedTuple):
    """A model and what was prepared of it. It keeps neither from being freed."""

    model: Structure
    arrays: tuple[weakref.ref[Array], ...]
    structure: Structure
    prepared: tuple[weakref.ref[Array], ...]

    def is_of(self, model: Structure, arrays: tuple[Array, ...]) -> bool:
        """Whether it is of this model, with just these arrays."""
        return self.model == model and all(
            known() is array for known, array in zip(self.arrays, arrays, strict=True)
        )


_SHARED: collections.deque[_Shared] = collections.deque(maxlen=8)
_LOCK = threading.RLock()


def _weak(arrays: tuple[Array, ...]) -> tuple[weakref.ref[Array], ...]:
    return tuple(map(weakref.ref, arrays))


def _improve(model: Transformer) -> Iterator[list[Array]]:
    """Changes a model part by part; yields the arrays that it has replaced in each."""
    for part in _parts(model):
        if not is_joined(part):  # as one is that stands in two layers
            yield join(part, part.input_projections, into=getattr(part, "down_proj", None))
    for owner in (model, *_parts(model)):
        for module in vars(owner).values():
            if type(module) in _OF_ONE_DTYPE:
                yield _convert(module)


def _parts(model: Any) -> list[Any]:
    """The attention and the MLP of all layers, as far as they are ours."""
    layers = [layer for layer in model.layers if type(layer) is DecoderLayer]
    parts = [part for layer in layers for part in (layer.attention, layer.mlp)]
    return [part for part in parts if type(part) in (NSAAttention, DenseAttention, GatedMLP)]


def _convert(module: Any) -> list[Array]:
    own = [value for value in vars(module).values() if isinstance(value, nnx.Param)]
    wide = [
        each for each in own if each.get_value().dtype != jnp.dtype(module.dtype or each.get_value().dtype)
    ]
    old = [each.get_value() for each in wide]
    for each, array in zip(wide, old, strict=True):
        each.set_value(array.astype(module.dtype))
    return old
