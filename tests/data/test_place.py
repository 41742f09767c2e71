"""Folders that are there already and empty, above all mounted volumes: they are filled from inside."""

import os

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data import place
from nanogpt_hf.data.place import is_vacant, lock_of, partial_of, put_in_place
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.errors import DataError


@pytest.fixture
def ext4(volume):
    """A volume with the folder that ext4 makes on it."""
    (volume / "lost+found").mkdir(mode=0o700)
    return volume


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lost+found", ".lock"}


def test_a_volume_can_hold_the_data_and_the_run(ext4, tmp_path, write_recipe, capsys):
    recipe = str(write_recipe(data__dir=str(ext4), train__max_steps=2))
    assert main(["prepare", recipe]) == 0
    assert names(ext4) == {"manifest.json", "train", "validation", "tokenizer"}
    assert main(["prepare", recipe]) == 0
    assert "is prepared already" in capsys.readouterr().out
    assert main(["pretrain", recipe, "--run-dir", str(tmp_path / "run")]) == 0


def test_a_volume_can_be_the_run_folder(ext4, write_recipe):
    words = ["pretrain", str(write_recipe(train__max_steps=2)), "--run-dir", str(ext4)]
    assert main(words) == 0
    assert {"best", "final", "checkpoints"} <= names(ext4)
    assert main([*words, "--resume", "--train.max_steps", "3"]) == 0


def test_a_volume_can_be_what_an_export_writes(ext4, letter_model):
    assert main(["export", str(letter_model), str(ext4)]) == 0
    assert {"config.json", "model.safetensors"} <= names(ext4)
    assert ".partial" not in names(ext4)
    assert main(["export", str(letter_model), str(ext4)]) == 2  # it is there already


def test_a_mount_point_that_no_rename_can_reach_is_filled_as_well(tmp_path, write_recipe, monkeypatch):
    """What a volume means for renames, where nothing can be mounted."""
    folder = tmp_path / "data"
    folder.mkdir()
    rename = os.rename

    def busy(source, target, **options):
        if os.path.realpath(target) == str(folder):
            raise OSError(16, "Device or resource busy")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", busy)
    monkeypatch.setattr(os, "rmdir", lambda path, **options: 1 / 0 if str(path) == str(folder) else None)
    config = load_config(write_recipe(data__dir=str(folder)))
    assert prepare(config)[1]
    assert load_prepared(config)


def test_what_says_that_all_is_there_comes_last(tmp_path, monkeypatch):
    partial = partial_of(tmp_path)
    partial.mkdir()
    for name in ("a", "manifest.json", "z"):
        (partial / name).touch()
    moved = []
    rename = place.Path.rename
    monkeypatch.setattr(place.Path, "rename", lambda path, to: moved.append(path.name) or rename(path, to))
    put_in_place(partial, tmp_path, last="manifest.json")
    assert (set(moved), moved[-1]) == ({"a", "z", "manifest.json"}, "manifest.json")
    assert names(tmp_path) == set(moved)


def test_a_kill_while_a_folder_is_filled_leaves_nothing_that_looks_finished(tmp_path, write_recipe, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    config = load_config(write_recipe(data__dir=str(folder)))

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(place.Path, "rename", killed)
        with pytest.raises(Killed):
            prepare(config)
    assert names(folder) <= {".partial"}
    partial_of(folder).mkdir(exist_ok=True)  # as SIGKILL leaves it
    assert prepare(config)[1]
    assert ".partial" not in names(folder)


def test_a_folder_that_holds_something_is_not_vacant(tmp_path):
    assert is_vacant(tmp_path)
    assert is_vacant(tmp_path / "not yet")
    (tmp_path / "thesis.txt").touch()
    assert not is_vacant(tmp_path)
    assert not is_vacant(tmp_path / "thesis.txt")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert not is_vacant(tmp_path / "link")


def test_others_wait_for_the_one_that_fills_a_folder_and_nothing_foreign_is_touched(tmp_path, write_recipe):
    folder = tmp_path / "data"
    folder.mkdir()
    config = load_config(write_recipe(data__dir=str(folder)))
    assert lock_of(folder).parent == partial_of(folder).parent == folder
    partial_of(folder).mkdir()
    (folder / "train").mkdir()  # another process has begun to move, or was killed as it did
    with pytest.raises(DataError, match=r"exists and holds no manifest\.json; choose another --data\.dir"):
        prepare(config)
    assert (folder / "train").is_dir()
