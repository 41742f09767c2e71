"""Fixtures of several test files: offline libraries, the shared folder, tiny texts, recipes and
models, a fake Hub.
"""

import contextlib
import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import cast
from unittest import mock

# Before any Hugging Face library is imported: no test waits for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests compare with what CPUs compute: they and the processes that they start see no GPU. Tests of
# a GPU, in tests/gpu/, run with DEVICE=cuda.
if os.environ.get("DEVICE", "cpu") == "cpu":
    for name in ("CUDA", "HIP", "ROCR"):
        os.environ[f"{name}_VISIBLE_DEVICES"] = ""
# Tiny models are faster on one thread, also on a busy machine. other_machines.py sets other
# numbers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import yaml

import browser as chromium
import fake_hub
from arguments import argv

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
# A job in the background ignores SIGINT, one under nohup SIGHUP, and so would the programs that
# tests start.
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

pytest.register_assert_rewrite("assertions")


def pytest_configure() -> None:
    """Remove the variables of a job that starts the tests, as on a cluster, or of a user who has an
    accelerate config.
    """
    launched = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    launched |= {"MASTER_ADDR", "MASTER_PORT"}
    for name in [*os.environ]:
        if name in launched or name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[name]


def leave_one_row_of_each(items: list[pytest.Item]) -> None:
    """Mark rows of tables slow, but for the first of each kind: see `one_row_per` in
    pyproject.toml.
    """
    known: set[tuple[str, str, str]] = set()
    for item in items:
        mark = item.get_closest_marker("one_row_per")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        row = cast(pytest.Function, item).callspec.params
        kinds = {name: row[name] for name in mark.args}
        kinds |= {name: kind_of(row[name]) for name, kind_of in mark.kwargs.items()}
        found = {(test, name, repr(kind)) for name, kind in kinds.items()} or {(test, "", "")}
        if found <= known:
            item.add_marker("slow")
        known |= found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without searches for garbage: what imports and tables of tests make stays until the
    end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with long tests first, so that no process waits at the end for the other's last
    file. What is exhaustive is slow, too, and so are the rows that `one_row_per` leaves out.
    """
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    leave_one_row_of_each(items)
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def bfloat16_instructions():
    """Runs in bf16 stay in bf16 on every CPU."""
    with mock.patch("nanogpt_hf.cpu.multiplies_bfloat16", return_value=True):
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of texts and checkpoints beside the repository, on machines that have it."""
    if not SHARED.is_dir():
        pytest.skip("the shared folder with text and checkpoints is not beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 20 thousand characters with some structure to learn, the same in every session."""
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "rats"]
    path = tmp_path_factory.mktemp("text") / "input.txt"
    lines = (" ".join(draw.choices(words, k=8)).capitalize() + ".\n" for _ in range(600))
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    """60 conversations of one to three exchanges, of very different lengths, the same in every
    session.
    """
    draw = random.Random(1)
    words = ["red", "green", "blue", "grey", "pink"]
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(60):
            messages = [{"role": "system", "content": "Say it again."}] if number % 4 == 0 else []
            for _ in range(draw.randint(1, 3)):
                question = " ".join(draw.choices(words, k=draw.randint(1, 5)))
                messages += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": question.upper()},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Path:
    """The folder of a GPT-2 tokenizer without merges: 256 bytes and the end of text, so that
    models stay tiny.
    """
    from transformers import GPT2Tokenizer

    from nanogpt_hf.data.bpe import printable_bytes

    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {
        token: number for number, token in enumerate([*printable_bytes(), "<|endoftext|>"])
    }
    GPT2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    return folder


RECIPE = """
model: {n_layer: 2, n_head: 2, n_embd: 16, n_positions: 16}
data: {tokenizer: char, validation_fraction: 0.1, block_size: 16}
optim: {learning_rate: 0.01, min_learning_rate: 0.001, warmup_steps: 2}
train: {max_steps: 6, tokens_per_step: 128, micro_batch_size: 4}
eval: {every: 3, tokens: 512}
checkpoint: {every: 2, keep: 2}
tracking: {every: 1}
"""


@pytest.fixture(scope="session")
def save_chat_model(byte_tokenizer):
    """Save a GPT of random weights with a chat template, changed by `change`."""
    import torch
    from transformers import AutoTokenizer

    from nanogpt_hf.data.own_template import chat_template
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM

    def save(folder: Path, change: Callable = lambda model, tokenizer: None, **options) -> None:
        tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
        tokenizer.chat_template = chat_template(tokenizer)
        torch.manual_seed(0)
        options = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2} | options
        end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = GPTForCausalLM(GPTConfig(**options, **end, vocab_size=len(tokenizer)))
        with torch.no_grad():
            change(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return save


@pytest.fixture(scope="session")
def make_recipe(text_file):
    """Write a recipe of a tiny model on the tiny text, with overrides such as
    train__max_steps=3; return its path.
    """

    from nanogpt_hf.config.schedules import ENDLESS

    def make(path: Path, **overrides) -> Path:
        tree = yaml.safe_load(RECIPE)
        tree["data"] |= {"source": str(text_file), "dir": str(path.parent / "data")}
        for key, value in overrides.items():
            section, knob = key.split("__")
            tree.setdefault(section, {})[knob] = value
        # With some overrides nothing reads a knob of RECIPE, which would be refused.
        if overrides.get("optim__schedule") in ENDLESS:
            del tree["optim"]["min_learning_rate"]
        if "rl__task" in overrides:
            del tree["eval"]["tokens"]
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    return make


@pytest.fixture
def write_run(tmp_path, make_recipe):
    """Write a run folder without training: losses that fall to `level`, with noise by the seed."""
    import numpy as np

    from nanogpt_hf.config.load import config_to_yaml, load_config
    from nanogpt_hf.runs.folder import RunFolder

    def write_run(name: str, level: float = 1.0, steps: int = 60, **overrides) -> RunFolder:
        overrides = {"train__max_steps": 60, "eval__every": 20, **overrides}
        config = load_config(make_recipe(tmp_path / "tiny.yaml", **overrides))
        run = RunFolder(tmp_path / name)
        run.path.mkdir()
        run.recipe.write_text(config_to_yaml(config))
        draw = np.random.default_rng(config.train.seed)
        with run.metrics.open("w") as file:
            for step in range(steps + 1):
                loss = level + 3 / (1 + step / 10) + 0.01 * draw.normal()
                position = {"step": step, "tokens": 128 * step, "seconds": 2 * step}
                trained = {"train/tokens_per_second": 64.0, "train/learning_rate": 1e-3}
                events = [trained | {"train/loss": loss}] if step else []
                if step % 20 == 0:
                    events.append({"val/loss": loss, "val/bits_per_byte": loss / 0.6931})
                for event in events:
                    file.write(json.dumps(position | event) + "\n")
        return run

    return write_run


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory, text_file) -> Path:
    """A GPT-2 of four blocks saved by transformers, with a tokenizer of the tiny text's
    characters.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from nanogpt_hf.data.tokenizer import char_tokenizer

    folder = tmp_path_factory.mktemp("base") / "tiny-gpt2"
    characters = sorted(set(text_file.read_text()) | set("ABCxyz"))
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
    sizes |= {"vocab_size": len(characters), "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**sizes))
        # otherwise biases are zeros and LayerNorms ones, which hides mistakes
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    char_tokenizer(characters).hf.save_pretrained(folder)
    return folder


@pytest.fixture
def write_recipe(tmp_path, make_recipe):
    """`make_recipe` in the test's own folder."""
    return lambda **overrides: make_recipe(tmp_path / "tiny.yaml", **overrides)


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """A function that runs a command in the test's folder and returns the one line that refuses it.

    The status is 2, stdout is empty, and no file in the folder has changed, but for locks.
    """
    from nanogpt_hf.commands import main

    def files() -> dict[Path, int | None]:
        paths = [path for path in tmp_path.rglob("*") if not path.name.endswith(".lock")]
        return {path: path.stat().st_mtime_ns if path.is_file() else None for path in paths}

    def refused(*words: object) -> str:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        before = files()
        with mock.patch.dict(os.environ):  # `launch` sets variables
            assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        line, _, rest = err.partition("\n")
        assert (out, rest.removesuffix("1 problem; nothing was started.\n")) == ("", "")
        assert files() == before
        return line

    return refused


@pytest.fixture(scope="session")
def forget_accelerate():
    """A function that resets accelerate's process-wide state, so that the next Accelerator is as
    in a new process.
    """

    def forget():
        from accelerate import state

        for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
            kind._reset_state()

    return forget


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What is left of imports and earlier files is not searched for garbage again: a search of
    all takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_accelerate(forget_accelerate):
    before = set(os.environ)
    yield
    forget_accelerate()
    for name in {"MASTER_ADDR", "MASTER_PORT"} - before:  # accelerate may set them
        os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def no_flushes():
    """Files are not flushed to the disk, which takes milliseconds each: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_metadata():
    """What an installed package states is read once. accelerate asks a dozen times in a run
    whether DeepSpeed is installed.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "metadata", functools.cache(metadata.metadata))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_loss_plots():
    """Runs draw no loss.png, which takes nearly half the time of a tiny run; `loss_plots` lets
    them draw it.
    """
    from nanogpt_hf.reports import page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "draw_run", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def loss_plots(no_loss_plots):
    """A function that gives a context in which runs draw loss.png."""
    from nanogpt_hf.reports import curves, page

    @contextlib.contextmanager
    def context():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page, "draw_run", curves.draw_run)
            yield

    return context


@pytest.fixture
def empty_plots(monkeypatch):
    """Commands write their plots without what these show: to draw it takes a third of a sweep."""
    from matplotlib.figure import Figure

    save = Figure.savefig

    def save_empty(_: Figure, *arguments: object, **options: object) -> None:
        save(Figure(figsize=(1, 1)), *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", save_empty)


@pytest.fixture(scope="session")
def letter_model(tmp_path_factory) -> Path:
    """A model folder with a vocabulary of 11 characters and weights large enough that samples
    differ.
    """
    import torch

    from nanogpt_hf.data.tokenizer import char_tokenizer
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM

    folder = tmp_path_factory.mktemp("letters")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPTForCausalLM(GPTConfig(**sizes, bos_token_id=None, eos_token_id=None))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    char_tokenizer(sorted("abcdefgh ?\n")).hf.save_pretrained(folder)
    return folder


TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
TASKS = {
    "letters": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list:
- {metric: acc, aggregation: mean, higher_is_better: true}
- {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "lines": """
output_type: loglikelihood
doc_to_target: "{{choices[0]}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
""",
}


@pytest.fixture(scope="session")
def letter_tasks(tmp_path_factory) -> list[str]:
    """Two lm-eval tasks as YAML files with their questions, some longer than the positions of
    `letter_model`.
    """
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)

    def word() -> str:
        return "".join(draw.choices("abcdefgh", k=draw.randint(1, 6)))

    rows = [
        {
            "question": " ".join(word() for _ in range(draw.randint(1, 9))) + "?",
            "choices": [f" {word()}" for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for _ in range(25)
    ]
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = []
    for name, text in TASKS.items():
        paths.append(str(folder / f"{name}.yaml"))
        Path(paths[-1]).write_text(f"task: {name}\n{TASK}{text}")
    return paths


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory, save_chat_model) -> Path:
    """A model folder with a chat template; its answers are letters without sense."""
    import torch

    def change(model, tokenizer):
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.4)

    folder = tmp_path_factory.mktemp("chat") / "parrot"
    save_chat_model(folder, change, n_positions=256, n_embd=16)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake Hub (fake_hub.py) for this process and its child processes, logged in as `tester`."""
    from huggingface_hub import HfFileSystem, constants
    from huggingface_hub.utils import close_session

    HfFileSystem.clear_instance_cache()  # an earlier Hub may have had the same port
    with fake_hub.FakeHub() as hub:
        hub.token = fake_hub.TOKEN
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # read from the environment at import
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
        close_session()
        yield hub
        close_session()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium with one tab."""
    driver = shutil.which("chromedriver")
    if not (driver and chromium.BROWSER):
        pytest.skip(
            "no Chromium with its chromedriver on this machine: apt-get install chromium "
            "chromium-driver"
        )
    opened = chromium.Browser(driver, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def save_checkpoint():
    """A function that saves a checkpoint and waits until it is complete."""
    from nanogpt_hf.checkpoint.writer import CheckpointWriter

    def save(accelerator, model, optimizer, state, run, keep) -> None:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        writer = CheckpointWriter(accelerator, run, keep)
        writer.save(model, optimizer, state)
        writer.wait()

    return save


@pytest.fixture
def volume(tmp_path):
    """A mounted file system of 4 MB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("no file system can be mounted here: that needs root on Linux")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def counted():
    """A function that counts the operations that torch dispatches in a call: aten's, and
    collectives as `c10d.*`.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = Counter()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count[str(function.overloadpacket).removeprefix("aten.")] += 1
            return function(*args, **(kwargs or {}))

    def count(call) -> Counter:
        with Operations() as operations:
            call()
        return operations.count

    return count


@pytest.fixture(scope="session")
def launch_command():
    """A function that gives `accelerate launch` of launched.py with a shipped accelerate config, on
    CPUs.

    The config `cpu` has one process, `hsdp`, `tp_fsdp2` and `pp_tp` four, the others two.
    """

    def command(machine: str, *arguments: object, machine_options: Sequence[str] = ()) -> list[str]:
        threads = f"--num_cpu_threads_per_process={os.environ['OMP_NUM_THREADS']}"
        launch = [sys.executable, "-m", "accelerate.commands.launch", threads]
        config = ["--config_file", str(ROOT / "accelerate_configs" / f"{machine}.yaml")]
        count = {"cpu": 1, "hsdp": 4, "tp_fsdp2": 4, "pp_tp": 4}.get(machine, 2)
        if machine != "cpu":
            config += [f"--num_processes={count}", "--main_process_port=0"]
        if machine == "hsdp":  # two × two processes instead of two machines of eight
            config += argv(
                "--num_machines=1 --main_process_ip=127.0.0.1 "
                "--parallelism_config_dp_replicate_size=2 --parallelism_config_dp_shard_size=2"
            )
        if machine == "tp_fsdp2":
            config += ["--parallelism_config_dp_shard_size=2"]
        if machine == "cp_fsdp2":
            config += argv("--parallelism_config_dp_shard_size=1 --parallelism_config_cp_size=2")
        if machine.startswith(("fsdp", "hsdp", "deepspeed", "tp", "cp_", "pp", "ep")):
            config += ["--mixed_precision=no", "--dynamo_backend=no"]
        # DeepSpeed gives no access to gradients
        knobs = ["--tracking.layers=false"] if machine.startswith("deepspeed") else []
        entry = str(ROOT / "tests" / "training" / "launched.py")
        return [*launch, *config, *machine_options, entry, *map(str, arguments), *knobs]

    return command


@pytest.fixture(scope="session")
def launch_warm(start_warm):
    """A function that trains like `accelerate launch`, in forks of a process that has imported
    torch: see warm.py.
    """
    with start_warm() as launch:
        yield launch


@pytest.fixture(scope="session")
def start_warm(launch_command):
    """A function that starts a process of warm.py with environment variables: a context with a
    function that launches.

    Its arguments are those of `launch_command`, and environment variables. It returns the run of
    --run-dir FOLDER. A launch that may fail is checked by `ends_with(status, output)`.
    """
    from nanogpt_hf.runs.folder import RunFolder

    @contextlib.contextmanager
    def start(**environment: str) -> Iterator[Callable]:
        with subprocess.Popen(
            [sys.executable, ROOT / "tests" / "training" / "warm.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        ) as process:

            def launch(
                machine: str,
                *arguments: object,
                machine_options: Sequence[str] = (),
                ends_with: Callable[[int, str], None] | None = None,
                **variables: str,
            ) -> RunFolder | None:
                command = launch_command(machine, *arguments, machine_options=machine_options)
                # without python -m accelerate.commands.launch
                order = {"arguments": command[3:], "environment": variables}
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
                if ends_with:
                    ends_with(answer["status"], answer["output"])
                else:
                    assert answer["status"] == 0, answer["output"][-5000:]
                if "--run-dir" not in arguments:
                    return None
                return RunFolder(Path(arguments[arguments.index("--run-dir") + 1]))

            yield launch
            process.stdin.close()

    return start


@pytest.fixture(scope="session")
def running():
    """A function (model folder, name) -> context with a server in a thread of this process; it
    has a `port`.
    """
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from nanogpt_hf.commands.generate import open_model
    from nanogpt_hf.serving.generation import Served
    from nanogpt_hf.serving.server import Server, listen

    @contextlib.contextmanager
    def running(folder, name):
        with listen("127.0.0.1", 0) as listener:
            served = Served(name, *open_model(str(folder)), contextlib.nullcontext)
            server = Server(served, "127.0.0.1")
            server.port = listener.getsockname()[1]
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield server
            finally:
                server.handle_exit(signal.SIGTERM, None)
                thread.join(30)
            assert not thread.is_alive()

    return running
