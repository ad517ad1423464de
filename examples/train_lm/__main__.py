"""`python -m examples.train_lm`: trains a byte-level language model and samples text from it."""

import argparse
import dataclasses
import pathlib
import sys
import time

from benchmarks.command_line import INTERRUPTED, InputError, Parser, complain, missing_package

try:  # said at once, not after minutes of training
    import matplotlib  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import tqdm  # noqa: F401
except ImportError as missing:
    raise SystemExit(missing_package("examples.train_lm", missing, "train")) from missing

import jax

from examples.train_lm import report, run_folder, sampling, text, training
from examples.train_lm.mesh import ONE_DEVICE, MeshSizes
from examples.train_lm.run_folder import RunFolder
from examples.train_lm.settings import Settings
from nsa_jax.model import Transformer

PROGRAM = "examples.train_lm"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    folder = RunFolder(options.output or pathlib.Path("runs") / f"train_lm_{options.attention}")
    try:
        if options.distributed:
            _meet_other_processes()
        run(options, folder)
    except InputError as error:
        return complain(PROGRAM, error)
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted; {folder.what_resume_finds()}", file=sys.stderr)
        return INTERRUPTED
    return 0


def run(options: argparse.Namespace, folder: RunFolder) -> None:
    """Checks everything, then trains, measures, writes and draws."""
    started = time.perf_counter()
    fields = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in vars(options).items() if name in fields})
    if options.stop_at is not None and options.stop_at < 1:
        raise InputError(f"--stop-at must be at least 1, got {options.stop_at}. Pass a step.")
    options.mesh.check(batch=settings.batch, length=settings.length, model=settings.model)
    corpus = text.load(options.data, settings.length)
    prompt = sampling.choose_prompt(options.prompt, corpus, settings.length)
    identity = run_folder.identity(settings, corpus)
    (folder.open_again if options.resume else folder.open_new)(identity)
    if jax.process_index() == 0:
        _introduce(settings, corpus, folder)

    with options.mesh.in_context():
        trained = training.train(
            settings, corpus, folder, mesh=options.mesh, resume=options.resume, stop_at=options.stop_at
        )
    if jax.process_index() > 0:
        return
    if trained.step < settings.steps:
        print(f"stopped at step {trained.step} of {settings.steps}; --resume goes on")
        return
    if jax.process_count() > 1:
        print(
            "trained to its last step; the same command with --resume, in one process and without --mesh and "
            "--distributed, measures the model and lets it write"
        )
        return
    done = report.finished_in(folder.path)
    row = done[0].row if done else report.record(settings, corpus, trained) | {"resumed": options.resume}
    sibling = folder.path.parent / f"train_lm_{report.OTHER[settings.attention]}"
    other = report.find_other(row, report.finished_in(sibling) + report.committed())
    print(report.summary(row, other))

    if settings.attention == "nsa":
        sample = _write_and_draw(trained.model, prompt, settings, folder)
        row |= {"prompt": sample.text[0], "sample": sample.text[1]}
    curves = {settings.attention: trained.curve} | ({other.row["attention"]: other.curve} if other else {})
    report.draw_losses(folder.path / "loss.png", curves, row["bigram_bits_per_byte"])
    if not done:
        row["seconds"] = round(time.perf_counter() - started, 1)
        run_folder.write_rows(folder.result, [row])
    print(f"{time.perf_counter() - started:.0f} s in all; results and pictures are in {folder.path}")


def _write_and_draw(
    model: Transformer, prompt: bytes, settings: Settings, folder: RunFolder
) -> sampling.Sample:
    """Lets the model continue the prompt up to the end of a sequence, and draws what it attended to."""
    sample = sampling.continue_prompt(model, prompt, most=settings.length - len(prompt), seed=settings.seed)
    run_folder.write(folder.path / "sample.txt", f"{sample}\n")
    print(f"\n{sample.excerpt()}\n")
    chosen = sampling.selections(model, sample)
    sampling.draw_selections(folder.path / "blocks.png", chosen, settings.nsa, prompt_length=len(prompt))
    return sample


def _meet_other_processes() -> None:
    """Joins the processes that SLURM, Open MPI or Kubernetes started together with this one."""
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        said = str(error).rstrip(".")
        raise InputError(
            f"--distributed must be one of several processes of a cluster, got the error {said!r}. "
            "Start it with srun or mpirun, or leave the option out."
        ) from error


def _introduce(settings: Settings, corpus: text.Corpus, folder: RunFolder) -> None:
    flops = training.flops_per_trained_token(settings.model, settings.length)
    tokens = settings.steps * settings.batch * settings.length
    print(
        f"{corpus.name}: {len(corpus.training)} bytes to train on, {len(corpus.held_out)} held out\n"
        f"{settings.sparsity()}\n"
        f"{tokens} tokens of {flops / 1e6:.2f} MFLOP each on {jax.devices()[0].device_kind}\n"
        f"output: {folder.path}"
    )


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = Parser(
        prog="python -m examples.train_lm",
        description="Trains a byte-level language model with NSA on text, compares it with a byte bigram "
        "and with dense attention, samples text from it, and draws its losses and the blocks it selected.",
    )
    add = parser.add_argument
    add(
        "--attention",
        choices=("nsa", "dense"),
        default=defaults.attention,
        help="attention of the model, default: %(default)s",
    )
    for name, meaning in (
        ("steps", "optimizer steps"),
        ("batch", "sequences of a step"),
        ("length", "bytes of a sequence"),
        ("seed", "random seed of parameters, data order and sampling"),
        ("layers", "decoder layers"),
        ("width", "width of the residual stream"),
        ("heads", "query heads"),
        ("kv-heads", "KV heads; must divide --heads"),
        ("warmup", "steps in which the learning rate rises"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        add(f"--{name}", type=int, default=default, help=f"{meaning}, default: %(default)s")
    add(
        "--learning-rate",
        type=float,
        default=defaults.learning_rate,
        help="peak learning rate, default: %(default)s",
    )
    add("--data", type=pathlib.Path, help="a UTF-8 file; default: the documentation that ships inside Python")
    add("--output", type=pathlib.Path, help="new folder of the run, default: runs/train_lm_ATTENTION")
    add("--resume", action="store_true", help="continue the run in --output; default: a new run")
    add(
        "--stop-at",
        type=int,
        metavar="STEP",
        help="save a checkpoint after this step and stop, default: the last step",
    )
    add(
        "--mesh",
        type=MeshSizes.parse,
        default=ONE_DEVICE,
        metavar="AXIS=SIZE,...",
        help="devices that share batches (data), batches and parameters (fsdp), heads (tensor) and tokens "
        "of a sequence (context), default: one device",
    )
    add(
        "--distributed",
        action="store_true",
        help="this is one of the processes of a mesh, which srun or mpirun started; default: the only one",
    )
    add("--prompt", help="text to continue and to draw; default: the start of the held-out text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
