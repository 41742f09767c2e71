"""Prove that a refactoring changes no number: digests of small reference runs, to compare before
and after it.

    python tests/run_digests.py --json before.json          # on the commit before
    python tests/run_digests.py --against before.json       # on the commit after: which values
    differ; status 1 if any python tests/run_digests.py --checkout ../other         # the package of
    another checkout, by this file python tests/run_digests.py --only fsdp2 resumed        # some of
    the runs, and those that they start from make digests ARGS='--against before.json'
    # the same in the project's virtual environment

Each run prints its name and a digest: a sha256 over the losses, learning rates, gradient norms and
validation losses of its metrics.jsonl in full precision, and the tensors of its models. Times,
rates and memory are left out. `--verbose` prints the values.

Two things are checked in every checkout: a run that SIGTERM stops and that resumes has the values
of the run that was not stopped, and the runs with a loss rollback and with 8-bit optimizer state
differ from those without.

A digest depends on the machine and on the versions of the libraries: compare on one machine only,
never with a file from elsewhere. If a number changes on purpose, say so in the commit. The whole
set takes two to three minutes on two cores. A run whose extra (deepspeed, torchao) is not installed
is skipped with the reason, and not compared.

The runs use the command line and the files of a run folder, and no module of the package but
`nanogpt_hf.commands`. If a change renames a knob or a key in metrics.jsonl, add the new name to
KNOBS or METRICS below: the tool then works on the commits before and after, and `--checkout`
runs the old one with it.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
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

# Other names of a knob, by the name used below: the first that the checkout's --help lists is set.
# None at the end of the names: the knob is left out of the recipe if the checkout has none of them.
KNOBS: dict[str, tuple[str | None, ...]] = {
    "optim.state": ("optim.state", "optim.moments"),
    "finetune.sample_tokens": ("finetune.sample_tokens", None),
}
# Keys of metrics.jsonl whose values must not change, by the name that facts have. One with / at its
# end is a prefix.
METRICS = {
    "train/loss": ("train/loss",),
    "train/learning_rate": ("train/learning_rate",),
    "train/grad_norm": ("train/grad_norm",),
    "train/clipped_share": ("train/clipped_share",),
    "train/skipped_steps": ("train/skipped_steps",),
    "val/loss": ("val/loss",),
    "val/perplexity": ("val/perplexity",),
    "val/bits_per_byte": ("val/bits_per_byte",),
    "layers/": ("layers/",),
    "samples": ("samples",),
}
# The same for the section `text` of what `evaluate --output` writes.
EVALUATION = {
    "loss": ("loss",),
    "loss_standard_error": ("loss_standard_error",),
    "perplexity": ("perplexity",),
    "bits_per_byte": ("bits_per_byte",),
    "tokens_predicted": ("tokens_predicted",),
    "windows": ("windows",),
    "tokens": ("tokens",),
    "bytes": ("bytes",),
    "tokens_sha256": ("tokens_sha256",),
}

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
    "optim.warmup_steps": 2,
    "eval.every": 5,
    "eval.tokens": 512,
    "eval.patience": None,
    "finetune.sample_tokens": 0,  # of commits that have it
    "tracking.every": 1,
}

# accelerate's config for each way to share a run out over two processes, and what it has to make of
# it on a CPU.
MACHINES = {
    "ddp": ({"distributed_type": "MULTI_GPU", "use_cpu": True}, "MULTI_CPU"),
    "fsdp2": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_reshard_after_forward": True,
                "fsdp_cpu_ram_efficient_loading": False,
                "fsdp_offload_params": False,
                "fsdp_activation_checkpointing": False,
            },
        },
        "FSDP",
    ),
    "zero3": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": "zero3_config.json",
                "zero3_init_flag": False,
            },
        },
        "DEEPSPEED",
    ),
}
ALL_MACHINES = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "main_process_port": 0,
    "use_cpu": False,
}
ZERO_3 = {
    # else small tensors are not sharded
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


class SkippedRun(Exception):  # noqa: N818  (it is no error)
    """The machine lacks what a run needs."""


class RunError(Exception):
    """A run did not end as it should, or did not do what it is there for."""


class Bench:
    """The reference runs of one checkout in one folder.

    Each is done once, when it is first asked for.
    """

    def __init__(self, checkout: Path, folder: Path):
        self.checkout, self.folder = checkout, folder
        self._done: dict[str, Facts | None] = {}
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ACCELERATE_", "FSDP_", "DIGEST_"))
        } | {
            "PYTHONPATH": str(checkout),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HOME": str(folder / "hf_home"),
            "HF_HUB_OFFLINE": "1",
        }
        write_text(
            folder / "text.txt",
            0,
            ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "rats"],
        )
        write_text(
            folder / "other.txt", 1, ["tom", "saw", "a", "rat", "on", "the", "stone", "tower"]
        )
        write_chat(folder / "chat.jsonl")

    @functools.cached_property
    def help(self) -> str:
        return self.command("pretrain", "--help")

    def facts(self, name: str) -> Facts:
        """The facts of the run `name`. Raises SkippedRun or RunError if there are none."""
        if name not in self._done:
            self._done[name] = None  # stays so if the run raises an error
            self._done[name] = RUNS[name](self)
        if (facts := self._done[name]) is None:
            raise RunError(f"it needs the run {name}, which failed")
        return facts

    def recipe(self, name: str, knobs: dict[str, Any]) -> str:
        """Write a recipe of the knobs by the names that the checkout has for them; return its
        path.
        """
        tree: dict[str, dict[str, Any]] = {}
        for knob, value in knobs.items():
            if name_here := knob_name(knob, self.help):
                section, _, key = name_here.partition(".")
                tree.setdefault(section, {})[key] = value
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
        return str(path)

    def command(self, *words: str) -> str:
        """Run `python cli.py` with these words; return what it printed to stdout."""
        return self._run(
            [sys.executable, str(self.checkout / "cli.py"), *words], {"ACCELERATE_USE_CPU": "true"}
        )

    def stopped(self, checkpoint: str, *words: str) -> None:
        """Run a command that gets SIGTERM when it has written `checkpoint`, and has to save and
        stop.
        """
        environment = {"ACCELERATE_USE_CPU": "true", "DIGEST_STOP_AFTER": checkpoint}
        self._run([sys.executable, str(PROCESS), *words], environment, status=STOPPED)

    def launch(self, machine: str, *words: str) -> None:
        """Run a command as two processes by `accelerate launch`."""
        options, kind = MACHINES[machine]
        config = self.folder / f"accelerate_{machine}.json"
        config.write_text(json.dumps(ALL_MACHINES | options), encoding="utf-8")
        launcher = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--num_cpu_threads_per_process=1",
        ]
        self._run(
            [*launcher, f"--config_file={config}", str(PROCESS), *words],
            {"DIGEST_DISTRIBUTED_TYPE": kind},
        )

    def _run(self, words: list[str], environment: dict[str, str], status: int = 0) -> str:
        with (self.folder / "stderr.txt").open("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self._environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
            )
            try:
                printed, _ = process.communicate(timeout=TIME_LIMIT)
            except BaseException as error:
                # not kill: a launcher has to end its processes, for which it takes 30 s at most
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RunError(
                        f"still running after {TIME_LIMIT} s: {' '.join(words[1:])}"
                    ) from None
                raise
            if process.returncode != status:
                errors.seek(0)
                # without what the launcher adds
                trace, _, _ = errors.read().partition("torch/distributed/elastic")
                said = (printed + trace)[-3000:]
                raise RunError(
                    f"exit status {process.returncode} instead of {status}: "
                    f"{' '.join(words[1:])}\n{said}"
                )
        return printed

    def start(self, name: str, changes: dict[str, Any] | None = None) -> tuple[str, ...]:
        """The words that pretrain into the run folder `name` by PRETRAIN with these changes."""
        text = {
            "data.source": str(self.folder / "text.txt"),
            "data.dir": str(self.folder / "data" / "text"),
        }
        knobs = PRETRAIN | text | (changes or {})
        return "pretrain", self.recipe(name, knobs), "--run-dir", str(self.folder / name)

    def start_finetuning(self, name: str, knobs: dict[str, Any]) -> tuple[str, ...]:
        """The words that fine-tune the model of the run `pretrain` on another text."""
        self.facts("pretrain")
        paths = {
            "finetune.model": str(self.folder / "pretrain" / "final"),
            "data.source": str(self.folder / "other.txt"),
            "data.dir": str(self.folder / "data" / "other"),
        }
        return (
            "finetune",
            self.recipe(name, FINETUNE | paths | knobs),
            "--run-dir",
            str(self.folder / name),
        )


# The runs. Each is done in the folder of its name and returns its facts.


def pretrain(bench: Bench) -> Facts:
    """Dropout and accumulation, with layer statistics and samples."""
    bench.command(*bench.start("pretrain"))
    return run_facts(bench.folder / "pretrain")


def resumed(bench: Bench) -> Facts:
    """The same, stopped in the middle, which must not show."""
    words = bench.start("resumed")
    bench.stopped("step_00000008", *words)
    last = read_lines(bench.folder / "resumed" / "metrics.jsonl")[-1]["step"]
    if not 8 <= last < PRETRAIN["train.max_steps"]:
        raise RunError(f"was to stop soon after step 8, stopped after step {last}")
    bench.command(*words, "--resume")
    facts = run_facts(bench.folder / "resumed")
    if changed := differences(bench.facts("pretrain"), facts):
        raise RunError(
            "\n".join(
                ["stopped and resumed, it is another run than pretrain:", *shown(changed, 10)]
            )
        )
    return facts


def adamw_8bit(bench: Bench) -> Facts:
    """8-bit optimizer state."""
    needs("torchao")
    bench.command(*bench.start("adamw_8bit", {"optim.state": "8bit"}))
    return must_differ(
        bench.facts("pretrain"), run_facts(bench.folder / "adamw_8bit"), "no state was in 8 bits"
    )


def ddp(bench: Bench) -> Facts:
    """Two processes."""
    bench.launch("ddp", *bench.start("ddp"))
    return run_facts(bench.folder / "ddp")


def fsdp2(bench: Bench) -> Facts:
    """Two processes, everything sharded."""
    bench.launch("fsdp2", *bench.start("fsdp2"))
    return run_facts(bench.folder / "fsdp2")


def onto_fsdp2(bench: Bench) -> Facts:
    """A run of one process, taken over by two that shard."""
    bench.launch("fsdp2", *continued(bench, "pretrain", "onto_fsdp2"))
    return run_facts(bench.folder / "onto_fsdp2")


def off_fsdp2(bench: Bench) -> Facts:
    """A run of two processes that shard, taken over by one."""
    bench.command(*continued(bench, "fsdp2", "off_fsdp2"))
    return run_facts(bench.folder / "off_fsdp2")


def zero3(bench: Bench) -> Facts:
    """Two processes, everything sharded by DeepSpeed, which keeps gradients from layer
    statistics.
    """
    needs("deepspeed")
    (bench.folder / "zero3_config.json").write_text(json.dumps(ZERO_3), encoding="utf-8")
    bench.launch("zero3", *bench.start("zero3", {"tracking.layers": False}))
    return run_facts(bench.folder / "zero3")


def finetune(bench: Bench) -> Facts:
    """The whole model, on another text."""
    bench.command(*bench.start_finetuning("finetune", {}))
    return run_facts(bench.folder / "finetune")


def rollback(bench: Bench) -> Facts:
    """The same, but back to a checkpoint when the loss is a spike."""
    bench.command(*bench.start_finetuning("rollback", {"train.rollback_ratio": 1.15}))
    return must_differ(
        bench.facts("finetune"), run_facts(bench.folder / "rollback"), "no loss was a spike"
    )


def unfreeze(bench: Bench) -> Facts:
    """Blocks and embeddings frozen, and unfrozen one after another."""
    knobs = {"finetune.freeze_layers": 2, "finetune.unfreeze_every": 6, "finetune.layer_decay": 0.8}
    bench.command(*bench.start_finetuning("unfreeze", knobs))
    return run_facts(bench.folder / "unfreeze")


def lora(bench: Bench) -> Facts:
    """Adapters."""
    bench.command(*bench.start_finetuning("lora", {"lora.rank": 4, "lora.dropout": 0.1}))
    return run_facts(bench.folder / "lora")


def chat(bench: Bench) -> Facts:
    """Conversations, several to a block, loss on the answers only."""
    byte_tokenizer(bench.folder / "bytes")
    options = {
        "data.source": str(bench.folder / "chat.jsonl"),
        "data.format": "chat",
        "data.packing": "packed",
        "data.tokenizer": str(bench.folder / "bytes"),
        "data.dir": str(bench.folder / "data" / "chat"),
        "data.block_size": 128,
        "model.n_positions": 128,
        "model.bias": True,
        "model.activation_function": "gelu_new",
        "train.tokens_per_step": 512,
        "eval.samples": ["red blue"],
    }
    bench.command(*bench.start("chat", options))
    return run_facts(bench.folder / "chat")


def evaluate(bench: Bench) -> Facts:
    """Loss on text, by windows that overlap."""
    bench.facts("pretrain")
    output = bench.folder / "evaluation.json"
    model = str(bench.folder / "pretrain" / "final")
    text = str(bench.folder / "other.txt")
    bench.command(
        "evaluate",
        model,
        "--data",
        text,
        "--block-size",
        "32",
        "--stride",
        "12",
        "--output",
        str(output),
    )
    measured = json.loads(output.read_text(encoding="utf-8"))["text"]
    facts = {fact: value for key, value in measured.items() if (fact := canonical(key, EVALUATION))}
    if missing := EVALUATION.keys() - facts.keys():
        raise RunError(
            f"evaluate --output writes no {', '.join(sorted(missing))}: add the new "
            "names to EVALUATION"
        )
    return facts


def sample(bench: Bench) -> Facts:
    """Two texts at once with a fixed seed."""
    bench.facts("pretrain")
    model = str(bench.folder / "pretrain" / "final")
    drawing = ["--temperature", "0.9", "--top-k", "12", "--top-p", "0.95", "--seed", "7"]
    words = [
        "sample",
        model,
        "--prompt",
        "the cat ",
        "--max-new-tokens",
        "60",
        "--num-samples",
        "2",
        *drawing,
    ]
    # no headings
    lines = [
        line for line in bench.command(*words).splitlines() if line and not line.startswith("---")
    ]
    if sum(line.startswith("the cat ") for line in lines) != 2:
        raise RunError("`sample` did not print two texts that begin with the prompt")
    return {"text": "\n".join(lines)}


RUNS: dict[str, Callable[[Bench], Facts]] = {
    run.__name__: run
    for run in (
        pretrain,
        resumed,
        adamw_8bit,
        ddp,
        fsdp2,
        onto_fsdp2,
        off_fsdp2,
        zero3,
        finetune,
        rollback,
        unfreeze,
        lora,
        chat,
        evaluate,
        sample,
    )
}


def continued(bench: Bench, source: str, name: str) -> tuple[str, ...]:
    """The words that continue a copy of the run `source` from its last checkpoint but one."""
    bench.facts(source)
    shutil.copytree(bench.folder / source, bench.folder / name)
    shutil.rmtree(bench.folder / name / "checkpoints" / f"step_{PRETRAIN['train.max_steps']:08d}")
    shutil.rmtree(bench.folder / name / "final")
    return *bench.start(name), "--resume"


def must_differ(plain: Facts, facts: Facts, what: str) -> Facts:
    """The facts.

    Raises RunError if they equal those of the plain run: then they do not prove what they are for.
    """
    if not differences(plain, facts):
        raise RunError(f"nothing differs from a run without the knob: {what}")
    return facts


def needs(package: str) -> None:
    """Raises SkippedRun if the package is not installed, or no compiler for what it builds for a
    CPU.
    """
    if importlib.util.find_spec(package) is None:
        raise SkippedRun(f"{package} is not installed")
    if shutil.which("g++") is None:
        raise SkippedRun(f"{package} compiles for the CPU, and there is no g++")


# Texts, the same on every machine.


def write_text(path: Path, seed: int, words: list[str]) -> None:
    """Lines of a few words, which are easy to learn, and rarely one of any characters, whose
    loss is a spike.
    """
    draw = random.Random(seed)
    characters = string.ascii_letters + string.digits + string.punctuation
    lines = [
        " ".join(draw.choices(words, k=8))
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


def knob_name(knob: str, help_text: str) -> str | None:
    """The knob's name in a checkout, from the help of its `cli.py pretrain`; None if it has none
    and needs none.
    """
    names = KNOBS.get(knob, (knob,))
    for name in names:
        if name is None or f"--{name}" in help_text.split():
            return name
    raise RunError(
        f"`cli.py pretrain --help` does not list {' or '.join(map(str, names))}: add "
        "the new name to KNOBS"
    )


def canonical(key: str, table: dict[str, tuple[str, ...]]) -> str | None:
    """The fact that a key stands for; None if its value is no fact."""
    for fact, names in table.items():
        for name in names:
            if key == name or (name.endswith("/") and key.startswith(name)):
                return fact + key.removeprefix(name)
    return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics_facts(lines: Iterable[dict[str, Any]]) -> Facts:
    """What the lines of a metrics.jsonl say of each step.

    Values are lists: a step may have several lines.
    """
    facts: Facts = {}
    for line in lines:
        known = {fact: value for key, value in line.items() if (fact := canonical(key, METRICS))}
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
    """All facts of a run folder. Raises RunError if a kind of fact is missing."""
    facts = metrics_facts(read_lines(folder / "metrics.jsonl"))
    for wanted in ("train/loss", "train/learning_rate", "train/grad_norm", "val/loss"):
        if not any(fact.endswith(f": {wanted}") for fact in facts):
            raise RunError(
                f"{folder.name}/metrics.jsonl has no {wanted}: add its new name to METRICS"
            )
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


def shown(changed: list[tuple[str, Any, Any]], limit: int | None) -> list[str]:
    """A line for each difference, `limit` at most."""
    lines = [f"  {fact}: {before} -> {after}" for fact, before, after in changed[:limit]]
    return lines + [f"  and {len(changed) - len(lines)} more"] * (len(lines) < len(changed))


def environment() -> dict[str, str]:
    """What digests depend on besides the code."""
    packages = (
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "numpy",
        "peft",
        "torchao",
        "deepspeed",
    )
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    cpu = platform.processor()
    with contextlib.suppress(OSError):  # only Linux has the file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu
        )
    return {
        "machine": platform.platform(),
        "cpu": cpu,
        "python": platform.python_version(),
        **versions,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=f"Runs: {', '.join(RUNS)}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkout",
        metavar="DIR",
        type=Path,
        default=Path(__file__).parents[1],
        help="default: this",
    )
    parser.add_argument(
        "--only",
        metavar="RUN",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        help="some of the runs",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write digests and values")
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        help="compare with what --json wrote; status 1 if not equal",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print all values and all differences"
    )
    parsed = parser.parse_args(arguments)
    parsed.checkout = parsed.checkout.resolve()
    if not (parsed.checkout / "cli.py").is_file():
        parser.error(f"--checkout: {parsed.checkout} holds no cli.py")
    if parsed.json and not parsed.json.absolute().parent.is_dir():
        parser.error(f"--json: {parsed.json} is in no folder")
    parsed.before = None
    if parsed.against:
        try:
            parsed.before = json.loads(parsed.against.read_text(encoding="utf-8"))
            parsed.before["runs"], parsed.before["environment"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--against: {parsed.against} is not what --json writes: {error!r}")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(arguments)
    results = {"environment": environment(), "runs": {}}
    ok = True
    if parsed.before and (
        changed := differences(parsed.before["environment"], results["environment"])
    ):
        print(
            "\n".join(
                [
                    "warning: other machine or versions, where digests may differ:",
                    *shown(changed, None),
                ]
            )
        )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="digests_") as folder:
        bench = Bench(parsed.checkout, Path(folder).resolve())
        for name in RUNS:
            if name not in parsed.only:
                continue
            try:
                facts = bench.facts(name)
            except SkippedRun as skipped:
                print(f"{name:<12} skipped: {skipped}", flush=True)
                continue
            except Exception as error:
                reason = error if isinstance(error, RunError) else repr(error)
                print(f"{name:<12} FAILED: {reason}", flush=True)
                ok = False
                continue
            results["runs"][name] = {"digest": digest(facts), "facts": facts}
            line, changed = f"{name:<12} {digest(facts)}", []
            if parsed.before and name not in parsed.before["runs"]:
                line += "  not compared: the file has no such run"
            elif parsed.before:
                changed = differences(parsed.before["runs"][name]["facts"], facts)
                line += f"  {len(changed)} of {len(facts)} values differ" if changed else "  equal"
            print("\n".join([line, *shown(changed, None if parsed.verbose else 10)]), flush=True)
            if parsed.verbose:
                print("\n".join(f"  {fact}: {value}" for fact, value in facts.items()))
            ok = ok and not changed
    print(f"{time.monotonic() - started:.0f} s")
    if parsed.json:
        parsed.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
