"""Trains one model on fresh sequences and scores it on sequences of another random stream."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.recall.task import Batch, RecallTask, window_reach
from nsa_jax.array_typing import Array, Float, Int
from nsa_jax.model import Transformer, TransformerConfig

# Random streams of one seed: they never meet, so validation and test sequences are not those of training.
TRAINING, VALIDATION, TEST = range(3)
SCORED_TOGETHER = 32  # sequences

type Report = Callable[[int, float, float], None]  # step, loss and accuracy of its batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast to train.

    Attributes:
      steps: optimizer steps at most.
      batch: sequences a step.
      learning_rate: AdamW's, constant after the warm-up.
      warmup: steps of linear warm-up. A model with an indexer attends to all blocks in them: what it has
        not learnt to find it could not learn to use.
      stop_at: validation accuracy at which training stops; None never stops early.
      validate_every: steps between validations.

    Raises:
      ValueError: a value is out of range.
    """

    steps: int = 1000
    batch: int = 16
    learning_rate: float = 3e-3
    warmup: int = 100
    stop_at: float | None = 0.99
    validate_every: int = 50

    def __post_init__(self):
        for name in ("steps", "batch", "warmup", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}. Pass a positive number."
                )
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(
                f"learning_rate must be positive and finite, got {self.learning_rate}. Try 3e-3."
            )


@dataclasses.dataclass(frozen=True)
class Score:
    """Mean loss in nats and accuracy, both on the answers alone."""

    loss: float
    accuracy: float


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model and what its training took; `seconds` counts compilation and validations in."""

    model: Transformer
    steps: int
    seconds: float


def train(
    config: TransformerConfig, task: RecallTask, schedule: Schedule, seed: int, report: Report
) -> Trained:
    """Trains a model from its initial parameters until the schedule ends; an indexer by a selection loss."""
    started = time.perf_counter()
    graph, state = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
    early = graph
    if config.selector != "importance":
        blocks = -(-task.length // config.nsa.selection_block_size)
        whole = dataclasses.replace(config, nsa=dataclasses.replace(config.nsa, num_selected_blocks=blocks))
        early, _ = nnx.split(Transformer(whole, rngs=nnx.Rngs(seed)))
    moments = _optimizer(schedule).init(state)
    rng, reach = random_stream(seed, TRAINING), window_reach(config.nsa, config.num_layers)
    for step in range(1, schedule.steps + 1):
        batch = task.batch(rng, schedule.batch, reach=reach)
        now = early if step <= schedule.warmup else graph
        state, moments, loss, accuracy = _update(now, state, moments, batch, schedule)
        report(step, float(loss), float(accuracy))
        if schedule.stop_at is not None and step % schedule.validate_every == 0:
            validation = score(
                nnx.merge(graph, state), held_out(config, task, SCORED_TOGETHER, seed, VALIDATION)
            )
            if validation.accuracy >= schedule.stop_at:
                break
    return Trained(nnx.merge(graph, state), step, time.perf_counter() - started)


def held_out(
    config: TransformerConfig, task: RecallTask, sequences: int, seed: int, which: int = TEST
) -> list[Batch]:
    """At least `sequences` sequences of the stream `which`, in batches of `SCORED_TOGETHER`."""
    rng, reach = random_stream(seed, which), window_reach(config.nsa, config.num_layers)
    count = -(-sequences // SCORED_TOGETHER)
    return [task.batch(rng, SCORED_TOGETHER, reach=reach) for _ in range(count)]


def score(model: Transformer, batches: list[Batch]) -> Score:
    """Loss and accuracy of a model."""
    graph, state = nnx.split(model)
    scores = np.array([_score(graph, state, batch) for batch in batches])
    return Score(*map(float, scores.mean(axis=0)))


def random_stream(seed: int, which: int) -> np.random.Generator:
    """The sequences of one purpose."""
    return np.random.default_rng([seed, which])


def _optimizer(schedule: Schedule) -> optax.GradientTransformation:
    rate = optax.warmup_constant_schedule(0.0, schedule.learning_rate, schedule.warmup)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))


def _loss(logits: Float[Array, "B T vocab"], answers: Int[Array | np.ndarray, "B T"]) -> tuple[Array, Array]:
    """Mean loss and accuracy over the tokens that have an answer."""
    scored = answers >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(answers, 0))
    right = logits.argmax(-1) == answers
    return jnp.where(scored, losses, 0).sum() / scored.sum(), (right & scored).sum() / scored.sum()


@functools.partial(jax.jit, static_argnames=("graph", "schedule"), donate_argnames=("state", "moments"))
def _update(graph, state, moments, batch: Batch, schedule: Schedule):
    def objective(state):
        model = nnx.merge(graph, state)
        if model.config.selector == "importance":  # also the model of windows
            return _loss(model(batch.tokens), batch.answers)
        logits, distance = model(batch.tokens, distil="dense")
        loss, accuracy = _loss(logits, batch.answers)
        return loss + distance, accuracy

    (loss, accuracy), gradient = jax.value_and_grad(objective, has_aux=True)(state)
    updates, moments = _optimizer(schedule).update(gradient, moments, state)
    return optax.apply_updates(state, updates), moments, loss, accuracy


@functools.partial(jax.jit, static_argnames="graph")
def _score(graph, state, batch: Batch):
    return jnp.stack(_loss(nnx.merge(graph, state)(batch.tokens), batch.answers))
