"""Training and evaluation: AdamW on next-byte loss; a resumed run gives the same bits as one run whole."""

import contextlib
import dataclasses
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from benchmarks.command_line import progress
from examples.train_lm.mesh import ONE_DEVICE, MeshSizes
from examples.train_lm.run_folder import RunFolder
from examples.train_lm.settings import Settings
from examples.train_lm.text import Corpus
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.model import Transformer, TransformerConfig

FINAL_RATE_SHARE = 0.1
EVALUATION_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Trained:
    """Where training stands; the model is on one device, or where several processes have it.

    `curve` has a row a step: `step, seconds, bits_per_byte`, some `held_out`.
    """

    model: Transformer
    step: int
    curve: list[dict[str, Any]]
    compile_seconds: float


def train(
    settings: Settings,
    corpus: Corpus,
    folder: RunFolder,
    *,
    mesh: MeshSizes = ONE_DEVICE,
    resume: bool = False,
    stop_at: int | None = None,
    evaluations: int = 5,
    checkpoint_every: int = 50,
) -> Trained:
    """Trains from the start or the last checkpoint to the last step, or to `stop_at` if that comes first.

    The state is checkpointed every `checkpoint_every` steps and at the end. Held-out loss is measured
    `evaluations` times, evenly spread, the last time after the last step. A mesh of several devices must be
    in context; a checkpoint does not depend on it.

    Raises:
      KeyboardInterrupt: after Ctrl-C, once the step under way is finished and saved; at once after a second,
        or in one of several processes.
    """
    saved = folder.load(settings, zero_moments(settings, mesh), mesh) if resume else None
    progress("compiling the training step")
    started = time.perf_counter()
    graph, update = _compile_update(settings, mesh)
    compile_seconds = time.perf_counter() - started
    if saved is None:
        saved = nnx.state(settings.new_model(mesh)), zero_moments(settings, mesh), 0, []
    parameters, moments, step, curve = saved

    sizes = dict(batch=settings.batch, length=settings.length, seed=settings.seed)
    last = settings.steps if stop_at is None else min(stop_at, settings.steps)
    evaluate_at = {round(settings.steps * (i + 1) / evaluations) for i in range(evaluations)}
    held_out = corpus.held_out_rows(settings.length)
    seconds = curve[-1]["seconds"] if curve else 0.0
    bar_options = dict(total=settings.steps, initial=step, unit="step", dynamic_ncols=True, smoothing=0.1)
    bar_options |= dict(disable=jax.process_index() > 0)
    with _delayed_interrupt() as interrupted, tqdm(**bar_options) as bar:
        while step < last:
            started = time.perf_counter()
            parameters, moments, loss = update(parameters, moments, mesh.place(corpus.batch(step, **sizes)))
            bits = float(loss) / math.log(2)
            elapsed = time.perf_counter() - started
            step, seconds = step + 1, seconds + elapsed
            row = {"step": step, "seconds": round(seconds, 3), "bits_per_byte": bits}
            curve.append(row)
            bar.set_postfix_str(
                f"{bits:.3f} bits/byte, {settings.batch * settings.length / elapsed:.0f} tokens/s",
                refresh=False,
            )
            bar.update()
            if step in evaluate_at:
                row["held_out"] = evaluate(nnx.merge(graph, parameters), held_out, mesh)
                if not bar.disable:
                    bar.write(f"step {step}: held-out {row['held_out']:.4f} bits/byte")
            stop = interrupted.is_set()
            if stop or step % checkpoint_every == 0 or step == last:
                folder.save(nnx.merge(graph, parameters), moments, step, curve)
            if stop:
                signal.default_int_handler(signal.SIGINT, None)  # raises KeyboardInterrupt
    # The last step is saved, so a model that lies on several devices of a process is read back onto one.
    here = mesh == ONE_DEVICE or jax.process_count() > 1
    model = nnx.merge(graph, parameters) if here else folder.model(settings)
    return Trained(model, step, curve, compile_seconds)


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[threading.Event]:
    """The event that the first Ctrl-C sets; a second interrupts at once. Main thread of the only process."""
    interrupted = threading.Event()
    # Several processes would hear of it in different steps, and save different ones.
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        yield interrupted
        return

    def note(*_: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not `print`: a signal may arrive inside another write to the same stream, which Python refuses.
        os.write(2, b"\ninterrupted: this step is finished and saved first; Ctrl-C again ends at once\n")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def evaluate(model: Transformer, rows: Int[np.ndarray, "rows T+1"], mesh: MeshSizes = ONE_DEVICE) -> float:
    """Mean bits per byte over sequences; each byte after the first is predicted from those before it."""
    graph, parameters = nnx.split(model)
    total = 0.0
    for first in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[first : first + EVALUATION_BATCH]
        # The last batch is filled up, so that there is one shape and one compilation.
        filled = np.pad(batch, ((0, EVALUATION_BATCH - len(batch)), (0, 0)))
        losses = _row_losses(graph, parameters, mesh.place(filled))
        total += mesh.fetch(losses)[: len(batch)].sum(dtype=np.float64)
    return total / len(rows) / math.log(2)


def flops_per_trained_token(config: TransformerConfig, length: int) -> float:
    """Floating-point operations of forward and backward (twice the forward) for one token of a sequence.

    They predict how long a run takes and say how fast it was. Only products count, and of the keys only those
    a query sees: tiles that masks empty out are not useful.
    """
    width, heads, kv_heads = config.model_dim, config.num_heads, config.num_kv_heads
    head_dim = width // heads if config.head_dim is None else config.head_dim
    mlp = -(-8 * width // 24) * 8 if config.mlp_dim is None else config.mlp_dim
    position = np.arange(length)
    multiplied: float = 2 * width * heads * head_dim + 3 * width * mlp
    if config.attention == "dense":
        multiplied += 2 * width * kv_heads * head_dim
        attended = (position + 1).mean()
        scored = 0.0
    else:
        nsa = config.nsa
        block, stride, selected = nsa.compression_block_size, nsa.compression_stride, nsa.selection_block_size
        gate, hidden = max(width // 4, 8), 2 * head_dim
        multiplied += 6 * width * kv_heads * head_dim + width * gate + gate * heads * 3
        multiplied += 2 * kv_heads * (block * head_dim * hidden + hidden * head_dim) / stride
        compressed = np.maximum((position + 1 - block) // stride + 1, 0)
        # The last of the chosen blocks is the query's own, of which it sees the tokens up to itself.
        whole = np.minimum(position // selected, nsa.num_selected_blocks - 1) * selected
        read = compressed + whole + position % selected + 1 + np.minimum(position + 1, nsa.window_size)
        attended, scored = read.mean(), compressed.mean()
    attention = heads * head_dim * (2 * attended + scored)
    return 3 * 2 * (config.num_layers * (multiplied + attention) + width * config.vocab_size)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW on clipped gradients; what has one axis, as a norm, does not decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        settings.learning_rate,
        min(settings.warmup, settings.steps // 2),
        settings.steps,
        FINAL_RATE_SHARE * settings.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate, b2=0.98, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
        ),
    )


def zero_moments(settings: Settings, mesh: MeshSizes = ONE_DEVICE) -> Any:
    """The optimizer's state before the first step, which is zeros; also a tree to read a checkpoint into."""
    moments = _abstract_moments(settings, nnx.state(settings.abstract_model(mesh)))
    zeros = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), moments)
    return jax.jit(zeros, out_shardings=mesh.where(moments))()


def _abstract_moments(settings: Settings, parameters: nnx.State) -> Any:
    """Shapes of the optimizer's state, each moment where its parameter lies."""
    optimizer = make_optimizer(settings)
    moments = jax.eval_shape(optimizer.init, parameters)
    return optax.tree_utils.tree_map_params(
        optimizer, lambda moment, parameter: moment.update(sharding=parameter.sharding), moments, parameters
    )


@functools.lru_cache(maxsize=1)
def _compile_update(settings: Settings, mesh: MeshSizes) -> tuple[nnx.GraphDef, Any]:
    """The model's structure and the compiled step, which takes parameters, optimizer state and sequences."""
    graph, parameters = nnx.split(settings.abstract_model(mesh))
    moments = _abstract_moments(settings, parameters)
    rows = mesh.place(np.zeros((settings.batch, settings.length + 1), np.int32))
    step = jax.jit(
        functools.partial(_update, graph, settings),
        out_shardings=(*mesh.where((parameters, moments)), None),
        donate_argnums=(0, 1),
    )
    return graph, step.lower(parameters, moments, rows).compile()


def _update(graph, settings, parameters, moments, rows):
    def objective(parameters):
        return _losses(graph, parameters, rows).mean()

    loss, gradient = jax.value_and_grad(objective)(parameters)
    updates, moments = make_optimizer(settings).update(gradient, moments, parameters)
    return optax.apply_updates(parameters, updates), moments, loss


@functools.partial(jax.jit, static_argnames="graph")
def _row_losses(graph, parameters, rows) -> Float[Array, " rows"]:
    return _losses(graph, parameters, rows).mean(axis=1)


def _losses(graph, parameters, rows: tuple[Int[Array, "rows T"], ...]) -> Float[Array, "rows T"]:
    inputs, labels = rows
    return nnx.merge(graph, parameters).loss(inputs, targets=labels, reduce=None)
