"""Checkpoints: atomic, checked, compared with the model; the rules of the run folder."""

import errno
import json
import re

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from assertions import load_newest
from nanogpt_hf.checkpoint import files, reader
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.runs import folder
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.runs.tensor_files import (
    Box,
    Part,
    TensorFiles,
    layout_digest,
    layout_lines,
    write_tensors,
)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.start("model: {}\n")
    return folder


def build_training():
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    accelerator = Accelerator()
    parts = accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection()))
    train_step(*parts)
    return parts


def train_step(accelerator, model, optimizer) -> None:
    tokens = torch.arange(8)[None]
    accelerator.backward(model(tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def log_records(caplog) -> list[tuple[str, str]]:
    """(level, message) of this package's log records."""
    return [
        (r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("nanogpt_hf")
    ]


FILES = ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def damage_file(path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[:-40])
        case "bit":
            content[-20] ^= 1  # one bit inside a number
            path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing", "bit"])
def test_damaged_checkpoint_is_named_and_older_one_loaded(
    run, file, damage, caplog, save_checkpoint
):
    parts = build_training()
    for step in (4, 8):
        train_step(*parts)
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    damage_file(run.checkpoint(8) / file, damage)
    caplog.set_level("INFO", "nanogpt_hf")
    assert load_newest(run, *parts).step == 4
    (level, first), (_, second) = log_records(caplog)
    assert f"{run.checkpoint(8)}: damaged checkpoint: " in first
    assert level == "WARNING"
    assert second == f"resuming from {run.checkpoint(4)}"
    damage_file(run.checkpoint(4) / file, damage)
    with pytest.raises(RunFolderError, match="all checkpoints are damaged"):
        load_newest(run, *parts)


@pytest.mark.parametrize("name", FILES[1:])
def test_entry_that_checksums_lack_is_a_damage(run, name, save_checkpoint):
    parts = build_training()
    save_checkpoint(*parts, TrainState(step=8), run, keep=2)
    path = run.checkpoint(8) / "checksums.json"
    checksums = json.loads(path.read_text())
    del checksums[name]
    path.write_text(json.dumps(checksums))
    with pytest.raises(reader.DamagedError, match=name):
        reader.read_checkpoint(run.checkpoint(8))


DEEP = "[" * 3000 + "]" * 3000
STATES = ["", "null", "[]", "{}", "5", '"x"', DEEP, '{"step": ', '"\xff"']
FIELDS = {
    "step": (None, "8", 8.0, -1, 9, True, [8], {}),
    "tokens": (None, "0", -1, 0.5, 10**30),
    "seconds": (None, "0", [], -1.0, float("nan"), float("inf")),
    "evaluated_step": (None, -2, "0"),
    "skipped_steps": (None, -1, "0", 10**30),
    "last_finite_step": (None, -1, 1.5),
    "loss_average": ("1", []),
    "score": ("1", {}),
    "best_loss": ("1", {}),
    "best_step": ("1", -1, 1.0),
    "evaluation": (5, [], {}, {"loss": 1.0}, {"loss": "1", "tokens": 1, "bytes_per_token": 1}),
    "identity": (5, "x", [], {}, {"knobs": {}}, {"knobs": [], "data": {}}, {"data": {}}),
    "scaler": (5, [], {"scale": "x"}),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in FIELDS.items() for value in values]
)
def test_edited_state_with_the_right_checksum_is_a_damage(run, name, value, save_checkpoint):
    save_checkpoint(*build_training(), TrainState(step=8), run, keep=2)
    path = run.checkpoint(8) / "state.json"
    rewrite(run.checkpoint(8), "state.json", json.loads(path.read_text()) | {name: value})
    with pytest.raises(
        reader.DamagedError, match=f"damaged checkpoint: state.json: .*({name}|step)"
    ):
        reader.read_checkpoint(run.checkpoint(8))


@pytest.mark.parametrize("content", STATES)
@pytest.mark.parametrize("file", ["state.json", "checksums.json"])
def test_file_that_is_no_mapping_is_a_damage(run, file, content, caplog, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    rewrite(run.checkpoint(8), file, content)
    assert load_newest(run, *parts).step == 4
    assert f"{run.checkpoint(8)}: damaged checkpoint: {file}: " in caplog.text


def test_state_without_identity_is_a_damage_to_a_run(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        identity = {"knobs": {}, "data": {}} if step == 4 else None
        save_checkpoint(*parts, TrainState(step=step, identity=identity), run, keep=2)
    found = reader.find_checkpoint(parts[0], run, {"knobs": {}, "data": {}})
    assert found.state.step == 4


def rewrite(folder, file: str, content: dict | str) -> None:
    """Replace a JSON file of a checkpoint, with the right checksum."""
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / file).write_text(text, encoding="latin-1")
    if file == "checksums.json":
        return
    sums = {
        path.name: reader.file_sha256(path)
        for path in folder.iterdir()
        if path.name != "checksums.json"
    }
    (folder / "checksums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("name", ["score", "best_loss", "skipped_steps"])
def test_state_that_lacks_a_field(run, name, save_checkpoint):
    """A field that older checkpoints lack has its default; without another they are refused."""
    save_checkpoint(*build_training(), TrainState(step=8, score=0.5), run, keep=2)
    state = json.loads((run.checkpoint(8) / "state.json").read_text())
    del state[name]
    rewrite(run.checkpoint(8), "state.json", state)
    if name == "score":
        assert reader.read_checkpoint(run.checkpoint(8)).state == TrainState(step=8)
        return
    with pytest.raises(RunFolderError, match="was written by other code: "):
        reader.read_checkpoint(run.checkpoint(8))


def test_checkpoint_of_another_version_is_refused(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    state = json.loads((run.checkpoint(8) / "state.json").read_text())
    for other in ({"version": 1}, {"version": None}, {"field": 0}):
        rewrite(run.checkpoint(8), "state.json", state | other)
        with pytest.raises(RunFolderError, match="step_00000008: was written by other code: "):
            load_newest(run, *parts)


def test_checkpoint_keep_counts_only_sound_checkpoints(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8, 12):
        save_checkpoint(*parts, TrainState(step=step), run, keep=3)
    for step in (8, 12):
        damage_file(run.checkpoint(step) / "model.safetensors", "truncated")
    assert load_newest(run, *parts).step == 4
    save_checkpoint(*parts, TrainState(step=6), run, keep=2)
    assert [path.name for path in run.checkpoint_folders()] == ["step_00000004", "step_00000006"]


def test_later_checkpoint_that_cannot_be_removed_ends_the_run(run, monkeypatch, save_checkpoint):
    """A resume would take it."""

    def remove(path):
        raise OSError(errno.EIO, "Input/output error")

    parts = build_training()
    save_checkpoint(*parts, TrainState(step=12), run, keep=1)
    monkeypatch.setattr(folder, "remove_folder", remove)
    with pytest.raises(RunFolderError, match="Input/output error"):
        save_checkpoint(*parts, TrainState(step=8), run, keep=1)


def craft(checkpoint, kind: str, change, *, honest: bool) -> None:
    """Change the tensors of a kind in a checkpoint, with the right checksums; with `honest` the
    checkpoint also records their layout, as if another model had written it.
    """
    file = checkpoint / f"{kind}.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    facts = json.loads((checkpoint / "state.json").read_text())
    if honest:
        lines = set()
        for each in ("model", "optimizer"):
            layout = TensorFiles([checkpoint / f"{each}.safetensors"]).layout
            lines |= layout_lines(each, layout)
        facts["tensors"] = layout_digest(lines)
    rewrite(checkpoint, "state.json", facts)


def replace(name: str, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


WTE = "transformer.wte.weight"
MOMENT = "transformer.wte.weight.exp_avg"
CRAFTED = {
    "smaller": ("model", replace(WTE, lambda t: t[:2, :2]), f"weight {WTE} is (2, 2) float32"),
    "larger": ("model", replace(WTE, lambda t: t.repeat(3, 3)), f"weight {WTE} is (33, 24)"),
    "fewer rows": ("model", replace(WTE, lambda t: t[:10]), f"weight {WTE} is (10, 8)"),
    "transposed": ("model", replace(WTE, lambda t: t.T), f"weight {WTE} is (8, 11)"),
    "one dimension": ("model", replace(WTE, torch.flatten), f"weight {WTE} is (88,)"),
    "no dimension": ("model", replace(WTE, torch.sum), f"weight {WTE} is ()"),
    "float16": ("model", replace(WTE, torch.Tensor.half), f"weight {WTE} is (11, 8) float16"),
    "integers": ("model", replace(WTE, torch.Tensor.long), f"weight {WTE} is (11, 8) int64"),
    "no weight": ("model", lambda t: t.pop(WTE), f"weight {WTE} is missing instead of (11, 8)"),
    "a weight more": (
        "model",
        lambda t: t.update(more=torch.ones(2)),
        "weight more is (2,) float32 instead of missing",
    ),
    "state smaller": ("optimizer", replace(MOMENT, lambda t: t[:2]), f"state {MOMENT} is (2, 8)"),
    "state transposed": ("optimizer", replace(MOMENT, lambda t: t.T), f"state {MOMENT} is (8, 11)"),
    "state in float16": ("optimizer", replace(MOMENT, torch.Tensor.half), "(11, 8) float16"),
    "state of integers": ("optimizer", replace(MOMENT, torch.Tensor.long), "(11, 8) int64"),
    "one moment": ("optimizer", lambda t: t.pop(MOMENT), f"state {MOMENT} is missing"),
    "a state more": (
        "optimizer",
        lambda t: t.update({f"{WTE}.more": torch.ones(2)}),
        f"state {WTE}.more is (2,) float32 instead of missing",
    ),
    "state of no weight": (
        "optimizer",
        lambda t: t.update({"no.exp_avg": torch.ones(2)}),
        "state no.exp_avg is (2,) float32 instead of missing",
    ),
}


@pytest.fixture
def two_checkpoints(run, save_checkpoint):
    """What trains, with checkpoints of the steps 4 and 8."""
    parts = build_training()
    for step in (4, 8):
        train_step(*parts)
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    return parts


@pytest.mark.parametrize("case", CRAFTED)
def test_tensors_of_another_layout_are_damage_or_another_model(case, run, two_checkpoints, caplog):
    kind, change, message = CRAFTED[case]
    craft(run.checkpoint(8), kind, change, honest=True)
    before = [parameter.clone() for parameter in two_checkpoints[1].parameters()]
    with pytest.raises(RunFolderError, match=re.escape(message)) as refused:
        load_newest(run, *two_checkpoints)
    assert str(refused.value).startswith(f"{run.checkpoint(8)}: is of another model: ")
    # nothing was loaded
    assert all(map(torch.equal, before, two_checkpoints[1].parameters()))

    facts = json.loads((run.checkpoint(4) / "state.json").read_text())
    written = json.loads((run.checkpoint(8) / "state.json").read_text())
    rewrite(run.checkpoint(8), "state.json", written | {"tensors": facts["tensors"]})
    assert load_newest(run, *two_checkpoints).step == 4
    assert "are not those written; trying an older one" in caplog.text


def without_state(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{WTE}.")]:
        del tensors[name]


def test_parameter_without_its_state_is_damage(run, two_checkpoints, caplog):
    craft(run.checkpoint(8), "optimizer", without_state, honest=False)
    assert load_newest(run, *two_checkpoints).step == 4
    assert "are not those written; trying an older one" in caplog.text


def test_parameter_that_had_no_gradient_has_no_state(run, save_checkpoint):
    """As one that was frozen: its state is made at its first step with a gradient."""
    accelerator, model, optimizer = build_training()
    optimizer.state.clear()
    idle = model.transformer.wpe.weight
    tokens = torch.arange(8)[None]
    accelerator.backward(model(tokens, labels=tokens).loss)
    idle.grad = None
    optimizer.step()
    save_checkpoint(accelerator, model, optimizer, TrainState(step=4), run, keep=2)
    train_step(accelerator, model, optimizer)
    assert optimizer.state[idle]
    assert load_newest(run, accelerator, model, optimizer).step == 4
    assert not optimizer.state.get(idle)


def split(checkpoint, boxes: list[Box]) -> None:
    """Replace the file of weights by one for each part of the embedding, as ranks write them."""
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "optimizer.safetensors").rename(
        checkpoint / files.file_names("optimizer", len(boxes))[0]
    )
    for number, box in enumerate(boxes, 1):
        parts = {}
        if number == 1:
            parts = {n: Part(t.shape, Box((0,) * t.dim(), t.shape), t) for n, t in tensors.items()}
        else:
            write_tensors(checkpoint / files.file_names("optimizer", len(boxes))[number - 1], {})
        places = zip(box.offset, box.shape, strict=True)
        value = tensors[WTE][tuple(slice(start, start + size) for start, size in places)]
        shape = tuple(tensors[WTE].shape)
        parts[WTE] = Part(shape, Box(box.offset, tuple(value.shape)), value.contiguous())
        write_tensors(checkpoint / files.file_names("model", len(boxes))[number - 1], parts)
    facts = json.loads((checkpoint / "state.json").read_text())
    rewrite(checkpoint, "state.json", facts)


WHOLE = {
    "rows": [Box((0, 0), (5, 8)), Box((5, 0), (6, 8))],
    "columns": [Box((0, 3), (11, 5)), Box((0, 0), (11, 3))],
    "both": [Box((0, 0), (4, 8)), Box((4, 0), (7, 2)), Box((4, 2), (7, 6))],
}
BROKEN = {
    "hole": [Box((0, 0), (5, 8)), Box((6, 0), (5, 8))],
    "only one part": [Box((0, 0), (5, 8))],
    "overlap": [Box((0, 0), (6, 8)), Box((5, 0), (6, 8))],
    "hole and overlap": [Box((0, 0), (4, 8)), Box((4, 0), (4, 8)), Box((5, 0), (3, 8))],
    "twice": [Box((0, 0), (11, 8)), Box((0, 0), (11, 8))],
}


@pytest.mark.parametrize("case", WHOLE)
def test_parts_that_cover_a_tensor_once_are_read(case, run, two_checkpoints):
    whole = reader.read_checkpoint(run.checkpoint(8)).weights[WTE]
    split(run.checkpoint(8), WHOLE[case])
    assert torch.equal(reader.read_checkpoint(run.checkpoint(8)).weights[WTE], whole)
    assert load_newest(run, *two_checkpoints).step == 8


@pytest.mark.parametrize("case", BROKEN)
def test_parts_with_a_hole_or_an_overlap_are_damage(case, run, two_checkpoints, caplog):
    split(run.checkpoint(8), BROKEN[case])
    assert load_newest(run, *two_checkpoints).step == 4
    assert f"the parts of {WTE} leave a hole in it or overlap; trying an older one" in caplog.text


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("removed", ["entry", "entry and file"])
def test_file_that_checksums_do_not_name_is_damage(file, removed, run, two_checkpoints, caplog):
    path = run.checkpoint(8) / "checksums.json"
    sums = json.loads(path.read_text())
    del sums[file]
    path.write_text(json.dumps(sums))
    if removed == "entry and file":
        (run.checkpoint(8) / file).unlink()
    assert load_newest(run, *two_checkpoints).step == 4
    assert f"{run.checkpoint(8)}: damaged checkpoint: " in caplog.text
    assert file in caplog.text


@pytest.mark.parametrize("lost", ["model-00002-of-00003", "optimizer-00003-of-00003"])
def test_part_that_is_not_named_is_damage(lost, run, two_checkpoints, caplog):
    split(run.checkpoint(8), WHOLE["both"])
    (run.checkpoint(8) / f"{lost}.safetensors").unlink()
    facts = json.loads((run.checkpoint(8) / "state.json").read_text())
    rewrite(run.checkpoint(8), "state.json", facts)
    assert load_newest(run, *two_checkpoints).step == 4
    assert "checksums.json: is damaged: it has no " in caplog.text


def test_file_of_another_checkpoint_is_damage(run, two_checkpoints, caplog):
    (run.checkpoint(8) / "model-00001-of-00002.safetensors").touch()
    assert load_newest(run, *two_checkpoints).step == 4
    assert "does not name model-00001-of-00002.safetensors; trying an older one" in caplog.text


@pytest.mark.parametrize(
    "history",
    [5, [{}], [{"step": "x", "evaluated_step": 0, "knobs": {}}], [{"step": 0, "knobs": {}}]],
)
def test_history_of_another_type_is_damage(history, run, two_checkpoints, caplog):
    facts = json.loads((run.checkpoint(8) / "state.json").read_text())
    rewrite(run.checkpoint(8), "state.json", facts | {"history": history})
    assert load_newest(run, *two_checkpoints).step == 4
    assert "history" in caplog.text
