"""`python -m examples.recall`: trains NSA and its window alone on associative recall and compares them."""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

try:
    import optax  # noqa: F401 (training needs it: say so before anything else)
    from tqdm import tqdm
except ImportError as missing:
    sys.exit(
        f"error: the example needs optax and tqdm, got: {missing}. Install them with: pip install '.[train]'."
    )

import flax
import jax
from flax import nnx

from benchmarks.records import Environment, environment
from examples.recall import results, training
from examples.recall.inspection import inspect
from examples.recall.results import Arm, Row
from examples.recall.task import RecallTask, check_sparse_and_far
from examples.recall.training import Schedule
from nsa_jax.config import NSAConfig
from nsa_jax.model import TransformerConfig

NSA = NSAConfig(
    compression_block_size=8,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=6,
    window_size=16,
    num_initial_blocks=0,
    num_local_blocks=1,
)
SMOOTHING = 0.9  # of the loss and accuracy that the progress bar shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run.

    Raises:
      ValueError: the task, the model and the schedule do not fit one another.
    """

    task: RecallTask
    model: TransformerConfig
    schedule: Schedule
    seeds: tuple[int, ...]
    test_sequences: int

    def __post_init__(self):
        check_sparse_and_far(self.task, self.model.nsa, self.model.num_layers)
        if min(self.seeds) < 0:
            raise ValueError(f"seeds must not be negative, got {list(self.seeds)}. Pass 0 or more.")
        if self.test_sequences < 1:
            raise ValueError(f"test_sequences must be at least 1, got {self.test_sequences}. Pass more.")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        if options.markdown is not None:
            print(results.markdown(results.read(options.markdown)))
            return 0
        settings = _settings(options)
        if options.results is not None:
            _check_writable(options.results)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run(settings, options.results)
    return 0


def run(settings: Settings, path: pathlib.Path | None) -> list[Row]:
    """Trains both models for each seed; each row is printed, and written, as soon as it is there."""
    here = environment()
    here.print()
    print(
        f"chance is {settings.task.chance:.2%}; every query stands at least "
        f"{settings.task.min_distance} tokens behind its value",
        flush=True,
    )
    rows: list[Row] = []
    arms: tuple[Arm, ...] = ("nsa", "window")
    for seed in settings.seeds:
        steps = None
        for attention in arms:
            row = _train_and_measure(settings, here, seed, attention, steps)
            steps = row.steps
            rows.append(row)
            print(results.verdict([row]), flush=True)
            if path is not None:
                results.append(path, row)
    print(f"\n{results.markdown(rows)}\n\n{results.verdict(rows)}")
    return rows


def _train_and_measure(
    settings: Settings, here: Environment, seed: int, attention: Arm, steps: int | None
) -> Row:
    """Trains one model; given `steps` it takes just as many, whatever its accuracy."""
    model = dataclasses.replace(settings.model, attention=attention)
    schedule = settings.schedule
    if steps is not None:
        schedule = dataclasses.replace(schedule, steps=steps, stop_at=None)
    with tqdm(total=schedule.steps, desc=f"seed {seed}, {results.NAMES[attention]}", unit="step") as bar:
        shown: list[float] = []

        def report(step: int, loss: float, accuracy: float) -> None:
            now = [loss, accuracy]
            shown[:] = (
                [SMOOTHING * a + (1 - SMOOTHING) * b for a, b in zip(shown, now, strict=True)]
                if shown
                else now
            )
            bar.set_postfix_str(f"loss {shown[0]:.3f}, accuracy {shown[1]:.1%}", refresh=False)
            bar.update()

        trained = training.train(model, settings.task, schedule, seed, report)
    batches = training.held_out(model, settings.task, settings.test_sequences, seed)
    score = training.score(trained.model, batches)
    found = inspect(trained.model, settings.task, batches) if attention == "nsa" else None
    return Row(
        **dataclasses.asdict(here),
        flax=flax.__version__,
        example="recall",
        attention=attention,
        seed=seed,
        steps=trained.steps,
        seconds=round(trained.seconds, 1),
        accuracy=score.accuracy,
        loss=score.loss,
        chance=settings.task.chance,
        scored_answers=sum(int((batch.answers >= 0).sum()) for batch in batches),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(trained.model, nnx.Param))),
        inspection=dataclasses.asdict(found) if found else None,
        task=dataclasses.asdict(settings.task),
        model=dataclasses.asdict(model),
        schedule=dataclasses.asdict(schedule),
    )


def _settings(options: argparse.Namespace) -> Settings:
    def chosen(kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in vars(options).items() if name in names}

    task = RecallTask(**chosen(RecallTask))
    nsa = dataclasses.replace(NSA, **chosen(NSAConfig))
    model = TransformerConfig(vocab_size=task.vocab_size, nsa=nsa, **chosen(TransformerConfig))
    schedule = Schedule(**chosen(Schedule))
    return Settings(
        task=task,
        model=model,
        schedule=schedule,
        seeds=tuple(options.seeds),
        test_sequences=options.test_sequences,
    )


def _check_writable(path: pathlib.Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"results must be a file that can be written, got {error}. Choose another path."
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recall",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one NSA and one window model each")
    parser.add_argument("--results", type=pathlib.Path, help="JSONL file to add the rows to")
    parser.add_argument(
        "--markdown",
        type=pathlib.Path,
        nargs="?",
        const=results.COMMITTED,
        help="train nothing: print the tables of a results file, by default the committed one",
    )
    parser.add_argument("--test-sequences", type=int, default=64, help="held-out sequences that are scored")
    _add(parser.add_argument_group("task, in tokens"), RecallTask())
    _add(parser.add_argument_group("attention, in tokens and blocks"), NSA)
    model = parser.add_argument_group("model")
    for name, value in dict(num_layers=2, model_dim=64, num_heads=2, num_kv_heads=1, mlp_dim=128).items():
        model.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help="see TransformerConfig"
        )
    model.add_argument(
        "--compression", choices=("mlp", "mean"), default="mlp", help="how blocks are compressed"
    )
    _add(parser.add_argument_group("training"), Schedule())
    return parser


def _add(group: "argparse._ArgumentGroup", defaults: RecallTask | NSAConfig | Schedule) -> None:
    """One option for each field, under its name."""
    for field in dataclasses.fields(defaults):
        value = getattr(defaults, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        group.add_argument(flag, type=type(value), default=value, help=f"see {type(defaults).__name__}")


if __name__ == "__main__":
    sys.exit(main())
