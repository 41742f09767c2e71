"""Sources of text: files and formats, folders, patterns, URLs, the Hub, and errors in one line."""

import csv
import gc
import gzip
import hashlib
import http.server
import io
import itertools
import json
import lzma
import os
import threading
import zipfile

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from assertions import refusal
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.files import file_digest, file_state, find_files
from nanogpt_hf.data.source import load_documents

ROWS = ["first\nof two lines", 'second, "quoted"', "third: ünï 😀\u2028.", "  spaces  kept  "]


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("inside", data)
    return file.getvalue()


def parquet(table):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), file)
    return file.getvalue()


def csv_bytes(rows):
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["number", "text"], *enumerate(rows)])
    return file.getvalue()


def contents(extension, texts):
    """A file of the format with the texts: (bytes, expected documents)."""
    rows = [{"number": i, "text": text} for i, text in enumerate(texts)]
    match extension:
        case ".txt" | ".md":
            texts = ["\n".join(texts)]
            data = texts[0]
        case ".jsonl":
            data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        case ".json":
            data = json.dumps(rows, indent=2)
        case ".csv":
            data = csv_bytes(texts)
        case ".parquet":
            return parquet({"number": range(len(texts)), "text": texts}), texts
    return data.encode(), texts


COMPRESSIONS = {
    "": lambda data: data,
    ".zip": zipped,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
FORMATS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")


@pytest.fixture
def write(tmp_path):
    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


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
    [*itertools.product(FORMATS[:-1], COMPRESSIONS), (".parquet", "")],
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


# --- folders and patterns
# --------------------------------------------------------------------------------------------


def test_folder_gives_visible_files_in_order(write, tmp_path):
    for name in ("b/2.txt", "b/1.md", "a.txt", ".git/x.txt", "b/.hidden.txt", "d.py"):
        write(f"text/{name}", name)
    write("text/c.txt.gz", gzip.compress(b"c.txt.gz"))
    write("text/picture.png", b"\x89\0\0")
    assert texts_of(tmp_path / "text", tmp_path) == ["a.txt", "b/1.md", "b/2.txt", "c.txt.gz"]


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
    ["none.txt", "./none", "/none/at/all", "a/b/c", "~nobody/a", "*.none", "/dev/null", "pictures"],
)
def test_path_without_files_is_one_line(write, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("pictures/a.png", "x")
    message = refusal(find_files, source)
    assert message == f"data.source: {source}: no file, or folder with {', '.join(FORMATS)}"


@pytest.mark.parametrize(
    "source", ["python-docs", "https://example.org/a.txt", "wikitext", "Owner/name", "x" * 300]
)
def test_invalid_path_names_no_files(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_files(source) == []


def test_digest_changes_with_text_and_its_boundaries(write):
    path = write("a.txt", "one two")
    before, state = [path, write("b.txt", " three")], file_state([path])
    os.utime(path, ns=(1, 1))
    assert file_state([path]) != state
    assert file_digest(before) != file_digest([write("c.txt", "one"), write("d.txt", " two three")])


# --- invalid text
# ------------------------------------------------------------------------------


# name and content of a file, and what the message names beside the file
UNREADABLE = [
    ("a.txt", "caf\xe9".encode("latin-1"), "byte 0xe9"),
    ("a.txt", b"\x7fELF\x02\x01\x01" + bytes(100), "NUL"),
    ("a.parquet", parquet({"text": ["x"]})[:-20]),
    ("a.jsonl", '{"text": "x"}\n\n{"txt": "y", "id": 1}\n', "row 2", "'text'", "txt, id"),
    ("a.parquet", parquet({"text": [b"x"]}), "row 1", "'text'"),
    ("a.jsonl", '{"text": "x"}\n{"text": 5}\n', "row 2", "'text'"),
    ("a.jsonl", '"x"\n[1]\n', "row 2", "'text'"),
    ("a.jsonl", '{"text": "x"}\nplain words\n', "row 2", "Expecting value"),
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


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_damaged_compressed_file_is_an_error(write, tmp_path, compression):
    whole = COMPRESSIONS[compression](os.urandom(50_000).hex().encode())
    for data in (b"not compressed at all", whole[:-3]):
        assert f"a.txt{compression}: " in error_of(write(f"a.txt{compression}", data), tmp_path)


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
            self.send_response(200 if path in files else 404)
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
    ],
)
def test_url_is_read_by_its_extension(server, tmp_path, path, written):
    url, files = server
    files[path] = gzip.compress(b'{"text": "one"}\n{"text": "two"}\n')
    assert texts_of(url + written, tmp_path) == ["one", "two"]


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
    for source in (f"{url}/none.txt", f"{url}/short.txt", "http://127.0.0.1:0/a.txt"):
        assert error_of(source, tmp_path).startswith("data.source: ")
    gc.collect()  # an open connection would warn now, and warnings are errors


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
    splits, requests = {"train": train, "test": {"body": ["three"]}}, []

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
