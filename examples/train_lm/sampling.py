"""Text from the trained model, and what its layers chose while they read it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.train_lm.errors import InputError
from examples.train_lm.text import Corpus
from nsa_jax.generate import generate
from nsa_jax.model import Transformer
from nsa_jax.nn import Selection

TEMPERATURE = 0.7
TOP_P = 0.95
MARK = "--- from here on by the model ---"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and its continuation."""

    prompt: bytes
    continuation: bytes

    @property
    def tokens(self) -> np.ndarray:
        """Both as one sequence [1, T]."""
        return np.frombuffer(self.prompt + self.continuation, np.uint8).astype(np.int32)[None]

    @property
    def text(self) -> tuple[str, str]:
        """Both as text; bytes that are no UTF-8 become U+FFFD."""
        return self.prompt.decode(errors="replace"), self.continuation.decode(errors="replace")

    def __str__(self) -> str:
        return self.excerpt(len(self.prompt))

    def excerpt(self, prompt_bytes: int = 300) -> str:
        """The end of the prompt, and the continuation behind a line that says where it begins."""
        before, after = dataclasses.replace(self, prompt=self.prompt[-prompt_bytes:]).text
        return f"{before}\n{MARK}\n{after}"


def choose_prompt(text: str | None, corpus: Corpus, length: int) -> bytes:
    """The bytes of `text`, by default three quarters of a sequence from the start of the held-out text.

    Raises:
      InputError: it is empty, or leaves no room in a sequence.
    """
    if text is None:
        return corpus.held_out[: max(length * 3 // 4, 1)].tobytes()
    prompt = text.encode(errors="surrogateescape")
    if not prompt:
        raise InputError(
            "--prompt must have at least one byte, got ''. Leave it out for one from the held-out text."
        )
    if len(prompt) >= length:
        raise InputError(
            f"--prompt must be shorter than --length, got {len(prompt)} bytes and {length}. Shorten it."
        )
    return prompt


def continue_prompt(model: Transformer, prompt: bytes, *, most: int, seed: int) -> Sample:
    """Draws up to `most` bytes in one compiled loop."""
    tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
    drawn = generate(
        model, jnp.asarray(tokens), max_new_tokens=most, temperature=TEMPERATURE, top_p=TOP_P, key=seed
    )
    return Sample(prompt, np.asarray(drawn.tokens[0]).astype(np.uint8).tobytes())


def selections(model: Transformer, sample: Sample) -> list[Selection]:
    """What each layer selected and how it gated its branches at every byte of the sample."""
    graph, parameters = nnx.split(model)
    return _inspect(graph, parameters, sample.tokens)


@functools.partial(jax.jit, static_argnames="graph")
def _inspect(graph, parameters, tokens):
    return nnx.merge(graph, parameters).inspect(tokens)
