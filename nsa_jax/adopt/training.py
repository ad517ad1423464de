"""The stages that train: what learns in each, by which loss, and the loop that can be interrupted."""

import contextlib
import dataclasses
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tqdm import tqdm

from nsa_jax.adopt import device_memory
from nsa_jax.adopt.command_line import InputError
from nsa_jax.adopt.mesh import ONE_DEVICE, Mesh
from nsa_jax.adopt.run_folder import RunFolder
from nsa_jax.adopt.settings import Settings
from nsa_jax.adopt.text import Packed
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.model import Transformer

SAVE_EVERY = 100
FINAL_RATE_SHARE = 0.1

# Groups of parameters, each with its learning rate, its clipping and its optimizer state.
GROUPS = "choosing", "new", "pretrained"
_NEW = ("compressor_key", "compressor_value", "gate", "selector")


class Stage(NamedTuple):
    """A part of the training.

    Attributes:
      name: "distil", "sparse" or "dense".
      steps: optimizer steps.
      first: number of the first batch.
      learns: the groups of parameters that learn.
    """

    name: str
    steps: int
    first: int
    learns: tuple[str, ...]


class Interrupted(Exception):
    """A signal asked to stop, and what was trained is saved."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def stages(settings: Settings) -> list[Stage]:
    """The stages of a run. The dense model gets the batches of the sparse stage."""
    first = settings.distil_steps
    found = [Stage("distil", first, 0, ("choosing",)), Stage("sparse", settings.sparse_steps, first, GROUPS)]
    if settings.train_dense:
        found.append(Stage("dense", settings.sparse_steps, first, ("pretrained",)))
    return [stage for stage in found if stage.steps]


def train(
    stage: Stage,
    model: Transformer,
    text: Packed,
    folder: RunFolder,
    settings: Settings,
    *,
    mesh: Mesh = ONE_DEVICE,
    dense: Transformer | None = None,
) -> Transformer:
    """Trains the model from the last checkpoint of the stage on to its last step; its arrays are donated.

    Models lie on the first device before and after, and on the `mesh` while they train. The `dense` model
    teaches, if it is given. The state is saved every `SAVE_EVERY` steps, at the end, and after a signal.

    Raises:
      Interrupted: after Ctrl-C or SIGTERM, once the step under way is finished and saved.
      InputError: the loss is not finite, or a device has no memory for a step.
    """
    with device_memory.needed(stage.name, _less_memory(settings), folder), mesh.in_context():
        teacher = None if dense is None else mesh.spread(dense)
        trained = _train(stage, mesh.spread(model), text, folder, settings, mesh, teacher)
    return mesh.gathered(trained)


def _less_memory(settings: Settings) -> str:
    """Options with which a step needs less."""
    same = [] if settings.remat == "layer" else ["--remat layer"]
    same.append("more devices by --mesh")
    return f"{' or '.join(same)} with the same --output, or a smaller --batch or --length in another"


def _train(
    stage: Stage,
    model: Transformer,
    text: Packed,
    folder: RunFolder,
    settings: Settings,
    mesh: Mesh,
    dense: Transformer | None,
) -> Transformer:
    graph, learning, fixed = _divided(model, stage, settings)
    moments = {name: _optimizer(settings, stage, name).init(group) for name, group in learning.items()}
    moments = mesh.share(moments)
    of_dense, dense_state = (None, None) if dense is None else nnx.split(dense)
    step, rows = 0, list[dict[str, Any]]()
    if found := folder.load(stage.name, moments, mesh):
        model, moments, step, rows = found
        model.config = dataclasses.replace(model.config, **settings.training)  # not as it was saved
        graph, learning, fixed = _divided(model, stage, settings)
    started: float | None = None  # when the device was free for the step that is told next; unknown at first
    bar = tqdm(total=stage.steps, initial=step, desc=stage.name, unit="step", dynamic_ncols=True)

    def tell(losses: dict[str, Array]) -> None:
        """Waits for a step, and notes its losses and its time."""
        nonlocal started
        told, number = {name: float(loss) for name, loss in losses.items()}, len(rows) + 1
        if not all(map(math.isfinite, told.values())):
            raise InputError(
                f"the loss must stay finite, got {told} in step {number} of {stage.name}; "
                f"{folder.saved}. Use smaller learning rates, in another --output."
            )
        now = time.perf_counter()
        ms = None if started is None else round(1e3 * (now - started), 1)
        rows.append({"step": number, "ms": ms} | told)
        started = now
        bar.set_postfix_str(", ".join(f"{name} {loss:z.4f}" for name, loss in told.items()), refresh=False)
        bar.update()

    running: dict[str, Array] | None = None
    with _delayed_signals() as received, bar:
        while step < stage.steps:
            batch = map(mesh.place, text.batch(stage.first + step, settings.batch))
            learning, moments, losses = _update(
                graph, stage, settings, learning, fixed, moments, *batch, of_dense, dense_state
            )
            if running is not None:
                tell(running)  # while the device computes the step after it
            running, step = losses, step + 1
            if received or step % SAVE_EVERY == 0 or step == stage.steps:
                tell(running)
                folder.save(stage.name, _whole(graph, learning, fixed), moments, step, rows)
                running, started = None, time.perf_counter()
            if received:
                raise Interrupted(received[0])
    return _whole(graph, learning, fixed)


def _divided(
    model: Transformer, stage: Stage, settings: Settings
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The structure of a model; its parameters that learn, by group; and all others."""
    choosing = "selector" if settings.selector == "indexer" else "compressor_key"
    graph, *states = nnx.split(
        model,
        lambda path, value: choosing in path,
        lambda path, value: any(name in path for name in _NEW),
        nnx.Param,
        ...,
    )
    named = dict(zip((*GROUPS, "rest"), states, strict=True))
    learning = {name: named.pop(name) for name in stage.learns if jax.tree.leaves(named[name])}
    return graph, learning, named


def _whole(graph: Any, learning: dict[str, Any], fixed: dict[str, Any]) -> Transformer:
    groups = learning | fixed
    # A layer under `nnx.remat` is written to, so its variables must be of the trace in which it is called.
    return nnx.merge(graph, *(groups[name] for name in (*GROUPS, "rest")), copy=True)


def _optimizer(settings: Settings, stage: Stage, group: str) -> optax.GradientTransformation:
    """AdamW on the clipped gradient of a group; matrices decay, biases and norms do not."""
    peak = settings.learning_rate if group == "pretrained" else settings.new_learning_rate
    warmup = min(settings.warmup, stage.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, stage.steps, FINAL_RATE_SHARE * peak
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate,
            b1=0.9,
            b2=0.95,
            weight_decay=0.01,
            mask=_decays,
        ),
    )


def _decays(parameters: Any) -> Any:
    """Which parameters decay: matrices. Biases of heads have two axes as well, and do not."""
    return jax.tree.map_with_path(
        lambda path, x: x.ndim > 1 and "bias" not in jax.tree_util.keystr(path), parameters
    )


@functools.partial(
    jax.jit,
    static_argnames=("graph", "stage", "settings", "of_dense"),
    donate_argnames=("learning", "moments"),
)
def _update(
    graph: Any,
    stage: Stage,
    settings: Settings,
    learning: dict[str, Any],
    fixed: dict[str, Any],
    moments: dict[str, Any],
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    of_dense: Any,
    dense: Any,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Float[Array, ""]]]:
    """A step. The gradient and the optimizer state are those of what learns alone."""
    teacher = None if of_dense is None else nnx.merge(of_dense, dense)

    def objective(learning: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
        return _losses(_whole(graph, learning, fixed), stage, settings, tokens, segment_ids, teacher)

    gradients, losses = jax.grad(objective, has_aux=True)(learning)
    learning, moments = dict(learning), dict(moments)
    for name, gradient in gradients.items():
        optimizer = _optimizer(settings, stage, name)
        updates, moments[name] = optimizer.update(gradient, moments[name], learning[name])
        learning[name] = optax.apply_updates(learning[name], updates)
    return learning, moments, losses


def _losses(
    model: Transformer,
    stage: Stage,
    settings: Settings,
    tokens: Array,
    segment_ids: Array,
    teacher: Transformer | None = None,
) -> tuple[Array, dict[str, Array]]:
    """What a stage minimises, and its parts to tell."""
    if stage.name == "distil":
        _, loss = model(tokens, segment_ids=segment_ids, distil="dense")
        return loss, {"selection": loss}
    weights, asked = {"loss": 1.0}, dict[str, Any]()
    if stage.name == "sparse" and settings.selection_weight and settings.can_be_taught:
        weights["selection"], asked["distil"] = settings.selection_weight, settings.selection_target
    if teacher is not None:
        weights["divergence"], asked["teacher"] = settings.logit_weight, teacher
    found = model.loss(tokens, segment_ids=segment_ids, **asked)
    told = dict(zip(weights, found if asked else (found,), strict=True))
    return jnp.stack([weights[name] * loss for name, loss in told.items()]).sum(), told


@contextlib.contextmanager
def _delayed_signals() -> Iterator[list[int]]:
    """The list to which the first Ctrl-C or SIGTERM adds its number; a second one ends at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, _: Any) -> None:
        received.append(number)
        for each, handler in (signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL):
            signal.signal(each, handler)
        # Not `print`: a signal may arrive inside another write to the same stream, which Python refuses.
        os.write(2, b"\nthis step is finished and saved first; the same signal again ends at once\n")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
