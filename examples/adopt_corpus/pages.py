"""Files of documentation as plain text, and the pages that they link to."""

import gzip
import html.parser
import posixpath
import re
from typing import NamedTuple

KINDS = re.compile(r"\.(html?|txt|text|md|pod)(\.gz)?$", re.IGNORECASE)
SOURCES = "/_sources/"  # of the HTML pages beside them
# Elements that are no text, and those that are a frame around it by a word of their class or role.
NO_TEXT = re.compile("title|script|style|nav|footer|form|button|select|svg|noscript|iframe")
MAY_BE_FRAME = re.compile("a|div|section|span|table|ul|ol|dl|aside|header")
FRAME = re.compile(
    "(nav|(sphinx)?sidebar|toc-drawer|breadcrumb|footer).*|related|header|headerlink|search|skip"
)
BREAKS = {"td": " ", "th": " ", "br": "\n", "tr": "\n", "dt": "\n", "dd": "\n", "div": "\n", "li": "\n* "}
BLOCKS = re.compile("p|h[1-6]|pre|ul|ol|dl|table|blockquote|section|article")
# Pages in other languages than English, by their path (pt-BR/x.html, x.fr.html) and by what they say.
TRANSLATED = re.compile(r"/(?!en)[a-z]{2}[-_][A-Z]{2}/|\.(?!en)[a-z]{2}([-_]\w+)?\.\w+(\.gz)?$")
LANGUAGE = re.compile(rb"<html[^>]*?[\s:]lang\s*=\s*[\"']?(?!en)[a-z]", re.IGNORECASE)


class Page(NamedTuple):
    """Text of a file, and the paths that it links to, in their order."""

    path: str
    text: str
    links: list[str]


def read(path: str, content: bytes) -> Page | None:
    """The page, or None for a file of another kind, or one in what it says is another language."""
    kind = KINDS.search(path)
    if not kind or SOURCES in path or TRANSLATED.search(path):
        return None
    if kind[2]:
        content = gzip.decompress(content)
    is_html = kind[1].lower().startswith("htm")
    if is_html and LANGUAGE.search(content[:2000]):
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")  # which old HTML is in
    if not is_html:
        return Page(path, _tidy(text.expandtabs()), [])
    reader = _Reader()
    reader.feed(text)
    reader.close()
    folder = posixpath.dirname(path)
    links = [posixpath.normpath(posixpath.join(folder, link)) for link in reader.links]
    return Page(path, _tidy("".join(reader.pieces)), links)


class _Reader(html.parser.HTMLParser):
    """Collects text and links outside frames; line breaks are those of the blocks, in `pre` also its own."""

    def __init__(self):
        super().__init__()
        self.pieces, self.links = ["\n"], []
        self.frame, self.depth = "", 0  # the element that is left out, and how many of its name are open
        self.verbatim = 0

    def handle_starttag(self, tag, attributes):
        if self.depth:
            self.depth += tag == self.frame
            return
        given = dict(attributes)
        words = f"{given.get('class') or ''} {given.get('role') or ''}".lower().split()
        is_frame = MAY_BE_FRAME.fullmatch(tag) and any(FRAME.fullmatch(word) for word in words)
        if is_frame or NO_TEXT.fullmatch(tag):
            self.frame, self.depth = tag, 1
            return
        if tag == "a" and (link := re.split("[?#]", given.get("href") or "")[0]) and ":" not in link:
            self.links.append(link)
        self.verbatim += tag == "pre"
        self._add(_break(tag))

    def handle_endtag(self, tag):
        if self.depth:
            self.depth -= tag == self.frame
            return
        self.verbatim -= tag == "pre" and self.verbatim > 0
        self._add(_break(tag).rstrip(" *"))

    def handle_data(self, data):
        if self.depth:
            return
        if not self.verbatim:
            data = re.sub(r"\s+", " ", data)
            if self.pieces[-1][-1] in "\n ":
                data = data.lstrip(" ")
        self._add(data)

    def _add(self, piece):
        if piece:
            self.pieces.append(piece)


def _break(tag: str) -> str:
    return "\n\n" if BLOCKS.fullmatch(tag) else BREAKS.get(tag, "")


def _tidy(text: str) -> str:
    """Without spaces at the ends of lines, and with at most one blank line in a row, none after a bullet."""
    text = re.sub(r"[ \t\r\f]+\n", "\n", text + "\n")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"^\*\n+", "* ", text, flags=re.MULTILINE)).strip("\n")
