"""The text of a run: tokenised once to a file, held-out documents split off, the others packed into rows."""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nsa_jax.adopt import files
from nsa_jax.adopt.command_line import InputError
from nsa_jax.array_typing import Int

CHARACTERS_AT_ONCE = 2**24  # of documents that are tokenised together, each in one thread
FILES = "tokens.bin", "documents.npy", "tokens.json"  # in the folder of a run


class Documents(NamedTuple):
    """Documents of a text: where each begins in `tokens`, and how many tokens it has."""

    tokens: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents"]
    sizes: Int[np.ndarray, " documents"]

    def rows(self, length: int, most: int) -> Int[np.ndarray, "rows length"]:
        """Rows that each lie in one document: the first of each document, then their second, and so on."""
        first = [
            (number, start + number * length)
            for start, size in zip(self.starts, self.sizes, strict=True)
            for number in range(size // length)
        ]
        chosen = sorted(first, key=lambda each: each[0])[:most]
        return np.stack([self.tokens[at : at + length] for _, at in chosen]).astype(np.int32)

    def joined(self) -> Int[np.ndarray, " tokens"]:
        """All tokens, one document after the other."""
        pieces = zip(self.starts, self.sizes, strict=True)
        return np.concatenate([self.tokens[start : start + size] for start, size in pieces]).astype(np.int32)


class Packed:
    """Rows of documents, one after the other; what does not fit goes on in another row.

    An epoch has the documents in random order, is cut from a random token on, and gives its rows in random
    order. A row is a pure function of its number.
    """

    def __init__(self, documents: Documents, length: int, seed: int):
        self.documents, self.length, self.seed = documents, length, seed
        self.total = int(documents.sizes.sum())
        self.rows_per_epoch = self.total // length
        self._order = functools.lru_cache(maxsize=2)(self._drawn)

    def batch(self, step: int, rows: int) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
        """Token ids and segment ids of a step."""
        found = [self._row(number) for number in range(step * rows, (step + 1) * rows)]
        tokens, segment_ids = (np.stack(each).astype(np.int32) for each in zip(*found, strict=True))
        return tokens, segment_ids

    def _drawn(self, epoch: int) -> tuple[Any, ...]:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.documents.sizes))
        first = int(rng.integers(self.total))
        return order, np.cumsum(self.documents.sizes[order]), first, rng.permutation(self.rows_per_epoch)

    def _row(self, number: int) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
        epoch, place = divmod(number, self.rows_per_epoch)
        order, ends, first, rows = self._order(epoch)
        at = (first + rows[place] * self.length + np.arange(self.length)) % self.total
        which = np.searchsorted(ends, at, side="right")
        document = order[which]
        within = at - ends[which] + self.documents.sizes[document]
        begins = within == 0
        begins[0] = False
        return self.documents.tokens[self.documents.starts[document] + within], 1 + np.cumsum(begins)


def read(
    folder: pathlib.Path,
    sources: Sequence[pathlib.Path],
    tokenizer: Any,
    vocab_size: int,
    identity: dict[str, Any],
) -> Documents:
    """Documents of the files, from the folder if they were tokenised before.

    Raises:
      InputError: a file cannot be read, there is no text, or it has a token that the model does not have.
      OSError: the tokens cannot be written.
    """
    paths = tokens, documents, done = [folder / name for name in FILES]
    known = {name: identity[name] for name in ("source", "field", "files")}
    try:
        fresh = json.loads(done.read_text(encoding="utf-8")) == known
    except (OSError, ValueError):
        fresh = False
    if not fresh:
        for path in paths[::-1]:
            path.unlink(missing_ok=True)
        sizes = _tokenise(tokens, sources, tokenizer, vocab_size, known["field"])
        np.save(documents, np.array(sizes, np.int64))
        done.write_text(
            json.dumps(known), encoding="utf-8"
        )  # last, because without it the others do not count
    sizes = np.load(documents)
    return Documents(np.memmap(tokens, np.uint32, mode="r"), np.cumsum(sizes) - sizes, sizes)


def split(documents: Documents, *, length: int, share: float, seed: int) -> tuple[Documents, Documents]:
    """Documents to train on, and held-out ones of at least a row each, together about `share` of the tokens.

    Where whole documents would come to more than twice that, only the end of the last one is held out, and
    so it always is of a single document. Copies of what is held out are in neither part.

    Raises:
      InputError: either part would have no whole row.
    """
    tokens, starts, sizes = documents
    total, longest = int(sizes.sum()), int(sizes.max())
    wanted = max(round(share * total), length)
    long = np.random.default_rng(seed).permutation(np.flatnonzero(sizes >= length))
    enough = int(np.searchsorted(np.cumsum(sizes[long]), share * total)) + 1
    held = long[: max(min(enough, len(long) - 1), 1)]
    used = np.setdiff1d(np.arange(len(sizes)), _copies(documents, held))
    starts, sizes, held = starts[used], sizes[used], np.searchsorted(used, held[np.isin(held, used)])
    if len(held) and (len(sizes) == 1 or sizes[held].sum() > 2 * wanted):
        last, others = held[-1], int(sizes[held[:-1]].sum())
        kept = max(int(sizes[last]) - max(wanted - others, length), 0)
        starts = np.insert(starts, last + 1, starts[last] + kept)
        sizes = np.insert(sizes, last + 1, sizes[last] - kept)
        sizes[last] = kept
        held = held + (held >= last)
    held = np.sort(held)
    rest = np.setdiff1d(np.arange(len(sizes)), held)
    if not len(held) or sizes[rest].sum() < length:
        raise InputError(
            "--text must have a document of at least --length tokens to hold out, and as many to train on, "
            f"got {total} tokens, {longest} in the longest document, for rows of {length} and --held-out "
            f"{share}. Pass more text, or a smaller --length or --held-out."
        )
    return Documents(tokens, starts[rest], sizes[rest]), Documents(tokens, starts[held], sizes[held])


def _copies(documents: Documents, held: Int[np.ndarray, " held"]) -> Int[np.ndarray, " copies"]:
    """Numbers of the documents that equal a held-out one; of several that are held out, all but the first."""
    tokens, starts, sizes = documents
    digests = {
        int(at): hashlib.sha256(tokens[starts[at] : starts[at] + sizes[at]]).digest()
        for at in np.flatnonzero(np.isin(sizes, sizes[held]))
    }
    first = {digests[at]: at for at in held[::-1].tolist()}
    return np.array([at for at, digest in digests.items() if first.get(digest, at) != at], int)


def _tokenise(
    target: pathlib.Path, paths: Sequence[pathlib.Path], tokenizer: Any, vocab_size: int, field: str
) -> list[int]:
    """Writes all tokens; returns how many each document has."""
    sizes = []
    total = sum(part.stat().st_size for path in paths for part in files.parts(path))
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", dynamic_ncols=True)
    with target.open("wb") as file, bar:
        for texts in _batches(paths, field):
            for encoded in tokenizer.encode_batch_fast(texts):
                ids = np.array(encoded.ids, np.uint32)
                if len(ids):
                    _check_ids(ids, tokenizer, vocab_size)
                    file.write(ids.tobytes())
                    sizes.append(len(ids))
            bar.update(sum(len(text.encode()) for text in texts))
        file.flush()
        os.fsync(file.fileno())
    if not sizes:
        raise InputError(
            f"--text must hold text, got none in {', '.join(path.name for path in paths)}. Pass other files."
        )
    return sizes


def _check_ids(ids: Int[np.ndarray, " tokens"], tokenizer: Any, vocab_size: int) -> None:
    """Raises InputError for an added token of the tokenizer that the model does not have."""
    if (largest := int(ids.max())) >= vocab_size:
        raise InputError(
            f"--text must have tokens of the model alone, got {tokenizer.id_to_token(largest)!r} beyond its "
            f"vocabulary of {vocab_size}. Leave it out of the text."
        )


def _batches(paths: Sequence[pathlib.Path], field: str) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for path in paths:
        for text in files.documents(path, field):
            batch.append(text)
            held += len(text)
            if held >= CHARACTERS_AT_ONCE:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch
