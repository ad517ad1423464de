"""The folder of a run: its files, how they are replaced without loss, and how a run goes on."""

import json
import os
import pathlib
from typing import Any

from nsa_jax.adopt.command_line import InputError
from nsa_jax.adopt.mesh import Mesh
from nsa_jax.adopt.text import FILES
from nsa_jax.model import Transformer, restore, restore_training, save


class RunFolder:
    """Paths and contents of one run.

    `settings.json` says what runs; `tokens.*` and `documents.npy` are its text. Each stage has a
    `STAGE.jsonl` with a row a step and a checkpoint in `checkpoints/STAGE`. `measured.json` holds what was
    measured so far; `report.md` and `report.json` are the result, and `model` the trained model.

    Attributes:
      saved: the last step that was saved or found here, in words.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.settings, self.measured = path / "settings.json", path / "measured.json"
        self.saved = "nothing is trained yet"

    def check(self, identity: dict[str, Any]) -> None:
        """Raises InputError unless the folder is new, empty, or holds the run with this identity."""
        try:
            names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
            found = json.loads(self.settings.read_text(encoding="utf-8")) if self.settings.exists() else None
        except (OSError, ValueError) as error:
            raise InputError(
                f"--output must be a folder that is new or holds a run, got {str(self.path)!r} ({error}). "
                "Name another."
            ) from error
        if found is None:
            begun = f".{self.settings.name}."  # left by a run that was killed while it wrote them
            if others := sorted(name for name in names - set(FILES) if not name.startswith(begun)):
                raise InputError(
                    f"--output must be a folder that is new or holds a run, got {others[0]!r} in "
                    f"{str(self.path)!r}. Name another."
                )
            return
        differing = [name for name in identity | found if identity.get(name) != found.get(name)]
        if differing:
            got = ", ".join(f"{name}={identity.get(name)!r}" for name in differing)
            has = ", ".join(f"{name}={found.get(name)!r}" for name in differing)
            raise InputError(
                f"a run must go on with its settings, got {got} where {str(self.path)!r} has {has}. Pass the "
                "options that it was started with, or name another --output."
            )

    def begin(self, identity: dict[str, Any]) -> None:
        """Says which run this folder holds from now on."""
        write(self.settings, json.dumps(identity, indent=1))

    def save(
        self, stage: str, model: Transformer, moments: Any, step: int, rows: list[dict[str, Any]]
    ) -> None:
        """Writes rows and a checkpoint; killed at any moment, the last complete checkpoint remains.

        Raises:
          InputError: another process writes there.
          OSError: there is no room, say.
        """
        write(self.path / f"{stage}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        try:
            save(self.path / "checkpoints" / stage, model, training={"moments": moments, "step": step})
        except ValueError as error:
            raise InputError(str(error)) from error
        self.saved = f"step {step} of {stage} is saved"

    def load(
        self, stage: str, moments: Any, mesh: Mesh
    ) -> tuple[Transformer, Any, int, list[dict[str, Any]]] | None:
        """What `save` wrote last, if anything, on the devices of the mesh in context.

        Raises:
          InputError: it was damaged.
        """
        path = self.path / "checkpoints" / stage
        try:
            model = restore(path, **mesh.of_model)
            training = restore_training(path, {"moments": moments, "step": 0})
            rows = self.rows(stage)
        except FileNotFoundError:
            return None
        except ValueError as error:
            told = str(error).rstrip(".")
            raise InputError(
                f"--output must hold a whole checkpoint of {stage!r}, got the error {told!r}. Start "
                "again in another folder."
            ) from error
        step = training["step"]
        self.saved = f"step {step} of {stage} is saved"
        return model, training["moments"], step, [row for row in rows if row["step"] <= step]

    def rows(self, stage: str) -> list[dict[str, Any]]:
        """What was noted of each step, which may be ahead of the checkpoint."""
        text = (self.path / f"{stage}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def results(self) -> dict[str, Any]:
        """What was measured so far. Raises InputError if it was damaged."""
        try:
            return json.loads(self.measured.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:  # of JSON or UTF-8
            raise InputError(
                f"--output must hold whole measurements, got the error {str(error)!r} in "
                f"{str(self.measured)!r}. Start again without this file, and all is measured again."
            ) from error

    def note(self, of: str, what: str, value: Any) -> None:
        """Adds a measurement of a model."""
        results = self.results()
        results.setdefault(of, {})[what] = value
        write(self.measured, json.dumps(results, indent=1))


def write(path: pathlib.Path, text: str) -> None:
    """Replaces a file as a whole: a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
