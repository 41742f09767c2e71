"""A longer context by fine-tuning: YaRN or another theta for rotary positions, more rows for
GPT-2's learned ones.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from arguments import argv
from assertions import copy_at
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long
NOT_TRAINED = "--optim.learning_rate 0 --optim.min_learning_rate 0 --optim.weight_decay 0"
YARN = {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def rotary_base(tmp_path_factory, tiny_base):
    """A Qwen3 with 32 positions and the tokenizer of tiny_base."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_base)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = transformers.Qwen3Config(**sizes, vocab_size=len(tokenizer), initializer_range=0.2)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def finetune(text_file, tmp_path, forget_accelerate):
    def finetune(base, options: str, status: int = 0) -> RunFolder:
        forget_accelerate()
        start = "finetune --from {} --data {} --data.dir {} --run-dir {} --train.max_steps 4 "
        start += "--train.tokens_per_step 160 --train.micro_batch_size 1 --eval.tokens 160 "
        start += "--eval.every 2 --checkpoint.every 2 --optim.warmup_steps 0"
        run = tmp_path / "run"
        words = argv(start, base, text_file, tmp_path / f"data-{base.name}", run)
        assert main([*words, *options.split()]) == status
        return RunFolder(run)

    return finetune


def logits(model, length: int) -> torch.Tensor:
    model = model.float().eval()
    with torch.no_grad():
        return model(torch.arange(length)[None] * 7 % 20).logits


@pytest.mark.parametrize(
    ("options", "rope"),
    [("--model.n_positions 80", YARN), ("--model.n_positions 80 --finetune.rope_theta 5e5", {})],
    ids=["yarn", "theta"],
)
def test_rotary_positions_are_those_of_transformers(rotary_base, finetune, options, rope):
    run = finetune(rotary_base, f"{options} {NOT_TRAINED}")
    config = transformers.AutoConfig.from_pretrained(rotary_base)
    theta = config.rope_parameters["rope_theta"] if rope else 5e5
    config.rope_parameters = config.rope_parameters | rope | {"rope_theta": theta}
    config.max_position_embeddings = 80
    expected = transformers.Qwen3ForCausalLM.from_pretrained(rotary_base, config=config)
    opened = transformers.AutoModelForCausalLM.from_pretrained(run.final)
    assert opened.config.rope_parameters == config.rope_parameters
    assert opened.config.max_position_embeddings == 80
    torch.testing.assert_close(logits(opened, 80), logits(expected, 80), rtol=0, atol=1e-6)
    before = transformers.Qwen3ForCausalLM.from_pretrained(rotary_base)
    assert not torch.allclose(logits(opened, 80), logits(before, 80), atol=1e-3)


def test_yarn_is_extended_from_its_first_context(rotary_base, finetune, tmp_path):
    first = finetune(rotary_base, "--model.n_positions 64 --train.tokens_per_step 128").final
    first.rename(tmp_path / "first")
    again = finetune(tmp_path / "first", "--model.n_positions 80 --overwrite").final
    rope = transformers.AutoConfig.from_pretrained(again).rope_parameters
    assert {name: rope[name] for name in YARN} == YARN


def test_learned_positions_are_repeated(tiny_base, finetune):
    run = finetune(tiny_base, f"--model.n_positions 80 {NOT_TRAINED}")
    old, new = (
        next(w for name, w in load_file(path).items() if name.endswith("wpe.weight"))
        for path in (tiny_base / "model.safetensors", run.final / "model.safetensors")
    )
    assert torch.equal(new, torch.cat([old, old, old[:16]]))
    models = map(transformers.GPT2LMHeadModel.from_pretrained, (tiny_base, run.final))
    before, after = (logits(model, 32) for model in models)
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize("base", ["tiny_base", "rotary_base"])
def test_run_with_more_positions_resumes_exactly(base, finetune, tmp_path, request):
    options = "--model.n_positions 80"
    run = finetune(request.getfixturevalue(base), options)
    assert run.path.rename(tmp_path / "whole")
    whole = RunFolder(tmp_path / "whole")
    copy_at(whole, 2, run.path)
    finetune(request.getfixturevalue(base), f"{options} --resume")
    ends = [(folder.final / "model.safetensors").read_bytes() for folder in (whole, run)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("base", "options", "named"),
    [
        ("rotary_base", "--model.n_positions 80 --lora 2", ["lora.rank 2", "n_positions"]),
        (
            "rotary_base",
            "--model.n_positions 16 --data.block_size 16",
            ["model.n_positions", "32 positions"],
        ),
        ("tiny_base", "--finetune.rope_theta 5e5", ["finetune.rope_theta", "GPT-2"]),
        ("rotary_base", "--finetune.rope_theta 0.5", ["finetune.rope_theta", "0.5"]),
    ],
)
def test_positions_that_cannot_be_are_one_line(base, options, named, finetune, capsys, request):
    folder = request.getfixturevalue(base)
    capsys.readouterr()  # what making the model has printed
    run = finetune(folder, options, status=2)
    line = capsys.readouterr().err.splitlines()[0]
    assert all(name in line for name in named)
    # A knob that was not stated is not the mistake.
    assert "model.n_positions" not in line or "model.n_positions" in options
    assert not run.path.exists()
