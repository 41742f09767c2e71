"""A run of nanoGPT that continues here: its next losses equal nanoGPT's own, from weights, AdamW's
state, step and options of a ckpt.pt; other files are refused.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from arguments import argv
from assertions import column, file_contents
from nanogpt_files import CHARACTERS, make_meta, make_state, write_bins
from nanogpt_hf.commands import main
from nanogpt_hf.export.nanogpt import import_bins
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import read_recipe
from nanogpt_hf.training.loop import train
from nanogpt_hf.training.start import prepare_run

LAYERS = 2
HEADS = 2
WIDTH = 16
BLOCK = 12
OPTIONS = {
    "block_size": BLOCK,
    "dropout": 0.0,
    "batch_size": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.02,
    "min_lr": 0.002,
    "warmup_iters": 4,
    "lr_decay_iters": 16,
    "decay_lr": True,
    "max_iters": 20,
    "grad_clip": 0.5,
    # nanoGPT's resume takes these from the optimizer's state, and not from here.
    "weight_decay": 0.7,
    "beta1": 0.1,
    "beta2": 0.1,
    "eval_interval": 4,
    "eval_iters": 2,
    "log_interval": 1,
}


class Bare:
    """nanoGPT's training in a few lines: GPT-2 with tied embeddings, AdamW, cosine, clipping."""

    def __init__(self, options: dict, *, bias: bool, rows: int = len(CHARACTERS)):
        self.options = options
        sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "dropout": 0.0}
        self.arguments = sizes | {"block_size": BLOCK, "bias": bias, "vocab_size": rows}
        state = make_state(**self.arguments)
        state.pop("lm_head.weight")
        self.weights = {name: (0.1 * weight).requires_grad_() for name, weight in state.items()}
        decayed = [p for p in self.weights.values() if p.dim() > 1]
        others = [p for p in self.weights.values() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
        self.step = 0
        # Tokens that have a probability.
        self.known = rows

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gain = self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        return F.layer_norm(x, (WIDTH,), gain, bias)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        tokens = self.weights["transformer.wte.weight"]
        x = tokens[ids] + self.weights["transformer.wpe.weight"][:length]
        for block in (f"transformer.h.{i}" for i in range(LAYERS)):
            mixed = self.linear(f"{block}.attn.c_attn", self.norm(f"{block}.ln_1", x))
            query, key, value = mixed.view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            joined = heads.transpose(1, 2).reshape(rows, length, WIDTH)
            x = x + self.linear(f"{block}.attn.c_proj", joined)
            inner = F.gelu(self.linear(f"{block}.mlp.c_fc", self.norm(f"{block}.ln_2", x)))
            x = x + self.linear(f"{block}.mlp.c_proj", inner)
        logits = self.norm("transformer.ln_f", x) @ tokens[: self.known].T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def learning_rate(self) -> float:
        o = self.options
        if not o["decay_lr"]:
            return o["learning_rate"]
        if self.step < o["warmup_iters"]:
            return o["learning_rate"] * (self.step + 1) / (o["warmup_iters"] + 1)
        done = (self.step - o["warmup_iters"]) / (o["lr_decay_iters"] - o["warmup_iters"])
        cosine = 0.5 * (1 + math.cos(math.pi * min(1, done)))
        return o["min_lr"] + cosine * (o["learning_rate"] - o["min_lr"])

    def update(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        losses = []
        for ids, targets in batches:
            losses.append(self.loss(ids, targets))
            (losses[-1] / len(batches)).backward()
        if self.options["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), self.options["grad_clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return sum(loss.item() for loss in losses) / len(losses)

    def content(self, prefix: str = "") -> dict:
        """What nanoGPT saves."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
        return {
            "model": {prefix + name: weight for name, weight in weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "model_args": self.arguments,
            "iter_num": self.step,
            "best_val_loss": torch.tensor(1.5),
            "config": self.options | {"init_from": "scratch", "device": "cpu", "compile": False},
        }


def draw(count: int, length: int = BLOCK, vocabulary: int = len(CHARACTERS)):
    draws = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(vocabulary, (3, length + 1), generator=draws)
        yield ids[:, :-1], ids[:, 1:]


def trained(steps: int = 8, *, bias: bool = False, **options) -> Bare:
    """A run of nanoGPT that has taken some steps."""
    bare = Bare(OPTIONS | options, bias=bias)
    for batch in draw(steps):
        bare.update([batch])
    return bare


@pytest.fixture
def data(tmp_path) -> Path:
    """Prepared data that was imported from nanoGPT's files."""
    ids = np.random.default_rng(2).integers(len(CHARACTERS), size=900)
    source = write_bins(tmp_path / "letters", ids[:700], ids[700:])
    make_meta(source / "meta.pkl", CHARACTERS)
    (tmp_path / "data").mkdir()
    import_bins(source, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def imported(tmp_path, data, capsys):
    """Import a checkpoint by the command; return its run folder and the line after `next:`."""

    def imported(content: dict, *options: str) -> tuple[Path, str]:
        torch.save(content, tmp_path / "ckpt.pt")
        run = tmp_path / "run"
        words = argv("import-nanogpt {} {} --data {}", tmp_path / "ckpt.pt", run, data)
        assert main([*words, *options]) == 0
        return run, capsys.readouterr().out.splitlines()[-1].removeprefix("next: nanogpt-hf ")

    return imported


CASES = {
    "plain": ({}, {}),
    "biases, compiled": ({"bias": True}, {"prefix": "_orig_mod."}),
    "constant rate, no clipping": ({"decay_lr": False, "grad_clip": 0.0, "min_lr": 0.1}, {}),
    "the decay is longer than the run": ({"lr_decay_iters": 500, "warmup_iters": 30}, {}),
}


@pytest.mark.one_row_per
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_nanogpts_own_resume(case, imported, forget_accelerate):
    """On the same batches, from warm-up through the decay to its end."""
    options, saving = CASES[case]
    bare = trained(8, **options)
    folder, command = imported(bare.content(**saving))
    assert command == f"resume {folder}"
    forget_accelerate()
    run = prepare_run(read_recipe(RunFolder(folder)), folder, resume=True)
    assert run.state.step == 8
    batches = {
        step: [
            (batch["input_ids"], batch["shift_labels"]) for batch in run.batches.micro_batches(step)
        ]
        for step in range(8, 20)
    }
    assert {len(of_step) for of_step in batches.values()} == {2}
    train(run)
    losses = column(RunFolder(folder), "train/loss")
    expected = {step + 1: bare.update(of_step) for step, of_step in batches.items()}
    assert losses == pytest.approx(expected, abs=1e-5)
    # A wrong rate or state would show: the losses of these steps differ by far more than that.
    assert max(expected.values()) - min(expected.values()) > 0.01


def test_padding_rows_of_gpt2s_vocabulary_take_no_part_in_the_loss(
    tmp_path, capsys, forget_accelerate
):
    """nanoGPT gives them a probability. Without it the losses are equal."""
    ids = np.random.default_rng(2).integers(50257, size=900)
    source = write_bins(tmp_path / "words", ids[:700], ids[700:])
    (tmp_path / "data").mkdir()
    import_bins(source, tmp_path / "data")
    bare = Bare(OPTIONS, bias=False, rows=50304)
    for batch in draw(2, vocabulary=50257):
        bare.update([batch])
    torch.save(bare.content(), tmp_path / "ckpt.pt")
    folder = tmp_path / "run"
    words = argv("import-nanogpt {} {} --data {}", tmp_path / "ckpt.pt", folder, tmp_path / "data")
    assert main(words) == 0
    forget_accelerate()
    config = read_recipe(RunFolder(folder), [("train.max_steps", "5")])
    run = prepare_run(config, folder, resume=True)
    names = ("input_ids", "shift_labels")
    batches = [
        [[b[name] for name in names] for b in run.batches.micro_batches(2 + i)] for i in range(3)
    ]
    train(run)
    bare.known = 50257
    expected = [bare.update(of_step) for of_step in batches]
    assert list(column(RunFolder(folder), "train/loss").values()) == pytest.approx(
        expected, abs=1e-5
    )


def test_finished_run_continues_with_more_steps(imported, capsys):
    """After the decay nanoGPT keeps its lowest rate, however many steps are added."""
    folder, command = imported(trained(20).content())
    assert command == f"resume {folder} --train.max_steps 40"
    assert (folder / "best" / "model.safetensors").is_file()
    assert main(command.split()) == 0
    run = RunFolder(folder)
    assert set(column(run, "train/learning_rate").values()) == {0.002}
    assert [*column(run, "val/loss")] == [20, 24, 28, 32, 36, 40]
    capsys.readouterr()
    status = main(argv("verify {} --steps 36:40", folder))
    assert status == 0, capsys.readouterr()


def change(path: str, value: object = None):
    """Set a field of a checkpoint, or delete it."""

    def change(content: dict) -> None:
        *parents, last = path.split("/")
        for name in parents:
            content = content[int(name) if name.isdigit() else name]
        last = int(last) if last.isdigit() else last
        if value is None:
            del content[last]
        else:
            content[last] = value

    return change


def as_before_june_2023(content: dict) -> None:
    """The embeddings do not decay."""
    decayed, others = content["optimizer"]["param_groups"]
    others["params"] += decayed["params"][:2]
    del decayed["params"][:2]


REFUSED = {
    "no options": (change("config"), "it has no 'config'"),
    "no option": (change("config/min_lr"), "it has no 'min_lr'"),
    "an option of another type": (change("config/batch_size", "many"), "batch_size"),
    "an option that no run has": (change("config/log_interval", -3), "tracking.every: must be"),
    "a conflict": (change("config/warmup_iters", 17), "17 is more than optim.decay_steps 16"),
    "no step": (change("iter_num"), "it has no 'iter_num'"),
    "a negative step": (change("iter_num", -1), "its step is -1"),
    "no optimizer": (change("optimizer"), "it has no 'optimizer'"),
    "no state": (change("optimizer/state/3"), "has no state of transformer.h.0.attn.c_proj.weight"),
    "half a state": (change("optimizer/state/3/exp_avg"), "it has no 'exp_avg'"),
    "a state of another shape": (
        change("optimizer/state/3/exp_avg", torch.zeros(2)),
        "exp_avg of transformer.h.0.attn.c_proj.weight has another shape",
    ),
    "a state that is not finite": (
        change("optimizer/state/3/exp_avg", torch.full((WIDTH, WIDTH), math.inf)),
        "transformer.h.0.attn.o_proj.weight.exp_avg is not finite",
    ),
    "unequal numbers of updates": (change("optimizer/state/3/step", 2.0), "[2.0, 8.0] times"),
    "another optimizer": (change("optimizer/param_groups/0/amsgrad", True), "has amsgrad True"),
    "groups of older versions": (as_before_june_2023, "older than June 2023"),
    "an untied head": (
        change("model/lm_head.weight", torch.ones(len(CHARACTERS), WIDTH)),
        "it has a head of its own",
    ),
    "another vocabulary": (change("model_args/vocab_size", 11), "has 11 tokens, the data in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_checkpoints_are_refused(case, tmp_path, data, refused):
    change, message = REFUSED[case]
    content = trained().content()
    change(content)
    torch.save(content, tmp_path / "ckpt.pt")
    before = file_contents(tmp_path)
    line = refused("import-nanogpt", "ckpt.pt", "run", "--data", "data")
    assert "ckpt.pt" in line
    assert message in line
    assert file_contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ckpt.pt run --data none", "--data none: holds no prepared data; `prepare` writes it"),
        ("ckpt.pt run --data letters", "letters data/letters`, and give --data data/letters"),
        ("letters run --data data", "--data: is for a ckpt.pt, and letters is a folder"),
        ("ckpt.pt run --data data --meta letters/meta.pkl", "--meta: the prepared data"),
        ("ckpt.pt data/run --data data", "one is inside the other"),
        ("ckpt.pt data --data data", "data: exists already"),
    ],
)
def test_mistakes_of_the_command_are_refused(words, message, tmp_path, data, refused):
    torch.save(trained(1).content(), tmp_path / "ckpt.pt")
    before = file_contents(tmp_path)
    assert message in refused("import-nanogpt", *words.split())
    assert file_contents(tmp_path) == before
