"""What is printed: by level, by process, above a bar, and nothing of it left behind."""

import argparse
import logging
import sys
import warnings

import pytest
from tqdm import tqdm

from nanogpt_hf.commands import COMMANDS, console, main

OURS = logging.getLogger("nanogpt_hf.training.somewhere")


def say_everything() -> None:
    for level in ("debug", "info", "warning", "error"):
        getattr(OURS, level)(f"our {level}, 100 % of it")
    warnings.warn("something is old", FutureWarning, stacklevel=1)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("log_level", "out", "err"),
    [
        (None, ["info"], ["warning", "error", "old"]),
        ("debug", ["debug", "info"], ["warning", "error", "old"]),
        ("info", ["info"], ["warning", "error", "old"]),
        ("warning", [], ["warning", "error", "old"]),
        ("error", [], ["error"]),
    ],
)
def test_each_level_prints_itself_and_what_is_above_it(capsys, log_level, out, err):
    with console.speaking(log_level):
        say_everything()
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"our {level}, 100 % of it" for level in out]
    lines = said.err.splitlines()
    ours = [f"our {level}, 100 % of it" for level in err if level != "old"]
    assert lines[: len(ours)] == ours
    assert ("FutureWarning: something is old" in said.err) == ("old" in err)
    assert "[rank" not in said.out + said.err


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("log_level", [None, "debug"])
def test_other_processes_only_warn_and_give_their_rank(capsys, monkeypatch, log_level):
    monkeypatch.setenv("RANK", "3")
    library = logging.getLogger("a_library")
    handler = logging.StreamHandler(sys.stderr)
    library.addHandler(handler)
    with console.speaking(log_level):
        say_everything()
        library.warning("theirs: %s", "slow")
    library.removeHandler(handler)
    said = capsys.readouterr()
    assert said.out == ""
    for line in ("our warning, 100 % of it", "our error, 100 % of it", "theirs: slow"):
        assert f"[rank 3] {line}" in said.err.splitlines()
    assert any(line.startswith("[rank 3] ") and "something is old" in line for line in said.err.splitlines())
    assert not any(level in said.err for level in ("debug", "info"))


def test_the_libraries_get_the_level_only_when_it_is_given(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "critical")  # what a user has set
    library = logging.getLogger("datasets")
    before = library.level
    with console.speaking(None):
        assert library.level == before
        assert console.os.environ["TRANSFORMERS_VERBOSITY"] == "critical"
    with console.speaking("debug"):
        assert library.level == logging.getLogger("transformers").level == logging.DEBUG
        assert console.os.environ["TRANSFORMERS_VERBOSITY"] == "debug"  # for those that are imported later
    assert library.level == before
    assert console.os.environ["TRANSFORMERS_VERBOSITY"] == "critical"


@pytest.mark.parametrize(("log_level", "said"), [(None, False), ("warning", False), ("debug", True)])
def test_kernels_of_torchao_that_cannot_be_loaded_are_debugging(log_level, said):
    torchao = logging.getLogger("torchao")
    before = torchao.isEnabledFor(logging.WARNING)
    with console.speaking(log_level):
        assert torchao.isEnabledFor(logging.WARNING) == said
    assert torchao.isEnabledFor(logging.WARNING) == before


def test_logging_is_left_as_it_was(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    ours, factory, show = logging.getLogger("nanogpt_hf"), logging.getLogRecordFactory(), warnings.showwarning
    before = ours.level, list(ours.handlers)
    with pytest.raises(ZeroDivisionError), console.speaking("error"):
        _ = 1 / 0
    assert (ours.level, ours.handlers) == before
    assert (logging.getLogRecordFactory(), warnings.showwarning) == (factory, show)


def test_a_line_stands_above_a_live_bar(capsys):
    with console.speaking(None), tqdm(total=3, file=sys.stderr, ncols=40) as bar:
        bar.update()
        OURS.info("a line")
        bar.update()
    said = capsys.readouterr()
    assert said.out == "a line\n"
    # the bar was wiped from its line before, and drawn again after
    assert "\r" + " " * 30 in said.err
    assert said.err.count("2/3") == 1


def test_every_command_takes_the_options(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert "-q, --quiet" in out, name
        assert "--log-level {debug,info,warning,error}" in out, name


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-q", "--log-level", "info"], "argument --log-level: not allowed with argument -q/--quiet"),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, options, complaint):
    assert main(["prepare", "recipe.yaml", *options]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_quiet_is_the_level_warning():
    parser = argparse.ArgumentParser()
    console.add_arguments(parser)
    assert parser.parse_args(["-q"]) == parser.parse_args(["--log-level", "warning"])


USELESS = {
    "DeepSpeed": "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
    "transformers.modeling_utils": "GPTForCausalLM LOAD REPORT from: m",
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than the specified maximum",
}


@pytest.mark.parametrize("name", USELESS)
@pytest.mark.parametrize(("log_level", "useless"), [(None, False), ("warning", False), ("debug", True)])
def test_a_useless_warning_of_a_library_is_debugging_and_its_other_ones_are_not(name, log_level, useless):
    library, heard = logging.getLogger(name), []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    with console.speaking(log_level):
        library.addHandler(handler)
        before, library.level = library.level, logging.WARNING  # as DeepSpeed sets it when it is imported
        library.warning(USELESS[name])
        library.warning("another")
        library.error(USELESS[name])
        library.removeHandler(handler)
        library.level = before
    assert heard == [USELESS[name]] * useless + ["another", USELESS[name]]
    assert not library.filters
