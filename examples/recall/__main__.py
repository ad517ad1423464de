"""`python -m examples.recall`: associative recall by NSA, by NSA with an indexer, and by its window alone."""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

from benchmarks.command_line import Parser, check_writable, command, complain, missing_package, progress

try:
    import optax  # noqa: F401 (training needs it: say so before anything else)
    from tqdm import tqdm
except ImportError as missing:
    raise SystemExit(missing_package("examples.recall", missing, "train")) from missing

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
from nsa_jax.nn import IndexerConfig

INDEXER = IndexerConfig(dim=32)
NSA = NSAConfig(
    compression_block_size=8,
    compression_stride=2,
    selection_block_size=8,
    num_selected_blocks=6,
    window_size=16,
    num_initial_blocks=0,
    num_local_blocks=1,
)
PROGRAM = "examples.recall"
MEANINGS = {
    "length": "tokens of a sequence",
    "num_pairs": "key-value pairs at the front",
    "num_queries": "queries at the end",
    "num_keys": "different keys, at least as many as pairs",
    "num_values": "different values",
    "num_fillers": "different filler tokens",
    "compression_block_size": "tokens of a compression block",
    "compression_stride": "tokens from one compression block to the next",
    "selection_block_size": "tokens of a selection block",
    "num_selected_blocks": "selected blocks of each query and KV head",
    "window_size": "tokens of the window",
    "num_initial_blocks": "first blocks that are always selected",
    "num_local_blocks": "last blocks that are always selected",
    "num_layers": "decoder layers",
    "model_dim": "width of the residual stream",
    "num_heads": "query heads",
    "num_kv_heads": "KV heads; must divide --num-heads",
    "mlp_dim": "width of the hidden layer of the MLPs",
    "steps": "optimizer steps at most",
    "batch": "sequences of a step",
    "learning_rate": "learning rate after the warm-up",
    "warmup": "steps in which the learning rate rises, and a model with an indexer attends to all blocks",
    "stop_at": "validation accuracy, from 0 to 1, at which training stops",
    "validate_every": "steps between two validations",
}
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
        if min(self.seeds) < 0 or max(self.seeds) >= 2**32:
            raise ValueError(f"seeds must be from 0 to 2**32 - 1, got {list(self.seeds)}. Pass others.")
        if self.test_sequences < 1:
            raise ValueError(f"test_sequences must be at least 1, got {self.test_sequences}. Pass more.")


@command(PROGRAM)
def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        if options.markdown is not None:
            print(results.markdown(results.read(options.markdown)))
            return 0
        settings = _settings(options)
    except ValueError as error:
        return complain(PROGRAM, error)
    check_writable(options.results, "--results")
    run(settings, options.results)
    return 0


def run(settings: Settings, path: pathlib.Path | None) -> list[Row]:
    """Trains all models for each seed; each row is printed, and written, as soon as it is there."""
    here = environment()
    here.print()
    print(
        f"chance is {settings.task.chance:.2%}; every query stands at least "
        f"{settings.task.min_distance} tokens behind its value",
        flush=True,
    )
    rows: list[Row] = []
    arms: tuple[Arm, ...] = ("nsa", "indexer", "window")
    for seed in settings.seeds:
        most = 0
        for attention in arms:
            row = _train_and_measure(settings, here, seed, attention, most if attention == "window" else None)
            most = max(most, row.steps)
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
    model = dataclasses.replace(
        settings.model,
        attention="window" if attention == "window" else "nsa",
        selector=INDEXER if attention == "indexer" else "importance",
    )
    schedule = settings.schedule
    progress(f"seed {seed}, {results.NAMES[attention]}: the first step compiles the model")
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
    progress("compiling and scoring on held-out sequences")
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
    blocks = chosen(NSAConfig)
    nsa = dataclasses.replace(NSA, **blocks)
    # `window_size` goes into `nsa`, from which the layers of the other arm take it.
    sizes = {name: value for name, value in chosen(TransformerConfig).items() if name not in blocks}
    model = TransformerConfig(vocab_size=task.vocab_size, nsa=nsa, **sizes)
    schedule = Schedule(**chosen(Schedule))
    return Settings(
        task=task,
        model=model,
        schedule=schedule,
        seeds=tuple(options.seeds),
        test_sequences=options.test_sequences,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m examples.recall",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="random seeds; each trains a model of each kind",
    )
    parser.add_argument("--results", type=pathlib.Path, help="JSONL file to append the rows to")
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
        model.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=MEANINGS[name])
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
        group.add_argument(flag, type=type(value), default=value, help=MEANINGS[field.name])


if __name__ == "__main__":
    sys.exit(main())
