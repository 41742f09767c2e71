"""What has to hold on a GPU, in one process: `make test-gpu`. Without one, the same in small."""

import json
import os
import re
import urllib.request
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from arguments import argv
from assertions import copy_at, same_weights, series
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.planning.hardware import peak_memory
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import loop
from nanogpt_hf.training.start import prepare_run

GPU = os.environ.get("DEVICE", "cpu") == "cuda"
if GPU and not torch.cuda.is_available():
    pytest.skip("DEVICE=cuda, and torch sees no CUDA GPU", allow_module_level=True)
pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    # torch warns of its own parts when it compiles, and that a group of one process has a device
    pytest.mark.filterwarnings("ignore"),
]
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: `make test-gpu`")
TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
BITSANDBYTES = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
# A C++ compiler takes half a minute for each graph of a CPU.
COMPILER = "INDUCTOR" if GPU else "AOT_EAGER"
HAS_FP8 = GPU and torch.cuda.get_device_capability() >= (8, 9)
SIZES = {"model__n_embd": 64, "model__n_positions": 32, "data__block_size": 32}
KNOBS = SIZES | {"train__max_steps": 8, "eval__every": 4, "checkpoint__keep": 9}
EXACT = {"train__deterministic": True, "model__dropout": 0.1}
EXPERTS = {
    "model__architecture": "qwen3_moe",
    "model__extra": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.fixture
def train(tmp_path, make_recipe, forget_accelerate, monkeypatch):
    """Train the tiny recipe on the device, in float32 if nothing else is stated."""

    def train(name="run", *, resume=False, environment=(), **knobs) -> RunFolder:
        torch.compiler.reset()
        forget_accelerate()
        with pytest.MonkeyPatch.context() as patch:
            stated = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
            for key, value in (stated | dict(environment)).items():
                patch.setenv(key, value)
            config = load_config(make_recipe(tmp_path / "tiny.yaml", **KNOBS | knobs))
            run = prepare_run(config, tmp_path / name, resume=resume, overwrite=not resume)
            assert run.accelerator.device.type == ("cuda" if GPU and "cpu" not in name else "cpu")
            return loop.train(run)

    return train


@pytest.fixture
def no_tf32(monkeypatch):
    """Products of float32 in float32 on a GPU, where a run takes TF32: after a few steps at a high
    rate, its rounding is visible in the loss.
    """
    choose = torch.set_float32_matmul_precision
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: choose("highest"))


PRECISIONS = {
    "bf16": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    "fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
    "fp8": {"ACCELERATE_MIXED_PRECISION": "fp8"},
    "compiled": {"ACCELERATE_DYNAMO_BACKEND": COMPILER},
    "compiled blocks": {
        "ACCELERATE_DYNAMO_BACKEND": COMPILER,
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
    },
    "compiled bf16": {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": COMPILER,
    },
}


@pytest.mark.parametrize("model", [{}, EXPERTS, {"model__architecture": "qwen3"}], ids=str)
def test_losses_are_those_of_a_cpu(train, no_tf32, model):
    here = series(train(**model), "train/loss")
    with_cpu = train("cpu", environment={"ACCELERATE_USE_CPU": "true"}, **model)
    assert len(here) == 8
    assert here == pytest.approx(series(with_cpu, "train/loss"), rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[on_gpu] * (name == "fp16") + [TORCHAO] * (name == "fp8"))
        for name in PRECISIONS
    ],
)
def test_losses_of_other_precisions(train, name):
    if name == "fp8" and not HAS_FP8:
        pytest.skip("needs a GPU of compute capability 8.9 or higher")
    losses = series(train(environment=PRECISIONS[name]), "train/loss")
    # fp8 has three bits after the leading one, and the rate is high.
    tolerance = 0.15 if name == "fp8" else 0.02
    assert losses == pytest.approx(series(train("plain"), "train/loss"), rel=tolerance)


@pytest.mark.parametrize("name", ["eager", "compiled", "compiled bf16"])
def test_killed_and_resumed_run_ends_with_the_same_bytes(train, tmp_path, name):
    environment = PRECISIONS.get(name, {})
    run = train(environment=environment, **EXACT)
    copy_at(run, 4, tmp_path / "copy")
    resumed = train("copy", resume=True, environment=environment, **EXACT)
    assert same_weights(run, resumed)
    assert series(run, "train/loss") == series(resumed, "train/loss")


@pytest.mark.parametrize("deterministic", [True, False])
def test_verify(train, capsys, forget_accelerate, monkeypatch, deterministic):
    run = train(train__deterministic=deterministic)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    forget_accelerate()
    capsys.readouterr()
    assert main(argv("verify {}", run.path)) == 0
    rounded = GPU and not deterministic
    assert ("equal to rounding" in capsys.readouterr().out) == rounded


def test_grouped_gradients_repeat(train):
    knobs = {"train__gradient_groups": 2, "train__micro_batch_size": 2}
    assert same_weights(train("a", **knobs), train("b", **knobs))


def test_packed_documents_beside_a_cpu(train, no_tf32, tmp_path):
    """On a GPU by flex attention, on a CPU document by document."""
    rows = [json.dumps({"text": "the cat sat on a mat. " * (1 + i % 5)}) for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    knobs = {
        "data__source": str(tmp_path / "rows.jsonl"),
        "data__dir": str(tmp_path / "documents"),
        "data__packing": "documents",
    }
    here = series(train(**knobs), "train/loss")
    there = series(train("cpu", environment={"ACCELERATE_USE_CPU": "true"}, **knobs), "train/loss")
    assert here == pytest.approx(there, rel=1e-3)


@pytest.mark.parametrize("level", ["true", "selective"])
def test_checkpointed_activations_change_nothing(train, level):
    environment = {"FSDP_ACTIVATION_CHECKPOINTING": level}
    assert same_weights(train("a", environment=environment, **EXACT), train("b", **EXACT))


@on_gpu
@TORCHAO
def test_state_in_8_bits(train):
    losses = series(train(optim__state="8bit", model__n_embd=128), "train/loss")
    assert losses[-1] < losses[0]


@on_gpu
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_one_process_of_a_group(train, kind):
    environment = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if kind == "FSDP2":
        environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        environment |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    try:
        losses = series(train(environment=environment), "train/loss")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert losses == pytest.approx(series(train("plain"), "train/loss"), rel=1e-4)


def test_auto_takes_at_most_three_trials(train, caplog):
    caplog.set_level("INFO")
    run = train(train__micro_batch_size="auto", train__max_steps=2)
    assert load_config(run.recipe).train.micro_batch_size == 4
    assert 1 <= len(re.findall("auto: trial", caplog.text)) <= 3


@on_gpu
@pytest.mark.parametrize(
    ("name", "tolerance"), [("bf16", 0.05), ("compiled bf16", 0.1), ("eager", 0.05)]
)
def test_memory_is_the_estimated_one(tmp_path, make_recipe, forget_accelerate, name, tolerance):
    sizes = {"model__n_layer": 6, "model__n_embd": 512, "model__n_head": 8}
    sizes |= {"model__n_positions": 512, "data__block_size": 512, "train__max_steps": 2}
    sizes |= {"train__micro_batch_size": 8, "train__tokens_per_step": 8192, "eval__every": 2}
    recipe = make_recipe(tmp_path / "large.yaml", **sizes)
    environment = {"ACCELERATE_MIXED_PRECISION": "no"} | PRECISIONS.get(name, {})
    estimated = tmp_path / "estimate.json"
    precision = environment["ACCELERATE_MIXED_PRECISION"]
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    (tmp_path / "machine.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\n"
        f"mixed_precision: '{precision}'\ndynamo_config:\n  dynamo_backend: '{backend}'\n"
    )
    options = "--config_file {} --json {}"
    assert main(argv(f"estimate {{}} {options}", recipe, tmp_path / "machine.yaml", estimated)) == 0
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        torch.compiler.reset()
        forget_accelerate()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        loop.train(prepare_run(load_config(recipe), tmp_path / "run"))
    peak = peak_memory(torch.device("cuda"))
    expected = json.loads(estimated.read_text())["memory"]["peak"]
    assert peak == pytest.approx(expected, rel=tolerance)


@pytest.fixture
def command(capsys, forget_accelerate):
    """A command that succeeds; its output."""

    def command(text: str, *words: object) -> str:
        forget_accelerate()
        capsys.readouterr()
        assert main(argv(text, *words)) == 0
        return capsys.readouterr().out

    return command


def test_sample_and_evaluate(train, command, text_file):
    run = train()
    sample = "sample {} --prompt The --max-new-tokens 20 --seed 3"
    assert command(sample, run.path) == command(sample, run.path)
    line = next(
        line
        for line in command("evaluate {} --data {}", run.path, text_file).splitlines()
        if "loss" in line
    )
    assert re.search(r"\d\.\d", line)


def test_served_text_is_that_of_a_seed(train, running):
    run = train()
    asked = {"prompt": "The ", "max_tokens": 20, "temperature": 0.9, "seed": 3}
    with running(run.best, "tiny") as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(asked).encode())
        request.add_header("Content-Type", "application/json")
        texts = []
        for _ in range(2):
            with urllib.request.urlopen(request, timeout=60) as answer:
                texts.append(json.load(answer)["choices"][0]["text"])
    assert len(texts[0]) == 20
    assert texts[0] == texts[1]


STEPS = "--train.max_steps 2 --train.micro_batch_size 4 --eval.every 2 --optim.warmup_steps 1"


def test_lora_and_reinforcement_learning_and_preferences(
    tmp_path, save_chat_model, chat_file, command
):
    save_chat_model(tmp_path / "start")
    start = tmp_path / "start"
    sizes = f"{STEPS} --data.block_size 64 --train.tokens_per_step 512"
    data = "--data {} --data.format chat --data.dir {}"
    lora = f"finetune --from {{}} --lora 4 --run-dir {{}} {data} {sizes}"
    command(lora, start, tmp_path / "lora", chat_file, tmp_path / "chat")
    assert (tmp_path / "lora/best").is_dir()
    (tmp_path / "reward.py").write_text(
        "def score(prompt, completion, answer):\n    return len(completion) / 64\n"
    )
    rl = (
        f"rl --from {{}} --run-dir {{}} --task arithmetic --reward {{}} {sizes} "
        "--rl.samples 8 --rl.max_new_tokens 6 --rl.eval_questions 2 --rl.eval_samples 2"
    )
    command(rl, start, tmp_path / "rl", f"{tmp_path / 'reward.py'}:score")
    pair = {"prompt": "red", "chosen": "RED", "rejected": "green"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 40)
    align = f"align --from {{}} --run-dir {{}} --data {{}} --data.dir {{}} {sizes}"
    command(align, start, tmp_path / "dpo", tmp_path / "pairs.jsonl", tmp_path / "pairs")
    assert (tmp_path / "dpo/final").is_dir()


@on_gpu
@BITSANDBYTES
def test_lora_in_4_bits(tmp_path, save_chat_model, chat_file, command):
    save_chat_model(tmp_path / "start", n_embd=64)
    sizes = f"{STEPS} --data.block_size 64 --train.tokens_per_step 512"
    data = "--data {} --data.format chat --data.dir {}"
    lora = f"finetune --from {{}} --lora 4 --lora.quantize 4bit --run-dir {{}} {data} {sizes}"
    command(lora, tmp_path / "start", tmp_path / "lora", chat_file, tmp_path / "chat")
