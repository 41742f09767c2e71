"""Files that cannot be meant as a recipe or an accelerate config: one line at once, from every
command that reads one.
"""

import os

import pytest

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.config.values import RecipeLoader, SettingsLoader, parse_settings
from nanogpt_hf.errors import ConfigError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
# content of a file, or how one is made -> what the line says
FILES = {
    "deep list": ("model: " + "[" * 3000, "nested more than"),
    "deep mapping": ("model: " + "{a: " * 3000, "nested more than"),
    "closed": ("model: " + "[" * 3000 + "]" * 3000, "nested more than"),
    "half a million deep": ("[" * 500_000, "nested more than"),
    "bomb": (BOMB, "aliases repeat more than 1,000,000 characters"),
    "bomb in a section": ("model:\n  extra: {" + BOMB.replace("\n", ", ") + "}", "aliases"),
    "bomb as a key": (f"{BOMB}? *i\n: x", "aliases"),
    "inside itself": ("model: &a [*a]", "inside itself"),
    "large": ("#" * 1_000_001, "over 1,000,000 characters"),
    "half a character": ('data: {source: "\\ud800"}', "no text"),
    "null character": ('data: {dir: "a\\0b"}', "no text"),
    "tag": ("model: {n_layer: !!bool maybe}", "maybe"),
    "date": ("model: {n_layer: !!timestamp x}", "cannot be read"),
    "object": ("model: !!python/object:os.system {}", "python/object"),
    "bytes": (b"model: \xff\xfe", "utf-8"),
    "control": (b"model: \x01", "special characters"),
    "unclosed": ("model: {n_layer: 2", "line 1"),
    "text": ("once upon a time", "expected"),
    "folder": (os.mkdir, "a folder"),
    "pipe": (os.mkfifo, "a device or a pipe"),
    "link": (lambda path: os.symlink("/dev/zero", path), "a device or a pipe"),
    "loop": (lambda path: os.symlink(path, path), "oo many levels of symbolic links"),
    "missing": (lambda path: None, "o such"),
}
COMMANDS = {
    "recipe": "pretrain FILE --run-dir run",
    "sweep": "sweep FILE --train.seed 1,2",
    "optional recipe": "doctor FILE",
    "launch": "launch --config_file FILE pretrain quickstart",
    "estimate": "estimate quickstart --config_file FILE",
    "config of a sweep": "sweep quickstart --train.seed 1,2 --config_file FILE",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", FILES)
def test_file_that_cannot_be_meant_is_one_line(refused, tmp_path, command, name):
    content, reason = FILES[name]
    file = tmp_path / "f.yaml"
    if callable(content):
        content(file)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(*COMMANDS[command].replace("FILE", "f.yaml").split())
    assert "f.yaml: " in line
    assert reason in line
    assert len(line) < 600


@pytest.mark.parametrize("value", ["[" * 1100, "{a: " * 1100, '"\\ud800"', "[&a [*a]]", "[\x01]"])
@pytest.mark.parametrize("key", KNOBS)
def test_value_that_cannot_be_meant_is_refused_or_kept_as_text(key, value):
    problems = []
    try:
        load_config(None, [("data.source", "x"), (key, value)], name="x")
    except ConfigError as error:
        problems = error.problems
    assert all(len(problem) < 300 for problem in problems)
    assert problems or KNOBS[key].kind not in (int, float, bool)


def test_aliases_within_the_bounds_are_read():
    text = "a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}"
    expected = {"a": {"x": [1, 2]}, "b": {"x": [1, 2]}, "c": {"x": [1, 2], "y": 3}}
    assert parse_settings(text, SettingsLoader) == expected


@pytest.mark.parametrize("loader", [SettingsLoader, RecipeLoader])
def test_a_file_that_is_read_again_is_not_parsed_again_and_has_its_own_values(loader, monkeypatch):
    text = "optim: {rates: [1, 2]}  # read twice"
    first = parse_settings(text, loader)
    first["optim"]["rates"].append(3)
    monkeypatch.setattr(loader, "get_single_node", None)
    assert list(map(str, parse_settings(text, loader)["optim"]["rates"])) == ["1", "2"]
