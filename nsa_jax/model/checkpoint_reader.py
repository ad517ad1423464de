"""Reads the newest checkpoint of a folder, and refuses it if it was damaged."""

import os
import warnings
from collections.abc import Callable
from typing import Any

from nsa_jax.model import checkpoint_folder, checksums
from nsa_jax.model.orbax_errors import Failure, attempt


class Reader:
    """The newest checkpoint at a path.

    Attributes:
      path: the folder that the caller named, as an absolute path.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = checkpoint_folder.absolute(path)
        self._newest = checkpoint_folder.newest(self.path)
        self._sums = self._read_json("checksums") if self.has("checksums") else None
        if self._sums is None:
            warnings.warn(
                f"the checkpoint at {self.path!r} has no checksums, because an earlier version saved it: "
                "damage to its arrays would not be noticed. Save it again to add them.",
                stacklevel=3,
            )

    def has(self, item: str) -> bool:
        """Whether the checkpoint holds an item, such as "training"."""
        return os.path.isdir(os.path.join(self._newest, item))

    def json(self, item: str) -> dict[str, Any]:
        """Reads an item that was saved as JSON."""
        values = self._read_json(item)
        self._check(item, checksums.of_json(values))
        return values

    def arrays(self, item: str, like: dict[str, Any]) -> dict[str, Any]:
        """Reads an item of arrays by name, into the shapes, dtypes and shardings of `like`."""
        import orbax.checkpoint as orbax

        arrays = self._read(item, orbax.args.StandardRestore(like))
        self._check(item, checksums.of_arrays(arrays))
        return arrays

    def shapes(self, item: str) -> dict[str, Any]:
        """What was saved as an item of arrays, by name: anything that has a shape and a dtype."""

        def call() -> dict[str, Any]:
            with _open() as opened:
                return opened.metadata(self._newest).item_metadata[item].tree

        return self.understand("metadata", call)

    def understand[T](self, what: str, call: Callable[[], T]) -> T:
        """Returns the result of a call that fails only where the checkpoint is damaged.

        Raises:
          ValueError: the call failed. The message says `what` cannot be read.
        """
        found = attempt(call)
        if not isinstance(found, Failure):
            return found
        if checkpoint_folder.newest(self.path) != self._newest:
            raise ValueError(
                f"path must keep its checkpoint while it is read, got a newer one at {self.path!r}. "
                "Restore again."
            )
        raise ValueError(
            f"path must hold an undamaged checkpoint, got one at {self.path!r} whose {what} cannot be read "
            f"({found.said}). Restore another copy, or save it again."
        )

    def _read_json(self, item: str) -> dict[str, Any]:
        import orbax.checkpoint as orbax

        return self._read(item, orbax.args.JsonRestore())

    def _read(self, item: str, args: Any) -> dict[str, Any]:
        import orbax.checkpoint as orbax

        def call() -> dict[str, Any]:
            with _open() as opened:
                return opened.restore(self._newest, args=orbax.args.Composite(**{item: args}))[item]

        return self.understand(item, call)

    def _check(self, item: str, found: dict[str, str]) -> None:
        """Raises ValueError unless the checksums of what was read are those of what was saved."""
        if self._sums is None:
            return
        saved = self._sums.get(item, {})
        changed = sorted(name for name in found.keys() | saved.keys() if found.get(name) != saved.get(name))
        if changed:
            raise ValueError(
                f"path must hold an undamaged checkpoint, got one at {self.path!r} whose {item} has other "
                f"checksums than were saved at {changed[:3]}. Restore another copy, or save it again."
            )


def _open() -> Any:
    import orbax.checkpoint as orbax

    handlers = {
        "config": orbax.JsonCheckpointHandler(),
        "checksums": orbax.JsonCheckpointHandler(),
        "model": orbax.StandardCheckpointHandler(),
        "training": orbax.StandardCheckpointHandler(),
    }
    return orbax.Checkpointer(orbax.CompositeCheckpointHandler(**handlers))
