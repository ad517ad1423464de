"""`python -m nsa_jax.adopt SOURCE --text FILES... --output RUN`: from a dense model to one of NSA.

Converts the model, teaches its selection alone if asked to (distil), trains all of it on the text (sparse),
and measures each of these against the dense model. Stopped at any time, the same command goes on. Exit code
0: all is done; 2: bad input, or no room; 130 or 143: Ctrl-C or SIGTERM.
"""

import argparse
import dataclasses
import pathlib
import sys

from nsa_jax.adopt import command_line
from nsa_jax.adopt.command_line import PROGRAM, InputError, complain, in_options

try:  # said at once, not after minutes
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers  # noqa: F401
    import tqdm  # noqa: F401
except ImportError as missing:
    raise SystemExit(
        complain(
            f'this command needs the packages of the extras "pretrained" and "train", got {missing}. Install '
            "them with: pip install 'nsa_jax[pretrained,train]'."
        )
    ) from missing

from typing import Any, get_args

from flax import nnx

from nsa_jax.adopt import device_memory, text
from nsa_jax.adopt.measure import Measurements
from nsa_jax.adopt.mesh import ONE_DEVICE, Mesh, bound
from nsa_jax.adopt.report import write_report
from nsa_jax.adopt.run_folder import RunFolder
from nsa_jax.adopt.settings import Settings
from nsa_jax.adopt.training import Interrupted, stages, train
from nsa_jax.config import BRANCHES
from nsa_jax.model import Transformer
from nsa_jax.model.config import AttentionKind
from nsa_jax.nn.distillation import TARGETS
from nsa_jax.pretrained import ChatFormat, load, load_chat_format, save, to_nsa

INTERRUPTED = 130
KINDS = get_args(AttentionKind.__value__)


def main(arguments: list[str] | None = None, **defaults: Any) -> int:
    """Runs the command, whose options may have other defaults, and returns its exit code."""
    parser = _parser()
    parser.set_defaults(**defaults)
    options = parser.parse_args(arguments)
    folder = RunFolder(options.output)
    try:
        names = {field.name for field in dataclasses.fields(Settings)}
        given = {name: value for name, value in vars(options).items() if name in names}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        with device_memory.needed("the model", "a smaller one, or a device with more", folder):
            run(Settings(**given), options.text, folder, options.mesh)
    except (InputError, ImportError) as error:
        return complain(error)
    except OSError as error:
        told = f"the error {str(error).rstrip('.')!r}; {folder.saved}"
        return complain(
            f"--output must be a folder that takes the run, got {told}. Make room, or name another."
        )
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"\n{PROGRAM}: interrupted; {folder.saved}; the same command goes on", file=sys.stderr)
        return 128 + error.number if isinstance(error, Interrupted) else INTERRUPTED
    return 0


def run(settings: Settings, files: list[pathlib.Path], folder: RunFolder, mesh: Mesh = ONE_DEVICE) -> None:
    """Does what is not done yet: tokenises, converts, trains, measures, and writes the page."""
    settings.nsa  # noqa: B018 (raises for sizes that do not fit)
    mesh.check(settings.batch)
    identity = settings.identity(files)
    folder.check(identity)
    dense, tokenizer, chat_format = _load(settings)
    if tokenizer is None:
        raise InputError(
            f"SOURCE must have a tokenizer, got {settings.source!r} with none that is known. Pass the folder "
            "or repository that its tokenizer.json is in."
        )
    model = _convert(dense, settings)
    mesh.check_model(model.config)
    folder.path.mkdir(parents=True, exist_ok=True)
    documents = text.read(folder.path, files, tokenizer, model.vocab_size, identity)
    training, held_out = text.split(
        documents, length=settings.length, share=settings.held_out, seed=settings.seed
    )
    packed = text.Packed(training, settings.length, settings.seed)
    folder.begin(identity)

    measurements = Measurements(folder, settings, held_out, tokenizer)
    measurements.measure("dense", dense, dense)
    measurements.measure("converted", model, dense)
    trained = stages(settings)
    for stage in trained:
        if stage.name == "dense":
            twin, *_ = _load(settings)
            twin = train(stage, twin, packed, folder, settings, mesh=mesh)
            measurements.measure("dense_trained", twin, dense)
            _save(twin, folder.path / "dense", tokenizer, chat_format)
        else:
            teacher = dense if stage.name == "sparse" and settings.logit_weight else None
            model = train(stage, model, packed, folder, settings, mesh=mesh, dense=teacher)
            measurements.measure(stage.name, model, dense)
    _save(model, folder.path / "model", tokenizer, chat_format)
    counted = dict(
        tokens=packed.total + int(held_out.sizes.sum()),
        documents=len(documents.sizes),
        held_out_tokens=int(held_out.sizes.sum()),
        held_out_documents=len(held_out.sizes),
        files=identity["files"],
    )
    write_report(folder, settings, trained, counted, mesh.devices)
    print(f"the model is in {folder.path / 'model'}, what was measured in {folder.path / 'report.md'}")


def _load(settings: Settings) -> tuple[Transformer, Any, ChatFormat]:
    try:
        model, tokenizer = load(
            settings.source, dtype=settings.dtype, rope_base=settings.rope_base, ignore=settings.ignore
        )
        chat_format = load_chat_format(settings.source)
    except (TypeError, ValueError) as error:
        raise InputError(in_options(error)) from error
    model.config = dataclasses.replace(model.config, **settings.training)
    return bound(model), tokenizer, chat_format


def _convert(dense: Transformer, settings: Settings) -> Transformer:
    try:
        return bound(to_nsa(dense, **settings.conversion, rngs=nnx.Rngs(settings.seed)))
    except (TypeError, ValueError) as error:
        raise InputError(in_options(error)) from error


def _save(model: Transformer, path: pathlib.Path, tokenizer: Any, chat_format: ChatFormat) -> None:
    """Saves a model for use, unless it is there."""
    if not (path / "config.json").exists():
        for part in path.glob("*"):  # of a save that was killed
            part.unlink()
        model.config = dataclasses.replace(model.config, remat=False, scan_layers=False)
        save(model, path, tokenizer=tokenizer, chat_format=chat_format)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n\n")[1])
    add, of = parser.add_argument, Settings
    files = (
        "files of UTF-8, .jsonl or .ndjson with a document in each line, or datasets of Hugging Face on disk"
    )
    add(
        "source", metavar="SOURCE", help="dense model: a folder or repository of Hugging Face, or a GGUF file"
    )
    add("--text", type=pathlib.Path, nargs="+", required=True, metavar="FILE", help=f"{files}; no default")
    told = "folder of the run, new or to go on with; no default"
    add("--output", type=pathlib.Path, required=True, metavar="RUN", help=told)
    add("--field", default=of.field, help="field or column that holds the text; default: %(default)s")
    told = "fields of its config.json, or settings of the GGUF file, that you know to change nothing"
    add("--ignore", nargs="+", default=of.ignore, metavar="NAME", help=f"{told}; default: none")
    told = f"of all layers or of each one: {', '.join(KINDS)}; default: what is dense becomes nsa"
    add("--attention", choices=KINDS, nargs="+", default=of.attention, metavar="KIND", help=told)
    told = f"of NSA layers; default: {' '.join(of.branches)}"
    add("--branches", choices=BRANCHES, nargs="+", default=of.branches, metavar="BRANCH", help=told)
    told = "tokens of prompts with a needle; default: --length"
    positive, count, rate = command_line.positive, command_line.count, command_line.rate
    base = "base of the rotary embedding, larger for rows that are longer than the model's; default: its own"
    add("--rope-base", type=rate, metavar="BASE", help=base)
    add("--needle-lengths", type=positive, nargs="+", default=(), metavar="T", help=told)
    told = "also train the dense model on the text of the sparse stage, to compare with"
    add("--train-dense", action="store_true", help=told)
    told = "devices to train on, such as data=2,fsdp=2: rows, and parameters, and with tensor=2 heads"
    add(
        "--mesh",
        type=Mesh.parse,
        default=ONE_DEVICE,
        metavar="AXIS=SIZE",
        help=f"{told}; default: one device",
    )
    choices = {
        "selector": (("importance", "indexer"), "what chooses the blocks"),
        "compression": (("mlp", "mean"), "how blocks are compressed; the mean learns nothing"),
        "selection-target": (TARGETS, "of the later selection loss: all attention, or that in the blocks"),
        "dtype": (("bfloat16", "float32"), "of the computation; parameters are float32"),
        "remat": (("attention", "layer", "none"), "what is computed again: all but attention, all, nothing"),
    }  # fmt: skip
    numbers = {
        "l": (positive, "tokens of a compression block"),
        "d": (positive, "tokens from one compression block to the next"),
        "block": (positive, "tokens of a selection block"),
        "n": (positive, "selected blocks of a query"),
        "w": (positive, "tokens of the window"),
        "length": (positive, "tokens of a row"),
        "batch": (positive, "rows of a step"),
        "distil-steps": (count, "steps that teach the choice of blocks alone"),
        "sparse-steps": (count, "steps that train everything"),
        "learning-rate": (rate, "peak for parameters of the dense model"),
        "new-learning-rate": (rate, "peak for new parameters"),
        "warmup": (count, "steps in which the rates rise"),
        "selection-weight": (command_line.weight, "of the selection loss while everything trains"),
        "logit-weight": (command_line.weight, "of the divergence from the dense model's logits there"),
        "held-out": (command_line.share, "share of the text that is not trained on"),
        "rows": (positive, "held-out rows to measure losses on, at most"),
        "needles": (count, "questions at each of 16 depths, 0 for none"),
        "seed": (count, "of new parameters and of the order of the text"),
    }
    for name, (words, meaning) in choices.items():
        default = getattr(of, name.replace("-", "_"))
        add(f"--{name}", choices=words, default=default, help=f"{meaning}; default: %(default)s")
    for name, (kind, meaning) in numbers.items():
        default = getattr(of, name.replace("-", "_"))
        add(f"--{name}", type=kind, default=default, help=f"{meaning}; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
