"""Secrets in URLs are removed from everything that is written, printed or pushed."""

import json
import logging
import shlex
import sys

import pytest

from nanogpt_hf import console
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.export.hub import push
from nanogpt_hf.reports.page import render
from nanogpt_hf.runs.files import redact, redact_urls, write_json
from nanogpt_hf.runs.folder import RunFolder


@pytest.mark.parametrize(
    "url",
    [
        "https://me:s3cr3t@host/x",
        "s3://s3cr3t:s3cr3t@host/x",
        "https://s3cr3t@host",
        "ftp://me:s3cr3t@x@host/x",
        "https://me:s3cr3t?s3cr3t@host/x",
        "https://host/x?page=https://me:s3cr3t@other/",
        "https://host/b/o?GoogleAccessId=svc@p.iam.gserviceaccount.com&Signature=s3cr3t",
        "https://host/x?k=a''s3cr3t\"s3cr3t",
        "https://host/x?page=2&sig=s3cr3t#token=s3cr3t",
    ],
)
def test_redact_removes_users_and_passwords(url):
    for text in (
        url,
        f"['{url}', 1]",
        f'source: "{url}"\nnext: 1',
        f"--x={url}",
    ):
        assert "s3cr3t" not in redact_urls(text)
        assert "host" in redact_urls(text)


def test_redact_removes_parameters_of_paths():
    text = "https://host/y?token=s3cr3t: Cannot connect, with url: /y?token=s3cr3t"
    assert "s3cr3t" not in redact_urls(text)


@pytest.mark.parametrize(
    "text",
    [
        "no URL: a?b=c&d=e me:pw@host",
        "https://host:8080/a/c.txt",
        "hf://datasets/user/name@refs/convert/parquet/a.parquet https://host/pkg@1.0/a.txt",
        "see https://host/x, (https://host/y). '[https://host]'",
        "/data/c#/a.txt /data/why?",
    ],
)
def test_redact_keeps_harmless_text(text):
    assert redact_urls(text) == text


def test_redact_replaces_home_by_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    text = "/home/ada/x --x=/home/ada '/home/ada': /home/adam /mnt/home/ada/x /home/ada-x"
    assert redact(text) == "~/x --x=~ '~': /home/adam /mnt/home/ada/x /home/ada-x"


SECRETS = ["u53r", "pa55word", "s3cr3t"]
URL = "http://u53r:pa55word@127.0.0.1:9/s.txt?pwd=s3cr3t"


def assert_no_secret(text: str | bytes) -> None:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_recipe, text_file):
    """A run whose recipe holds secrets in several knobs; the recipe keeps them for `--resume`."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [{URL: line} for line in text_file.read_text().splitlines()]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"data__source": str(folder / "rows.jsonl"), "data__text_column": URL}
    recipe = make_recipe(folder / "tiny.yaml", train__max_steps=2, eval__every=2, **source)
    run = str(folder / "run")
    arguments = ["pretrain", str(recipe), "--run-dir", run, f"--tracking.project={URL}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cli.py", *arguments])
        assert main(arguments) == 0
    return RunFolder(folder / "run")


def test_run_folder_has_secrets_only_in_recipe(trained):
    assert load_config(trained.recipe).data.text_column == URL
    for path in trained.path.rglob("*"):
        if path.is_file() and path != trained.recipe:
            assert_no_secret(path.read_bytes())
    assert (
        shlex.quote("--tracking.project=http://127.0.0.1:9/s.txt?...")
        in (json.loads(trained.machine.read_text())["starts"][0]["command"])
    )
    assert_no_secret(render(trained, []))


def test_pushed_files_have_no_secret(trained, hub):
    push(trained.best, "tester/tiny")
    files = hub.repositories["tester/tiny"].files()
    assert b"s.txt?..." in files["recipe.yaml"]
    for content in files.values():
        assert_no_secret(content)


def test_output_has_no_secret(trained, write_recipe, tmp_path, capsys, caplog):
    recipe = str(write_recipe(data__source=URL, data__dir=str(tmp_path / "new")))
    for arguments, status in (
        (["prepare", recipe], 2),
        (["prepare", recipe, "--data.source", "http://u53r:pa55word@127.0.0.1:x/"], 2),
        (["pretrain", recipe, "--dry-run"], 0),
        (["pretrain", recipe, f"--{URL}"], 2),
        (["sample", URL], 2),
        (["compare", str(trained.path), "--output", str(tmp_path / "x.png")], 0),
    ):
        capsys.readouterr()
        assert main(arguments) == status
        out, err = capsys.readouterr()
        assert_no_secret(out + err)
        if status:
            assert err.count("\n") <= 2
    with console.configure_logging(None):
        logging.getLogger("nanogpt_hf.x").info(f"from {URL}")
        logging.getLogger("nanogpt_hf.x").warning(f"no {URL}: refused")
    out, err = capsys.readouterr()
    assert_no_secret(out + err)
    assert "127.0.0.1:9" in out
    assert "127.0.0.1:9" in err


def test_write_json_removes_secrets(tmp_path):
    write_json(tmp_path / "x.json", {"data": URL, "rows": [{"a": f'"{URL}"'}], f"{URL}?": URL})
    text = (tmp_path / "x.json").read_text()
    assert_no_secret(text)
    shown = "http://127.0.0.1:9/s.txt?..."
    assert json.loads(text) == {"data": shown, "rows": [{"a": f'"{shown}"'}], shown: shown}
