"""Sources of text: files and formats, folders, patterns, URLs, the Hub, and errors in one line."""

import bz2
import csv
import errno
import gc
import gzip
import hashlib
import http.server
import io
import itertools
import json
import lzma
import os
import re
import struct
import threading
import zipfile
from pathlib import Path

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from assertions import refusal
from nanogpt_hf.config import names
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.compression import DECOMPRESS
from nanogpt_hf.data.local_files import find_files
from nanogpt_hf.data.manifest import file_digest, file_state
from nanogpt_hf.data.source import load_documents
from nanogpt_hf.errors import DataError

ROWS = ["first\nof two lines", 'second, "quoted"', "third: ünï 😀\u2028.", "  spaces  kept  "]


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inside", data)
    return file.getvalue()


def parquet(table):
    file = io.BytesIO()
    table = table if isinstance(table, pyarrow.Table) else pyarrow.table(table)
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def csv_bytes(rows, **dialect):
    file = io.StringIO(newline="")
    csv.writer(file, **dialect).writerows([["number", "text"], *enumerate(rows)])
    return file.getvalue()


def contents(extension, texts):
    """A file of the format with the texts: (bytes, expected documents)."""
    rows = [{"number": i, "text": text} for i, text in enumerate(texts)]
    match extension:
        case ".txt" | ".md":
            texts = ["\n".join(texts)]
            data = texts[0]
        case ".jsonl" | ".ndjson":
            data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        case ".json":
            data = json.dumps(rows, indent=2)
        case ".csv":
            data = csv_bytes(texts)
        case ".tsv":
            data = csv_bytes(texts, delimiter="\t")
        case ".parquet":
            return parquet({"number": range(len(texts)), "text": texts}), texts
    return data.encode(), texts


COMPRESSIONS = {
    "": lambda data: data,
    ".zip": zipped,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
FORMATS = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def test_each_ending_that_a_recipe_knows_is_read_and_tested():
    assert tuple(DECOMPRESS) == names.COMPRESSIONS
    assert {"", *names.COMPRESSIONS, names.ARCHIVE} == COMPRESSIONS.keys()
    assert set(FORMATS) == set(names.TEXT_ENDINGS)


@pytest.fixture
def texts_in(write, tmp_path):
    """A function that writes a file and gives its documents."""
    return lambda name, data: texts_of(write(name, data), tmp_path)


def texts_of(source, tmp_path, **knobs):
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    documents = load_documents(DataSection(source=str(source), **knobs), scratch)
    return list(documents.train())


def error_of(source, tmp_path, **knobs):
    return refusal(texts_of, source, tmp_path, **knobs)


# --- files
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extension", "compression"),
    [*itertools.product(FORMATS, COMPRESSIONS)],
)
def test_formats_and_compressions(write, tmp_path, extension, compression):
    data, documents = contents(extension, ROWS)
    path = write(f"a{extension}{compression}", COMPRESSIONS[compression](data))
    assert texts_of(path, tmp_path) == documents


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", '{"text": "wrong", "body": "right"}'),
        ("a.csv", "text,body\nwrong,right"),
        ("a.parquet", parquet({"text": ["wrong"], "body": ["right"]})),
    ],
)
def test_text_column(write, tmp_path, name, data):
    assert texts_of(write(name, data), tmp_path, text_column="body") == ["right"]


@pytest.mark.parametrize(
    ("name", "data", "texts"),
    [
        ("a.json", '["one", "two"]', ["one", "two"]),
        ("a.json", '{"text": "one"}', ["one"]),
        ("a.jsonl", '"one"\n\n  \n"two"\n', ["one", "two"]),
        ("a.jsonl", '{"text": ""}\n{"text": "x"}\n{"text": ""}\n', ["x"]),
        ("a.jsonl", '{"text": "a\\r\\nb\\u2028c\\u0085"}\n', ["a\r\nb\u2028c\x85"]),
        ("a.jsonl", '{"text": null}\n{"text": "x"}\n', ["x"]),
        ("a.csv", 'text,id\n"a, b",1\n\n"c\nd",2\n', ["a, b", "c\nd"]),
    ],
)
def test_rows_of_other_shapes(texts_in, name, data, texts):
    assert texts_in(name, data) == texts


LINES = '{"text": "one"}\n\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (LINES, ["one", "two"]),
        (LINES.strip().replace("\n", "\r\n"), ["one", "two"]),
        ('\n"one"\n"two"', ["one", "two"]),
        ('\ufeff{"text":\n"one"}\n', ["one"]),
        ('[{"text": "one"},\n{"text": "two"}]', ["one", "two"]),
        ('{"data": [{"text": "one"}, {"text": "two"}]}', ["one", "two"]),
        ('{"version": "1",\n"data":\n[{"text": "one"}]}\n\n', ["one"]),
        ('{"data": ["one", "two"]}', ["one", "two"]),
        # a row with the column is a row, whatever else it has
        ('{"text": "one", "data": [{"text": "two"}]}', ["one"]),
        ("[]", []),
    ],
)
def test_layouts_of_json(texts_in, data, texts):
    assert texts_in("a.json", data) == texts


def test_parquet_ignores_other_columns(texts_in):
    # a time beyond Python's years cannot be converted
    others = {
        "when": pyarrow.array([2**61, None], pyarrow.timestamp("us")),
        "bytes": pyarrow.array([b"\xff", None]),
    }
    table = {"text": pyarrow.array(["x", "y"]).dictionary_encode(), **others}
    assert texts_in("a.parquet", parquet(table)) == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", "one\r\ntwo\rthree"),
        ("a.jsonl", '{"text": "one\\ntwo"}\r\n{"text": "three"}\r\n'),
        ("a.csv", 'text\r\n"one\r\ntwo"\r\n"three"\r\n'),
    ],
)
def test_byte_order_mark_and_line_ends_are_normalized(texts_in, name, data):
    assert "\n".join(texts_in(name, b"\xef\xbb\xbf" + data.encode())) == "one\ntwo\nthree"


# --- archives
# ------------------------------------------------------------------------------


def archive(*members):
    """A .zip with members: (name, content)."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in members:
            opened.writestr(name, data)
    return file.getvalue()


def test_every_member_of_a_zip_is_read_in_order_by_its_ending(write, tmp_path):
    members = [
        ("data/", ""),
        ("data/z.jsonl", '{"text": "1"}\n{"text": "2"}\n'),
        ("__MACOSX/data/._z.jsonl", b"\0\5\x16\7"),
        ("__MACOSX/a.txt", "not text of the archive"),
        ("data/._z.jsonl", b"\0\5\x16\7"),
        (".DS_Store", b"\0\0"),
        ("data/a.txt", "3"),
        ("data\\b.csv", "id,text\n1,4\n"),
        ("c.parquet", parquet({"text": ["5", "6"]})),
        ("d.jsonl.gz", gzip.compress(b'"7"')),
        ("empty.txt", ""),
        ("../e.tsv", "text\n8\n"),
        ("enwik", "9"),
        ("code.py", "[1, 2]\n10"),
        ("a.txt", "11"),
    ]
    for name in ("books.zip", "folder/books.ZIP"):
        write(name, archive(*members))
        source = tmp_path / name.partition("/")[0]
        assert texts_of(source, tmp_path) == [
            *map(str, range(1, 10)),
            "[1, 2]\n10",
            "11",
        ]


@pytest.mark.parametrize(
    ("kind", "words"),
    [(0o120777, "symbolic link"), (0o010644, "special file"), (0o020644, "special file")],
)
def test_link_in_a_zip_is_refused_by_name(write, tmp_path, kind, words):
    link = zipfile.ZipInfo("link.txt")
    link.create_system = 3
    link.external_attr = kind << 16
    path = write("a.zip", archive(("a.txt", "text"), (link, "../a.txt")))
    message = error_of(path, tmp_path)
    assert message.startswith(f"{path}: link.txt: ")
    assert words in message


@pytest.mark.parametrize("kind", [0, 0o600, 0o100644])
def test_member_of_any_system_is_text(write, tmp_path, kind):
    member = zipfile.ZipInfo("a.txt")
    member.external_attr = kind << 16
    assert texts_of(write("a.zip", archive((member, "text"))), tmp_path) == ["text"]


def test_name_of_a_member_is_printed_in_one_line(write, tmp_path):
    path = write("a.zip", archive(("a\n\x1b[2J.bin", b"\xff")))
    assert error_of(path, tmp_path).startswith(f"{path}: a??[2J.bin: row 1: ")


# what a member is, and what the message names beside it
REFUSED_MEMBERS = [
    (("b.zip", archive(("c.txt", "c"))), "archive inside"),
    (("b.pdf", b"%PDF-1.4 text"), "known are .txt"),
    (("b.pdf", b"%PDF-1.4 text"), "not plain text; convert it to .txt"),
    (("b.bin", b"\xff\xfe"), "known are .txt"),
    (("b.jsonl.lz4", b"\x04\x22\x4d\x18"), ".zst"),
    (("b.jsonl", '{"text": "x"}\n{"text"'), "row 2"),
    (("b.txt.gz", b"plain"), "row 1"),
]


@pytest.mark.parametrize(("member", "word"), REFUSED_MEMBERS)
def test_member_that_cannot_be_read_is_named(write, tmp_path, member, word):
    path = write("a.zip", archive(("a.txt", "text"), member))
    message = error_of(path, tmp_path)
    assert message.startswith(f"{path}: {member[0]}: ")
    assert word in message


def changed_header(data, flags=0, method=8):
    """The archive with other flags and another method in the directory and before its member."""
    data = bytearray(data)
    for mark, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        struct.pack_into("<HH", data, data.index(mark) + offset, flags, method)
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda data: changed_header(data, flags=1), "member.txt: row 1: encrypted"),
        (lambda data: changed_header(data, method=93), "method 93, which is not read; known are"),
        (lambda data: data[:-10], "not a zip file"),
        (lambda data: b"plain text", "not a zip file"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "member.txt: row 1: "),
    ],
)
def test_zip_that_cannot_be_read_is_one_line(write, tmp_path, change, word):
    content = "text " * 2 + "".join(map(chr, range(32, 127)))
    path = write("a.zip", change(archive(("member.txt", content))))
    assert word in error_of(path, tmp_path)


# --- files of other forms
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes", "a.log", "b.py", "c.tex", "d.html", "e.v2", "F.TXT"])
def test_plain_text_of_any_ending_is_text(texts_in, name):
    assert texts_in(name, "{text}\n[1] x\n") == ["{text}\n[1] x\n"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pdf", b"%PDF-1.4\n1 0 obj"),
        ("a.rtf", b"{\\rtf1 text}"),
        ("a.docx", archive(("word/document.xml", "<w/>"))),
        ("train.bin", bytes(range(256))),
        ("a.npy", b"\x93NUMPY\1\0"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18"),
        ("a.txt.tar", b"a.txt" + bytes(600)),
        ("a.7z", b"7z"),
        ("a.dat", b"\1\2"),
    ],
)
def test_binary_content_of_another_ending_is_refused_with_the_list(write, tmp_path, name, data):
    message = error_of(write(name, data), tmp_path)
    assert all(ending in message for ending in (*FORMATS, *COMPRESSIONS)), message


@pytest.mark.parametrize("name", ["a.jsonl.bak", "rows", "a.geojson", "a.ipynb"])
@pytest.mark.parametrize("data", [LINES, '{\n "text": "x"\n}', '[\n{"text": "x"}]'])
def test_rows_under_another_ending_are_refused(write, tmp_path, name, data):
    assert ".jsonl or .json" in error_of(write(name, data), tmp_path)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "b.jsonl.lz4", "c.7z", "d.txt.snappy"])
def test_text_in_an_unknown_form_is_not_passed_over_in_a_folder(write, tmp_path, name):
    write("text/a.txt", "x")
    path = write(f"text/{name}", "x")
    assert error_of(tmp_path / "text", tmp_path).startswith(f"data.source: {path}: ")


def test_a_saved_data_set_is_refused_with_the_way_to_write_it(tmp_path):
    """Its JSON files would be read as rows."""
    rows = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    for folder in (tmp_path / "saved", tmp_path / "saved" / "train"):
        message = refusal(find_files, str(folder))
        assert f"load_from_disk('{tmp_path}/saved/train').to_parquet" in message


# --- folders and patterns
# --------------------------------------------------------------------------------------------


def test_folder_gives_visible_files_in_order(write, tmp_path):
    for name in ("b/2.txt", "b/1.md", "a.txt", ".git/x.txt", "b/.hidden.txt", "d.py"):
        write(f"text/{name}", name)
    write("text/c.txt.gz", gzip.compress(b"c.txt.gz"))
    write("text/picture.png", b"\x89\0\0")
    assert texts_of(tmp_path / "text", tmp_path) == ["a.txt", "b/1.md", "b/2.txt", "c.txt.gz"]


@pytest.mark.parametrize(
    ("links", "names"),
    [
        ({"text/z": "books"}, ["text/a.txt", "text/z/b.txt"]),
        ({"text/z": ".", "text/z2": "."}, ["text/a.txt"]),
        ({"text/z": "books", "books/up": "text"}, ["text/a.txt", "text/z/b.txt"]),
        ({"text/b": "text/deep"}, ["text/a.txt", "text/b/c.txt"]),  # once, not under both names
        ({"text/.z": "books"}, ["text/a.txt"]),
        ({"text/b.txt": "books/b.txt"}, ["text/a.txt", "text/b.txt"]),
    ],
)
def test_folder_gives_the_files_of_linked_folders_once(write, tmp_path, links, names):
    write("text/a.txt", "a")
    write("books/b.txt", "b")
    if "text/deep" in links.values():
        write("text/deep/c.txt", "c")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / ("text" if target == "." else target))
    assert find_files(str(tmp_path / "text")) == [tmp_path / name for name in names]


@pytest.mark.parametrize("source", ["text", "text/*", "text/b.txt"])
@pytest.mark.parametrize("kind", ["broken link", "link to itself", "pipe"])
def test_what_is_no_file_is_not_passed_over(write, tmp_path, source, kind):
    write("text/a.txt", "a")
    path = tmp_path / "text" / "b.txt"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("missing.txt" if kind == "broken link" else "b.txt")
    reason = "is a pipe or a device" if kind == "pipe" else "is a broken link"
    message = refusal(find_files, str(tmp_path / source))
    assert message.startswith(f"data.source: {path}: {reason}")


def test_a_device_is_no_source():
    message = refusal(find_files, "/dev/null")
    assert message == "data.source: /dev/null: is a pipe or a device; write its text to a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_folder_that_cannot_be_read_is_not_passed_over(write, tmp_path):
    locked = write("text/locked/a.txt", "a").parent
    write("text/b.txt", "b")
    locked.chmod(0)
    try:
        message = refusal(find_files, str(tmp_path / "text"))
    finally:
        locked.chmod(0o700)
    assert message == f"data.source: {locked}: Permission denied"


def test_pattern_gives_matching_files_in_order(write, tmp_path):
    names = ["1.txt", "2.txt", "deep/3.txt", "4.md", "a[1].txt"]
    for name in reversed(names):
        write(f"text/{name}", name)
    for pattern, found in (
        ("*.txt", [names[0], names[1], names[4]]),
        ("**/[123].txt", names[:3]),
        ("[34].md", ["4.md"]),
        ("a[1].txt", ["a[1].txt"]),  # a file of this name
    ):
        assert texts_of(tmp_path / "text" / pattern, tmp_path) == found


def test_tilde_in_source_is_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write("a.txt", "x")
    assert find_files("~/a.txt") == find_files("~/*.txt") == [path]


@pytest.mark.parametrize(
    "source",
    ["none.txt", "./none", "/none/at/all", "a/b/c", "~unknown/a", "*.none", "empty"],
)
def test_path_without_files_is_one_line(write, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("empty/.hidden.txt", "x")
    message = refusal(find_files, source)
    assert message == f"data.source: {source}: no file, or folder with {', '.join(FORMATS)}"


DOCUMENTS = ["a.pdf", "deep/b.PDF", "c.html", "README"]


def load_text(source):
    load_documents(DataSection(source=source), Path("scratch"))


def load_chats(source):
    load_documents(DataSection(source=source, format="chat"), Path("scratch"))


def load_rows(source):
    load_documents(DataSection(source=source), Path("scratch"), lambda row, data: row)


@pytest.mark.parametrize(
    ("load", "also", "remedy"),
    [
        (load_text, ["d.md", "e.zip"], "; to read them, write their text to .txt files"),
        (load_chats, ["d.jsonl"], None),
        (load_rows, ["d.jsonl"], None),
    ],
)
def test_files_of_other_endings_are_counted(
    write, caplog, tmp_path, monkeypatch, load, also, remedy
):
    """A folder of a user's documents may have most of its text in PDFs."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    for name in DOCUMENTS:
        write(f"text/{name}", "x")
    named = "4 files left out, by ending: .pdf (2), .html (1), no ending (1)"
    message = refusal(load, "text")
    assert message.startswith("data.source: no ")
    assert f" below text: {named}{remedy or ''}" in message
    assert message.endswith(("pandoc", "(1)")[remedy is None])
    for name in [*also, ".hidden.pdf"]:
        write(f"text/{name}", zipped(b"x") if name.endswith(".zip") else "{}")
    load("text")
    assert [line.startswith(f"text: {named}{remedy or ''}") for line in caplog.messages] == [True]


def test_a_folder_that_is_read_whole_is_not_commented(write, caplog, tmp_path):
    caplog.set_level("INFO")
    write("text/a.txt", "x")
    load_text(str(tmp_path / "text"))
    assert not caplog.messages


@pytest.mark.parametrize(
    "source", ["python-docs", "https://example.org/a.txt", "wikitext", "Owner/name", "x" * 300]
)
def test_invalid_path_names_no_files(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_files(source) == []


def test_digest_changes_with_text_and_its_boundaries(write):
    path = write("a.txt", "one two")
    before = [path, write("b.txt", " three")]
    state = file_state([path])
    os.utime(path, ns=(1, 1))
    assert file_state([path]) != state
    assert file_digest(before) != file_digest([write("c.txt", "one"), write("d.txt", " two three")])


# --- invalid text
# ------------------------------------------------------------------------------


TWICE = pyarrow.Table.from_arrays([["x"], ["y"]], names=["text", "text"])

# name and content of a file, and what the message names beside the file
UNREADABLE = [
    ("a.txt", "caf\xe9".encode("latin-1"), "byte 0xe9"),
    ("a.txt", b"\x7fELF\x02\x01\x01" + bytes(100), "NUL"),
    ("a.parquet", parquet({"text": ["x"]})[:-20]),
    ("a.jsonl", '{"text": "x"}\n\n{"txt": "y", "id": 1}\n', "row 2", "'text'", "txt, id"),
    ("a.parquet", parquet({"text": [b"x", b"\xff"]}), "row 2", "'text'", "bytes"),
    ("a.jsonl", '{"text": "x"}\n{"text": 5}\n', "row 2", "'text'"),
    ("a.jsonl", '"x"\n[1]\n', "row 2", "'text'"),
    ("a.jsonl", '{"text": "x"}\nplain words\n', "row 2", "Expecting value"),
    ("a.json", '{"rows": [{"text": "x"}], "more": [{"text": "y"}]}', "rows, more", '"data"'),
    ("a.json", '{"text": "x"}\n{"txt": "y"}\n', "row 2", "txt"),
    ("a.json", '{\n"text": "x"}\n{"text": "y"}\n', "Extra data"),
    ("a.jsonl", '{"text": "x"}\nnull\n', "row 2", "'text'", "got None"),
    ("a.jsonl", '{"text": "x"}\n{"text": "y", "text": "z"}\n', "row 2", "'text' is there twice"),
    ("a.jsonl", '{"text": "x", "m": [{"a": 1, "a": 2}]}\n', "row 1", "'a' is there twice"),
    ("a.json", '[{"text": "x"}, {"text": "y", "text": "z"}]', "row 2", "'text' is there twice"),
    ("a.json", '{"text": "y", "text": "z"}\n{"text": "x"}\n', "row 1", "'text' is there twice"),
    ("a.json", '{"text": "y", "text": "z"}', "row 1", "'text' is there twice"),
    ("a.json", '{"data": [{"text": "x"}], "data": [{"text": "y"}]}', "'data' is there twice"),
    ("a.json", '{"text": "x"}\n{"text"\n', "row 2", "not JSON", "one list of rows"),
    ("a.jsonl", '[\n{"text": "x"}\n]\n', "row 1", "not JSON", "named .json"),
    ("a.jsonl", '{"text": 5}\n', "'text' holds 5"),
    ("a.csv", "id,body\n1,x\n", "'text' does not hold text", "id, body"),
    ("a.json", '[{"text": "x"}, null]', "row 2", "'text'", "got None"),
    ("a.json", "\n5", "row 1", "'text'", "got 5"),
    ("a.csv", "text,id,text\na,1,b\n", "2 columns are named 'text'"),
    ("a.parquet", parquet(TWICE), "2 columns are named 'text'"),
    ("a.tsv", 'id\ttext\n1\t"so" it is\n', "line 2", "'tab' expected", "in quotes"),
    ("a.tsv", "id\ttext\n1\tx\t3\n", "row 1", "tabs"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', "row 2", "byte 0xe9"),
    ("a.json", b'[{"text": "caf\xe9"}]', "byte 0xe9"),
    ("a.csv", b"text\nx\ncaf\xe9\n", "row 2", "byte 0xe9"),
    ("a.json", '[\n{"text": "x"},\n{"text" "y"}]', "line 3"),
    ("a.csv", 'text\nx\n"an open quote would\nswallow, all\n', "end of data"),
    # the comma would truncate the text
    ("a.csv", 'text\n"two\nlines"\nalpha, beta\n', "row 2", "more or fewer fields"),
    ("a.csv", "id,text\n1,x\n2\n", "row 2", "more or fewer fields"),
    # JSON can escape what UTF-8 cannot encode
    ("a.jsonl", '{"text": "\\ud83d\\ude00"}\n{"text": "x\\ud83d!"}\n', "row 2", r"\ud83d"),
]


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_text_is_refused_with_file_and_row(write, tmp_path, case):
    name, data, *named = case
    path = write(name, data)
    message = error_of(path, tmp_path)
    assert f"{path}: " in message
    assert all(word in message for word in named), message


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst", ".lzma"])
def test_damaged_compressed_file_is_an_error(write, tmp_path, compression):
    whole = COMPRESSIONS[compression](os.urandom(50_000).hex().encode())
    for data in (b"not compressed at all", whole[:-3]):
        message = error_of(write(f"a.txt{compression}", data), tmp_path)
        assert f"a.txt{compression}: " in message
        assert message.endswith("copy it again")


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".lzma", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv", "a.json"])
def test_an_empty_file_has_no_rows(write, tmp_path, name, ending):
    for data in (b"", b"\xef\xbb\xbf"):
        data = COMPRESSIONS[ending](data) if ending else data
        assert texts_of(write(f"{name}{ending}", data), tmp_path) == []


NOT_UTF8 = {"UTF-16": "caf\xe9".encode("utf-16"), "Latin-1": "caf\xe9 noir".encode("latin-1")}


@pytest.mark.parametrize("encoding", NOT_UTF8)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_text_in_another_encoding_is_refused_with_what_to_do(write, tmp_path, name, encoding):
    data = NOT_UTF8[encoding]
    if name.endswith(("csv", "tsv")):
        data = b"text\n" + data
    message = error_of(write(name, data), tmp_path)
    assert "not UTF-8: byte 0x" in message
    assert "iconv" in message


ROWS_OF_ENDINGS = {
    **dict.fromkeys(["a.txt", "a.md"], "cafe"),
    **dict.fromkeys(["a.jsonl", "a.json"], '{"text": "cafe"}\n'),
    **dict.fromkeys(["b.json"], '[\n{"text": "cafe"}\n]'),
    **dict.fromkeys(["a.csv", "a.tsv"], "text\ncafe\n"),
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ROWS_OF_ENDINGS)
def test_utf_16_without_a_mark_is_refused_with_what_to_do(write, tmp_path, name, encoding):
    """It is valid UTF-8."""
    message = error_of(write(name, ROWS_OF_ENDINGS[name].encode(encoding)), tmp_path)
    assert "UTF-16" in message
    assert "iconv" in message


def test_many_keys_are_searched_once(write, tmp_path):
    """Counting each among all takes minutes."""
    pairs = [f'"key {n}": 1' for n in range(100_000)]
    path = write("a.jsonl", f'{{"text": "x", {", ".join(pairs)}, "key 99999": 2}}')
    assert "'key 99999' is there twice" in error_of(path, tmp_path)


def damaged_archives():
    """Archives with a byte that is another, or that are cut."""
    data = archive(("rows.jsonl", ONE + TWO), ("notes.txt", "some text"))
    for position in range(len(data)):
        for byte in {0, 255, data[position] ^ 1}:
            yield data[:position] + bytes([byte]) + data[position + 1 :]
        yield data[:position]


def test_a_damaged_archive_is_refused_with_what_to_do(write, tmp_path):
    path = write("a.zip", b"")
    messages = []
    for data in damaged_archives():
        path.write_bytes(data)
        # A byte of a date may be any, for example.
        try:
            texts_of(path, tmp_path)
        except DataError as error:
            messages.append(str(error))
    assert len(messages) > 400
    assert not [message for message in messages if not re.search(REMEDIES, message)]


REMEDIES = "copy it again|extract it first|compress it again|write it in|known are|make the archive"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pyarrow.ArrowInvalid("no magic"), "damaged, or not what its ending says: no magic; "),
        (pyarrow.lib.ArrowNotImplementedError("codec lzo"), "not read here: codec lzo; write it"),
        (NotImplementedError("zip file version 6.3"), "not read here: zip file version 6.3; "),
        (OSError(errno.EIO, "Input/output error"), "row 1: [Errno 5] Input/output error"),
    ],
)
def test_errors_of_libraries_are_what_they_are(write, tmp_path, monkeypatch, error, words):
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", raising(error))
    assert words in error_of(write("a.parquet", b""), tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), pyarrow.lib.ArrowMemoryError("malloc failed")])
@pytest.mark.parametrize("place", ["ParquetFile", "ZipFile"])
def test_memory_that_is_used_up_is_no_damage(write, tmp_path, monkeypatch, error, place):
    name = {"ParquetFile": "a.parquet", "ZipFile": "a.zip"}[place]
    monkeypatch.setattr({"a.zip": zipfile}.get(name, pyarrow.parquet), place, raising(error))
    with pytest.raises(MemoryError):
        texts_of(write(name, b""), tmp_path)


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


STREAMS = [".gz", ".bz2", ".xz", ".lzma", ".zst"]
ONE = b'{"text": "one"}\n'
TWO = b'{"text": "two"}\n'


@pytest.mark.parametrize("padding", [0, 4, 300_000])
@pytest.mark.parametrize("ending", STREAMS)
def test_all_streams_of_a_compressed_file_are_read(write, tmp_path, ending, padding):
    if ending == ".zst" and padding:
        pytest.skip("zstd knows no padding")
    one, two = map(COMPRESSIONS[ending], (ONE, TWO))
    zeros = bytes(padding)
    path = write(f"a.jsonl{ending}", one + zeros + two + zeros)
    assert texts_of(path, tmp_path) == ["one", "two"]


AFTER_A_STREAM = {
    "its first byte is another": lambda two: bytes([two[0] ^ 0xFF]) + two[1:],
    "a byte in its middle is another": lambda two: (
        two[: len(two) // 2] + bytes([two[len(two) // 2] ^ 0xFF]) + two[len(two) // 2 + 1 :]
    ),
    "it is cut": lambda two: two[:-9],
    "only its start is there": lambda two: two[:3],
    "padding, then another byte first": lambda two: bytes(8) + b"!" + two[1:],
    "text": lambda two: b"plain text, and more of it than any header has\n",
    "one byte": lambda two: b"!",
}


@pytest.mark.parametrize("after", AFTER_A_STREAM)
@pytest.mark.parametrize("inside", ["", ".zip"])
@pytest.mark.parametrize("ending", STREAMS)
def test_what_follows_a_stream_is_no_silent_loss(write, tmp_path, ending, inside, after):
    data = COMPRESSIONS[ending](ONE) + AFTER_A_STREAM[after](COMPRESSIONS[ending](TWO))
    name = f"a.jsonl{ending}"
    path = write(name + inside, archive((name, data)) if inside else data)
    assert error_of(path, tmp_path).startswith(f"{path}: ")


# --- python-docs
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["python-docs", "a.txt"])
def test_validation_split_of_files_is_an_error(write, tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.txt", "x")
    assert "data.validation_split: " in error_of(source, tmp_path, validation_split="test")


# --- URLs
# ------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """A local web server that serves {path: bytes}."""
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    files = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            data = files.get(path, b"")
            status = {"/loop.txt": 302, "/secret.txt": 401}.get(path, 404)
            self.send_response(200 if path in files else status)
            if status == 302:
                self.send_header("Location", path)
            # /short announces more bytes than it sends, like a lost connection
            length = len(data) + 100 * (path == "/short.txt")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", files
        finally:
            httpd.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("/a.jsonl.gz", "/a.jsonl.gz"),
        ("/deep/a.jsonl.gz", "/deep/a.jsonl.gz?download=true"),
        ("/caf%C3%A9%20au%20lait.jsonl.gz", "/café%20au lait.jsonl.gz?größe=1"),
        (f"/{'a' * 300}.jsonl.gz", f"/{'a' * 300}.jsonl.gz"),
        (f"/Dr.%20{'a' * 300}.jsonl.gz", f"/Dr. {'a' * 300}.jsonl.gz"),
        (f"/v1.{'0.' * 200}2.jsonl.gz", f"/v1.{'0.' * 200}2.jsonl.gz"),
    ],
)
def test_url_is_read_by_its_extension(server, tmp_path, path, written):
    url, files = server
    files[path] = gzip.compress(b'{"text": "one"}\n{"text": "two"}\n')
    assert texts_of(url + written, tmp_path) == ["one", "two"]


def test_long_words_after_points_of_a_url_are_no_problem(server, tmp_path):
    url, files = server
    path = f"/Dr. Smith{'é' * 250}".replace(" ", "%20").replace("é", "%C3%A9")
    for ending in (".txt", ""):
        files[f"{path}{ending}"] = b"hello"
        assert texts_of(f"{url}{path}{ending}", tmp_path) == ["hello"]


@pytest.mark.parametrize("path", ["", "/", "/..", "/x/.."])
def test_url_without_a_name_is_a_text(server, tmp_path, path):
    url, files = server
    files["/"] = b"hello"
    assert texts_of(url + path, tmp_path) == ["hello"]


def test_scheme_of_a_url_may_have_capitals(server, tmp_path):
    url, files = server
    files["/a.txt"] = b"hello"
    assert texts_of(f"{url}/a.txt".replace("http", "Http"), tmp_path) == ["hello"]


def test_sha256_of_url_is_checked(server, tmp_path):
    url, files = server
    files["/a.txt"] = b"hello"
    right = hashlib.sha256(b"hello").hexdigest()
    assert texts_of(f"{url}/a.txt", tmp_path, sha256=right.upper()) == ["hello"]
    message = error_of(f"{url}/a.txt", tmp_path, sha256="0" * 64)
    assert message.startswith("data.sha256: ")
    assert right in message
    assert "0" * 64 in message


def test_url_that_cannot_be_downloaded_is_one_line(server, tmp_path):
    url, files = server
    files["/short.txt"] = b"only the beginning"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "scratch").mkdir()
    refused = {
        f"{url}/none.txt": "no such file there",
        # aiohttp says what.
        f"{url}/short.txt": "",
        f"{url}/loop.txt": ": TooManyRedirects",
        f"{url}/secret.txt": "Unauthorized (401)",
        "http://127.0.0.1:0/a.txt": "127.0.0.1",
        f"file://{tmp_path}/none.txt": "no such file there",
        f"file://{tmp_path}/folder": "a folder",
        f"file://{tmp_path}/pipe": "a pipe or a device; write its text to a file",
    }
    for source, reason in refused.items():
        message = error_of(source, tmp_path)
        start = f"data.source: {source}: cannot be downloaded: "
        assert message.startswith(start)
        assert len(message) > len(start)
        assert reason in message.removeprefix(f"data.source: {source}")
        assert "(0)" not in message
    gc.collect()  # an open connection would warn now, and warnings are errors


@pytest.mark.parametrize("scheme", ["hf", "s3"])
def test_the_remedy_of_a_file_system_is_kept(tmp_path, monkeypatch, scheme):
    """That of the Hub says that a repository which is not found may be private."""
    said = "datasets/x (repository not found). Make sure you are authenticated"

    class System:
        def get_file(self, path, target):
            raise FileNotFoundError(said)

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **_: (System(), url))
    message = error_of(f"{scheme}://x/a.txt", tmp_path)
    assert message == f"data.source: {scheme}://x/a.txt: cannot be downloaded: no such file: {said}"


@pytest.mark.parametrize("url", ["http://me:pa/ss@host/a.txt", "http://me:secret@[x/a.txt"])
def test_password_of_a_url_is_not_printed(write_recipe, refused, url):
    line = refused("prepare", write_recipe(data__source=url))
    assert "data.source: http://" in line
    assert "pa/ss" not in line
    assert "secret" not in line


# --- Hub data sets
# ------------------------------------------------------------------------------


def test_hub_data_set_is_requested_by_recipe(monkeypatch, tmp_path):
    train = {"id": [1, 2], "body": ["one", "two"], "text": ["x", "x"]}
    splits = {"train": train, "test": {"body": ["three"]}}
    requests = []

    def load_dataset(name, config=None, *, split, revision=None, streaming, trust_remote_code):
        requests.append((name, config, split, revision))
        return datasets.Dataset.from_dict(splits[split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    knobs = {"config": "small", "revision": "v1", "text_column": "body"}
    data = DataSection(source="owner/name", split="train", validation_split="test", **knobs)
    documents = load_documents(data, tmp_path)
    assert requests == [
        ("owner/name", "small", "train", "v1"),
        ("owner/name", "small", "test", "v1"),
    ]
    assert list(documents.train()) == ["one", "two"]
    assert list(documents.validation()) == ["three"]
    assert documents.revision == "v1"
