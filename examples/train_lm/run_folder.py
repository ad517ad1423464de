"""The folder of a run: its files, how they are replaced without loss, and how a run is resumed."""

import io
import json
import os
import pathlib
from typing import Any

import jax
from flax import nnx
from matplotlib.figure import Figure

from benchmarks.command_line import InputError
from examples.train_lm.mesh import ONE_DEVICE, MeshSizes
from examples.train_lm.settings import Settings
from examples.train_lm.text import Corpus
from nsa_jax.model import Transformer, restore, restore_training, save


class RunFolder:
    """Paths and contents of one run.

    `settings.json` says what runs, `curve.jsonl` has one row a step, `checkpoint` the state to go on from,
    `result.jsonl` one object when the run is complete; pictures and a text sample lie beside them.

    Attributes:
      saved: step of the last checkpoint that this process wrote or read, None before the first.
      saving: step of the checkpoint that is being written now.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.curve = path / "curve.jsonl"
        self.result = path / "result.jsonl"
        self.saved: int | None = None
        self.saving: int | None = None

    def open_new(self, identity: dict[str, Any]) -> None:
        """Makes the folder of a new run; `identity` is what a resumed run must share with it.

        Of several processes the first makes it.

        Raises:
          InputError: the path is taken, or cannot be made.
        """
        if jax.process_index() > 0:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = any(self.path.iterdir())
            if not taken:
                write(self.path / "settings.json", json.dumps(identity, indent=1))
        except OSError as error:
            raise InputError(
                f"--output must be a folder that can be made and written, got {str(self.path)!r} "
                f"({error.strerror}). Name another."
            ) from error
        if taken:
            raise InputError(
                f"--output must be a new or empty folder, got {str(self.path)!r} with files in it. "
                "Pass --resume to continue that run, or name another folder."
            )

    def open_again(self, identity: dict[str, Any]) -> None:
        """Checks that the folder holds this run.

        Raises:
          InputError: it holds no run, or another one.
        """
        try:
            found = json.loads((self.path / "settings.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"--resume must find a run in --output, got none in {str(self.path)!r}. "
                "Start it without --resume."
            ) from error
        except ValueError as error:
            raise InputError(
                f"--resume must find a readable settings.json in --output, got {error}. "
                "Name another --output and start anew."
            ) from error
        differing = sorted(
            name for name in identity.keys() | found.keys() if identity.get(name) != found.get(name)
        )
        if differing:
            got = ", ".join(f"{name}={identity.get(name)!r}" for name in differing)
            has = ", ".join(f"{name}={found.get(name)!r}" for name in differing)
            raise InputError(
                f"--resume must continue the run that --output holds, got {got} where it has {has}. "
                "Pass the options it was started with, or name another --output."
            )

    def save(self, model: Transformer, moments: Any, step: int, curve: list[dict[str, Any]]) -> None:
        """Writes the curve and a checkpoint; killed at any moment, the last complete checkpoint remains.

        Of several processes each writes its part of the checkpoint.

        Raises:
          InputError: the disk is full, say, or another process saves there.
        """
        self.saving = step
        try:
            if jax.process_index() == 0:
                write_rows(self.curve, curve)
            save(self.checkpoint, model, training={"moments": moments, "step": step})
        except (OSError, ValueError) as error:
            said = str(error).rstrip(".")
            raise InputError(
                f"--output must be a folder that takes step {step}, got the error {said!r}. "
                "Pass --resume, when that is cured, to go on from the last step that was saved."
            ) from error
        self.saved, self.saving = step, None

    def what_resume_finds(self) -> str:
        """Where `--resume` will go on, in words; for a run that was interrupted."""
        if self.saved is None and self.saving is None:
            if self.checkpoint.exists():
                return "--resume goes on from the checkpoint that was there before"
            if (self.path / "settings.json").exists():
                return "no step was saved yet; --resume starts from the first step"
            return "nothing was saved; start it again without --resume"
        before = "the first step" if self.saved is None else f"step {self.saved}"
        if self.saving is not None:
            return f"--resume goes on from step {self.saving} if it was saved whole, else from {before}"
        return f"step {self.saved} is saved; --resume goes on from there"

    def model(self, settings: Settings, mesh: MeshSizes = ONE_DEVICE) -> Transformer:
        """The model of the last checkpoint, on the devices of the mesh in context."""
        return restore(self.checkpoint, settings.model, **mesh.arguments)

    def load(
        self, settings: Settings, moments: Any, mesh: MeshSizes = ONE_DEVICE
    ) -> tuple[nnx.State, Any, int, list[dict[str, Any]]] | None:
        """Parameters, optimizer state like `moments`, step and curve of the last checkpoint, if there is one.

        Raises:
          InputError: the checkpoint is one of another configuration, or was damaged.
        """
        try:
            model = self.model(settings, mesh)
            training = restore_training(self.checkpoint, {"moments": moments, "step": 0})
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise InputError(f"--resume must find a whole checkpoint of this run: {error}") from error
        step = training["step"]
        try:
            rows = read_rows(self.curve)
        except ValueError as error:
            raise InputError(
                f"--resume must find rows of JSON in {str(self.curve)!r}, got {error}. "
                "Name another --output and start anew."
            ) from error
        # The curve is written first and may be ahead.
        curve = [row for row in rows if row["step"] <= step]
        self.saved = step
        return nnx.state(model), training["moments"], step, curve


def identity(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What two runs must share to be the same run."""
    return settings.to_json() | {"data": corpus.name, "data_sha256": corpus.sha256}


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Replaces a file as a whole: a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_rows(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Writes JSON Lines."""
    write(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads JSON Lines; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_picture(path: pathlib.Path, figure: Figure) -> None:
    """Draws a figure into a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write(path, picture.getvalue())
