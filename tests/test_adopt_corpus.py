"""`python -m examples.adopt_corpus`: packages are what they must be, and their pages become documents."""

import gzip
import hashlib
import io
import json
import pathlib
import re
import tarfile

import pytest
from messages import has_form, refused

from benchmarks.command_line import InputError
from examples.adopt_corpus import documents, packages
from examples.adopt_corpus.__main__ import main
from examples.adopt_corpus.documents import Documents
from examples.adopt_corpus.pages import Page, read

FOLDER = "usr/share/doc/book/"


def prose(number: int, sentences: int = 40) -> str:
    """English that no other number has."""
    letters = str.maketrans("0123456789", "abcdefghij")
    words = (f"w{number}x{at}".translate(letters) for at in range(sentences))
    return " ".join(f"The {word} of that {word} and this one are not {word} when seen." for word in words)


def deb(files: dict[str, bytes], data: str = "data.tar.xz") -> bytes:
    """A package: an archive of `ar` that holds archives of `tar`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", data: packed.getvalue()}
    written = b"!<arch>\n"
    for name, content in members.items():
        written += f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(content):<10}`\n".encode()
        written += content + b"\n" * (len(content) % 2)
    return written


@pytest.fixture
def mirror(tmp_path):
    """A mirror with two packages, and arguments that make a text of them."""
    links = '<a href="b.html#x">b</a> <a href="a.html?y">a</a>'
    books = {
        "pool/book_1_all.deb": {
            f"{FOLDER}a.html": f"<html><h1>A</h1><p>{prose(1)}".encode(),
            f"{FOLDER}b.html": f"<html lang='en-US'><h1>B</h1><p>{prose(2)}".encode(),
            f"{FOLDER}c10.html": f"<h1>C10</h1>{prose(3)}".encode(),
            f"{FOLDER}c9.html": f"<h1>C9</h1>caf\xe9 {prose(4)}".encode("latin-1"),
            f"{FOLDER}index.html": f"<title>no</title>{links}<h1>Index</h1>{prose(5)}".encode(),
            f"{FOLDER}index.fr.html": prose(6).encode(),
            f"{FOLDER}de.html": f'<html xml:lang="de">{prose(7)}'.encode(),
            f"{FOLDER}_sources/a.txt": prose(8).encode(),
            f"{FOLDER}picture.png": b"\x89PNG",
        },
        "pool/manual_2_all.deb": {
            "usr/share/doc/manual/copy.txt.gz": gzip.compress(prose(1).encode()),
            "usr/share/doc/manual/deutsch.txt": b"Dies ist kein Text in der Sprache, die bleibt. " * 99,
            "usr/share/doc/manual/manual.md": prose(9, 100).encode(),
            "usr/share/doc/manual/tiny.txt": b"All of that is too short.",
        },
    }
    sums = tmp_path / "sums"
    for name, files in books.items():
        path = tmp_path / "mirror" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(deb(files))
        with sums.open("a") as file:
            file.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n")
    options = ["--packages", str(tmp_path / "kept"), "--list", str(sums), "--mirror"]
    return tmp_path / "mirror", [str(tmp_path / "text.jsonl"), *options, (tmp_path / "mirror").as_uri()]


def written(arguments: list[str]) -> list[str]:
    return [json.loads(line)["text"] for line in pathlib.Path(arguments[0]).read_text().splitlines()]


def test_packages_become_documents(mirror, capsys):
    assert main(mirror[1]) == 0

    book, manual = written(mirror[1])
    # The pages that the index links, in that order, then the others in theirs.
    assert re.findall(r"^(Index|A|B|C\d+)$", book, re.MULTILINE) == ["Index", "B", "A", "C9", "C10"]
    pages = {"b a\n\nIndex\n\n": 5, "B\n\n": 2, "A\n\n": 1, "C9\n\ncafé ": 4, "C10\n\n": 3}
    assert book == "\n\n".join(head + prose(number) for head, number in pages.items())
    assert manual == prose(9, 100)  # without the copy of a page, and what is short or in another language
    assert "book_1_all.deb: 1 documents, 0.0 M characters" in capsys.readouterr().out


def test_the_same_packages_give_the_same_bytes(mirror, tmp_path):
    _, arguments = mirror
    main(arguments)
    first = pathlib.Path(arguments[0]).read_bytes()

    again = [str(tmp_path / "again.jsonl"), *arguments[1:-1], "file:///nowhere"]  # the packages are kept

    assert main(again) == 0
    assert pathlib.Path(again[0]).read_bytes() == first


def test_a_package_with_another_sum_is_refused_by_name(mirror, capsys):
    folder, arguments = mirror
    (folder / "pool" / "manual_2_all.deb").write_bytes(deb({}))

    assert main(arguments) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("examples.adopt_corpus: a mirror must have pool/manual_2_all.deb with SHA-256 ")
    assert hashlib.sha256(deb({})).hexdigest() in line
    assert has_form(line)
    assert not pathlib.Path(arguments[0]).exists()  # no half of a text
    assert not list(pathlib.Path(arguments[0]).parent.glob(".*"))


@pytest.mark.parametrize("bad", ["file:///nowhere", "nowhere", "file:///{wrong}"])
def test_the_next_mirror_is_asked_where_one_fails(mirror, tmp_path, bad):
    wrong = tmp_path / "wrong" / "pool" / "book_1_all.deb"
    wrong.parent.mkdir(parents=True)
    wrong.write_bytes(b"another")
    *arguments, good = mirror[1]

    assert main([*arguments, bad.format(wrong=tmp_path / "wrong"), good]) == 0


def test_a_kept_package_that_was_damaged_is_downloaded_again(mirror, tmp_path):
    assert main(mirror[1]) == 0
    kept = tmp_path / "kept" / "book_1_all.deb"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])

    assert main(mirror[1]) == 0
    assert kept.read_bytes() == whole


def test_no_room_is_said_in_one_line(mirror, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)

    assert main(mirror[1]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "FILE and --packages must take what is written, got the error '[Errno 28] No space" in line
    assert has_form(line)


@pytest.mark.parametrize("content", [b"", b"odd", deb({}, "data.tar.zst")], ids=["empty", "odd", "zst"])
def test_what_is_no_package_is_refused(tmp_path, content):
    (tmp_path / "x.deb").write_bytes(content)
    with refused(InputError, "a package must hold data.tar.xz, got none in x.deb"):
        list(packages.files(tmp_path / "x.deb"))


def test_the_list_names_each_package_once():
    listed = packages.listed()

    assert len(listed) == len({path for path, _ in listed}) > 50
    for path, expected in listed:
        assert re.fullmatch(r"pool/main/\S+_(all|amd64)\.deb", path)
        assert re.fullmatch("[0-9a-f]{64}", expected)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One\n  <b>two</b> three<p>four", "One two three\n\nfour"),
        ("<pre>if x:\n    y  = 1\n</pre> so", "if x:\n    y  = 1\n\nso"),
        ("<ul><li><p>one</p><li>two</ul>", "* one\n\n* two"),
        ("<table><tr><td>a<td>b<tr><td>c</table>", " a b\n c"),
        ("a &amp; b&nbsp;&#65;", "a & b A"),
        ("<div class='sphinxsidebar'><div>menu</div>menu</div>text", "text"),
        ("<nav>menu</nav><div role='navigation'>menu</div>text<style>x</style>", "text"),
        ("<h1>Head<a class=headerlink>¶</a></h1>text", "Head\n\ntext"),
        ("<nav>never closed", ""),
    ],
)
def test_html_becomes_plain_text(html, text):
    assert read("x.html", html.encode()).text == text


def test_links_of_frames_do_not_count():
    page = read("a/b/x.html", b'<nav><a href="n.html">n</a></nav><a href="../y.html#z"><a href="http://w">')

    assert page.links == ["a/y.html"]


def test_lines_that_pages_begin_or_end_with_are_left_out():
    texts = [f"{prose(i)}\n\nNext Up\n{prose(i + 50)}" for i in range(6)]
    pages = [Page(f"{i}", f"Next Up\n\n{text}\n\nCopyright", []) for i, text in enumerate(texts)]

    assert list(Documents().of(pages)) == ["\n\n".join(texts)]


def test_a_long_manual_becomes_several_documents_of_whole_pages(monkeypatch):
    monkeypatch.setattr(documents, "JOINED", 3 * len(prose(100)))
    monkeypatch.setattr(documents, "WHOLE", 2 * len(prose(100)))
    monkeypatch.setattr(documents, "SMALLEST_DOCUMENT", len(prose(100)))
    pages = [Page(f"f/{i}", prose(i), []) for i in range(100, 105)] + [Page("g/0", prose(105), [])]

    made = list(Documents().of(pages))

    assert [text.count("\n\n") for text in made] == [2, 1, 0]  # the second ends with its folder
    assert "\n\n".join(made) == "\n\n".join(prose(i) for i in range(100, 106))


def test_a_package_with_little_text_has_no_document():
    assert list(Documents().of([Page("a", prose(1, sentences=5), [])])) == []
