"""Pictures: loss over steps, and which blocks each query of a text selected."""

import io
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from examples.train_lm.run_folder import write
from nsa_jax import layout
from nsa_jax.config import NSAConfig
from nsa_jax.nn import Selection

COLOURS = {"nsa": "tab:blue", "dense": "tab:orange"}
BRANCHES = ("compressed", "selected", "window")
BRANCH_COLOURS = ("#74c476", "#9e9ac8", "#fdae6b")
NOT_SELECTED, FORCED, CHOSEN, FUTURE = range(4)
BLOCK_COLOURS = ("#eeeeee", "#9ecae1", "#08519c", "#ffffff")
# Training loss of single batches is noisy; the line is a running mean over this share of the steps.
SMOOTHED_SHARE = 1 / 40


def draw_losses(path: pathlib.Path, curves: dict[str, list[dict[str, Any]]], bigram: float) -> None:
    """Training loss (lines) and held-out loss (dots) of runs named by their attention, and the baseline."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        steps = np.array([row["step"] for row in curve])
        losses = np.array([row["bits_per_byte"] for row in curve])
        width = max(int(len(losses) * SMOOTHED_SHARE), 1)
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(steps[width - 1 :], smooth, color=COLOURS[name], label=f"{name}, training")
        held_out = [(row["step"], row["held_out"]) for row in curve if "held_out" in row]
        axes.plot(*zip(*held_out, strict=True), "o", color=COLOURS[name], label=f"{name}, held out")
    axes.axhline(bigram, color="grey", linestyle="--", label="bigram, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.6 * bigram))
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


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
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    _save(figure, path)


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


def _save(figure: Figure, path: pathlib.Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write(path, picture.getvalue())
