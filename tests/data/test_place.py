"""Outputs into existing empty folders, such as mounted volumes."""

import pytest

from assertions import refusal
from nanogpt_hf import place
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.place import lock_of, partial_of


@pytest.fixture
def ext4(volume):
    """A volume with ext4's lost+found folder."""
    (volume / "lost+found").mkdir(mode=0o700)
    return volume


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lost+found", ".lock"}


def test_volume_holds_data_and_run(ext4, tmp_path, write_recipe, capsys):
    recipe = str(write_recipe(data__dir=str(ext4), train__max_steps=2))
    assert main(["prepare", recipe]) == 0
    assert names(ext4) == {"manifest.json", "train", "validation", "tokenizer"}
    assert main(["prepare", recipe]) == 0
    assert "is prepared already" in capsys.readouterr().out
    assert main(["pretrain", recipe, "--run-dir", str(tmp_path / "run")]) == 0


def test_kill_while_filling_a_folder_leaves_no_manifest(tmp_path, write_recipe, monkeypatch):
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
    # SIGKILL leaves such a folder.
    partial_of(folder).mkdir(exist_ok=True)
    assert prepare(config)[1]
    assert ".partial" not in names(folder)


def test_folder_being_filled_is_locked_and_foreign_files_are_kept(tmp_path, write_recipe):
    folder = tmp_path / "data"
    folder.mkdir()
    config = load_config(write_recipe(data__dir=str(folder)))
    assert lock_of(folder).parent == partial_of(folder).parent == folder
    partial_of(folder).mkdir()
    (folder / "train").mkdir()  # another process is moving files, or was killed meanwhile
    assert "--data.dir" in refusal(prepare, config)
    assert (folder / "train").is_dir()
