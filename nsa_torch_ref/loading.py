"""Reads the attention layers of a model that `nsa_jax.pretrained.save` wrote, by their names, without JAX.

`config.json` holds the options of the model as `"transformer"`. `model.safetensors`, or the files that
`model.safetensors.index.json` lists, hold `layers.{number}.attention.{name}`, where `name` is that of a
parameter of `NSAAttention`.
"""

import json
import os
import pathlib
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from nsa_torch_ref.masks import NSAConfig
from nsa_torch_ref.module import IndexerConfig, NSAAttention

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SAME = (  # options that have one name in a model and in a layer
    *("num_kv_heads", "head_dim", "branches", "share_keys_values", "compression", "out_bias", "normalize_qk"),
    *("norm_epsilon", "scale"),
)


def load_layers(folder: str | os.PathLike[str]) -> dict[int, NSAAttention]:
    """Loads the attention of each NSA layer of a model that `nsa_jax.pretrained.save` wrote.

    Args:
      folder: where it was saved.

    Returns:
      The layers by their numbers, in float32 and in `eval()` mode. What each takes is the residual stream
      after its `attention_norm`. Dense and window layers are left out.

    Raises:
      ValueError: the folder holds another model or a part of one, or a layer chooses no blocks itself.
      ImportError: the package safetensors is not installed.

    Examples:
      >>> from nsa_torch_ref.loading import load_layers
      >>> out = load_layers("smollm2-nsa")[0](x)  # [batch, tokens, width]
    """
    folder = pathlib.Path(folder)
    fields = _read(folder / CONFIG)
    if fields.get("model_type") != "nsa_jax":
        raise ValueError(
            f"folder must hold an NSA model of nsa_jax.pretrained.save, got model_type="
            f"{fields.get('model_type')!r} in {str(folder / CONFIG)!r}. Save one there."
        )
    model = _held(folder / CONFIG, fields, "transformer")
    try:
        numbers = [i for i in range(model["num_layers"]) if _of_layer(model["attention"], i) == "nsa"]
        layers = {number: _layer(model, number) for number in numbers}
    except (KeyError, TypeError) as error:  # an option is missing, or of a later version
        _broken(folder / CONFIG, f"{type(error).__name__}: {error}")
    weights = _attention_weights(folder)
    for number, layer in layers.items():
        _fill(layer, number, weights)
    return layers


def _layer(model: Mapping[str, Any], number: int) -> NSAAttention:
    """The layer with random parameters."""
    selector = model["selector"]
    if selector == "given":
        raise ValueError(
            "a layer must choose its blocks, got selector='given'. Pass block_indices to an NSAAttention of "
            "your own."
        )
    scaling = model["rope_scaling"]
    if isinstance(scaling, list):
        scaling = scaling[number]
    return NSAAttention(
        model["num_heads"],
        model["model_dim"],
        config=NSAConfig(**model["nsa"]),
        selector=selector if isinstance(selector, str) else IndexerConfig(**selector),
        use_bias=model["qkv_bias"],
        rope_base=_of_layer(model["rope_base"], number),
        rope_scaling=None if scaling is None else types.SimpleNamespace(**scaling),
        **{name: model[name] for name in SAME},
    ).eval()


def _of_layer(value: Any, number: int) -> Any:
    """The value of a layer, of one for all or of a list with one for each."""
    return value[number] if isinstance(value, list) else value


def _fill(layer: NSAAttention, number: int, weights: Mapping[str, Tensor]) -> None:
    """Gives the layer its weights."""
    begin = f"layers.{number}.attention."
    own = {name.removeprefix(begin): value for name, value in weights.items() if name.startswith(begin)}
    try:
        layer.load_state_dict(own)
    except RuntimeError as error:  # lists names and shapes that differ
        told = "; ".join(line.strip(" .\t") for line in str(error).splitlines()[1:])
        raise ValueError(
            f"the tensors must be those that {CONFIG} asks for, got a layer {number} with {told}. Load a "
            "whole copy of the model."
        ) from None


def _attention_weights(folder: pathlib.Path) -> dict[str, Tensor]:
    """The weights of all attention layers."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            f"loading needs the package safetensors, got {error}. Install it with: pip install "
            "'nsa_jax[torch]'."
        ) from error
    if (folder / WEIGHTS).exists():
        files = [WEIGHTS]
    else:
        files = sorted(set(_held(folder / INDEX, _read(folder / INDEX), "weight_map").values()))
    weights = {}
    for file in files:
        try:
            with safetensors.safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if ".attention." in name:
                        weights[name] = opened.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            _broken(folder / file, error)
    return weights


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _broken(file, error)
    if not isinstance(values, dict):
        _broken(file, f"a {type(values).__name__}")
    return values


def _held(file: pathlib.Path, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The mapping under this name."""
    if not isinstance(fields.get(name), dict):
        _broken(file, f"no {name}")
    return fields[name]


def _broken(file: pathlib.Path, found: object) -> NoReturn:
    raise ValueError(
        f"folder must hold a whole model, got {str(found).splitlines()[0]!r} at {str(file)!r}. Load another "
        "copy."
    ) from None
