"""`python -m examples.adopt_corpus text.jsonl`: books and manuals to adopt a model with.

Downloads the Debian packages of `packages.sha256`, each of just this content, and writes a JSONL file with a
document in each line, for `python -m nsa_jax.adopt --text`. The same packages give the same bytes.
"""

import json
import pathlib
import sys

from benchmarks.command_line import InputError, Parser, check_writable, command
from examples.adopt_corpus import packages
from examples.adopt_corpus.documents import Documents
from examples.adopt_corpus.pages import read

PROGRAM = "examples.adopt_corpus"


@command(PROGRAM)
def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 without a package, 130 when interrupted."""
    parser = Parser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").split("\n\n")[1])
    add = parser.add_argument
    add("target", type=pathlib.Path, metavar="FILE", help="to write, such as text.jsonl")
    told = "folder that keeps the packages; default: %(default)s"
    add("--packages", type=pathlib.Path, default=pathlib.Path("packages"), metavar="FOLDER", help=told)
    told = "which packages, as `sha256sum` writes it; default: that of the example"
    add("--list", type=pathlib.Path, default=packages.LIST, metavar="FILE", help=told)
    told = "where they are, the first that has one counts; default: Debian's and its archives"
    add("--mirror", nargs="+", default=packages.MIRRORS, metavar="URL", help=told)
    options = parser.parse_args(arguments)
    listed = packages.listed(options.list)
    check_writable(options.target, "FILE")
    check_writable(options.packages / "package", "--packages")
    made, part = Documents(), options.target.with_name(f".{options.target.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for path, expected in listed:
                package = packages.fetch(path, expected, options.mirror, options.packages)
                pages = filter(None, (read(*each) for each in packages.files(package)))
                texts = list(made.of(pages))
                file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
                millions = sum(map(len, texts)) / 1e6
                print(f"{package.name}: {len(texts)} documents, {millions:.1f} M characters", flush=True)
        part.replace(options.target)
    except OSError as error:
        raise InputError(
            f"FILE and --packages must take what is written, got the error {str(error)!r}. Make room, or "
            "name others."
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
