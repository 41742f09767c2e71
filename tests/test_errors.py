"""Errors that become one line, and bugs that keep their traceback."""

import errno

import numpy as np
import pytest
import torch
from safetensors import safe_open

from nanogpt_hf.commands import COMMANDS
from nanogpt_hf.config.aliases import ALIASES, suggestion
from nanogpt_hf.config.schema import KNOBS, SECTIONS
from nanogpt_hf.errors import ConfigError, UserError, did_you_mean, explain, is_out_of_memory


def raised(action) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the tests are about its type)
        action()
    return caught.value


def test_os_errors_name_file_and_reason(tmp_path):
    assert explain(raised((tmp_path / "none").read_text)) == (
        f"{tmp_path}/none: No such file or directory"
    )
    assert explain(raised(lambda: (tmp_path / "none").rename(tmp_path / "b"))).startswith(
        f"{tmp_path}/b: No such"
    )
    assert explain(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert explain(OSError("a library's\n   own words")) == "a library's own words"
    httpx = pytest.importorskip("httpx", reason="huggingface_hub brings httpx, or httpx2")
    assert explain(httpx.ConnectError("no route")) == "the network: no route"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("5m\n", r"5m\n"),
        ("a\r\nb", r"a\r\nb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\0b", r"a\x00b"),
        ("a\x85b\u2028c", r"a\x85b\u2028c"),
        ("café 💥 \\n", "café 💥 \\n"),
    ],
)
def test_error_is_one_line_whatever_value_it_names(text, shown):
    assert str(UserError(f"knob: {text}: no")) == f"knob: {shown}: no"
    error = ConfigError([f"knob: {text}", "other"])
    assert error.problems == [f"knob: {shown}", "other"]
    assert str(error) == f"knob: {shown}\nother\n2 problems; nothing was started."


def test_damaged_weights_are_explained(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"x" * 100)
    error = raised(lambda: safe_open(tmp_path / "w.safetensors", "pt").__enter__())
    assert explain(error).startswith("a safetensors file cannot be read or written: ")


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(10**15),
        lambda: np.empty(10**15),
        lambda: bytearray(2**62),
        lambda: (_ for _ in ()).throw(
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        ),
        lambda: (_ for _ in ()).throw(OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
    ids=["torch", "numpy", "python", "cuda", "system"],
)
def test_out_of_memory_errors_are_recognized(allocate):
    error = raised(allocate)
    assert is_out_of_memory(error)
    assert explain(error).startswith("out of memory")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "CppCompileError: C++ compile error\n\nOutput:\n/tmp/a.cpp:194:10: fatal error: "
            "Python.h: No such file or directory\n  194 | #include <Python.h>",
            "Python.h: No such file or directory",
        ),
        ("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')", None),
        ("Compiler: g++-9 is not found.", "Compiler: g++-9 is not found"),
        ("Failed to find C compiler. Please specify via CC environment variable", None),
    ],
)
def test_machine_that_cannot_compile_is_explained(said, reason):
    line = explain(RuntimeError(said))
    assert line.startswith(f"torch.compile: {reason or said[:24]}")
    assert line.endswith("or set dynamo_backend: NO in the accelerate config")
    assert "\n" not in line


def test_operation_without_a_deterministic_kernel_is_explained():
    error = RuntimeError("histc_cuda does not have a deterministic implementation, but you set ...")
    assert explain(error).startswith("train.deterministic, which train.gradient_groups implies, ")


@pytest.mark.parametrize("bug", [TypeError("x"), KeyError("x"), RuntimeError("shape")])
def test_bugs_are_not_explained(bug):
    assert explain(bug) is None
    assert not is_out_of_memory(bug)


def test_wrapped_error_is_explained():
    error = RuntimeError("generation failed")
    error.__cause__ = FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone")
    assert explain(error) == "/gone: No such file or directory"
    assert explain(UserError("ours, as it is")) == "ours, as it is"
    assert explain(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None  # the connection is closed


OPTIONS = ["--run-dir", "--resume", "--depth", *(f"--{knob}" for knob in KNOBS)]
MACHINE = "of an accelerate config sets it"
SUGGESTED = [
    # Names of other programs.
    ("optim.lr", KNOBS, "optim.learning_rate?"),
    ("train.lr", KNOBS, "optim.learning_rate?"),
    ("optim.min_lr", KNOBS, "optim.min_learning_rate?"),
    ("train.steps", KNOBS, "train.max_steps?"),
    ("eval.steps", KNOBS, "eval.every?"),
    ("eval.interval", KNOBS, "eval.every?"),
    ("train.num_epochs", KNOBS, "train.epochs?"),
    ("train.batch_size", KNOBS, "train.micro_batch_size?"),
    ("data.path", KNOBS, "data.source?"),
    ("data.seq_len", KNOBS, "data.block_size?"),
    ("data.max_length", KNOBS, "data.block_size?"),
    ("tracking.wandb", KNOBS, "tracking.trackers?"),
    ("train.device", KNOBS, MACHINE),
    ("--device", OPTIONS, MACHINE),
    ("--lr", OPTIONS, "--optim.learning_rate?"),
    ("--output_dir", OPTIONS, "--run-dir?"),
    ("evaluation", SECTIONS, "eval?"),
    ("generate", COMMANDS, "sample?"),
    ("train", COMMANDS, "pretrain?"),
    ("--device", ["--prompt", "--seed"], ""),
    # Misspelled names.
    ("optim.learnig_rate", KNOBS, "optim.learning_rate?"),
    ("model.dropuot", KNOBS, "model.dropout?"),
    ("--max-steps", OPTIONS, "--train.max_steps?"),
    ("--resum", OPTIONS, "--resume?"),
    ("modle", SECTIONS, "model?"),
    ("pretain", COMMANDS, "pretrain?"),
    # Names of another section, and names that are in several.
    ("model.block_size", KNOBS, "data.block_size?"),
    ("data.seed", KNOBS, "train.seed?"),
    ("train.every", KNOBS, "eval.every, checkpoint.every or tracking.every?"),
    # No suggestion is better than a wrong one.
    ("zzz.qqqqqq", KNOBS, ""),
    ("optim.eps", KNOBS, ""),
    ("train.callback", KNOBS, ""),
    ("foo", COMMANDS, ""),
]


@pytest.mark.parametrize(("word", "candidates", "end"), SUGGESTED)
def test_suggested_name(word, candidates, end):
    found = suggestion(word, candidates)
    assert found.startswith("; ") if end else found == ""
    assert found.removeprefix("; did you mean ") == end or (end == MACHINE and MACHINE in found)


def test_names_of_other_programs_are_no_names_here():
    for name, targets in ALIASES.items():
        assert name not in KNOBS
        known = {*KNOBS, *SECTIONS, *COMMANDS}
        assert all(target in known or target.startswith("--") for target in targets), name
    # Without the table the nearest spelling counts.
    assert did_you_mean("optim.lr", KNOBS) == ""
