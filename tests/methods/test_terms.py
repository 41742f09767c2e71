"""The loss on text is a sum of terms: a row of the test is added to it, with distillation; layouts
that do not honour a term or a method refuse it.
"""

from dataclasses import replace

import pytest
import torch

from assertions import column, refusal
from nanogpt_hf.config.compatibility import RULES
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import RECIPE_METHODS, RecipeMethod, objective_rules
from nanogpt_hf.config.schema import KNOBS, Config, DistillSection, replace_knobs
from nanogpt_hf.config.settings import Setting
from nanogpt_hf.data.tokenizer import char_tokenizer
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import ConfigError, UserError
from nanogpt_hf.methods import terms
from nanogpt_hf.methods.distillation import TaughtData
from nanogpt_hf.methods.term import Term
from nanogpt_hf.methods.terms import text_objective
from nanogpt_hf.methods.text import TEXT
from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt
from nanogpt_hf.training.loop import train
from nanogpt_hf.training.start import prepare_run

VOCAB = 40
# A knob of the package that changes nothing here: it chooses the rows of the test.
KNOB = "data.max_epochs"


def squared_log_partition(config, data, model, batch):
    """The z-loss of PaLM (arXiv:2204.02311): log² of the sum of exponentials of a row's logits."""
    return lambda chunk, logits: logits.logsumexp(-1).square()


@pytest.fixture
def z_loss(monkeypatch):
    before = list(RULES)
    monkeypatch.setitem(KNOBS, KNOB, replace(KNOBS[KNOB], layouts=()))
    row = Term("z_loss", knob=KNOB, weight=lambda config: 0.01, rows=squared_log_partition)
    monkeypatch.setattr(terms, "TERMS", [*terms.TERMS, row])
    RULES.extend(objective_rules(RECIPE_METHODS, {KNOB: ()}))
    yield
    RULES[:] = before


def build(seed: int) -> GPTForCausalLM:
    torch.manual_seed(seed)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "dropout": 0.0}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "vocab_size": VOCAB}
    return GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.3))


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("distills", [True, False])
def test_terms_add_up(monkeypatch, z_loss, chunks, distills):
    if chunks:
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 7 * VOCAB)
    model = build(1)
    teacher = build(2).eval().requires_grad_(False)
    ids = torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(5))
    labels = ids[:, 1:].clone()
    labels[0, 3:7] = -100
    batch = {"input_ids": ids[:, :-1], "shift_labels": labels}
    config = replace_knobs(Config(), {KNOB: 9.0})
    if distills:
        section = DistillSection(teacher="x", weight=0.3, temperature=2.0)
        config = replace(config, distill=section)
    data = TaughtData(*[None] * 4, teacher=teacher)  # pyright: ignore

    logits = model(input_ids=batch["input_ids"]).logits[labels != -100]
    taught = teacher(input_ids=batch["input_ids"]).logits[labels != -100]
    targets = labels[labels != -100][:, None]
    expected = {
        "cross_entropy": -logits.log_softmax(-1).gather(1, targets).sum(),
        "z_loss": logits.exp().sum(-1).log().square().sum(),
    }
    whole = expected["cross_entropy"] + 0.01 * expected["z_loss"]
    if distills:
        p = (logits / 2).log_softmax(-1)
        q = (taught / 2).log_softmax(-1)
        expected["kl"] = (q.exp() * (q - p)).sum()
        whole = 0.7 * expected["cross_entropy"] + 0.01 * expected["z_loss"]
        whole = whole + 0.3 * 4 * expected["kl"]
    whole.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    loss, metrics = text_objective(config, data)(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(metrics, expected, atol=1e-4, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_run_trains_with_two_terms(z_loss, make_recipe, text_file, tmp_path):
    tokenizer = char_tokenizer(sorted(set(text_file.read_text()))).hf
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "vocab_size": len(tokenizer)}
    torch.manual_seed(3)
    GPTForCausalLM(GPTConfig(**sizes, initializer_range=0.5)).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    knobs = {"distill__teacher": str(tmp_path / "teacher"), "distill__weight": 0.25}
    recipe = make_recipe(tmp_path / "terms.yaml", data__max_epochs=99, train__max_steps=6, **knobs)
    run = train(prepare_run(load_config(recipe), tmp_path / "run"))
    parts = {name: column(run, f"train/{name}") for name in ("cross_entropy", "kl", "z_loss")}
    for step, loss in column(run, "train/loss").items():
        cross_entropy, kl, z = (part[step] for part in parts.values())
        assert loss == pytest.approx(0.75 * cross_entropy + 0.25 * kl + 0.01 * z, rel=1e-5)
    assert parts["z_loss"][6] < parts["z_loss"][1]


LAYOUTS = {
    Setting.PIPELINE_STAGES: Launch(world_size=2, pp_size=2),
    Setting.TENSOR_PARALLELISM: Launch(world_size=2, tp_size=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", ["a term", "a method"])
def test_layouts_refuse_what_does_not_state_them(layout, row, write_recipe, tmp_path):
    config = load_config(write_recipe(data__max_epochs=99))
    launch = LAYOUTS[layout]
    mesh = Mesh.of(launch, 0)
    check_layout(config, launch)
    method = RecipeMethod(KNOB, "halves", {}, 16, "text")
    before = list(RULES)
    try:
        RULES.extend(objective_rules(*(([], {KNOB: ()}) if row == "a term" else ([method], {}))))
        line = refusal(prepare_run, config, tmp_path / "run", mesh=mesh, error=UserError)
        check_layout(replace_knobs(config, {KNOB: None}), launch)
        # A row that states the layout is not refused.
        honoured = (Setting.PIPELINE_STAGES, Setting.TENSOR_PARALLELISM)
        method = method._replace(layouts=honoured)
        term = {KNOB: honoured}
        RULES[:] = before + objective_rules(*(([], term) if row == "a term" else ([method], {})))
        check_layout(config, launch)
    finally:
        RULES[:] = before
    assert line.startswith(f"{KNOB} 99 does not combine with {layout.value} (")
    assert "its loss needs whole models" in line
    assert not (tmp_path / "run").exists()


def test_term_is_refused_by_methods_with_another_loss(z_loss, write_recipe):
    recipe = write_recipe(data__max_epochs=99, rl__task="arithmetic")
    with pytest.raises(ConfigError, match=f"{KNOB}: 99 does not combine with rl.task"):
        load_config(recipe)


def test_a_row_that_the_recipe_does_not_declare_is_an_error():
    with pytest.raises(ValueError, match=f"{KNOB}: declare it by `loss_term`"):
        Term("z_loss", knob=KNOB, weight=lambda config: 0.01, rows=squared_log_partition)
    with pytest.raises(ValueError, match="halves: list its recipe in RECIPE_METHODS"):
        replace(TEXT, name="halves", recipe=RecipeMethod(KNOB, "halves", {}, 16, "text"))


@pytest.mark.parametrize(
    ("layouts", "kind", "named"),
    [
        ((Setting.PIPELINE_STAGES,), "rows", "pipeline stages"),
        ((Setting.PIPELINE_STAGES,), "output", "pipeline stages"),
        ((Setting.TENSOR_PARALLELISM,), "rows", "tensor parallelism"),
        ((Setting.TENSOR_PARALLELISM,), "output", None),
        ((Setting.DEEPSPEED,), "rows", None),
    ],
)
def test_term_cannot_state_a_layout_that_would_leave_it_out(monkeypatch, layouts, kind, named):
    monkeypatch.setitem(KNOBS, KNOB, replace(KNOBS[KNOB], layouts=layouts))
    parts = {kind: squared_log_partition}

    def build_term() -> Term:
        return Term("z_loss", knob=KNOB, weight=lambda config: 0.01, **parts)

    if named is None:
        assert build_term().knob == KNOB
        return
    with pytest.raises(ValueError, match=f"no such term can honour {named}"):
        build_term()
