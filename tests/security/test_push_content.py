"""Files of a push: inside the folder, with the content that their names imply, checked before
the first request.
"""

import json
import os
import shutil

import pytest

from nanogpt_hf.commands import main


@pytest.fixture
def model(letter_model, tmp_path):
    return shutil.copytree(letter_model, tmp_path / "model")


@pytest.fixture
def push_refused(hub, model, capsys):
    """Push the model folder; return the error lines. Nothing may be created on the Hub."""

    def push_refused() -> list[str]:
        capsys.readouterr()
        assert main(["push", str(model), "tester/x"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = err.splitlines()
        assert all(line.endswith("; nothing was pushed") for line in lines), lines
        assert hub.repositories == {}
        assert not any(request.startswith("POST") for request in hub.requests)
        return lines

    return push_refused


@pytest.mark.skipif(os.name == "nt", reason="needs links")
@pytest.mark.parametrize("name", ["LICENSE", "x.safetensors", "vocab.json"])
def test_link_out_of_the_folder_is_refused(push_refused, model, tmp_path, name):
    secret = tmp_path / "id_rsa"
    secret.write_text("{}")
    (tmp_path / "hop").symlink_to(secret)
    for target in (secret, "../id_rsa", "../hop"):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)
        (line,) = push_refused()
        assert f"{model / name}: is a link to {secret}" in line


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_links_within_and_to_the_folder_are_pushed(hub, model, tmp_path):
    (model / "model.safetensors").rename(model / "weights.safetensors")
    (model / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "link").symlink_to(model)
    assert main(["push", str(tmp_path / "link"), "tester/x"]) == 0
    files = hub.repositories["tester/x"].files()
    assert files["model.safetensors"] == (model / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["LICENSE", "vocab.json"])
def test_file_with_a_secret_is_refused(push_refused, model, hub, name):
    (model / name).write_text(json.dumps({hub.token: 1, "-----BEGIN RSA PRIVATE KEY-----": 2}))
    (line,) = push_refused()
    assert line.startswith(f"{model / name}: contains a token")
    assert hub.token not in line


def test_adapter_config_does_not_name_the_home_folder(hub, model, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = {"peft_type": "LORA", "base_model_name_or_path": "/home/ada/base"}
    (model / "adapter_config.json").write_text(json.dumps(config))
    assert main(["push", str(model), "tester/x"]) == 0
    assert json.loads(hub.repositories["tester/x"].files()["adapter_config.json"]) == config | {
        "base_model_name_or_path": "~/base"
    }
