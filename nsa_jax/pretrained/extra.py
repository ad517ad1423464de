"""The packages of the extra `pretrained`, each imported when it is first needed."""

import importlib
from typing import Any


def package(name: str) -> Any:
    """Imports a package. Raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"nsa_jax.pretrained needs the package {name}, got {error}. Install it with: pip install "
            "'nsa_jax[pretrained]'."
        ) from error
