"""Check that files of a model folder have the content that their names promise, and hold no secret."""

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path

import safetensors
import yaml

from nanogpt_hf.errors import RunFolderError, one_line
from nanogpt_hf.runs.redact import holds_token

WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.onnx", "*.onnx.data")


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_files(stage: Path, source: Path, token: str) -> None:
    """Check every file in `stage`; messages name the files as in `source`.

    Raises RunFolderError, one line per file, if the content does not match the name, or holds `token`, another token of
    the Hub, or a private key.
    """
    problems = []
    for path in sorted(stage.iterdir()):
        try:
            _check_content(path)
        except Exception as error:  # parsers raise many types
            problems.append(
                f"{source / path.name}: is not what its name says: {one_line(error, 200) or type(error).__name__}"
            )
            continue
        if not matches(path.name, WEIGHT_FILES) and holds_token(path.read_bytes(), token):
            problems.append(f"{source / path.name}: contains a token of the Hub or a private key; remove it first")
    raise_problems(problems)


def raise_problems(problems: list[str]) -> None:
    if problems:
        raise RunFolderError("; nothing was pushed\n".join(problems))


def _check_content(path: Path) -> None:
    for pattern, check in _CHECKS:
        if fnmatch.fnmatchcase(path.name, pattern):
            check(path)
            return


def _check_safetensors(path: Path) -> None:
    with safetensors.safe_open(path, framework="numpy") as file:  # checks the header against the file's size
        if not file.keys():
            raise ValueError("it has no tensors")


def _check_json(path: Path) -> None:
    tree = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        raise ValueError("it is not a JSON object")
    if path.name.endswith(".index.json"):
        missing = {str(name) for name in tree["weight_map"].values()} - {file.name for file in path.parent.iterdir()}
        if missing:
            raise ValueError(f"it names {min(missing)}, which is missing")


def _check_json_lines(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # a run may be writing the last one
        json.loads(line)


def _check_yaml(path: Path) -> None:
    if not isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict):
        raise ValueError("it has no sections")


def _check_text(path: Path) -> None:
    if "\0" in path.read_text(encoding="utf-8"):
        raise ValueError("it has NUL bytes")


def _check_magic(magic: bytes) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        with path.open("rb") as file:
            if file.read(len(magic)) != magic:
                raise ValueError(f"it does not start with {magic!r}")

    return check


# The first pattern that matches a name decides. An .onnx.data file is raw numbers.
_CHECKS = (
    ("*.safetensors", _check_safetensors),
    ("*.gguf", _check_magic(b"GGUF")),
    ("*.onnx", _check_magic(b"\x08")),  # protobuf field 1, the version, an integer
    ("tokenizer.model", _check_magic(b"\x0a")),  # protobuf field 1, the pieces, a message
    ("*.png", _check_magic(b"\x89PNG\r\n\x1a\n")),
    ("*.json", _check_json),
    ("*.jsonl", _check_json_lines),
    ("*.yaml", _check_yaml),
    ("README.md", _check_text),
    ("LICENSE*", _check_text),
    ("*.txt", _check_text),
    ("*.jinja", _check_text),
)
