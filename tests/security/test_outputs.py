"""Output files: atomic replacement; links, devices and pipes are kept; `-` is stdout."""

import json
import os
import stat
import threading

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.errors import UserError
from nanogpt_hf.place import replaced_folder
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.runs import files
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX links, pipes and devices")


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_recipe):
    folder = tmp_path_factory.mktemp("trained")
    recipe = make_recipe(folder / "tiny.yaml", train__max_steps=2, eval__every=2)
    assert main(["pretrain", str(recipe), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def commands(run, letter_model, write_recipe, tmp_path):
    """Each option that names an output: the arguments before the name, and the first bytes of
    the output.
    """
    text = tmp_path / "text.txt"
    text.write_text("abc def\n" * 20)
    recipe = str(write_recipe())
    return {
        "evaluate": (["evaluate", str(letter_model), "--data", str(text), "--output"], b"{"),
        "report": (["report", str(run), "--output"], b"<!"),
        "compare": (["compare", str(run), "--output"], b"\x89PNG"),
        "estimate": (["estimate", recipe, "--json"], b"{"),
    }


NAMES = ["evaluate", "report", "compare", "estimate"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "stdout"), [*((name, "-") for name in NAMES), ("report", "/dev/stdout")]
)
def test_dash_writes_only_the_output_to_stdout(commands, name, stdout, capfd):
    arguments, start = commands[name]
    assert main([*arguments, stdout]) == 0
    out, err = capfd.readouterr()
    if start == b"\x89PNG":
        assert "PNG" in out[:5]
    else:
        assert out.lstrip().startswith(start.decode())
        if start != b"<!":
            json.loads(out)
    # Messages go to stderr. The only line of `report` names its output.
    assert bool(err) == (name != "report")


@pytest.mark.parametrize("name", ["report", "estimate"])
def test_output_to_a_pipe(commands, name, tmp_path):
    arguments, start = commands[name]
    pipe = tmp_path / "pipe"
    received = []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert main([*arguments, str(pipe)]) == 0
    reader.join(10)
    assert received[0].lstrip().startswith(start)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("name", ["report", "estimate", "compare"])
def test_output_link_is_followed_and_kept(commands, name, tmp_path):
    (tmp_path / "target").write_text("older")
    arguments, start = commands[name]
    for link, target in (("link", "target"), ("dangling", "new")):
        (tmp_path / link).symlink_to(target)
        assert main([*arguments, str(tmp_path / link)]) == 0
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / target).read_bytes().lstrip().startswith(start)


def test_link_in_run_folder_is_not_followed(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = RunFolder(run)
    folder.report.unlink(missing_ok=True)
    folder.report.symlink_to(victim)
    write_report(folder, folder.report)
    assert not folder.report.is_symlink()
    assert victim.read_text() == "mine"


def test_planted_partial_file_is_not_used(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    target = tmp_path / "o.html"
    victim.write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "guessed")
    (tmp_path / ".guessed.partial.html").symlink_to(victim)
    with pytest.raises(UserError, match="cannot be written: File exists"), written_whole(target):
        raise AssertionError("it was opened")
    assert victim.read_text() == "mine"


def test_planted_partial_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".best.partial").symlink_to(tmp_path / "elsewhere")
    with replaced_folder(tmp_path / "best") as partial:
        (partial / "x").write_text("x")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_written_file_has_default_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        with written_whole(tmp_path / "x") as partial:
            partial.write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
    with pytest.raises(ZeroDivisionError), written_whole(tmp_path / "y"):
        _ = 1 / 0
    assert os.listdir(tmp_path) == ["x"]
