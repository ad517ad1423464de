"""The folder of checkpoints: which one in it is the newest, and that one save at a time writes there."""

import contextlib
import os
from collections.abc import Iterator

import jax

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def absolute(path: str | os.PathLike[str]) -> str:
    """The folder that a caller named."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path must be a str or os.PathLike, got {type(path).__name__}. Name the checkpoint's folder."
        )
    return os.path.abspath(path)


def newest(path: str) -> str:
    """Directory of the newest complete checkpoint under `path`."""
    import orbax.checkpoint as orbax

    steps = orbax.utils.checkpoint_steps(path) if os.path.isdir(path) else []
    # A folder with a number for a name may be somebody else's.
    steps = [step for step in steps if os.path.isdir(os.path.join(path, str(step), "model"))]
    if not steps:
        raise FileNotFoundError(
            f"path must hold a checkpoint that save wrote, got {path!r}. Check it, or save one first."
        )
    return os.path.join(path, str(max(steps)))


@contextlib.contextmanager
def only_writer(path: str) -> Iterator[None]:
    """Keeps other saves out of a folder: they would delete what this one is writing.

    Of the processes of one run the first does so. Where there are no file locks, nothing is kept out.

    Raises:
      ValueError: another save writes there.
    """
    if fcntl is None or jax.process_index() > 0:
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        _lock(folder, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: str) -> None:
    """Locks the folder itself: no file is left behind, and the lock ends with the process."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"path must be written by one save at a time, got {path!r} while another save writes there. "
            "Save again when it is done, or name another path."
        ) from error
    except OSError:  # a file system without locks
        pass
