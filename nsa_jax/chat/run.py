"""Opens what `nsa_jax.adopt` wrote, or anything that `nsa_jax.pretrained.load` takes, for text."""

import pathlib
from typing import Any

from nsa_jax.dispatch import default_platform
from nsa_jax.generate import prepare
from nsa_jax.model import Transformer
from nsa_jax.pretrained import ChatFormat, load, load_chat_format
from nsa_jax.pretrained.folder import CONFIG


def open_run(run: str) -> tuple[Transformer, Any, ChatFormat]:
    """A prepared model, in bfloat16 on a GPU and float32 elsewhere, its tokenizer, and its chat format.

    Args:
      run: the folder of a run of `nsa_jax.adopt`, or what `load` takes.

    Raises:
      TypeError, ValueError, ImportError: as in `load`; or the run is not finished, or there is no tokenizer.
    """
    folder = pathlib.Path(run)
    trained = folder / "model"
    if (folder / "settings.json").exists() and not any((x / CONFIG).exists() for x in (folder, trained)):
        raise ValueError(
            f"a run of nsa_jax.adopt must be finished, got {run!r} without its model. Run the command that "
            "began it again, which goes on."
        )
    source = str(trained) if trained.is_dir() else run
    dtype = "bfloat16" if default_platform() == "cuda" else "float32"
    model, tokenizer = load(source, dtype=dtype, param_dtype=dtype)
    if tokenizer is None:
        raise ValueError(
            f"a model must have a tokenizer, got {source!r} with none that is known. Name the folder or "
            "repository that its tokenizer.json is in."
        )
    return prepare(model, donate=True), tokenizer, load_chat_format(source)
