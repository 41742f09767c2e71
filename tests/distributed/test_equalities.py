"""Layouts × features: a run that moves from layout to layout equals one process, and resumes bit
for bit on each.

Each feature is trained once on one process, and once through its layouts in turn, each of which
resumes the run of the one before and trains STEPS steps.
"""

import functools
import importlib.util
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from arguments import argv
from assertions import CHUNKS, column, copy_at, held_by_ranks, tensor_files
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

pytestmark = pytest.mark.long
STEPS = 3
MEASURED = ("seconds", "train/tokens_per_second", "train/data_wait", "train/memory_peak_bytes")
ROUTING = ("train/balance_loss", "train/router_entropy", "train/expert_load_max")
ROUTING += ("train/unused_experts",)

# Row of the table: accelerate config, processes.
LAYOUTS = {
    "DDP": ("cpu_ddp", 2),
    "DDP on 3": ("cpu_ddp", 3),
    "FSDP2": ("fsdp2", 2),
    "FSDP2 on 3": ("fsdp2", 3),
    "FSDP2, recomputed": ("fsdp2_checkpointing", 2),
    "HSDP": ("hsdp", 4),
    "ZeRO-2": ("deepspeed_zero2", 2),
    "ZeRO-3": ("deepspeed_zero3", 2),
    "ZeRO-3 on 3": ("deepspeed_zero3", 3),
    "TP": ("tp", 2),
    "TP × CP × FSDP2": ("cp_fsdp2", 4),
    "PP": ("pp", 2),
    "PP on 3, zero bubble": ("pp", 3),
    "PP × TP": ("pp_tp", 4),
    "PP × FSDP2": ("pp_fsdp2", 4),
    "EP": ("ep", 2),
    "EP × FSDP2": ("ep_fsdp2", 4),
    "CP × FSDP2": ("cp_fsdp2", 2),
    "CP × FSDP2 on 4": ("cp_fsdp2", 4),
    "CP by ring × FSDP2": ("cp_fsdp2", 4),
    "DDP in bf16": ("cpu_ddp", 2),
    "DDP in fp16": ("cpu_ddp", 2),
}
# what `cli.py launch` passes on, and the rest of a config for GPUs
PP = ("PP", "PP × TP", "PP × FSDP2")
VARIABLES = {layout: {"PARALLELISM_CONFIG_PP_SIZE": "2"} for layout in PP}
VARIABLES |= {
    "PP on 3, zero bubble": {
        "PARALLELISM_CONFIG_PP_SIZE": "3",
        "PARALLELISM_CONFIG_PP_SCHEDULE": "zero_bubble",
    },
    "DDP in bf16": {"PARALLELISM_CONFIG_DDP_COMM_HOOK": "bf16"},
    "DDP in fp16": {"PARALLELISM_CONFIG_DDP_COMM_HOOK": "fp16"},
    "CP by ring × FSDP2": {"CPU_RING": "true"},
    "TP × CP × FSDP2": {"CPU_RING": "true"},
}
VARIABLES |= {layout: {"PARALLELISM_CONFIG_EP_SIZE": "2"} for layout in ("EP", "EP × FSDP2")}
OPTIONS = {
    "EP × FSDP2": ["--num_machines=1", "--parallelism_config_dp_shard_size=4"],
    "PP × TP": ["--parallelism_config_dp_replicate_size=1"],
    "CP × FSDP2 on 4": ["--parallelism_config_dp_shard_size=2"],
    "CP by ring × FSDP2": [
        "--parallelism_config_cp_size=4",
        "--parallelism_config_cp_comm_strategy=alltoall",
    ],
    "TP × CP × FSDP2": ["--parallelism_config_tp_size=2"],
}
# all others are forks of a process that has imported torch: warm.py
REAL_LAUNCHER = ("FSDP2, recomputed",)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
    reason="torchao or g++ (to compile its CPU step) is not installed",
)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("g++") is None,
    reason="DeepSpeed or g++ (to compile its CPU operations) is not installed",
)

COMMON = {
    "optim.schedule": "constant",  # each layout trains up to another train.max_steps
    "optim.learning_rate": 2e-3,
    "optim.warmup_steps": 2,
    "eval.every": STEPS,
    "eval.tokens": 512,
    "checkpoint.every": 1,
    "checkpoint.keep": 99,
    "tracking.every": 1,
    "train.micro_batch_size": 2,
}
DROPOUT = {"model.dropout": 0.1}
LAYERS = {"tracking.layers": True}
# more than the 16 positions of the model
SAMPLES = {"eval.samples": '["A cat "]', "eval.sample_tokens": 18}
DECODER = {"model.n_kv_head": 1}
FINETUNED = DROPOUT | {"train.tokens_per_step": 256, "data.block_size": 16, "data.order": "random"}
UNFREEZING = FINETUNED | {"finetune.freeze_layers": 2, "finetune.unfreeze_every": 2}


class Feature(NamedTuple):
    """Column of the table: knobs beside COMMON, and the layouts of its moving run, the slow ones at
    the end, so that no other cell trains them.
    """

    knobs: dict[str, Any]
    quick: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    exhaustive: tuple[str, ...] = ()

    @property
    def layouts(self) -> list[str]:
        last = [*self.slow, *self.exhaustive]
        first = [*self.quick, *(["one process"] * ("one process" not in last))]
        return [*first, *last] if len(first + last) > 1 else []


FEATURES = {
    # With three processes the order of a sum matters. No size is a multiple of three, so shards are
    # padded.
    "AdamW": Feature(
        DROPOUT
        | LAYERS
        | SAMPLES
        | {"model.n_embd": 20, "train.tokens_per_step": 192}
        | {"optim.betas": "{tokens: [0.7, 0.99], query_key_value: [0.5, 0.9]}"},
        ("DDP on 3", "FSDP2", "ZeRO-3 on 3"),
        exhaustive=("FSDP2, recomputed", "ZeRO-2"),
    ),
    # 20 is no multiple of 3 processes, and there are fewer stacked matrices (2) than processes
    "Muon": Feature(
        DROPOUT
        | LAYERS
        | {
            "optim.name": "muon",
            "optim.rates": "{positions: 0.1, query_key_value: 0.6, mlp_in: 2}",
            "optim.betas": "{positions: [0.7, 0.99], vectors: [0.8, 0.9]}",
            "model.init": "look_back",
            "model.n_embd": 20,
            "train.tokens_per_step": 384,
        },
        *(("FSDP2 on 3",), ("HSDP",), ("DDP",)),
    ),
    "mixture": Feature(
        LAYERS
        | SAMPLES
        | {
            "model.n_head": 4,
            "optim.name": "muon",
            "optim.rates": "{tokens: 0.5, mlp_out: 2}",
            "optim.betas": "{tokens: [0.7, 0.99], vectors: [0.8, 0.9]}",
        },
        *(("TP",), ("PP × TP", "FSDP2"), ("DDP", "TP × CP × FSDP2")),
    ),
    # four processes do not divide the heads
    "ring": Feature(
        LAYERS | {"model.n_head": 6, "model.n_embd": 24},
        slow=("CP by ring × FSDP2", "one process"),
        exhaustive=("TP × CP × FSDP2",),
    ),
    "uneven stages": Feature(
        LAYERS | SAMPLES | {"model.n_layer": 3, "train.micro_batch_size": "auto"},
        slow=("PP on 3, zero bubble", "one process"),
        exhaustive=("PP × FSDP2",),
    ),
    "tasks": Feature({}, slow=("PP × TP", "one process")),
    "dropout": Feature(DROPOUT),
    "conversations": Feature(
        DROPOUT
        | {
            "data.format": "chat",
            "data.block_size": 128,
            "model.n_positions": 128,
            "train.tokens_per_step": 1024,
        },
        *(("DDP",), ("FSDP2",)),
    ),
    # the teacher has twice the model's blocks, its own width and dropout
    "distillation": Feature(
        DROPOUT | {"distill.weight": 0.7, "distill.temperature": 2.0}, slow=("FSDP2", "DDP on 3")
    ),
    "documents": Feature(
        {"data.packing": "documents", "data.mask": "documents"},
        slow=("FSDP2", "DDP", "TP", "PP", "CP × FSDP2"),
    ),
    "documents, qwen3": Feature(
        {"model.architecture": "qwen3", "model.n_head": 4, "model.n_kv_head": 2}
        | {"data.mask": "documents"},
        slow=("CP × FSDP2 on 4", "one process"),
    ),
    "conversations, llama": Feature(
        {"model.architecture": "llama", "model.n_kv_head": 2, "train.tokens_per_step": 1024}
        | {"data.format": "chat", "data.block_size": 128, "model.n_positions": 128},
        slow=("CP × FSDP2", "one process"),
    ),
    "unfreezing": Feature(UNFREEZING, slow=("FSDP2", "one process"), exhaustive=("DDP",)),
    # both begin in the steps of the first layout
    "stages": Feature(
        DROPOUT
        | {
            "optim.name": "muon",
            "train.stages": "[{at: 1, weights: {text2: 9}, data.block_size: 8}, "
            "{at: 2, train.tokens_per_step: 256, optim.muon_learning_rate: 0.002}]",
        },
        slow=("FSDP2", "DDP", "one process"),
    ),
    # a spike in the steps of each layout
    "rollback": Feature(
        {
            "train.rollback_ratio": 1.003,
            "train.tokens_per_step": 64,
            "optim.learning_rate": 1e-4,
        },
        ("PP",),
        exhaustive=("ZeRO-2",),
    ),
    "unfreezing with Muon": Feature(UNFREEZING | {"optim.name": "muon"}),
    "LoRA": Feature(FINETUNED | {"lora.rank": 2, "lora.dropout": 0.1}),
    "qwen3": Feature({"model.architecture": "qwen3"} | DECODER, slow=("FSDP2", "ZeRO-3")),
    "nanochat": Feature(
        {"model.architecture": "nanochat"} | DECODER,
        exhaustive=("ZeRO-3", "FSDP2", "one process"),
    ),
    # three experts on two processes; the first of the blocks is dense
    "experts": Feature(
        {
            "model.architecture": "glm4_moe",
            "model.extra": "{n_routed_experts: 3, num_experts_per_tok: 2, n_group: 1, "
            "topk_group: 1, moe_intermediate_size: 8, first_k_dense_replace: 1}",
            "optim.balance_loss": 0.1,
            "optim.name": "muon",
        }
        | LAYERS,
        exhaustive=("DDP", "FSDP2", "FSDP2, recomputed"),
    ),
    "experts, AdamW": Feature(
        {
            "model.architecture": "qwen3_moe",
            "model.extra": "{num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}",
        }
        | LAYERS
        | SAMPLES,
        *(("EP",), ("PP", "EP × FSDP2"), ("ZeRO-3",)),
    ),
}
# beside one process: whether it is slow
RESUMED = {
    ("AdamW", "DDP on 3"): False,
    ("AdamW", "ZeRO-3 on 3"): True,
    ("ring", "CP by ring × FSDP2"): True,
    ("uneven stages", "PP on 3, zero bubble"): True,
    ("Muon", "FSDP2 on 3"): True,
    ("mixture", "PP × TP"): True,
    ("documents", "CP × FSDP2"): True,
    ("documents, qwen3", "CP × FSDP2 on 4"): True,
    ("conversations, llama", "CP × FSDP2"): True,
    ("experts, AdamW", "EP"): True,
    ("experts, AdamW", "EP × FSDP2"): True,
}


def cell(name: str, layout: str, *more: object, slow: bool = False):
    """A feature and a layout as parameters."""
    feature = FEATURES[name]
    marks = [needs_deepspeed] * ("ZeRO" in layout)
    marks += [pytest.mark.slow] * (slow or layout in feature.slow + feature.exhaustive)
    marks += [pytest.mark.exhaustive] * (layout in feature.exhaustive)
    return pytest.param(name, layout, *more, marks=marks)


class Trained(NamedTuple):
    """A run up to the end of a layout's steps, and what each of its processes held: see
    launched.py.
    """

    run: RunFolder
    first: int
    last: int
    held: list[dict]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("equalities")


@pytest.fixture(scope="module")
def words_of(
    folder, make_recipe, text_file, chat_file, byte_tokenizer, tiny_base, request
) -> Callable[..., list[str]]:
    """The command line of a feature's run: (feature, folder, steps, flags)."""
    recipe = make_recipe(folder / "recipe.yaml")
    draw = random.Random(0)
    sources = {"mixture": [], "conversations": [{"source": str(chat_file), "weight": 2}]}
    for number, words in enumerate(
        ("the cat sat on a mat", "def x return y if z", "one plus two is three")
    ):
        path = folder / f"text{number}.txt"
        path.write_text(
            "".join(
                " ".join(draw.choices(words.split(), k=6)) + "\n" for _ in range(200 - 60 * number)
            )
        )
        sources["mixture"].append({"source": str(path), "weight": (7, 2, 1)[number]})
    draw = random.Random(1)
    rows = folder / "rows.jsonl"
    texts = (
        " ".join(draw.choices(("cat", "sat", "on"), k=draw.randrange(1, 9))) for _ in range(300)
    )
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources["documents"] = [{"source": str(rows), "weight": 1, "validation_fraction": 0.1}]
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    (folder / "talk.jsonl").write_text((json.dumps({"messages": turns * 3}) + "\n") * 20)
    sources["conversations"].append({"source": str(folder / "talk.jsonl"), "weight": 1})

    def words(name: str, run: Path, steps: int, *flags: str) -> list[str]:
        knobs = COMMON | FEATURES[name].knobs | {"train.max_steps": steps}
        start = ["pretrain", str(recipe)]
        if "finetune.freeze_layers" in knobs or "lora.rank" in knobs:
            start = ["finetune", "--from", str(tiny_base), "--data", str(text_file)]
            knobs["data.dir"] = folder / "finetuning"
        if name == "distillation":
            knobs |= {"distill.teacher": tiny_base, "data.tokenizer": tiny_base}
            knobs["data.dir"] = folder / name
            knobs["train.tokens_per_step"] = 192
        if name == "tasks":
            tasks = request.getfixturevalue("letter_tasks")
            knobs |= {"eval.tasks": tasks[0], "data.tokenizer": byte_tokenizer}
            knobs["data.dir"] = folder / name
        sources["stages"] = sources["mixture"]
        if kind := sources.get(name.partition(",")[0]):
            knobs |= {"data.source": json.dumps(kind), "data.tokenizer": byte_tokenizer}
            knobs["data.dir"] = folder / name
        options = [str(word) for key, value in knobs.items() for word in (f"--{key}", value)]
        return [*start, "--run-dir", str(run), *options, *flags]

    return words


@pytest.fixture(scope="module")
def train(words_of, launch_warm, launch_command, root, forget_accelerate):
    """Train a feature on a layout up to a step: (feature, layout, folder, steps, flags) -> what
    each process held.
    """

    def ends_diverged(status: int, output: str) -> None:
        assert status
        assert "the run has diverged" in output

    def train(
        name: str, layout: str, run: Path, steps: int, *flags: str, diverges: bool = False
    ) -> list[dict]:
        words = words_of(name, run, steps, *flags)
        if layout == "one process":
            forget_accelerate()
            assert main(words) == (2 if diverges else 0)
            return []
        machine, processes = LAYOUTS[layout]
        options = [f"--num_processes={processes}", *OPTIONS.get(layout, [])]
        variables = CHUNKS | VARIABLES.get(layout, {})
        if layout in REAL_LAUNCHER:
            command = launch_command(machine, *words, machine_options=options)
            environment = os.environ | {"PYTHONPATH": str(root)} | CHUNKS
            completed = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=300
            )
            assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
        else:
            ending = {"ends_with": ends_diverged} if diverges else {}
            launch_warm(machine, *words, machine_options=options, **ending, **variables)
        return held_by_ranks(RunFolder(run))

    return train


@pytest.fixture(scope="module")
def alone(train, folder):
    """The run of a feature on one process, trained once."""

    @functools.cache
    def alone(name: str) -> RunFolder:
        run = folder / f"{name} alone"
        train(name, "one process", run, STEPS * max(2, len(FEATURES[name].layouts)), "--overwrite")
        return RunFolder(run)

    return alone


@pytest.fixture(scope="module")
def moved(train, folder):
    """The moving run of a feature after the steps of a layout; it trains the layouts before,
    too.
    """

    @functools.cache
    def moved(name: str, layout: str) -> Trained:
        layouts = [
            other
            for other in FEATURES[name].layouts
            if "ZeRO" not in other or not needs_deepspeed.args[0]
        ]
        number = layouts.index(layout)
        run = folder / f"{name} {layout}"
        shutil.rmtree(run, ignore_errors=True)
        if number:
            shutil.copytree(moved(name, layouts[number - 1]).run.path, run)
        first = STEPS * number
        last = STEPS * (number + 1)
        held = train(name, layout, run, last, "--resume" if number else "--overwrite")
        return Trained(RunFolder(run), first, last, held)

    return moved


def events(run: RunFolder, first: int, last: int) -> list[dict]:
    """The metrics of the steps after `first` up to `last`, and of step 0 if `first` is 0."""
    found = [
        event
        for event in read_metrics(run)
        if first < event["step"] <= last or event["step"] == first == 0
    ]
    assert len(found) > last - first
    return found


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        cell(name, layout, slow=layout == "one process" and not feature.quick)
        for name, feature in FEATURES.items()
        for layout in feature.layouts
    ],
)
def test_moving_run_equals_one_process(moved, alone, feature, layout):
    run, first, last, held = moved(feature, layout)
    one, zero = alone(feature), "ZeRO" in layout  # DeepSpeed gives no access to gradients
    for ours, theirs in zip(events(run, first, last), events(one, first, last), strict=True):
        expected = {
            name: value
            for name, value in theirs.items()
            if not (zero and name.startswith("layers/"))
            and not (layout == "PP" and name in ROUTING)  # a stage has no metrics of its routers
        }
        assert ours.keys() == expected.keys()
        for name in expected.keys() - set(MEASURED):
            tolerance = {"abs": 1e-4 if "grad_norm" in name else 1e-5, "rel": 1e-5}
            if name.startswith("layers/"):
                tolerance = {"abs": 1e-5, "rel": 1e-3}
            value = expected[name]
            if not isinstance(value, list):  # samples are equal
                value = pytest.approx(value, **tolerance)
            assert ours[name] == value, f"step {ours['step']}: {name}"
    for ours, theirs in zip(
        *(read_checkpoint(r.checkpoint(last))[:2] for r in (run, one)), strict=True
    ):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            # it has no gradient but rounding errors, which AdamW enlarges
            if "k_proj.bias" not in name:
                assert (ours[name].float() - theirs[name].float()).abs().max() < 1e-5, name
    kinds = {kind for process in held for kind, _, _ in process["weights"].values()}
    kinds -= {"Tensor"}  # saved buffers
    if "SDP" in layout:
        assert kinds == {"DTensor"}
    elif layout == "EP":  # experts are shared, all else is whole
        assert kinds == {"Parameter", "DTensor"}
    elif "TP" not in layout and layout != "one process":
        assert kinds == {"Parameter"}


@pytest.mark.parametrize(
    ("feature", "layout", "steps_left"),
    [
        *(
            cell(name, "one process", steps)
            for name in FEATURES
            for steps in ((2, 3) if "unfreezing" in name else (2,))
        ),
        *(cell(*where, 2, slow=slow) for where, slow in RESUMED.items()),
    ],
)
def test_resumed_run_equals_uninterrupted(
    train, moved, alone, tmp_path, feature, layout, steps_left
):
    if layout == "one process":
        source = alone(feature)
        last = max(event["step"] for event in read_metrics(source))
    else:
        source, _, last, _ = moved(feature, layout)
    resumed = copy_at(source, last - steps_left, tmp_path / "resumed")
    train(feature, layout, resumed.path, last, "--resume")
    contents = []
    for run in (resumed, source):
        contents.append(tensor_files(run, last))
        numbers = [
            {key: value for key, value in event.items() if key not in MEASURED}
            for event in events(run, last - steps_left, last)
        ]
        contents.append(numbers)
    assert contents[:2] == contents[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *("CP × FSDP2", "DDP in bf16", "PP × FSDP2"),
        *(pytest.param(layout, marks=pytest.mark.exhaustive) for layout in ("DDP in fp16", "PP")),
    ],
)
def test_run_with_dropout_resumes_exactly_and_compresses(train, alone, tmp_path, layout):
    whole = RunFolder(tmp_path / "whole")
    last = 2 * STEPS
    train("dropout", layout, whole.path, last, "--overwrite")
    resumed = copy_at(whole, STEPS, tmp_path / "resumed")
    train("dropout", layout, resumed.path, last, "--resume")
    assert tensor_files(resumed, last) == tensor_files(whole, last)
    if "DDP" in layout:  # gradients of one process, rounded
        norm, rounded = (column(run, "train/grad_norm")[1] for run in (alone("dropout"), whole))
        assert rounded == pytest.approx(norm, rel=1e-3)
        assert rounded != pytest.approx(norm, rel=1e-7)


@pytest.mark.exhaustive
@needs_torchao
def test_8bit_state_resumes_exactly_and_moves(train, tmp_path):
    flags = argv(
        "--optim.state 8bit --model.n_embd 128 --model.n_positions 128 "
        "--model.pad_vocab_to_multiple_of 128"
    )
    flags += ["--optim.betas", "{tokens: [0.7, 0.99]}"]
    names = ("whole", "resumed", "moved")
    last = 2 * STEPS
    whole, resumed, moved = runs = [RunFolder(tmp_path / name) for name in names]
    held = []
    for run, layout in zip(runs, ("FSDP2", "FSDP2", "DDP"), strict=True):
        if run is not whole:
            copy_at(whole, STEPS, run.path)
        start = "--overwrite" if run is whole else "--resume"
        held.append(train("dropout", layout, run.path, last, *flags, start))
    assert tensor_files(resumed, last) == tensor_files(whole, last)
    assert column(moved, "val/loss") == pytest.approx(column(whole, "val/loss"), abs=1e-3)
    for sharded, copied in zip(held[0], held[2], strict=True):
        assert 0.48 < sharded["optimizer_state"] / copied["optimizer_state"] < 0.52
        # one byte each and the blocks' scales; LayerNorms stay float32
        for process in (sharded, copied):
            assert 1 < process["optimizer_state_bytes"] / process["optimizer_state"] < 1.03


@pytest.mark.slow
def test_gradient_that_is_not_finite_skips_the_step_on_all_stages(train, tmp_path):
    skipped = []
    for layout in ("one process", "PP × TP"):
        run = RunFolder(tmp_path / layout)
        flags = "--optim.learning_rate=1e20", "--eval.tasks=[]"
        train("tasks", layout, run.path, 6, *flags, diverges=True)
        skipped.append(column(run, "train/skipped_steps"))
    assert len(skipped[0]) > 2
    assert skipped[0] == skipped[1]


@pytest.mark.parametrize(
    ("layout", "weights_shared"),
    [
        ("FSDP2", True),
        pytest.param("ZeRO-2", False, marks=[needs_deepspeed, pytest.mark.slow]),
        pytest.param("ZeRO-3 on 3", True, marks=needs_deepspeed),
    ],
)
def test_each_process_holds_and_copies_its_share(moved, layout, weights_shared):
    ours = moved("AdamW", layout).held
    whole = moved("AdamW", "DDP on 3").held
    share = 1.06 / len(ours)
    weights = sum(size for _, _, size in whole[0]["weights"].values())
    assert [held["optimizer_state"] for held in whole] == [2 * weights] * 3
    for held in ours:
        own = sum(own for _, own, _ in held["weights"].values())
        assert own <= share * weights if weights_shared else own == weights
        assert 0.9 * share * 2 * weights <= held["optimizer_state"] <= share * 2 * weights
    assert sum(held["copied"] for held in ours) == whole[0]["copied"]
    assert max(held["copied"] for held in ours) < 1.2 * share * whole[0]["copied"]


@pytest.mark.slow
def test_tensor_parallelism_splits_matrices_and_stages_the_blocks(moved):
    stages = moved("mixture", "PP × TP").held
    for held in stages[2:]:
        for name in ("attn.q_proj", "attn.o_proj", "mlp.fc", "mlp.proj"):
            _, own, whole = held["weights"][f"transformer.h.1.{name}.weight"]
            assert own == whole / 2
    blocks = [{name.split(".")[2] for name in held["weights"] if ".h." in name} for held in stages]
    assert blocks == [{"0"}, {"0"}, {"1"}, {"1"}]


@pytest.mark.one_row_per
@pytest.mark.parametrize("layout", ["FSDP2 on 3", "DDP"])
def test_muon_state_is_one_sharded_buffer_per_matrix(moved, layout):
    ranks = moved("Muon", layout).held
    sizes = {name: size for name, (_, _, size) in ranks[0]["weights"].items()}
    matrices = sum(size for name, size in sizes.items() if ".h." in name and "ln_" not in name)
    total = 2 * sum(sizes.values()) - matrices
    states = [rank["optimizer_state"] for rank in ranks]
    assert states == [total] * 2 if layout == "DDP" else sum(states) == total
