"""What is measured of each model on the way: losses by position, needles, recall of blocks, and decoding."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from nsa_jax.adopt import device_memory
from nsa_jax.adopt.command_line import InputError
from nsa_jax.adopt.run_folder import RunFolder
from nsa_jax.adopt.settings import Settings
from nsa_jax.adopt.text import Documents
from nsa_jax.evaluate import MagicNumber, block_recall, find_needles
from nsa_jax.generate import generate
from nsa_jax.model import Transformer
from nsa_jax.pretrained import compare

DEPTHS = 16
# Decoding: at most so many rows; whole chunks of steps after the first token, few enough for the program that
# finds the needles; and rounds until their seconds are spent.
DECODED_ROWS = 8
DECODED_TOKENS = 1 + 7 * 8
DECODING_S = 10.0
MAX_ROUNDS = 5


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

        Decoding is measured of the converted model, beside the dense one: weights do not change its speed.

        Raises:
          InputError: needles do not fit into their prompts, or a device has no memory for them.
        """
        todo: dict[str, Callable[[Transformer, Transformer], Any]] = {}
        if self.settings.needles:
            todo["needles"] = self._needles
        if model is not dense:
            todo["losses"] = self._losses
        if any(each.attention == "nsa" for each in model.config.per_layer):
            todo["recall"] = self._recall
        if name == "converted":
            todo["decoding"] = self._decoding
        done = self.folder.results().get(name, {})
        todo = {what: measure for what, measure in todo.items() if what not in done}
        remedy = "shorter --needle-lengths, fewer --rows or a smaller --batch, in another --output"
        with (
            device_memory.needed(f"measuring {name}", remedy, self.folder),
            tqdm(
                todo.items(), desc=f"measuring {name}", unit="", disable=not todo, dynamic_ncols=True
            ) as bar,
        ):
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
            told = str(error).rstrip(".")
            raise InputError(
                f"needles must fit into their prompts, got the error {told!r}. Pass other --needle-lengths, "
                "or --needles 0, in another --output."
            ) from error
        return {name: np.asarray(value).tolist() for name, value in vars(found).items()}

    def _recall(self, model: Transformer, dense: Transformer) -> dict[str, Any]:
        found = block_recall(model, jnp.asarray(self.rows[: self.settings.batch]))
        return {name: np.asarray(value).tolist() for name, value in vars(found).items()}

    def _decoding(self, model: Transformer, dense: Transformer) -> dict[str, Any]:
        """What a token of `generate` takes; the two models in turns, so that they run in the same minutes."""
        # Of the needles' sizes, so that their programs serve here, too, if there are at most 8 rows.
        rows = min(self.settings.batch, DECODED_ROWS)
        length = max(self.settings.needle_lengths or (self.settings.length,))
        prompts = np.resize(self.filler, (rows, length)).astype(np.int32)
        models, counts = {"dense": dense, "nsa": model}, (1, DECODED_TOKENS)

        def ms(each: Transformer, count: int) -> float:
            begin = time.perf_counter()
            jax.block_until_ready(generate(each, prompts, max_new_tokens=count))
            return 1e3 * (time.perf_counter() - begin)

        for each in models.values():  # compiles
            for count in counts:
                ms(each, count)
        taken: dict[str, list[list[float]]] = {name: [] for name in models}
        begin = time.perf_counter()
        while not taken["nsa"] or (
            len(taken["nsa"]) < MAX_ROUNDS and time.perf_counter() - begin < DECODING_S
        ):
            for name, each in models.items():
                taken[name].append([ms(each, count) for count in counts])
        found: dict[str, Any] = dict(rows=rows, length=length, new_tokens=DECODED_TOKENS)
        for name, rounds in taken.items():
            first = statistics.median(first for first, _ in rounds)
            further = statistics.median(whole - first for first, whole in rounds) / (DECODED_TOKENS - 1)
            # None where it drowns in noise.
            found[name] = dict(
                first_token_ms=first, token_ms=further if further > 0 else None, samples=len(rounds)
            )
        return found
