"""Sources of text: files and formats, folders, patterns, URLs, the Hub, and errors in one line."""

import csv
import gc
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import threading
import zipfile
from base64 import b64encode

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
            data = "\n".join(texts)
            return data.encode(), [data]
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
    ".zip": lambda data: zipped(data),
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


def texts_of(source, tmp_path, **knobs):
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    documents = load_documents(DataSection(source=str(source), **knobs), scratch)
    return list(documents.train())


def error_of(source, tmp_path, **knobs):
    return refusal(texts_of, source, tmp_path, **knobs)


# --- files
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("extension", FORMATS)
def test_formats_and_compressions(write, tmp_path, extension, compression):
    data, documents = contents(extension, ROWS)
    path = write(f"a{extension}{compression}", COMPRESSIONS[compression](data))
    assert texts_of(path, tmp_path) == documents
    assert len(documents) == (1 if extension in (".txt", ".md") else len(ROWS))


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv", ".parquet"])
def test_text_column(write, tmp_path, extension):
    rows = [{"text": "wrong", "body": "right"}, {"text": "wrong", "body": "right, too"}]
    data = {
        ".jsonl": "\n".join(map(json.dumps, rows)),
        ".json": json.dumps(rows),
        ".csv": 'text,body\nwrong,right\nwrong,"right, too"\n',
        ".parquet": parquet({"text": ["wrong"] * 2, "body": ["right", "right, too"]}),
    }[extension]
    assert texts_of(write(f"a{extension}", data), tmp_path, text_column="body") == [
        "right",
        "right, too",
    ]


def test_json_strings_and_single_row(write, tmp_path):
    assert texts_of(write("a.json", '["one", "two"]'), tmp_path) == ["one", "two"]
    assert texts_of(write("b.json", '{"text": "one"}'), tmp_path) == ["one"]
    assert texts_of(write("c.jsonl", '"one"\n\n  \n"two"\n'), tmp_path) == ["one", "two"]


def test_parquet_ignores_other_columns(write, tmp_path):
    # a time beyond Python's years cannot be converted
    others = {
        "when": pyarrow.array([2**61, None], pyarrow.timestamp("us")),
        "bytes": pyarrow.array([b"\xff", None]),
    }
    path = write(
        "a.parquet", parquet({"text": pyarrow.array(["x", "y"]).dictionary_encode(), **others})
    )
    assert texts_of(path, tmp_path) == ["x", "y"]


def test_empty_rows_are_dropped(write, tmp_path):
    assert texts_of(write("a.jsonl", '{"text": ""}\n{"text": "x"}\n{"text": ""}\n'), tmp_path) == [
        "x"
    ]


@pytest.mark.parametrize("extension", FORMATS[:-1])
def test_byte_order_mark_and_line_ends_are_normalized(write, tmp_path, extension):
    data = {
        ".txt": "one\r\ntwo\rthree\nfour",
        ".md": "one\r\ntwo\rthree\nfour",
        ".jsonl": '{"text": "one\\ntwo"}\r\n{"text": "three\\nfour"}\r\n',
        ".json": '[{"text": "one\\ntwo"},\r\n{"text": "three\\nfour"}]',
        ".csv": 'text\r\n"one\r\ntwo"\r\n"three\r\nfour"\r\n',
    }[extension]
    texts = texts_of(write(f"a{extension}", b"\xef\xbb\xbf" + data.encode()), tmp_path)
    assert "\n".join(texts) == "one\ntwo\nthree\nfour"


def test_escaped_carriage_return_in_json_is_text(write, tmp_path):
    assert texts_of(write("a.jsonl", '{"text": "a\\r\\nb\\u2028c\\u0085"}\n'), tmp_path) == [
        "a\r\nb\u2028c\x85"
    ]


def test_revision_is_sha256_of_the_file(write, tmp_path):
    path = write("a.txt", "hello")
    documents = load_documents(DataSection(source=str(path)), tmp_path)
    assert documents.revision == f"sha256:{hashlib.sha256(b'hello').hexdigest()}"
    assert documents.validation is None


# --- folders and patterns
# --------------------------------------------------------------------------------------------


def test_folder_gives_visible_files_in_order(write, tmp_path):
    for name in (
        "b/2.txt",
        "b/1.md",
        "a.jsonl",
        "c.txt.gz",
        ".git/x.txt",
        "b/.hidden.txt",
        "picture.png",
        "d.py",
    ):
        extension = name.removesuffix(".gz").rpartition(".")[2]
        data = {"jsonl": '{"text": "a.jsonl"}\n', "png": b"\x89\0\0"}.get(extension, name)
        write(f"text/{name}", gzip.compress(name.encode()) if name.endswith(".gz") else data)
    assert texts_of(tmp_path / "text", tmp_path) == ["a.jsonl", "b/1.md", "b/2.txt", "c.txt.gz"]


def test_pattern_gives_matching_files_in_order(write, tmp_path):
    for name in ("2.txt", "1.txt", "deep/3.txt", "4.md"):
        write(f"text/{name}", name)
    assert texts_of(tmp_path / "text" / "*.txt", tmp_path) == ["1.txt", "2.txt"]
    assert texts_of(tmp_path / "text" / "**" / "*.txt", tmp_path) == [
        "1.txt",
        "2.txt",
        "deep/3.txt",
    ]
    assert texts_of(tmp_path / "text" / "[34].md", tmp_path) == ["4.md"]


def test_file_name_with_pattern_characters(write, tmp_path):
    write("a1.txt", "other")
    assert texts_of(write("a[1].txt", "this"), tmp_path) == ["this"]


def test_tilde_in_source_is_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write("a.txt", "x")
    assert find_files("~/a.txt") == find_files("~/*.txt") == [path]


@pytest.mark.parametrize(
    "source",
    [
        "none.txt",
        "./none",
        "/none/at/all",
        "a/b/c",
        "none.jsonl.zst",
        "~no-such-user/a.txt",
        "*.none",
        "/" + "x" * 300,
    ],
)
def test_missing_path_is_one_line(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"data.source: {source}: " in refusal(find_files, source)


def test_pipe_or_device_is_refused(tmp_path):
    # a pipe can be read only once; text is also read for its checksum
    os.mkfifo(tmp_path / "pipe.txt")
    reader, writer = os.pipe()  # like --data.source <(command)
    for source in (str(tmp_path / "pipe.txt"), "/dev/null", f"/dev/fd/{reader}"):
        assert f"data.source: {source}: " in refusal(find_files, source)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "source", ["python-docs", "https://example.org/a.txt", "wikitext", "Owner/name", "x" * 300]
)
def test_invalid_path_names_no_files(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_files(source) == []


def test_folder_without_text_names_the_extensions(write, tmp_path):
    write("text/a.png", "x")
    assert ", ".join(FORMATS) in error_of(tmp_path / "text", tmp_path)


def test_state_changes_with_file_and_digest_with_text(write):
    path = write("a.txt", "one")
    state, digest = file_state([path]), file_digest([path])
    os.utime(path, ns=(1, 1))
    assert file_state([path]) != state
    assert file_digest([path]) == digest
    path.write_text("two")
    assert file_digest([path]) != digest


def test_digest_depends_on_document_boundaries(write):
    before = [write("a.txt", "one two"), write("b.txt", " three")]
    after = [write("c.txt", "one"), write("d.txt", " two three")]
    assert file_digest(before) != file_digest(after)


# --- invalid text
# ------------------------------------------------------------------------------


# name and content of a file, and what the message names beside the file
UNREADABLE = [
    *(
        (name, b"", "empty")
        for name in ("a.txt", "a.jsonl", "a.csv", "a.txt.gz", "a.txt.zst", "a.md")
    ),
    ("a.json", "[]", "empty"),
    ("a.csv", "text\n", "empty"),
    ("a.jsonl", '\n{"text": ""}\n', "empty"),
    ("a.txt", b"\xef\xbb\xbf", "empty"),
    ("a.txt", b"a\xff\xfe", "byte 0xff"),
    ("a.txt", "caf\xe9".encode("latin-1"), "byte 0xe9"),
    ("a.txt", "text".encode("utf-16"), "byte 0xff"),
    ("a.txt", b"\x7fELF\x02\x01\x01" + bytes(100), "NUL"),
    ("a.txt", b"x" * 100_000 + b"\xc0\x80", "byte 0xc0"),
    *((name, b'{"text": "\xff"}', "byte 0xff") for name in ("a.jsonl", "a.json", "a.csv")),
    *(
        ("a.parquet", data, "")
        for data in (b"", b"PAR1", b"not parquet", parquet({"text": ["x"]})[:-20])
    ),
    (
        "a.jsonl",
        '{"text": "x"}\n\n{"txt": "y", "id": 1}\n',
        "line 3",
        "'text'",
        "txt, id",
        "data.text_column",
    ),
    (
        "a.json",
        '[{"text": "x"}, {"txt": "y", "id": 1}]',
        "row 2",
        "'text'",
        "txt, id",
        "data.text_column",
    ),
    ("a.csv", "txt,id\nx,1\n", "line 2", "'text'", "txt, id", "data.text_column"),
    (
        "a.parquet",
        parquet({"txt": ["x"], "id": [1]}),
        "row 1",
        "'text'",
        "txt, id",
        "data.text_column",
    ),
    *(
        (
            "a.jsonl",
            f'{{"text": "x"}}\n{{"text": {value}}}\n',
            "line 2",
            "'text'",
            repr(json.loads(value)),
        )
        for value in ("5", "null", '["a"]', '{"a": "b"}', "true", "1.5")
    ),
    ("a.csv", "id,text\n1,x\n2\n", "line 3", "'text'", "None"),
    ("a.parquet", parquet({"text": ["x", None]}), "row 2", "'text'", "None"),
    ("a.parquet", parquet({"text": [b"x"]}), "row 1", "'text'", "b'x'"),
    ("a.jsonl", '"x"\n[1]\n', "line 2", "[1]"),
    ("a.jsonl", '{"text": "x"}\n{"text: "y"}\n', "line 2", "JSON"),
    ("a.jsonl", '{"text": "x"}\nplain words\n', "line 2", "JSON"),
    ("a.json", '[\n{"text": "x"},\n{"text" "y"}]', "line 3"),
    ("a.json", "[" * 100_000, ""),
    ("a.csv", 'text\nx\n"an open quote would\nswallow, all\n', "end of data"),
    ("a.csv", 'text\n"two\nlines"\nalpha, beta\n', "line 4", "more fields"),
    (
        "a.csv",
        "text,id,,\na, b,1,,\n",
        "line 2",
        "more fields",
    ),  # the comma would truncate the text
    ("a.csv", "text,id,,\na,1,,,\n", "line 2", "more fields"),
    ("a.csv", "text,id,text\nx,1,y\n", "columns", "text"),
    ("a.jsonl", '{"text": "x"}\n{"text": "y", "n": ' + "1" * 5000 + "}\n", "line 2"),
    ("a.jsonl", '{"text": "x"}\n' + "[" * 100_000, "line 2"),
    # JSON can escape what UTF-8 cannot encode
    ("a.jsonl", '{"text": "\\ud83d\\ude00"}\n{"text": "x\\ud83d!"}\n', "line 2", r"\ud83d"),
    # after the first rows it is found while the data set is written, not when the source is opened
    ("a.jsonl", '{"text": "x"}\n' * 5000 + '{"text": 1}\n', "line 5001"),
]


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_text_is_refused_with_file_and_place(write, tmp_path, case):
    name, data, *named = case
    path = write(name, data)
    message = error_of(path, tmp_path)
    assert f"{path}: " in message
    assert all(word in message for word in named), message


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_damaged_compressed_file_is_an_error(write, tmp_path, compression):
    whole = COMPRESSIONS[compression](os.urandom(50_000).hex().encode())
    for data in (b"not compressed at all", whole[:-3], whole[: len(whole) // 2]):
        assert f"a.txt{compression}: " in error_of(write(f"a.txt{compression}", data), tmp_path)
    if compression != ".zst":  # pyarrow writes Zstandard without a checksum
        flipped = whole[: len(whole) // 2] + bytes(100) + whole[len(whole) // 2 + 100 :]
        assert f"a.txt{compression}: " in error_of(write(f"a.txt{compression}", flipped), tmp_path)


def test_csv_rows_short_blank_or_quoted(write, tmp_path):
    path = write("a.csv", 'text,id,,\n"a, b",1\n\n"c\nd",2,,\n')
    assert texts_of(path, tmp_path) == ["a, b", "c\nd"]


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("extension", FORMATS)
def test_nul_is_binary_in_every_format(write, tmp_path, extension, compression):
    data, _ = contents(extension, ["fine", "not\0fine"])
    message = error_of(
        write(f"a{extension}{compression}", COMPRESSIONS[compression](data)), tmp_path
    )
    position = {".txt": "", ".md": "", ".jsonl": "line 2: ", ".csv": "line 3: "}.get(
        extension, "row 2: "
    )
    assert f"{extension}{compression}: {position}" in message
    assert "NUL" in message


# --- python-docs
# ------------------------------------------------------------------------------


def test_python_docs_is_one_fixed_document(tmp_path):
    (text,) = texts_of("python-docs", tmp_path)
    assert len(text) > 100_000
    assert 'The "if" statement' in text
    assert texts_of("python-docs", tmp_path) == [text]


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
    requests = files["requests"] = []  # (host, login) of each request

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path, login = self.path.partition("?")[0], self.headers.get("Authorization")
            requests.append((self.headers["Host"], login))
            data = files.get(path)
            private = (
                path.startswith("/private") and login != "Basic " + b64encode(b"me:pa@ss").decode()
            )
            self.send_response(
                404 if data is None or private else 302 if path.endswith("/moved") else 200
            )
            if path.endswith("/moved"):
                self.send_header("Location", data.decode())
                data = None
            # /short announces more bytes than it sends, like a lost connection
            self.send_header(
                "Content-Length", str(len(data or b"") + 100 * (self.path == "/short.txt"))
            )
            self.end_headers()
            self.wfile.write(data or b"")

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
    "name", ["/a.jsonl.gz", "/deep/a.jsonl.gz?download=true", "/a.jsonl.gz#rows"]
)
def test_url_is_read_by_its_extension(server, tmp_path, name):
    url, files = server
    files[name.partition("?")[0].partition("#")[0]] = gzip.compress(
        b'{"text": "one"}\n{"text": "two"}\n'
    )
    assert texts_of(url + name, tmp_path) == ["one", "two"]


def test_sha256_of_url_is_checked(server, tmp_path):
    url, files = server
    files["/a.txt"] = b"hello"
    right = hashlib.sha256(b"hello").hexdigest()
    assert texts_of(f"{url}/a.txt", tmp_path, sha256=right) == ["hello"]
    assert texts_of(f"{url}/a.txt", tmp_path, sha256=right.upper()) == ["hello"]
    message = error_of(f"{url}/a.txt", tmp_path, sha256="0" * 64)
    assert message.startswith("data.sha256: ")
    assert right in message
    assert "0" * 64 in message


def test_missing_url_is_one_line(server, tmp_path):
    url, _ = server
    assert f"data.source: {url}/none.txt: " in error_of(f"{url}/none.txt", tmp_path)
    gc.collect()  # an open connection would warn now, and warnings are errors


def test_unreachable_server_is_one_line(tmp_path):
    # nothing listens on port 0
    for url in ("http://127.0.0.1:0/a.txt", "http://[broken/a.txt"):
        assert error_of(url, tmp_path).startswith("data.source: ")


def test_partial_download_is_an_error(server, tmp_path):
    url, files = server
    files["/short.txt"] = b"only the beginning"
    assert f"{url}/short.txt: " in error_of(f"{url}/short.txt", tmp_path)


def test_error_in_a_download_names_the_url(server, tmp_path):
    url, files = server
    files["/a.jsonl"] = b'{"text": "x"}\n{"txt": "y"}\n'
    message = error_of(f"{url.replace('//', '//me:secret@')}/a.jsonl", tmp_path)
    assert message.startswith(f"{url}/a.jsonl: line 2: ")


@pytest.mark.parametrize("private", [True, False])
def test_url_login_is_sent_and_not_printed(server, tmp_path, private):
    url, files = server
    path = "/private/a.txt" if private else "/a.txt"
    files[path] = b"hello"
    login = url.replace("//", "//me:pa%40ss@")
    assert texts_of(login + path, tmp_path) == ["hello"]
    wrong = url.replace("//", "//me:secret@")
    for source, knobs in (
        (f"{wrong}/private/a.txt", {}),
        (f"{wrong}/none", {}),
        (wrong + path, {"sha256": "0" * 64}),
    ):
        message = error_of(source, tmp_path, **knobs)
        assert url in message
        assert "secret" not in message
    gc.collect()


def test_url_login_is_not_sent_to_another_host(server, tmp_path):
    url, files = server
    files["/a.txt"] = b"hello"
    files["/private/a.txt"] = b"private"
    files["/private/moved"] = f"{url}/private/a.txt".encode()
    login = url.replace("//", "//me:pa%40ss@")
    assert texts_of(f"{login}/private/moved", tmp_path) == ["private"]
    elsewhere = url.replace("127.0.0.1", "localhost")
    files["/private/far/moved"] = f"{elsewhere}/a.txt".encode()
    (tmp_path / "other").mkdir()
    assert texts_of(f"{login}/private/far/moved", tmp_path / "other") == ["hello"]
    assert files["requests"][-1] == (elsewhere.removeprefix("http://"), None)


def test_url_with_unicode_and_spaces(server, tmp_path):
    url, files = server
    files["/caf%C3%A9%20au%20lait.txt"] = b"hello"
    for written in (
        "/café au lait.txt",
        "/caf%C3%A9%20au%20lait.txt",
        "/café%20au lait.txt?größe=1",
    ):
        assert texts_of(url + written, tmp_path) == ["hello"]


@pytest.mark.parametrize(
    "url", ["http://me:pa/ss@host/a.txt", "http://me:secret@/a.txt", "http://me:secret@[x/a.txt"]
)
def test_invalid_url_is_one_line_without_password(tmp_path, url):
    message = error_of(url, tmp_path)
    assert message.startswith("data.source: ")
    assert "%2F" in message
    assert "pa/ss" not in message
    assert "secret" not in message


# --- Hub data sets
# ------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A fake Hub: its {split: data set}, and the list of requests."""
    splits, requests = {}, []

    def load_dataset(name, config=None, *, split, revision=None, streaming, trust_remote_code):
        requests.append((name, config, split, revision))
        return splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return splits, requests


def test_hub_data_set_is_requested_by_recipe(hub, tmp_path):
    splits, requests = hub
    splits["train"] = datasets.Dataset.from_dict(
        {"id": [1, 2], "body": ["one", "two"], "text": ["x", "x"]}
    )
    splits["test"] = datasets.Dataset.from_dict({"body": ["three"]})
    data = DataSection(
        source="owner/name",
        config="small",
        revision="v1",
        text_column="body",
        split="train",
        validation_split="test",
    )
    documents = load_documents(data, tmp_path)
    assert requests == [
        ("owner/name", "small", "train", "v1"),
        ("owner/name", "small", "test", "v1"),
    ]
    assert list(documents.train()) == ["one", "two"]
    assert list(documents.validation()) == ["three"]
    assert documents.revision == "v1"


def test_hub_data_set_without_text_column_names_columns(hub, tmp_path):
    splits, _ = hub
    splits["train"] = datasets.Dataset.from_dict({"id": [1], "body": ["one"]})
    message = error_of("owner/name", tmp_path)
    assert all(
        word in message for word in ("data.text_column: ", "owner/name", "'text'", "id, body")
    )


@pytest.mark.parametrize("column", [[1, 2], [["a"], ["b"]], [b"a", b"b"]])
def test_hub_column_of_other_type_is_an_error(hub, tmp_path, column):
    splits, _ = hub
    splits["train"] = datasets.Dataset.from_dict({"text": column})
    message = error_of("owner/name", tmp_path)
    assert all(word in message for word in ("data.text_column: ", "owner/name", "'text'"))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach\nthe Hub"),
        FileNotFoundError("no such data set"),
        ValueError("BuilderConfig 'x' not found"),
        RuntimeError("Dataset scripts are no longer supported"),
        datasets.exceptions.DatasetNotFoundError("does not exist"),
        datasets.exceptions.DatasetGenerationError("An error occurred"),
    ],
)
def test_hub_errors_are_one_line(monkeypatch, tmp_path, error):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = error_of("owner/name", tmp_path)
    assert message.startswith("data.source: owner/name: ")
    assert message.endswith(str(error).replace("\n", " "))
