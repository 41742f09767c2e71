"""The table of docs/machines.md, "What combines": each cell trains as one process does, or is
refused in one line.
"""

import gc
import multiprocessing
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import state
from accelerate.utils import DistributedType
from accelerate.utils.other import get_free_port
from decoder_types import tiny_section
from safetensors.torch import load_file, save_file
from tables import EXPERT_LAYOUTS, KINDS
from transformers import AutoTokenizer

from cpu_ring import allow_cpu_ring
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, ModelSection
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.distributed import accelerate_config
from nanogpt_hf.distributed import layout as layouts
from nanogpt_hf.distributed.accelerate_config import check_launch, check_sizes, settled
from nanogpt_hf.distributed.accelerator import build_accelerator, sum_over_ranks
from nanogpt_hf.distributed.full_state import full_weights
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.optim.state import full_tensor
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.build import build_run
from nanogpt_hf.training.step import train_step

STEPS = 5
KNOBS = {
    "model.n_layer": 2,
    "model.n_head": 4,
    "model.n_embd": 16,
    "model.n_positions": 16,
    "data.tokenizer": "char",
    "data.validation_fraction": 0.1,
    "data.block_size": 16,
    "optim.learning_rate": 1e-3,
    "optim.warmup_steps": 0,
    "train.max_steps": STEPS,
    "train.tokens_per_step": 128,
    "train.micro_batch_size": 1,  # two for each stage of PP × HSDP
}
GPT2 = {"model.bias": True, "model.pad_vocab_to_multiple_of": 64}
DECODER = {"model.n_kv_head": 2, "model.extra": {"tie_word_embeddings": False}}
TUNED = {"data.block_size": 16, "model.dropout": 0.0}

_DEADLINE = 600  # seconds for all features of a layout, which are trained in its first test
RING = "CP by ring × FSDP2"
# Row of the table: processes, the accelerate config's parallelism_config, FSDP2.
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "TP": (2, {"tp_size": 2}, False),
    "TP × FSDP2": (4, {"tp_size": 2, "dp_shard_size": 2}, True),
    "CP × FSDP2": (2, {"cp_size": 2}, True),
    RING: (2, {"cp_size": 2}, True),
    "PP": (2, {"pp_size": 2}, False),
    "PP × FSDP2": (4, {"pp_size": 2, "dp_shard_size": 2}, True),
    "PP, zero bubble": (2, {"pp_size": 2, "pp_schedule": "zero_bubble"}, False),
    "PP, zero bubble × FSDP2": (
        4,
        {"pp_size": 2, "dp_shard_size": 2, "pp_schedule": "zero_bubble"},
        True,
    ),
    "PP × HSDP": (8, {"pp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2}, True),
    "PP × TP": (4, {"pp_size": 2, "tp_size": 2}, False),
    "PP, zero bubble × TP": (
        4,
        {"pp_size": 2, "tp_size": 2, "pp_schedule": "zero_bubble"},
        False,
    ),
    "PP × TP × DP": (8, {"pp_size": 2, "dp_replicate_size": 2, "tp_size": 2}, False),
    "PP × TP × FSDP2": (8, {"pp_size": 2, "dp_shard_size": 2, "tp_size": 2}, True),
    "EP": (2, {"ep_size": 2}, False),
    "EP × DDP": (4, {"ep_size": 2}, False),
    "EP × FSDP2": (4, {"ep_size": 2, "dp_shard_size": 4}, True),
    "FSDP2": (2, {"dp_shard_size": 2}, True),
    "HSDP": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, True),
}
# Column of the table: knobs, environment variables of the accelerate config, and how far a run may
# be from one process.
FEATURES: dict[str, tuple[dict, dict[str, str], float]] = {
    "gpt2": (GPT2, {}, 1e-5),
    "llama": ({"model.architecture": "llama"} | DECODER, {}, 1e-5),
    "qwen3": (
        {"model.architecture": "qwen3"} | DECODER | {"model.extra": {"tie_word_embeddings": True}},
        {},
        1e-5,
    ),
    "nanochat": ({"model.architecture": "nanochat"} | DECODER, {}, 1e-5),
    "olmo2": ({"model.architecture": "olmo2"} | DECODER, {}, 1e-5),
    "Muon": ({"optim.name": "muon"}, {}, 1e-5),
    "8-bit state": ({"optim.state": "8bit", "model.n_layer": 1, "model.n_embd": 128}, {}, 5e-3),
    "LoRA": ({"finetune.model": "tiny", "lora.rank": 4} | TUNED, {}, 1e-5),
    "frozen layers": ({"finetune.model": "tiny", "finetune.freeze_layers": 1} | TUNED, {}, 1e-5),
    "conversations": (
        {"data.format": "chat", "data.block_size": 128, "model.n_positions": 128},
        {},
        1e-5,
    ),
    "documents": ({"data.packing": "documents", "data.mask": "documents"}, {}, 1e-5),
    "bf16": (GPT2, {"ACCELERATE_MIXED_PRECISION": "bf16"}, 1e-2),
    "fp16": (GPT2, {"ACCELERATE_MIXED_PRECISION": "fp16"}, 1e-2),
    # emulated; all linear layers are multiplied so, also if two processes split them
    "fp8": (GPT2 | {"model.n_embd": 32}, {"ACCELERATE_MIXED_PRECISION": "fp8"}, 1e-2),
    "compiled": (
        GPT2,
        {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"},
        1e-5,
    ),  # without generating code, which takes minutes
    "checkpointed": (GPT2, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, 1e-5),
    "selective": (GPT2, {"FSDP_ACTIVATION_CHECKPOINTING": "selective"}, 1e-5),
}
# Cells that are trained also without the exhaustive ones, within two minutes on one core. Every
# feature of the package that one of these layouts has is trained at least once, where it is
# cheapest: under PP. Under TP and EP it is what their splits of matrices and experts concern.
# Decoders of transformers (KINDS) and layouts of several dimensions are exhaustive.
QUICK: dict[str, tuple[str, ...]] = {
    "TP": ("gpt2", "llama", "Muon", "frozen layers", "bf16"),
    "PP": (
        *("gpt2", "llama", "qwen3", "nanochat", "olmo2", "Muon", "conversations", "documents"),
        *("bf16", "fp8", "compiled", "checkpointed", "selective"),
    ),
    "PP, zero bubble": ("gpt2", "Muon", "conversations"),
    "EP": ("qwen3_moe", "mixtral", "gpt_oss", "Muon", "LoRA", "frozen layers", "documents"),
}
# The models of the second table, four experts each; its other columns train the first one.
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": LATENT | {"n_routed_experts": 4, "moe_intermediate_size": 8},
    "gpt_oss": {"num_local_experts": 4},
}


# more than the characters of the text
WIDER = {"gemma4_text": {"vocab_size_per_layer_input": 128}}


def feature_of(layout: str, feature: str) -> tuple[dict, dict[str, str], float]:
    """Knobs, variables and tolerance of a cell."""
    of_experts = layout in EXPERT_LAYOUTS and feature in EXPERTS
    if feature in KINDS and not of_experts:
        section = tiny_section(feature)
        knobs = {f"model.{name}": value for name, value in vars(section).items()}
        # its gradients' norms are large, and AdamW enlarges rounding
        tolerance = 2e-3 if feature == "gemma4_text" else 1e-5
        return {**knobs, "model.extra": section.extra | WIDER.get(feature, {})}, {}, tolerance
    if not layout.startswith("EP"):
        return FEATURES[feature]
    knobs, variables, tolerance = FEATURES.get(feature, ({}, {}, 1e-5))
    architecture = feature if feature in EXPERTS else "qwen3_moe"
    extra = EXPERTS[architecture] | {"num_experts_per_tok": 2}
    if "finetune.model" in knobs:
        return knobs | {"finetune.model": "tiny_moe"}, variables, tolerance
    knobs = {key: value for key, value in knobs.items() if key not in GPT2}
    model = {"model.architecture": architecture, "model.extra": extra, "optim.balance_loss": 0.1}
    return knobs | model, variables, tolerance


def cells() -> dict[tuple[str, str], str]:
    """The table's cells: (layout, feature) -> yes or no."""
    text = (Path(__file__).parents[2] / "docs" / "machines.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    found = {}
    head = []
    for layout, *row in rows:
        if layout == "layout":
            head = row
        elif layout in LAYOUTS:
            found |= {(layout, name): cell for name, cell in zip(head, row, strict=True)}
    return found


CELLS = cells()


def with_answer(*answers: str) -> list[tuple[str, str]]:
    return [cell for cell, answer in CELLS.items() if answer in answers]


def test_table_has_every_layout_and_feature():
    quick = {(layout, feature) for layout, features in QUICK.items() for feature in features}
    assert quick <= set(with_answer("yes"))
    possible = {feature for layout, feature in with_answer("yes") if layout in QUICK}
    assert {feature for _, feature in quick} >= possible & set(FEATURES)
    assert {layout for layout, _ in CELLS} == set(LAYOUTS)
    assert {feature for _, feature in CELLS} == {*FEATURES, *EXPERTS, *KINDS}
    assert set(CELLS.values()) == {"yes", "no"}


@pytest.fixture(scope="module")
def recipe_of(
    tmp_path_factory, text_file, chat_file, byte_tokenizer, tiny_base
) -> Callable[[str, str], Config]:
    folder = tmp_path_factory.mktemp("recipes")
    bases = {"tiny": tiny_base, "tiny_moe": folder / "tiny_moe"}
    extra = EXPERTS["qwen3_moe"] | {"num_experts_per_tok": 2}
    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 16, "n_positions": 32}
    section = ModelSection("qwen3_moe", extra=extra, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        bases["tiny_moe"].mkdir(exist_ok=True)
        shutil.copy(tiny_base / name, bases["tiny_moe"])
    vocab_size = len(AutoTokenizer.from_pretrained(tiny_base))
    build_model(build_config(section, vocab_size), 0).save_pretrained(bases["tiny_moe"])

    def recipe(layout: str, feature: str) -> Config:
        knobs = (
            {"data.source": str(text_file), "data.dir": str(folder / "text")}
            | KNOBS
            | feature_of(layout, feature)[0]
        )
        if feature == "conversations":
            knobs |= {"data.source": str(chat_file), "data.dir": str(folder / "chat")}
            knobs |= {"data.tokenizer": str(byte_tokenizer), "train.tokens_per_step": 1024}
        if feature == "documents":
            rows = folder / "rows.jsonl"
            lines = (" cat sat" * (number % 5) + " mat" for number in range(200))
            rows.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
            knobs |= {"data.source": str(rows), "data.dir": str(folder / "rows")}
            knobs |= {"data.tokenizer": str(byte_tokenizer)}
        if "finetune.model" in knobs:
            shape = {
                "data.tokenizer",
                "model.n_layer",
                "model.n_head",
                "model.n_embd",
                "model.n_positions",
            }
            knobs = {key: value for key, value in knobs.items() if key not in shape}
            base = bases[knobs["finetune.model"]]
            knobs |= {"finetune.model": base, "data.dir": folder / f"tuned from {base.name}"}
            return finetune_config(None, [(key, str(value)) for key, value in knobs.items()])[0]
        return load_config(None, knobs, name="tiny")

    return recipe


def environment(layout: str, feature: str) -> dict[str, str]:
    """The variables that a launcher sets for all processes of a cell."""
    processes, sizes, fsdp = LAYOUTS[layout]
    values: dict[str, Any] = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    values |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "ACCELERATE_USE_CPU": not fsdp}
    values |= {f"PARALLELISM_CONFIG_{name.upper()}": size for name, size in sizes.items()}
    if fsdp:
        values |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true"}
        values |= {"FSDP_VERSION": 2, "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
        values["FSDP_RESHARD_AFTER_FORWARD"] = "pp_schedule" not in sizes
    return {name: str(value) for name, value in values.items()} | feature_of(layout, feature)[1]


def check(layout: str, config: Config, feature: str) -> None:
    """`check_layout` as a launch of the layout would call it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(layout, feature).items():
            patch.setenv(name, value)
        if layout == RING:
            take_ring(patch)
        # Every precision, although a CPU has not all: its own refusal would hide the layout's.
        patch.setattr(accelerate_config, "_check_precision", lambda *_: None)
        mesh = settled(Mesh.from_environment(), config)
        check_sizes(mesh)
        check_layout(config, mesh)


def take_ring(patch: pytest.MonkeyPatch) -> None:
    """Take the ring although the heads divide: so its row has the models, and the expected
    numbers, of the others.
    """
    patch.setattr(layouts, "needs_ring", lambda *_: True)
    patch.setattr(layouts, "RING_MACHINES", [("cpu", "no"), ("cpu", "bf16"), ("cpu", "fp8")])


@pytest.mark.parametrize(("layout", "feature"), with_answer("no"))
def test_what_does_not_combine_is_one_line(layout, feature, recipe_of):
    with pytest.raises(UserError) as error:
        check(layout, recipe_of(layout, feature), feature)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "feature"), with_answer("yes"))
def test_what_combines_passes_the_check(layout, feature, recipe_of):
    check(layout, recipe_of(layout, feature), feature)


def train(config: Config, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after a few steps, on the main process, and the loss and gradient norm of each
    step.
    """
    for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
        kept._reset_state()
    accelerator = build_accelerator(
        check_launch(config, Mesh.from_environment()), RunFolder(folder)
    )
    # torchao's 8-bit step would be compiled for minutes; test_adamw_8bit.py has the compiled one
    compile = torch.compile
    if config.optim.state == "8bit":
        torch.compile = lambda function, **_: function
    run = build_run(config, accelerator, load_prepared(config))
    values = {}

    def note(*_: Any) -> None:
        """The gradients of the first step, clipped."""
        for name, p in accelerator.unwrap_model(run.model).named_parameters():
            if p.grad is not None:
                values.setdefault(f"gradient of {name}", full_tensor(p.grad).cpu().clone())

    if run.mesh.pp_size == 1:  # a stage has those of its blocks
        optimizer: Any = run.optimizer
        getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(note)
    for step in range(STEPS):
        result = train_step(run, step, 1e-3)
        loss = result.loss
        norm = result.grad_norm
        values[f"step {step}"] = torch.stack([sum_over_ranks(accelerator, loss), norm])
    weights = full_weights(accelerator, run.model)
    accelerator.free_memory()
    torch.compiler.reset()
    torch.compile = compile
    return values | {name: weight.clone() for name, weight in weights.items()}


def train_rank(rank: int, port: int, layout: str, configs: dict[str, Config], folder: Path) -> None:
    """A process of a layout: train every feature."""
    torch.set_num_threads(1)
    accelerate_config.EMULATES_FP8 = True
    gc.freeze()  # accelerate collects garbage between runs, and would search what the parent has
    # nothing changes what it names in place: the gradients are compared
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    if LAYOUTS[layout][2]:
        state.PartialState._prepare_backend = lambda self, *a, **k: (
            "gloo",
            DistributedType.MULTI_GPU,
        )
    if layout == RING:
        allow_cpu_ring()
        take_ring(pytest.MonkeyPatch())
    for feature, config in configs.items():
        os.environ.update(environment(layout, feature), RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1")
        try:
            values = train(config, folder)
            if rank == 0:
                save_file(values, folder / f"{feature}.safetensors")
        except BaseException:
            (folder / f"{feature}.{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)  # the others may wait for this process
        for name in feature_of(layout, feature)[1]:
            del os.environ[name]
    os._exit(0)  # gloo processes sometimes abort during teardown


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory, recipe_of):
    """(layout, feature) -> what it trains, and what one process does.

    All features of a layout that this session tries are trained at once.
    """
    tried = {
        (item.callspec.params["layout"], item.callspec.params["feature"])
        for item in request.session.items
        if getattr(item, "originalname", None) == "test_what_combines_equals_one_process"
    }
    folders: dict[str, Path] = {}
    alone: dict[str, dict[str, torch.Tensor]] = {}

    def configs_of(layout: str) -> dict[str, Config]:
        configs = {
            feature: recipe_of(layout, feature)
            for row, feature in with_answer("yes")
            if row == layout and (row, feature) in tried
        }
        if find_spec("torchao") is None or not shutil.which("g++"):
            configs.pop("8-bit state", None)
        for config in configs.values():
            prepare(config)
        return configs

    def one_process(layout: str, feature: str) -> dict[str, torch.Tensor]:
        key = f"{layout[:2] == 'EP'} {feature}"
        if key not in alone:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ACCELERATE_USE_CPU", "true")
                patch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 200)
                patch.setattr(accelerate_config, "EMULATES_FP8", True)
                for name in ("ACCELERATE_MIXED_PRECISION",) if feature in ("bf16", "fp8") else ():
                    patch.setenv(name, FEATURES[feature][1][name])
                config = recipe_of(layout, feature)
                prepare(config)
                alone[key] = train(config, tmp_path_factory.mktemp("one"))
        return alone[key]

    def results(layout: str, feature: str) -> dict[str, torch.Tensor]:
        if layout not in folders:
            folders[layout] = folder = tmp_path_factory.mktemp("layout")
            torch.set_num_threads(1)  # a thread pool does not survive a fork
            fork = multiprocessing.get_context("fork")
            port = get_free_port()
            configs = configs_of(layout)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 200)
                ranks = [
                    fork.Process(target=train_rank, args=(rank, port, layout, configs, folder))
                    for rank in range(LAYOUTS[layout][0])
                ]
                for process in ranks:
                    process.start()
            for process in ranks:
                process.join(timeout=_DEADLINE)
                process.kill()
        path = folders[layout] / f"{feature}.safetensors"
        if not path.is_file():
            if feature not in configs_of(layout):
                pytest.skip("needs torchao and g++")
            pytest.fail(
                "\n".join(file.read_text() for file in sorted(folders[layout].glob("*.txt")))
                or "timed out"
            )
        return load_file(path)

    return results, one_process


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * _DEADLINE)
@pytest.mark.skipif(
    sys.platform != "linux", reason="forks after torch is imported, which is safe on Linux only"
)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("layout", "feature"),
    [
        pytest.param(
            layout,
            feature,
            marks=[] if feature in QUICK.get(layout, ()) else pytest.mark.exhaustive,
        )
        for layout, feature in with_answer("yes")
    ],
)
def test_what_combines_equals_one_process(layout, feature, trained):
    trained, one_process = trained
    values = trained(layout, feature)
    expected = one_process(layout, feature)
    if layout.startswith("PP"):
        expected = {key: value for key, value in expected.items() if "gradient" not in key}
    tolerance = feature_of(layout, feature)[2]
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        near = min(tolerance, 1e-5) if feature in KINDS and "gradient" in name else tolerance
        torch.testing.assert_close(values[name], value, atol=near, rtol=near, msg=f"{name}")
