"""Loads a dense model of others, or an NSA model that `save` wrote."""

import dataclasses
import functools
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from nsa_jax.dispatch import Implementation, check_implementation
from nsa_jax.model import Transformer, TransformerConfig
from nsa_jax.model.abstract import abstract_transformer, fill, parameters
from nsa_jax.model.stored_config import config_from_plain
from nsa_jax.nn.parameters import differences, sharding_of
from nsa_jax.nn.projections import Sharding
from nsa_jax.option_checks import check_dtype
from nsa_jax.pretrained.extra import package
from nsa_jax.pretrained.families import read_fields
from nsa_jax.pretrained.folder import CONFIG, INDEX, TOKENIZER, WEIGHTS, read_config, read_folder
from nsa_jax.pretrained.gguf_file import read_gguf
from nsa_jax.pretrained.names import Place, places
from nsa_jax.pretrained.source import Source

# In the place of a family, in the `config.json` of a model that `save` wrote under our names.
NATIVE, NATIVE_CONFIG = "nsa_jax", "transformer"

ALIGNMENT = 64  # bytes

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = [CONFIG, TOKENIZER, WEIGHTS, INDEX, WEIGHTS.replace(".", "-*.")]


def load(
    source: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    param_dtype: str = "float32",
    rope_base: float | None = None,
    sharding: Sharding | None = None,
    implementation: Implementation | None = None,
    ignore: Collection[str] = (),
) -> tuple[Transformer, Any]:
    """Loads a model and its tokenizer.

    Families: Llama 1 to 3.3 and what has its architecture, such as SmolLM2; Mistral; Qwen2 and Qwen2.5;
    Qwen3; Gemma 3 for text. Mixtures of experts, soft caps, other rotations and other activations are
    refused, with the field that asks for them.

    Weights are read one at a time, straight into `param_dtype` and their sharding, so the host needs the
    memory of the model in that dtype and of the largest tensor. Those of a GGUF file are dequantised a few
    rows at a time.

    Args:
      source: a folder of Hugging Face with `config.json`, safetensors in one file or several, and
        `tokenizer.json`; the name of such a repository, which is downloaded; a GGUF file; or a folder that
        `nsa_jax.pretrained.save` wrote.
      dtype: name of the dtype of the computation, see `nsa_jax.model.TransformerConfig`.
      param_dtype: name of the dtype of the parameters.
      rope_base: base of the rotary embedding instead of the source's. One that is larger, and some training,
        prepare a model for longer rows than it was made for.
      sharding: mesh axes of named dimensions, see `nsa_jax.model.Transformer`. The parameters are read into
        this sharding of the mesh in context.
      implementation: one of `nsa_jax.dispatch.IMPLEMENTATIONS` or None, see `nsa_jax.model.Transformer`.
      ignore: fields of `config.json`, or settings of a GGUF file, that you know to change nothing. A field
        that is not known is refused otherwise.

    Returns:
      The model, and its `tokenizers.Tokenizer`, or None if the source has none. It neither truncates nor
      pads, whatever its file says. That of a GGUF file is built from its data if it is byte-level BPE as in
      SmolLM2, Llama 3 or Qwen2, and None otherwise.

    Raises:
      TypeError: an argument or a field is of the wrong kind.
      ValueError: there is no such source; a file is missing or broken; tensors are missing, extra or of
        another shape; the family is unknown, or a field changes the computation in a way that is unknown;
        `rope_base` is out of range, or the layers have bases of their own; the tokenizer has more tokens than
        the vocabulary; or there is a `sharding` and no mesh in context.
      ImportError: a package of the extra `pretrained` is not installed.

    Warns:
      UserWarning: the tokenizer of a GGUF file is of another kind, or one has added tokens that the model
        does not have.

    Examples:
      >>> model, tokenizer = load("HuggingFaceTB/SmolLM2-135M-Instruct", dtype="bfloat16")
      >>> tokens = jnp.array([tokenizer.encode("NSA is").ids])
    """
    check_dtype(dtype=dtype, param_dtype=param_dtype)
    check_implementation(implementation)
    if isinstance(ignore, str) or not isinstance(ignore, Collection):
        raise TypeError(f"ignore must be a collection of names, got {ignore!r}. Pass a tuple.")
    understand = functools.partial(_understand, dtype=dtype, param_dtype=param_dtype, ignore=ignore)
    found = _open(source, ignore, understand)
    config = understand(found.fields)
    if rope_base is not None:
        if isinstance(config.rope_base, tuple):
            raise ValueError(
                "rope_base must be left out for a model whose layers have bases of their own, got "
                f"{rope_base} for {config.rope_base}. Set them in a copy of its config.json."
            )
        config = dataclasses.replace(config, rope_base=rope_base)
    model = abstract_transformer(config, sharding=sharding, implementation=implementation)
    wanted = parameters(model)
    if found.fields.get("model_type") == NATIVE:
        where = {name: Place(name, value.shape, value.shape) for name, value in wanted.items()}
    else:
        where = places(config)
    _check_tensors(found, where, config)
    _check_tokenizer(found.tokenizer, config.vocab_size)
    for name, value in wanted.items():
        wanted[name] = _on_device(found, where[name], value)
    fill(model, wanted)
    return model, found.tokenizer


def _on_device(found: Source, place: Place, value: Any) -> Any:
    """Reads a parameter. On a CPU it is read into the memory where it stays."""
    # JAX 0.12 uses the memory of an array at a multiple of ALIGNMENT. Of another it makes a copy, and keeps
    # both until the next one comes. It must not be that of the tensor, which may be the file's.
    raw = np.empty(math.prod(value.shape) * value.dtype.itemsize + ALIGNMENT, np.uint8)
    raw = raw[-raw.ctypes.data % ALIGNMENT :][: raw.size - ALIGNMENT]
    own = raw.view(value.dtype).reshape(value.shape)
    place.fill(own, found.tensors[place.name].parts())
    return jax.device_put(own, sharding_of(value))


def _understand(
    fields: Mapping[str, Any], dtype: str, param_dtype: str, ignore: Collection[str]
) -> TransformerConfig:
    """The configuration that `config.json` asks for."""
    if fields.get("model_type") != NATIVE:
        return read_fields(fields, dtype=dtype, param_dtype=param_dtype, ignore=ignore)
    try:
        values = dict(fields[NATIVE_CONFIG]) | dict(dtype=dtype, param_dtype=param_dtype)
        return config_from_plain(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"config.json must hold what nsa_jax.pretrained.save wrote, got {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Load it with the version of nsa_jax that saved it."
        ) from None


def _open(source: str | os.PathLike[str], ignore: Collection[str], understand: Callable[..., Any]) -> Source:
    path = found_source(source, [CONFIG])
    if path.is_file():
        return read_gguf(path, ignore)
    if not pathlib.Path(source).exists():  # a repository
        understand(read_config(path))  # before all the rest is downloaded
        path = found_source(source, _FILES)
    return read_folder(path)


def found_source(source: str | os.PathLike[str], files: list[str]) -> pathlib.Path:
    """The folder or GGUF file that `load` was asked for; of a repository, a folder with these files.

    Raises TypeError or ValueError if there is none.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source must be a path or a name, got {type(source).__name__}. Pass a string.")
    path = pathlib.Path(source)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists() or not _REPOSITORY.fullmatch(str(source)) or path.suffix == ".gguf":
        raise ValueError(
            "source must be a folder, a .gguf file or the name of a repository of Hugging Face, got "
            f"{str(source)!r}. Check the path."
        )
    return _download(str(source), files)


def _download(name: str, files: list[str]) -> pathlib.Path:
    hub = package("huggingface_hub")
    try:
        return pathlib.Path(hub.snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError, hub.errors.HFValidationError) as error:  # errors of HTTP are OSErrors
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"source must be a repository that can be downloaded, got {name!r}: {told!r}. Check its name, "
            "your token and the network, or download it and pass the folder."
        ) from None


def _check_tensors(found: Source, where: dict[str, Place], config: TransformerConfig) -> None:
    """Raises ValueError unless the tensors are those of the model. Two kinds of extra ones are dropped."""
    spare = ("lm_head.weight",) if config.tie_embeddings else ()
    given: dict[str, Any] = {
        name: stored
        for name, stored in found.tensors.items()
        if name not in spare and not name.endswith(".rotary_emb.inv_freq")
    }
    wanted: dict[str, Any] = {place.name: place for place in where.values()}
    if problems := differences(wanted, given):
        raise ValueError(
            f"the tensors must be those that config.json asks for, got {', '.join(problems)}. Load a whole "
            "copy of the model."
        )


def _check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    if tokenizer is None:
        return
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= vocab_size:
        raise ValueError(
            f"the ids of the tokenizer must be below the vocab_size of the model, {vocab_size}, got "
            f"{largest}. Load the tokenizer that belongs to the model."
        )
    added = tokenizer.get_added_tokens_decoder()
    if beyond := [token.content for number, token in sorted(added.items()) if number >= vocab_size]:
        warnings.warn(
            f"the model has a vocab_size of {vocab_size}, got the added tokens {', '.join(beyond)} beyond "
            "it. Leave them out of your texts.",
            stacklevel=3,
        )
