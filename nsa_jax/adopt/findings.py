"""What a run measured, as its folder keeps it, read for the page and its figures."""

from typing import Any, NamedTuple

import numpy as np

from nsa_jax.evaluate import Needles

# Models of a run by the names under which they are measured, in the order of the columns.
MODELS = {
    "dense": "dense, as loaded",
    "converted": "NSA, converted",
    "distil": "NSA after distil",
    "sparse": "NSA after sparse",
    "dense_trained": "dense, trained",
}


class Losses(NamedTuple):
    """Losses of a model on held-out text.

    Attributes:
      by_position: nats a token, by the stretches of a row.
      all: of all tokens.
      agreement: how often its first choice is that of the dense model as loaded.
    """

    by_position: list[float]
    all: float
    agreement: float


def needles(plain: dict[str, Any]) -> Needles:
    """The counts as they were before they were noted as JSON."""
    arrays = dict(
        found=np.array(plain["found"]), lengths=tuple(plain["lengths"]), depths=tuple(plain["depths"])
    )
    return Needles(**plain | arrays)


def all_needles(measured: dict[str, Any]) -> dict[str, Needles]:
    """The counts of each model that was asked."""
    return {
        name: needles(measured[name]["needles"]) for name in MODELS if "needles" in measured.get(name, {})
    }


def losses(measured: dict[str, Any]) -> tuple[list[int], dict[str, Losses]]:
    """Where the stretches begin, and the losses of each model. Each comparison has those of the dense one."""
    compared = {name: measured[name]["losses"] for name in MODELS if "losses" in measured.get(name, {})}
    first = next(iter(compared.values()))
    found = {"dense": Losses(first["dense_losses"], first["dense_loss"], 1.0)}
    found |= {name: Losses(of["losses"], of["loss"], of["agreement"]) for name, of in compared.items()}
    return first["starts"], found
