"""The `compare` command: table, differences of recipes, plot, verdict, references."""

import json
import os
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from nanogpt_hf.commands import main
from nanogpt_hf.reports import reference


@pytest.fixture
def write_run(write_run):
    return lambda *arguments, **knobs: str(write_run(*arguments, **knobs).path)


@pytest.fixture
def compare(capsys, tmp_path):
    def compare(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["compare", *arguments, "--output", str(tmp_path / "compare.png")]) == 0, (
            capsys.readouterr().err
        )
        return capsys.readouterr().out

    return compare


def test_compare_prints_table_and_differences_and_plots(write_run, compare, tmp_path):
    runs = write_run("one"), write_run("other", level=1.2, steps=40, optim__learning_rate=5e-3)
    out = compare(*runs, "--json", str(tmp_path / "compare.json"))
    head, one, other = (line.split() for line in out.splitlines()[:3])
    assert " ".join(head) == "run steps tokens time tokens/s best val/loss at step last"
    assert one[:6] == [runs[0], "60", "7,680", "2", "min", "0"]
    assert other[:3] == [runs[1], "40", "5,120"]
    assert one[-2] == "60"
    assert float(one[-1]) == pytest.approx(1.43, abs=0.05)
    differing = out.partition("the recipes differ in\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in differing] == [
        ["knob", *runs],
        ["optim.learning_rate", "0.01", "0.005"],
    ]
    assert out.count("no reference: ") == 2
    tree = json.loads((tmp_path / "compare.json").read_text())
    found = [(run["steps"], run["verdict"]) for run in tree["runs"].values()]
    assert found == [(60, "none"), (40, "none")]
    assert tree["knobs"] == {"optim.learning_rate": dict(zip(runs, ("0.01", "0.005"), strict=True))}
    assert f"plot: {tmp_path / 'compare.png'}" in out
    assert image.imread(tmp_path / "compare.png")[..., :3].std() > 0.05


def test_steps_that_a_budget_or_epochs_have_found(write_run, compare, tmp_path):
    """A number that a resume has stated since follows from neither."""
    stated, timed, counted, changed = (
        write_run(name, train__max_steps=60 if name != "changed" else 61)
        for name in ("stated", "timed", "counted", "changed")
    )
    for run, knob in ((timed, "train.budget 9m"), (counted, "train.epochs 3"), (changed, "x")):
        start = {"step": 0, "steps_from": knob, "max_steps": 60}
        text = json.dumps({"starts": [start, {"step": 20}]})
        (Path(run) / "machine.json").write_text(text)
    out = compare(stated, timed, counted, changed, "--json", str(tmp_path / "all.json"))
    assert [line for line in out.splitlines() if "follows from" in line] == [
        f"{timed}: train.max_steps 60 follows from train.budget 9m",
        f"{counted}: train.max_steps 60 follows from train.epochs 3",
    ]
    runs = json.loads((tmp_path / "all.json").read_text())["runs"]
    found = [runs[run].get("steps_from") for run in (stated, timed, counted, changed)]
    assert found == [None, "train.budget 9m", "train.epochs 3", None]


def test_other_tokenizers_are_compared_by_bits_per_byte(write_run, compare, text_file, tmp_path):
    text = tmp_path / "upper.txt"
    text.write_text(text_file.read_text().upper())
    out = compare(write_run("one"), write_run("other", data__source=str(text)))
    assert "best val/bits_per_byte" in out
    bpe = {"data__tokenizer": "bpe"}
    out = compare(*(write_run(f"bpe-{size}", **bpe, data__vocab_size=size) for size in (270, 300)))
    assert "best val/bits_per_byte" in out


REWARDED = {"finetune__model": "start", "rl__task": "arithmetic", "rl__max_new_tokens": 4}


def test_rewards_are_compared_by_the_score_that_chose_the_best(write_run, compare, tmp_path):
    loss = write_run("loss")
    runs = {"rising": [0.1, 0.3, 0.2], "falling": [0.3, 0.2, 0.1], "begun": [0.3]}
    for name, rewards in runs.items():
        events = []
        for step, reward in enumerate(rewards):
            position = {"step": step, "tokens": step, "seconds": step}
            events += [position | {"train/reward": 0.5}] if step else []
            events.append(position | {"val/reward": reward, "val/pass@1": reward})
        lines = "".join(f"{json.dumps(event)}\n" for event in events)
        (Path(write_run(name, **REWARDED)) / "metrics.jsonl").write_text(lines)
    paths = {name: str(tmp_path / name) for name in runs}
    for others, metric in (([], "val/reward"), ([loss], "val/loss")):
        out = compare(*paths.values(), *others, "--json", str(tmp_path / "all.json"))
        assert f"best {metric}" in out
        assert f"{paths['falling']}: no evaluation was better than that of its start" in out
        assert out.count("no evaluation was better") == 1
        assert out.count("rewards have no reference") == 3
        found = json.loads((tmp_path / "all.json").read_text())["runs"]
        assert [found[path]["beats_start"] for path in paths.values()] == [True, False, None]
        bests = [found[path]["best"] for path in paths.values()]
        assert bests == ([0.3, 0.3, 0.3] if metric == "val/reward" else [None] * 3)
    assert found[loss]["best"] is not None


# Values of the evaluations at steps 0, 1, 2: best, its step, whether it beats the start, where the
# run has diverged, last.
NOT_FINITE = {
    "last": ([3.0, 2.0, None], [2.0, 1, True, 2, "nan"]),
    "all_but_the_start": ([3.0, None, None], [3.0, 0, False, 2, "nan"]),
    "worse_then_not": ([3.0, 4.0, None], [3.0, 0, False, 2, "nan"]),
    "middle": ([3.0, None, 2.0], [2.0, 2, True, None, "2.0000"]),
    "start": ([None, 3.0, 2.0], [2.0, 2, True, None, "2.0000"]),
    "all": ([None, None, None], [None, None, None, 2, "nan"]),
    "only_the_start": ([3.0], [3.0, 0, None, None, "3.0000"]),
}


@pytest.mark.parametrize("metric", ["val/loss", "val/reward"])
@pytest.mark.parametrize(("values", "expected"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_values_that_are_not_finite(write_run, compare, tmp_path, metric, values, expected):
    best, best_step, beats_start, diverged_at, last = expected
    sign = -1 if metric == "val/reward" else 1
    best = best and sign * best
    lines = []
    for step, value in enumerate(values):
        scores = {metric: value and sign * value, f"{metric}/one": value}
        lines.append(json.dumps({"step": step, "tokens": step, "seconds": step} | scores))
    run = write_run("run", **(REWARDED if metric == "val/reward" else {}))
    (Path(run) / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    out = compare(run, "--json", str(tmp_path / "out.json"))
    assert out.splitlines()[1].split()[-2].removeprefix("-") == last
    assert (f"{run}: has diverged: the evaluation at step" in out) == (diverged_at is not None)
    assert (f"{run}: no evaluation was better" in out) == (beats_start is False)
    (found,) = json.loads((tmp_path / "out.json").read_text())["runs"].values()
    shown = [found[key] for key in ("best", "best_step", "beats_start", "diverged_at")]
    assert shown == [best, best_step, beats_start, diverged_at]
    assert found["last"] == (None if last == "nan" else sign * float(last))
    assert main(["report", run]) == 0
    page = (Path(run) / "report.html").read_text()
    assert ("The run has diverged" in page) == (diverged_at is not None)
    assert ("no evaluation was better than that of the start" in page) == (beats_start is False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', "null"])
def test_damaged_manifest_is_one_warning(write_run, tmp_path, capsys, content):
    run = write_run("one")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text(content)
    page = tmp_path / "report.html"
    plot = tmp_path / "compare.png"
    for command in (["report", run, "--output", page], ["compare", run, "--output", plot]):
        assert main(list(map(str, command))) == 0
    assert page.exists()
    assert plot.exists()
    # one warning of a process, whatever reads the manifest
    said = capsys.readouterr().err
    assert said.count("compared without facts of the text") == 1
    assert str(tmp_path / "data" / "manifest.json") in said
    assert main(["compare", run, run, "--make-reference", str(tmp_path / "tiny.json")]) == 2
    assert "manifest.json: not a manifest" in capsys.readouterr().err
    assert not (tmp_path / "tiny.json").exists()


def foreign_plot(path):
    Figure().savefig(path, format="png")


# What may have the default name of the plot, which a call without --output does not replace.
FOREIGN = {
    "plot": foreign_plot,
    "text": lambda path: path.write_text("tEXtSoftware\0nanogpt_hf"),
    "empty": lambda path: path.touch(),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link": lambda path: (foreign_plot(path.with_name("own.png")), path.symlink_to("own.png")),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_default_plot_replaces_no_file_of_the_user(write_run, refused, tmp_path, write):
    run = write_run("one")
    write(tmp_path / "compare.png")
    line = refused("compare", run)
    assert line.startswith("compare.png: exists")
    assert "--output FILE" in line


@pytest.mark.parametrize(
    ("command", "file"), [("compare", "compare.png"), ("report", "report.html")]
)
def test_default_output_that_cannot_be_written_names_the_option(
    write_run, refused, monkeypatch, command, file
):
    run = write_run("one")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = refused(command, run)
    assert f"{file}: cannot be written" in line
    assert line.endswith("--output FILE")


def test_results_on_stdout_have_no_line_with_its_name(write_run, capfdbinary):
    run = write_run("one")
    for command, start in (("compare", b"\x89PNG"), ("report", b"<!doctype html>")):
        assert main([command, run, "--output", "-"]) == 0
        out, err = capfdbinary.readouterr()
        assert out.startswith(start)
        assert [line for line in err.splitlines() if line.endswith(b"-")] == []


def test_default_plot_replaces_a_plot_of_this_program(write_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = write_run("one"), write_run("other", level=1.2)
    plot = tmp_path / "compare.png"
    foreign_plot(plot)
    # A named file is replaced, whatever it was.
    assert main(["compare", *runs, "--output", "compare.png"]) == 0
    two = plot.read_bytes()
    assert main(["compare", runs[0]]) == 0
    assert plot.read_bytes() != two
    assert "plot: compare.png" in capsys.readouterr().out


@pytest.mark.long
def test_make_reference_and_verdict(write_run, compare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reference, "SHIPPED", tmp_path)
    path = tmp_path / "tiny.json"
    seeds = [write_run(f"seed_{seed}", train__seed=seed) for seed in range(4)]
    assert main(["compare", *seeds, "--make-reference", str(path)]) == 0
    assert "4 seeds; the band ends at 1.3" in capsys.readouterr().out
    assert not (tmp_path / "compare.png").exists()
    out = compare(write_run("fifth", train__seed=9))
    assert "fifth: normal: inside the band of 4 reference runs of tiny" in out
    assert ": validation loss 1.4" in out
    out = compare(write_run("bad", level=1.5, optim__learning_rate=0.5))
    assert "bad: above the band of 4 reference runs of tiny from step 20 on" in out
    assert "check 1: optim.learning_rate is 0.5 here, 0.01 in the reference" in out
    assert out.count("check ") == 3
    assert "deeper: no reference" in compare(write_run("deeper", model__n_layer=3))
