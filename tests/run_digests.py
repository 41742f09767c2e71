"""Prove that a refactoring changes no number: digests of small reference runs, to compare before
and after it.

    python tests/run_digests.py --json before.json          # on the commit before
    python tests/run_digests.py --against before.json       # after: which values differ; status 1
    python tests/run_digests.py --only fsdp2 resumed        # some, and those that they start from
    make digests ARGS='--against before.json'               # in the project's environment

Each run prints its name and a digest: a sha256 over the losses, learning rates, gradient norms and
validation losses of its metrics.jsonl in full precision, and the tensors of its models. Times,
rates and memory are left out.

A digest depends on the machine and on the versions of the libraries: compare on one machine only,
never with a file from elsewhere. If a number changes on purpose, say so in the commit. The whole
set takes two to three minutes on two cores. A run whose extra (deepspeed, torchao) is not installed
is left out.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Fact -> value. A fact names where the value was found, such as `step 4: train/loss`.
Facts = dict[str, Any]

# Keys of metrics.jsonl whose values must not change, and prefixes of such keys.
METRICS = ("train/loss", "train/learning_rate", "train/grad_norm", "train/clipped_share")
METRICS += ("train/skipped_steps", "val/loss", "val/perplexity", "val/bits_per_byte", "samples")
PREFIX = "layers/"
# The same for the section `text` of what `evaluate --output` writes.
EVALUATION = ("loss", "loss_standard_error", "perplexity", "bits_per_byte", "tokens_predicted")
EVALUATION += ("windows", "tokens", "bytes", "tokens_sha256")

ROOT = Path(__file__).parents[1]
PROCESS = Path(__file__).with_name("digest_process.py")
TIME_LIMIT = 300  # seconds for one command; each takes about 10 on an idle machine
STOPPED = 75  # exit status of a run that a signal stopped after it saved

PRETRAIN = {
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 32,
    "model.n_positions": 32,
    "model.dropout": 0.1,
    "data.tokenizer": "char",
    "data.validation_fraction": 0.1,
    "data.block_size": 32,
    "optim.learning_rate": 1e-2,
    "optim.min_learning_rate": 1e-3,
    "optim.warmup_steps": 2,
    "train.max_steps": 24,
    "train.tokens_per_step": 256,  # 2 x 32 x 4 micro-batches, or x 2 processes x 2
    "train.micro_batch_size": 2,
    "eval.every": 5,
    "eval.tokens": 1024,
    "eval.samples": ["the cat "],
    "eval.sample_tokens": 20,
    "checkpoint.every": 4,
    "tracking.every": 1,
    "tracking.layers": True,
}
# Fine-tuning takes the sizes from the model that it starts from.
FINETUNE = {
    name: value
    for name, value in PRETRAIN.items()
    if name.partition(".")[0] in ("train", "checkpoint")
} | {
    "model.dropout": 0.1,
    "data.validation_fraction": 0.1,
    "data.block_size": 32,
    "optim.learning_rate": 1e-3,
    "optim.min_learning_rate": 6e-6,
    "optim.warmup_steps": 2,
    "eval.every": 5,
    "eval.tokens": 512,
    "eval.patience": None,
    "tracking.every": 1,
}

# Ways to share a run out over two processes: the shipped accelerate config, and what accelerate has
# to make of it on a CPU.
MACHINES = {
    "ddp": ("cpu_ddp", "MULTI_CPU"),
    "fsdp2": ("fsdp2", "FSDP"),
    "zero3": ("deepspeed_zero3", "DEEPSPEED"),
}


CHAT = {
    "data.format": "chat",
    "data.packing": "packed",
    "data.block_size": 128,
    "model.n_positions": 128,
    "model.bias": True,
    "model.activation_function": "gelu_new",
    "train.tokens_per_step": 512,
    "eval.samples": ["red blue"],
}


class RunError(Exception):
    """A run did not end as it should."""


class Bench:
    """The reference runs in one folder. Each is done once, when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._done: dict[str, Facts] = {}
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ACCELERATE_", "FSDP_", "DIGEST_"))
        } | {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HOME": str(folder / "hf_home"),
            "HF_HUB_OFFLINE": "1",
        }
        write_text(folder / "text.txt", 0, "the cat sat on a mat and saw two rats")
        write_text(folder / "other.txt", 1, "tom saw a rat on the stone tower")
        write_chat(folder / "chat.jsonl")

    def facts(self, name: str) -> Facts:
        """The facts of the run `name`. Raises RunError if it failed."""
        if name not in self._done:
            self._done[name] = RUNS[name](self, name)
        return self._done[name]

    def run(
        self, words: list[object], environment: dict[str, str] | None = None, status: int = 0
    ) -> str:
        """Run Python with these words; return what it printed to stdout."""
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=self.folder,
            env=self._environment | (environment or {"ACCELERATE_USE_CPU": "true"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=TIME_LIMIT,
        )
        if done.returncode != status:
            ended = f"exit status {done.returncode} instead of {status}: {words}"
            raise RunError(f"{ended}\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def command(self, *words: object) -> str:
        """Run `python cli.py` with these words; return what it printed to stdout."""
        return self.run([ROOT / "cli.py", *words])

    def launch(self, machine: str, *words: object) -> None:
        """Run a command as two processes by `accelerate launch`."""
        config, kind = MACHINES[machine]
        launcher = ["-m", "accelerate.commands.launch", "--num_cpu_threads_per_process=1"]
        launcher += [f"--config_file={ROOT}/accelerate_configs/{config}.yaml", "--num_processes=2"]
        launcher += ["--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"]
        self.run([*launcher, PROCESS, *words], {"DIGEST_DISTRIBUTED_TYPE": kind})

    def start(self, command: str, name: str, changes: dict[str, Any]) -> list[object]:
        """The words that pretrain into the run folder `name`, or fine-tune the model of the run
        `pretrain` on another text.
        """
        text = "text"
        knobs = PRETRAIN
        if command == "finetune":
            self.facts("pretrain")
            text = "other"
            knobs = FINETUNE | {"finetune.model": str(self.folder / "pretrain" / "final")}
        if changes is CHAT:
            text = "chat"
            byte_tokenizer(self.folder / "bytes")
            changes = CHAT | {"data.tokenizer": str(self.folder / "bytes")}
        ending = "jsonl" if text == "chat" else "txt"
        paths = {
            "data.source": str(self.folder / f"{text}.{ending}"),
            "data.dir": str(self.folder / "data" / text),
        }
        tree: dict[str, dict[str, Any]] = {}
        for knob, value in (knobs | paths | changes).items():
            section, _, key = knob.partition(".")
            tree.setdefault(section, {})[key] = value
        recipe = self.folder / f"{name}.yaml"
        recipe.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
        return [command, recipe, "--run-dir", self.folder / name]


Reference = Callable[[Bench, str], Facts]


def trained(
    command: str = "pretrain",
    changes: dict[str, Any] | None = None,
    machine: str = "",
) -> Reference:
    """A run from its first step to its last."""

    def run(bench: Bench, name: str) -> Facts:
        words = bench.start(command, name, {} if changes is None else changes)
        bench.launch(machine, *words) if machine else bench.command(*words)
        return run_facts(bench.folder / name)

    return run


def resumed(bench: Bench, name: str) -> Facts:
    """Stopped in the middle, which must not show."""
    words = bench.start("pretrain", name, {})
    stop = {"ACCELERATE_USE_CPU": "true", "DIGEST_STOP_AFTER": "step_00000008"}
    bench.run([PROCESS, *words], stop, status=STOPPED)
    bench.command(*words, "--resume")
    return run_facts(bench.folder / name)


def continued(source: str, machine: str = "") -> Reference:
    """A copy of the run `source`, continued from its last checkpoint but one by another machine."""

    def run(bench: Bench, name: str) -> Facts:
        bench.facts(source)
        folder = Path(shutil.copytree(bench.folder / source, bench.folder / name))
        shutil.rmtree(folder / "checkpoints" / f"step_{PRETRAIN['train.max_steps']:08d}")
        shutil.rmtree(folder / "final")
        words = [*bench.start("pretrain", name, {}), "--resume"]
        bench.launch(machine, *words) if machine else bench.command(*words)
        return run_facts(folder)

    return run


def evaluate(bench: Bench, name: str) -> Facts:
    """Loss on text, by windows that overlap."""
    bench.facts("pretrain")
    output = bench.folder / "evaluation.json"
    model = bench.folder / "pretrain" / "final"
    options = ["--block-size", 32, "--stride", 12, "--output", output]
    bench.command("evaluate", model, "--data", bench.folder / "other.txt", *options)
    measured = json.loads(output.read_text(encoding="utf-8"))["text"]
    return {key: measured[key] for key in EVALUATION}


def sample(bench: Bench, name: str) -> Facts:
    """Two texts at once with a fixed seed."""
    bench.facts("pretrain")
    words = "--max-new-tokens 60 --num-samples 2 --temperature 0.9 --top-k 12 --top-p 0.95 --seed 7"
    prompt = ["--prompt", "the cat "]
    printed = bench.command(
        "sample", bench.folder / "pretrain" / "final", *prompt, *words.split()
    ).splitlines()
    # no headings
    return {"text": "\n".join(line for line in printed if line and not line.startswith("---"))}


# Each is done in the folder of its name and returns its facts.
UNFREEZE = {"finetune.freeze_layers": 2, "finetune.unfreeze_every": 6, "finetune.layer_decay": 0.8}
RUNS: dict[str, Reference] = {
    "pretrain": trained(),  # dropout and accumulation, with layer statistics and samples
    "resumed": resumed,
    "adamw_8bit": trained(changes={"optim.state": "8bit"}),
    "ddp": trained(machine="ddp"),
    "fsdp2": trained(machine="fsdp2"),
    "onto_fsdp2": continued("pretrain", "fsdp2"),
    "off_fsdp2": continued("fsdp2"),
    # DeepSpeed keeps gradients from layer statistics
    "zero3": trained(changes={"tracking.layers": False}, machine="zero3"),
    "finetune": trained("finetune"),
    "rollback": trained("finetune", {"train.rollback_ratio": 1.15}),
    "unfreeze": trained("finetune", UNFREEZE),
    "lora": trained(
        "finetune", {"lora.rank": 4, "lora.dropout": 0.1, "optim.min_learning_rate": 6e-5}
    ),
    "chat": trained(changes=CHAT),  # several conversations to a block, loss on the answers only
    "evaluate": evaluate,
    "sample": sample,
}


if importlib.util.find_spec("torchao") is None:
    del RUNS["adamw_8bit"]
if importlib.util.find_spec("deepspeed") is None:
    del RUNS["zero3"]


# Texts, the same on every machine.


def write_text(path: Path, seed: int, words: str) -> None:
    """Lines of a few words, which are easy to learn, and rarely one of any characters, whose
    loss is a spike.
    """
    draw = random.Random(seed)
    characters = string.ascii_letters + string.digits + string.punctuation
    lines = [
        " ".join(draw.choices(words.split(), k=8))
        if number % 60
        else "".join(draw.choices(characters, k=96))
        for number in range(600)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_chat(path: Path) -> None:
    """Conversations of one to three exchanges and very different lengths; some have a system
    message.
    """
    draw = random.Random(2)
    words = ["red", "green", "blue", "grey", "pink"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(80):
            messages = [{"role": "system", "content": "Say it again."}] if number % 4 == 0 else []
            for _ in range(draw.randint(1, 3)):
                question = " ".join(draw.choices(words, k=draw.randint(1, 4)))
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": question.upper()})
            file.write(json.dumps({"messages": messages}) + "\n")


def byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer of the 256 bytes and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(
        models.BPE({character: number for number, character in enumerate(alphabet)}, merges=[])
    )
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|endoftext|>").save_pretrained(
        folder
    )


# Facts


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_facts(lines: Iterable[dict[str, Any]]) -> Facts:
    """What the lines of a metrics.jsonl say of each step.

    Values are lists: a step may have several lines.
    """
    facts: Facts = {}
    for line in lines:
        known = {k: v for k, v in line.items() if k in METRICS or k.startswith(PREFIX)}
        if known:
            for fact, value in {"tokens": line["tokens"], **known}.items():
                facts.setdefault(f"step {line['step']}: {fact}", []).append(value)
    return facts


def model_facts(folder: Path) -> Facts:
    """The sha256 of every tensor in the safetensors files of a model folder, with its dtype and
    shape.
    """
    from safetensors import deserialize

    facts = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(deserialize(path.read_bytes()), key=lambda pair: pair[0]):
            sha256 = hashlib.sha256(tensor["data"]).hexdigest()
            facts[f"{folder.name}/ {name}"] = f"{tensor['dtype']} {list(tensor['shape'])} {sha256}"
    if not facts:
        raise RunError(f"{folder} holds no tensors")
    return facts


def run_facts(folder: Path) -> Facts:
    """All facts of a run folder."""
    facts = metrics_facts(read_lines(folder / "metrics.jsonl"))
    return facts | model_facts(folder / "best") | model_facts(folder / "final")


def digest(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


ABSENT = "(absent)"


def differences(before: Facts, after: Facts) -> list[tuple[str, Any, Any]]:
    """(fact, value before, value after) of what is not the same to the last bit, in the order of
    the facts.
    """
    return [
        (fact, before.get(fact, ABSENT), after.get(fact, ABSENT))
        for fact in [*before, *(fact for fact in after if fact not in before)]
        if json.dumps(before.get(fact, ABSENT)) != json.dumps(after.get(fact, ABSENT))
    ]


def shown(changed: list[tuple[str, Any, Any]]) -> list[str]:
    """A line for each difference, 10 at most."""
    lines = [f"  {fact}: {before} -> {after}" for fact, before, after in changed[:10]]
    return lines + [f"  and {len(changed) - len(lines)} more"] * (len(lines) < len(changed))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog=f"Runs: {', '.join(RUNS)}."
    )
    parser.add_argument("--only", metavar="RUN", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, help="write digests and values")
    parser.add_argument("--against", type=Path, help="compare with what --json wrote")
    parsed = parser.parse_args(arguments)
    results = {"runs": {}}
    before = None
    ok = True
    if parsed.against:
        before = json.loads(parsed.against.read_text(encoding="utf-8"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="digests_") as folder:
        bench = Bench(Path(folder).resolve())
        for name in (name for name in RUNS if name in parsed.only):
            try:
                facts = bench.facts(name)
            except Exception as error:
                reason = error if isinstance(error, RunError) else repr(error)
                print(f"{name:<12} FAILED: {reason}", flush=True)
                ok = False
                continue
            results["runs"][name] = {"digest": digest(facts), "facts": facts}
            line = f"{name:<12} {digest(facts)}"
            changed = []
            if before and name in before["runs"]:
                changed = differences(before["runs"][name]["facts"], facts)
                line += f"  {len(changed)} of {len(facts)} values differ" if changed else "  equal"
            print(line, *shown(changed), sep="\n", flush=True)
            ok = ok and not changed
    print(f"{time.monotonic() - started:.0f} s")
    if parsed.json:
        parsed.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
