"""`python -m examples.train_lm`: trains a byte-level language model, measures it, lets it write, draws it."""

import argparse
import dataclasses
import pathlib
import sys
import time

import jax

from examples.train_lm import report, run_folder, sampling, text, training
from examples.train_lm.run_folder import RunFolder
from examples.train_lm.settings import InputError, Settings
from nsa_jax.model import Transformer

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


def run(options: argparse.Namespace) -> None:
    """Checks everything, then trains, measures, writes and draws."""
    started = time.perf_counter()
    fields = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in vars(options).items() if name in fields})
    if options.stop_at is not None and options.stop_at < 1:
        raise InputError(f"--stop-at must be at least 1, got {options.stop_at}. Pass a step.")
    corpus = text.load(options.data, settings.length)
    prompt = sampling.choose_prompt(options.prompt, corpus, settings.length)
    folder = RunFolder(options.output or pathlib.Path("runs") / f"train_lm_{settings.attention}")
    identity = run_folder.identity(settings, corpus)
    (folder.open_again if options.resume else folder.open_new)(identity)
    _introduce(settings, corpus, folder)

    trained = training.train(settings, corpus, folder, resume=options.resume, stop_at=options.stop_at)
    if trained.step < settings.steps:
        print(f"stopped at step {trained.step} of {settings.steps}; --resume goes on")
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
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_lm",
        description="Trains a byte-level language model with NSA on text, compares it with a byte bigram "
        "and with dense attention, lets it write, and draws its losses and the blocks it selected.",
    )
    add = parser.add_argument
    add("--attention", choices=("nsa", "dense"), default=defaults.attention, help="default: %(default)s")
    for name, meaning in (
        ("steps", "optimizer steps"),
        ("batch", "sequences a step"),
        ("length", "bytes of a sequence"),
        ("seed", "of parameters, data order and sampling"),
        ("layers", "decoder layers"),
        ("width", "width of the residual stream"),
        ("heads", "query heads"),
        ("kv-heads", "KV heads"),
        ("warmup", "steps of the learning rate's rise"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        add(f"--{name}", type=int, default=default, help=f"{meaning}, default: %(default)s")
    add("--learning-rate", type=float, default=defaults.learning_rate, help="its peak, default: %(default)s")
    add("--data", type=pathlib.Path, help="a UTF-8 file; default: the documentation that ships inside Python")
    add("--output", type=pathlib.Path, help="new folder of the run, default: runs/train_lm_ATTENTION")
    add("--resume", action="store_true", help="go on with the run in --output, bit for bit")
    add("--stop-at", type=int, metavar="STEP", help="stop early with a checkpoint, for a later --resume")
    add("--prompt", help="text to continue and to draw; default: the start of the held-out text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
