"""Debian packages: which, from where, and the files in them."""

import hashlib
import http.client
import io
import lzma
import pathlib
import re
import tarfile
import urllib.request
from collections.abc import Iterator, Sequence

from benchmarks.command_line import InputError

LIST = pathlib.Path(__file__).with_name("packages.sha256")  # as `sha256sum` writes it: a sum and a path
# Debian 12 is complete and its packages stay as they are. Should they move, the archives keep them.
MIRRORS = (
    "http://deb.debian.org/debian",
    "http://archive.debian.org/debian",
    "http://snapshot.debian.org/archive/debian/20260712T000000Z",
)
AR_MAGIC, AR_HEADER = b"!<arch>\n", 60  # bytes


def listed(path: pathlib.Path = LIST) -> list[tuple[str, str]]:
    """Path and SHA-256 of each package. Raises InputError if there are none."""
    try:
        found = re.findall(r"^([0-9a-f]{64})  (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError) as error:
        raise InputError(f"--list must be a file that can be read, got {error}. Name another.") from error
    if not found:
        raise InputError(f"--list must be what `sha256sum` writes, got {str(path)!r}. Name another.")
    return [(name, expected) for expected, name in found]


def fetch(path: str, expected: str, mirrors: Sequence[str], folder: pathlib.Path) -> pathlib.Path:
    """The package in the folder, downloaded unless it is there.

    Raises:
      InputError: no mirror has it, or what they have has another sum.
    """
    target = folder / pathlib.PurePosixPath(path).name
    if target.exists() and _sum(target.read_bytes()) == expected:
        return target
    told = []
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(f"{mirror.rstrip('/')}/{path}", timeout=60) as answer:
                content = answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:  # an address may be none at all
            told.append(f"{mirror}: {str(error).rstrip('.')}")
            continue
        if (found := _sum(content)) == expected:
            target.write_bytes(content)
            return target
        told.append(f"{mirror}: SHA-256 {found}")
    raise InputError(
        f"a mirror must have {path} with SHA-256 {expected}, got {'; '.join(told)}. Name another by --mirror."
    )


def files(package: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file. Raises InputError if it is no package with a data.tar.xz."""
    content = package.read_bytes()
    at = len(AR_MAGIC)
    while content.startswith(AR_MAGIC) and at + AR_HEADER <= len(content):
        name, size = content[at : at + 16].decode().strip(" /"), int(content[at + 48 : at + 58])
        at += AR_HEADER
        if name == "data.tar.xz":
            with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content[at : at + size]))) as archive:
                for member in archive:
                    if member.isfile():
                        yield member.name.removeprefix("./"), archive.extractfile(member).read()
            return
        at += size + size % 2
    raise InputError(f"a package must hold data.tar.xz, got none in {package.name}. Name another in --list.")


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
