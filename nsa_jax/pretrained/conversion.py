"""Makes an NSA model of a dense one: the same weights, and new ones where NSA has more."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
from flax import nnx

from nsa_jax.array_typing import Array
from nsa_jax.config import BRANCHES, Branch, NSAConfig, check_branches
from nsa_jax.dispatch import Implementation
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.model.abstract import abstract_transformer, fill, parameters
from nsa_jax.model.config import AttentionKind
from nsa_jax.nn.checks import check_rngs
from nsa_jax.nn.gate import check_initial_gates
from nsa_jax.nn.parameters import sharding_of
from nsa_jax.nn.projections import Sharding
from nsa_jax.nn.selector import SelectorOption
from nsa_jax.option_checks import check_flag
from nsa_jax.parallel import Order
from nsa_jax.pretrained import indexer

_OF_A_BRANCH = re.compile(r"(?<=\.attention\.)(key|value)_(?:cmp|slc|win)_(proj|norm)(?=\.)")


def to_nsa(
    model: Transformer,
    *,
    nsa: NSAConfig = NSAConfig(),  # noqa: B008 (frozen)
    attention: AttentionKind | Sequence[AttentionKind] | None = None,
    selector: SelectorOption | Literal["indexer"] = "importance",
    branches: Sequence[Branch] = BRANCHES,
    compression: Literal["mlp", "mean"] = "mean",
    initial_gates: Sequence[float] | None = (0.02, 0.96, 0.02),
    share_keys_values: bool = True,
    sharding: Sharding | None = None,
    context_axis: str | None = None,
    context_order: Order = "zigzag",
    implementation: Implementation | None = None,
    rngs: nnx.Rngs,
) -> Transformer:
    """Makes an NSA model with the weights of a dense one.

    Where the selected blocks cover all tokens, and the selected branch is alone or has a gate of almost 1, it
    computes what the dense model does. On longer rows it attends to the blocks that it chooses, which has to
    be trained; see the guide page *From a dense model*.

    Args:
      model: a model of dense layers, and perhaps of window layers. It stays as it is; its arrays are copied.
      nsa: block structure.
      attention: kind of each layer of the new model, see `nsa_jax.model.TransformerConfig`. By default dense
        layers become "nsa", and window layers stay.
      selector: chooses the blocks, see `nsa_jax.nn.NSAAttention`. Or "indexer": an `nsa_jax.nn.Indexer` that
        starts as the queries and keys of the dense model, in the slower half of their rotation and without
        biases and norms, so that it ranks first the block with the largest product.
      branches: branches of an NSA layer. With one alone, it has no gates.
      compression: "mean", or "mlp", which starts as the mean and learns, see `nsa_jax.nn.Compressor`.
      initial_gates: what the gates of cmp, slc and win are at first; those of absent branches do not matter.
        None for gates that start at random, around one half each: the model is far from the dense one then.
      share_keys_values: whether the branches share the keys and values of the dense model. Otherwise each has
        a copy, which learns on its own.
      sharding: mesh axes of named dimensions, see `nsa_jax.model.Transformer`. Pass what `model` was loaded
        with. By default its weights stay where they are.
      context_axis: mesh axis over which the tokens of a row are spread, see `nsa_jax.model.Transformer`.
      context_order: order of the tokens on the devices, see `nsa_jax.model.Transformer`.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None, see `nsa_jax.model.Transformer`.
      rngs: source of the parameters that are new.

    Returns:
      The model. Its configuration has `norm_epsilon`, biases, rotation and all else of the given one.

    Raises:
      TypeError: an argument is of the wrong kind, or the model holds no arrays.
      ValueError: an option is out of range or unknown, `model` has NSA layers already or donated arrays, or
        the new model would have no NSA layer.
      NotImplementedError: as in `nsa_jax.model.Transformer`.

    Examples:
      >>> dense, tokenizer = load("SmolLM2-135M-Instruct")
      >>> model = to_nsa(dense, rngs=nnx.Rngs(0))
    """
    check_rngs(rngs)
    check_flag(share_keys_values=share_keys_values)
    old = _arrays(model)
    branches = check_branches(branches)
    gates = check_initial_gates(initial_gates, len(BRANCHES))
    several = len(branches) > 1
    copies = isinstance(selector, str) and selector == "indexer"
    chooses = indexer.options_of(model.config) if copies else cast(SelectorOption, selector)
    if gates is not None:
        gates = tuple(gate for branch, gate in zip(BRANCHES, gates, strict=True) if branch in branches)
    config = dataclasses.replace(
        model.config,
        **_kinds(model.config, attention),
        nsa=nsa,
        selector=chooses,
        branches=branches,
        compression=compression if "cmp" in branches else "mlp",
        initial_gates=gates if several else None,
        share_keys_values=share_keys_values and several,
    )
    options: dict[str, Any] = dict(
        sharding=sharding, context_axis=context_axis, context_order=context_order,
        implementation=implementation,
    )  # fmt: skip
    converted = abstract_transformer(config, **options)
    wanted = parameters(converted)
    origin = {name: _OF_A_BRANCH.sub(r"\1_\2", name) for name in wanted}
    known = {name: old[source] for name, source in origin.items() if source in old}
    if copies:
        known |= indexer.copied(old, wanted, model.config)
    new = _initial(config, options, rngs, [name for name in wanted if name not in known])
    for name, value in known.items():
        place = sharding_of(wanted[name]) or value.sharding
        new[name] = jax.device_put(value, place, may_alias=False)
    fill(converted, new)
    return converted


def _arrays(model: Any) -> Mapping[str, Array]:
    if not isinstance(model, Transformer):
        raise TypeError(f"model must be a Transformer, got {type(model).__name__}. Pass what load returned.")
    if any(each.attention == "nsa" for each in model.config.per_layer):
        raise ValueError(
            f"model must have dense and window layers only, got attention={model.config.attention!r}. Pass "
            "the dense model."
        )
    arrays = parameters(model)
    for name, value in arrays.items():
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            raise TypeError(
                f"model must hold arrays, got {type(value).__name__} at {name}. Call it outside jit, on a "
                "model that was loaded."
            )
        if value.is_deleted():
            raise ValueError(
                f"model must hold arrays, got a donated one at {name}. Convert it before a step or prepare "
                "takes its arrays."
            )
    return arrays


def _kinds(config: TransformerConfig, attention: Any) -> dict[str, Any]:
    """`attention` and `window_size` of the new model."""
    layers = config.per_layer
    if attention is None:
        attention = tuple("nsa" if each.attention == "dense" else each.attention for each in layers)
    # The sizes of windows that stay: of another layer that is to have one, it is that of `nsa`.
    named = dataclasses.replace(config, attention=attention, window_size=None).per_layer
    kinds = tuple(each.attention for each in named)
    if "nsa" not in kinds:
        raise ValueError(
            f"a new model must have an NSA layer, got attention={config.attention!r} of the old one and "
            f'{attention!r}. Pass attention="nsa", or one for each layer.'
        )
    sizes = tuple(
        (old.window_size or old.nsa.window_size) if new.attention == old.attention == "window" else None
        for new, old in zip(named, layers, strict=True)
    )
    return dict(
        attention=kinds[0] if len(set(kinds)) == 1 else kinds,
        window_size=None if set(sizes) == {None} else sizes,
    )


def _initial(
    config: TransformerConfig, options: dict[str, Any], rngs: nnx.Rngs, names: Sequence[str]
) -> dict[str, Any]:
    """Initial values of these parameters alone: the compiler drops all others."""
    key = rngs.params()

    @jax.jit
    def draw(key: Array) -> dict[str, Array]:
        made = parameters(Transformer(config, **options, rngs=nnx.Rngs(key)))
        return {name: made[name] for name in names}

    return draw(key) if names else {}
