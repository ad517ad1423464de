"""Text from the trained model, and a picture of which blocks its layers selected while they read it."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.command_line import InputError
from examples.train_lm.run_folder import write_picture
from examples.train_lm.text import Corpus
from nsa_jax import layout
from nsa_jax.config import NSAConfig
from nsa_jax.generate import generate
from nsa_jax.model import Transformer
from nsa_jax.nn import Selection

TEMPERATURE = 0.7
TOP_P = 0.95
MARK = "--- from here on by the model ---"
BRANCHES = ("compressed", "selected", "window")
BRANCH_COLOURS = ("#74c476", "#9e9ac8", "#fdae6b")
NOT_SELECTED, FORCED, CHOSEN, FUTURE = range(4)
BLOCK_COLOURS = ("#eeeeee", "#9ecae1", "#08519c", "#ffffff")


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
    if length < 2:
        raise InputError(
            f"--length must be at least 2, for a prompt and a byte to write, got {length}. Pass 2."
        )
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


def draw_selections(
    path: pathlib.Path, layers: list[Selection], config: NSAConfig, *, prompt_length: int
) -> None:
    """One column a layer: above, which blocks each query read; below, the share of each branch's gate.

    With several KV heads a block counts as chosen if one of them chose it. A share is a gate over the sum of
    the three, averaged over query heads.
    """
    figure = Figure(figsize=(3.2 * len(layers) + 0.6, 6), layout="constrained")
    grid = figure.subplots(2, len(layers), squeeze=False, sharex=True, height_ratios=(3, 1))
    for number, (layer, (above, below)) in enumerate(zip(layers, grid.T, strict=True)):
        states = block_states(np.asarray(layer.block_indices[0]), config)
        shares = gate_shares(np.asarray(layer.gates[0]))
        length, num_blocks = states.shape
        above.imshow(
            states.T,
            cmap=ListedColormap(BLOCK_COLOURS),
            vmin=NOT_SELECTED,
            vmax=FUTURE,
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            extent=(0, length, 0, num_blocks),
        )
        below.stackplot(np.arange(length), smoothed(shares).T, colors=BRANCH_COLOURS)
        for axes in (above, below):
            axes.axvline(prompt_length, color="black", linewidth=0.8, linestyle=":")
        above.set_title(f"layer {number + 1}")
        below.set(xlabel="query token", xlim=(0, length), ylim=(0, 1))
    grid[0, 0].set_ylabel(f"block of {config.selection_block_size} tokens")
    grid[1, 0].set_ylabel("gate share")
    names = ("not read", "forced (initial, local)", "chosen by score")
    patches = [Patch(color=c, label=n) for c, n in zip(BLOCK_COLOURS, names, strict=False)]
    patches += [Patch(color=c, label=f"gate: {n}") for c, n in zip(BRANCH_COLOURS, BRANCHES, strict=True)]
    end = Line2D([], [], color="black", linewidth=0.8, linestyle=":", label="end of the prompt")
    figure.legend(
        handles=[*patches, end], loc="outside lower center", ncols=4, fontsize="small", frameon=False
    )
    write_picture(path, figure)


def block_states(block_indices: np.ndarray, config: NSAConfig) -> np.ndarray:
    """What each query [T] did with each block [M], from its `block_indices` [T, K, R]."""
    length = len(block_indices)
    position, block = np.arange(length)[:, None], np.arange(layout.num_selection_blocks(length, config))
    states = np.where(block * config.selection_block_size <= position, NOT_SELECTED, FUTURE)
    token, head, slot = np.nonzero(block_indices >= 0)
    states[token, block_indices[token, head, slot]] = CHOSEN
    forced = np.asarray(layout.is_forced(jnp.asarray(block), jnp.asarray(position), config))
    return np.where((states == CHOSEN) & forced, FORCED, states)


def gate_shares(gates: np.ndarray) -> np.ndarray:
    """Share of each branch [T, 3] from gates [T, N, 3]: each over the sum of the three, mean of the heads."""
    return (gates / gates.sum(-1, keepdims=True)).mean(1)


def smoothed(shares: np.ndarray, width: int = 15) -> np.ndarray:
    """Running mean over tokens, shorter at the ends."""
    kernel = np.ones(min(width, len(shares)))
    count = np.convolve(np.ones(len(shares)), kernel, mode="same")
    return np.stack([np.convolve(share, kernel, mode="same") for share in shares.T], axis=1) / count[:, None]


@functools.partial(jax.jit, static_argnames="graph")
def _inspect(graph, parameters, tokens):
    return nnx.merge(graph, parameters).inspect(tokens)
