"""What is measured of each model on the way: losses by position, needles, and the recall of blocks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from nsa_jax.adopt.command_line import InputError
from nsa_jax.adopt.run_folder import RunFolder
from nsa_jax.adopt.settings import Settings
from nsa_jax.adopt.text import Documents
from nsa_jax.evaluate import MagicNumber, block_recall, find_needles
from nsa_jax.model import Transformer
from nsa_jax.pretrained import compare

DEPTHS = 16


class Measurements:
    """Measures models on the held-out text, and notes what it finds in the folder of the run.

    What is noted there already is not measured again.
    """

    def __init__(self, folder: RunFolder, settings: Settings, held_out: Documents, tokenizer: Any):
        self.folder, self.settings = folder, settings
        self.rows = held_out.rows(settings.length, settings.rows)
        self.filler, self.tokenizer = held_out.joined(), tokenizer

    def measure(self, name: str, model: Transformer, dense: Transformer) -> None:
        """Measures a model; the dense one that was loaded is only asked for needles.

        Raises:
          InputError: needles do not fit into their prompts.
        """
        todo: dict[str, Callable[[Transformer, Transformer], Any]] = {}
        if self.settings.needles:
            todo["needles"] = self._needles
        if model is not dense:
            todo["losses"] = self._losses
        if any(each.attention == "nsa" for each in model.config.per_layer):
            todo["recall"] = self._recall
        done = self.folder.results().get(name, {})
        todo = {what: measure for what, measure in todo.items() if what not in done}
        with tqdm(
            todo.items(), desc=f"measuring {name}", unit="", disable=not todo, dynamic_ncols=True
        ) as bar:
            for what, measure in bar:
                bar.set_postfix_str(what)
                self.folder.note(name, what, measure(model, dense))

    def _losses(self, model: Transformer, dense: Transformer) -> dict[str, Any]:
        return compare(dense, model, jnp.asarray(self.rows))._asdict()

    def _needles(self, model: Transformer, dense: Transformer) -> dict[str, Any]:
        def encode(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        try:
            found = find_needles(
                model,
                MagicNumber(encode),
                self.filler,
                lengths=self.settings.needle_lengths or (self.settings.length,),
                depths=DEPTHS,
                asked=self.settings.needles,
                batch=self.settings.batch,
                start=self.tokenizer.encode("").ids,  # what it puts before a text
                seed=self.settings.seed,
            )
        except ValueError as error:
            raise InputError(f"--needle-lengths must suit the needles: {error}") from error
        return {name: np.asarray(value).tolist() for name, value in vars(found).items()}

    def _recall(self, model: Transformer, dense: Transformer) -> dict[str, Any]:
        found = block_recall(model, jnp.asarray(self.rows[: self.settings.batch]))
        return {name: np.asarray(value).tolist() for name, value in vars(found).items()}
