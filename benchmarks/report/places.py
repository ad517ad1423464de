"""Takes out of a text where things lie on this machine: no reader has them there."""

import pathlib
import re
import sys

from benchmarks.records import ROOT


def without_places(text: str, folder: pathlib.Path) -> str:
    """Paths begin at the folder of the report, the root of the clone, Python's own, or the home folder."""
    names = {
        folder: "report", ROOT: ".", pathlib.Path(sys.prefix): "PYTHON",
        pathlib.Path(sys.base_prefix): "PYTHON", pathlib.Path.home(): "~",
    }  # fmt: skip
    for path, name in names.items():
        if path.is_absolute() and path != pathlib.Path("/"):
            text = re.sub(rf"(?<![\w.-]){re.escape(str(path))}(?![\w-])", name, text)
    return text
