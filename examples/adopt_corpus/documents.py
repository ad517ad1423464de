"""Documents out of pages: which pages are kept, in which order, and how they are joined."""

import collections
import itertools
import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator

from examples.adopt_corpus.pages import Page

JOINED = 2**18  # characters, about 64k tokens, at which pages of a manual go on in another document
WHOLE = 2**16  # characters at which a document ends with its folder
SMALLEST_PAGE, SMALLEST_DOCUMENT = 200, 4000  # characters
COMMON_WORDS = {"the", "of", "and", "that", "this", "with", "are", "not", "from", "which", "when", "have"}
ENGLISH = 0.06  # least share of these among the words: prose has about 0.16, other languages and lists none
# A line is no text of its pages, but their frame, if a quarter of a folder's pages, and at least so many,
# have it among so many first or last lines.
FRAME_PAGES, FRAME_LINES = 5, 20
SAMPLED, WORDS = 32, 8  # every 32nd run of 8 words is remembered, to know copies by
COPIED = 0.5  # share of known runs at which a page is a copy


class Documents:
    """Makes documents of packages, and leaves out what an earlier page has."""

    def __init__(self):
        self.known: set[int] = set()

    def of(self, pages: Iterable[Page]) -> Iterator[str]:
        """Documents of the pages of one package."""
        folders = collections.defaultdict(list)
        for page in pages:
            folders[posixpath.dirname(page.path)].append(page)
        parts: list[str] = []
        size = 0
        for folder in sorted(folders, key=_natural):
            texts = _without_frames([page.text for page in _ordered(folders[folder])])
            for number, text in enumerate(texts):
                if size >= (JOINED if number else WHOLE):
                    yield "\n\n".join(parts)
                    parts, size = [], 0
                if self._is_kept(text):
                    parts.append(text)
                    size += len(text)
        if size >= SMALLEST_DOCUMENT:
            yield "\n\n".join(parts)

    def _is_kept(self, text: str) -> bool:
        words = re.findall(r"[^\W\d_]+", text.lower())
        if len(text) < SMALLEST_PAGE or sum(map(COMMON_WORDS.__contains__, words)) < ENGLISH * len(words):
            return False
        starts = (at for at, word in enumerate(words) if zlib.crc32(word.encode()) % SAMPLED == 0)
        runs = {zlib.crc32(" ".join(words[at : at + WORDS]).encode()) for at in starts}
        copied = len(runs & self.known) > COPIED * len(runs)
        self.known |= runs
        return not copied


def _ordered(pages: list[Page]) -> list[Page]:
    """Pages of a folder as the first, by preference its index, links them, then as those link others."""
    first = sorted(pages, key=lambda page: ("/index." not in page.path, _natural(page.path)))
    left = {page.path: page for page in first}
    found: list[Page] = []
    while left:
        queue = collections.deque([next(iter(left))])
        while queue:
            if page := left.pop(queue.popleft(), None):
                found.append(page)
                queue.extend(page.links)
    return found


def _without_frames(texts: list[str]) -> list[str]:
    """The texts without what they begin and end with if many of them do."""
    pages = [text.split("\n") for text in texts]
    for _ in range(2):  # their beginnings, and, with the lines turned around, their ends
        found = collections.Counter(line for lines in pages for line in set(lines[:FRAME_LINES]))
        frames = {line for line, count in found.items() if count >= max(FRAME_PAGES, len(pages) / 4)} | {""}
        pages = [list(itertools.dropwhile(frames.__contains__, lines))[::-1] for lines in pages]
    return ["\n".join(lines) for lines in pages]


def _natural(path: str) -> list[str | int]:
    """Sorts page10 after page9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]
