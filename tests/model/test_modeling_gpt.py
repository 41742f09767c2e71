"""The GPT model: causality, initialization, loss, generation, compilation, use through
transformers.
"""

import itertools
import json
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.generic import find_labels

from nanogpt_hf.model import GPTConfig, GPTForCausalLM, loss_gpt
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.model.head_gpt import CACHE, batch_loss
from nanogpt_hf.model.loss_gpt import cross_entropy

TINY = {
    "vocab_size": 61,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "dropout": 0.0,
}
NO_TEXT = {"bos_token_id": None, "eos_token_id": None}


def tiny(seed: int = 0, **options) -> GPTForCausalLM:
    torch.manual_seed(seed)
    return GPTForCausalLM(GPTConfig(**TINY | NO_TEXT | options)).eval()


def random_model(**options) -> GPTForCausalLM:
    """A model with large random weights, whose greedy tokens vary without ties."""
    model = tiny(tie_word_embeddings=False, **options)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def ids(rows: int = 2, length: int = 20, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("position", [0, 7, 19])
def test_logits_depend_on_all_earlier_and_no_later_tokens(attention, position):
    model = tiny(attn_implementation=attention)
    embedded = model.transformer.wte(ids(rows=1)).detach().requires_grad_()
    model(inputs_embeds=embedded).logits[0, position].sum().backward()
    influence = embedded.grad[0].abs().sum(-1)
    assert (influence[: position + 1] > 0).all()
    assert (influence[position + 1 :] == 0).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 12, 768), 124_439_808),
        ((24, 16, 1024), 354_823_168),
        ((36, 20, 1280), 774_030_080),
        ((48, 25, 1600), 1_557_611_200),
    ],
)
def test_parameter_counts_equal_gpt2(shape, expected):
    n_layer, n_head, n_embd = shape
    assert count_parameters(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)) == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_equal_gpt2_of_transformers(tmp_path, attention):
    torch.manual_seed(0)
    sizes = {"vocab_size": 211, "n_positions": 48, "n_layer": 48, "n_head": 25, "n_embd": 100}
    reference = GPT2LMHeadModel(GPT2Config(**sizes, **NO_TEXT)).eval()
    for name, parameter in reference.named_parameters():  # biases of zero would hide mistakes
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    reference.save_pretrained(tmp_path)
    model = GPTForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    tokens = ids(2, 48, 211)
    with torch.no_grad():
        assert (model(tokens).logits - reference(tokens).logits).abs().max() <= 1e-5


def test_initialization_is_gpt2s_with_scaled_residual_projections():
    n_layer = 8
    model = tiny(n_layer=n_layer, n_embd=128, vocab_size=1000)
    for name, parameter in model.named_parameters():
        if name.endswith(("attn.o_proj.weight", "mlp.proj.weight")):
            expected = 0.02 / math.sqrt(2 * n_layer)
        elif "ln_" in name and name.endswith("weight"):
            assert (parameter == 1).all(), name
            continue
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
            continue
        else:
            expected = 0.02
        # The standard deviation of n samples varies by about 1 / sqrt(2n): five times that is no
        # chance.
        assert parameter.std().item() == pytest.approx(
            expected, rel=5 / math.sqrt(2 * parameter.numel())
        ), name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


@pytest.mark.parametrize("padded_vocab_size", [None, 64])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_gpt2(tmp_path, monkeypatch, padded_vocab_size, tied):
    model = tiny(padded_vocab_size=padded_vocab_size, tie_word_embeddings=tied).train()
    model.save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).train()
    tokens = ids()
    labels = ids()
    labels[0, 3:9] = -100
    expected = reference(tokens, labels=labels).loss
    expected.backward()
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", 7 * 61)  # 7 rows: the last chunk is shorter
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], dim=1)
    for options in ({"labels": labels}, {"shift_labels": shifted}):
        model.zero_grad()
        out = model(tokens, **options)
        assert out.logits is None
        out.loss.backward()
        torch.testing.assert_close(out.loss, expected, atol=1e-6, rtol=0)
        for name in ("transformer.wte.weight", "transformer.h.0.ln_1.bias", "lm_head.weight"):
            theirs = reference.get_parameter(name).grad
            gradient = model.get_parameter(name).grad[: len(theirs)]
            torch.testing.assert_close(gradient, theirs, atol=1e-6, rtol=1e-5)


def test_logits_are_returned_only_outside_training():
    model = tiny()
    tokens = ids()
    assert model(tokens, labels=tokens).logits.shape == (2, 20, 61)
    assert model(tokens, labels=tokens, skip_logits=True).logits is None
    assert model.train()(tokens, labels=tokens).logits is None
    assert model(tokens).logits.shape == (2, 20, 61)
    assert model(tokens, logits_to_keep=1).logits.shape == (2, 1, 61)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generation_with_cache_equals_without_and_gpt2(tmp_path, attention):
    model = random_model(attn_implementation=attention)
    model.save_pretrained(tmp_path)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    prompt = ids(2, 5)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, **options)
    assert cached.shape == (2, 25)
    assert len(set(cached[0, 5:].tolist())) > 1
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))
    assert torch.equal(cached, reference.generate(prompt, **options))


@pytest.mark.long
def test_model_and_blocks_compile_without_graph_breaks():
    model = tiny()
    tokens = ids()
    expected = model(tokens).logits
    # aot_eager traces like inductor, without a minute of C++ compilation
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(tokens, use_cache=False).logits, expected, atol=1e-6, rtol=0
    )
    names = list(model.state_dict())
    for block in model.transformer.h:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-6, rtol=0)
    assert list(model.state_dict()) == names
    torch.compiler.reset()


def test_more_tokens_than_positions_is_one_line():
    with pytest.raises(ValueError, match="33 tokens are more than the model's 32 positions"):
        tiny()(ids(1, 33))


@pytest.mark.parametrize(("past", "new"), [(32, 1), (20, 13), (1, 32)])
def test_more_tokens_with_those_in_the_cache_is_the_same_line(past, new):
    model = tiny().eval()
    cache = {CACHE: model(ids(1, past), use_cache=True)[CACHE]}
    with pytest.raises(ValueError, match="33 tokens are more than the model's 32 positions"):
        model(ids(1, new), use_cache=True, **cache)


def test_generating_more_than_the_positions_is_the_same_line():
    with pytest.raises(ValueError, match="33 tokens are more than the model's 32 positions"):
        tiny().eval().generate(ids(1, 30), max_new_tokens=9, do_sample=False)


def test_trainer_uses_one_label_name():
    assert find_labels(GPTForCausalLM) == ["labels"]


def test_sorting_model_sorts_all_inputs(shared):
    model = GPTForCausalLM.from_pretrained(shared / "models" / "gpt-nano-sort").eval()
    rows = torch.tensor(list(itertools.product(range(3), repeat=6)))
    assert len(rows) == 729
    out = rows
    with torch.no_grad():
        for _ in range(6):
            out = torch.cat([out, model(out).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(out[:, 6:], rows.sort(dim=1).values)


def test_slm4096_has_its_known_perplexity(shared):
    folder = shared / "models" / "slm4096"
    id_of = json.loads((folder / "chars.json").read_text())["stoi"]
    tokens = torch.tensor([id_of[c] for c in (folder / "corpus.txt").read_text()])
    model = GPTForCausalLM.from_pretrained(folder).eval()
    windows = tokens[: len(tokens) // 128 * 128].view(-1, 128)
    with torch.no_grad():
        losses = [model(rows, labels=rows).loss.item() * len(rows) for rows in windows.split(64)]
    assert math.exp(sum(losses) / len(windows)) == pytest.approx(1.073, abs=0.003)


def compiled(model, graphs):
    """The model with a compiled base model, whose graphs are added to `graphs`."""

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model.transformer.compile(backend=keep)
    return model


def calls(graph, function) -> int:
    return sum(node.target == function for node in graph.graph.nodes)


@pytest.mark.parametrize("bias", [True, False])
def test_compiled_graph_has_one_product_for_queries_keys_and_values_and_no_mask(bias):
    graphs = []
    plain = tiny(bias=bias, attn_implementation="sdpa").train()
    model = compiled(tiny(bias=bias, attn_implementation="sdpa").train(), graphs)
    losses = []
    for each in (plain, model):
        losses.append(each(input_ids=ids(), labels=ids(), use_cache=False).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    (graph,) = graphs
    # Of each block's six products three are one: of q, k and v, of the output, and two of the MLP.
    assert calls(graph, torch._C._nn.linear) == 4 * TINY["n_layer"]
    attention = [
        node
        for node in graph.graph.nodes
        if node.target == torch._C._nn.scaled_dot_product_attention
    ]
    assert len(attention) == TINY["n_layer"]
    assert all(node.kwargs["attn_mask"] is None for node in attention)
    assert all(node.kwargs["is_causal"] for node in attention)


def test_compiled_training_is_one_graph_from_tokens_to_loss():
    graphs = []
    model = compiled(tiny(attn_implementation="sdpa").train(), [])

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    batch = {"input_ids": ids(), "shift_labels": ids().roll(-1), "use_cache": False}
    expected = model(**batch, skip_logits=True).loss
    model.compiled_batch_loss = torch.compile(batch_loss, backend=keep, fullgraph=True)
    for items, factor in ((None, 1), (1, ids().numel()), (torch.tensor(2), ids().numel() / 2)):
        loss = model(**batch, skip_logits=True, num_items_in_batch=items).loss
        torch.testing.assert_close(loss, expected * factor)
    (graph,) = graphs
    # The products of the blocks, and with the head.
    assert calls(graph, torch._C._nn.linear) == 4 * TINY["n_layer"] + 1


@pytest.mark.parametrize(
    "call",
    [
        {"skip_logits": False},
        {"attention_mask": torch.ones(2, 20, dtype=torch.long)},
        {"row_loss": cross_entropy},
        {"output_hidden_states": True},
        {"chunks": 2},
        {"grad": False},
    ],
    ids=lambda call: next(iter(call)),
)
def test_other_calls_of_a_compiled_model_do_not_take_that_graph(call, monkeypatch):
    def never(*_):
        raise AssertionError("the graph of training was called")

    model = tiny(attn_implementation="sdpa").train()
    model.compiled_batch_loss = never
    call = dict(call)
    if chunks := call.pop("chunks", None):
        monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", ids().numel() * 61 // chunks)
    options = {"skip_logits": True, "use_cache": False}
    with torch.set_grad_enabled(call.pop("grad", True)):
        out = model(input_ids=ids(), shift_labels=ids(), **options | call)
    assert out.loss.isfinite()


def test_compiled_graph_calls_layers_that_are_not_plain():
    """An adapter, a gathered weight or a split layer acts in the layer's own forward pass."""
    graphs = []
    model = compiled(tiny(attn_implementation="sdpa").train(), graphs)
    for block in model.transformer.h:
        block.attn.k_proj.register_forward_hook(lambda *_: None)
    model(input_ids=ids(), labels=ids(), use_cache=False)
    assert calls(graphs[0], torch._C._nn.linear) == 6 * TINY["n_layer"]


def test_compiled_rows_with_padding_have_a_mask():
    model = compiled(tiny(attn_implementation="sdpa"), [])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        padded = model(input_ids=ids(), attention_mask=mask, use_cache=False).logits
        alone = model(
            input_ids=ids()[:1, 5:],
            position_ids=torch.arange(5, 20)[None],
            use_cache=False,
        ).logits
    torch.testing.assert_close(padded[:1, 5:], alone)


def test_exported_graph_is_that_of_separate_layers_with_a_mask():
    """Its number of positions may vary, so the order cannot be the kernel's own."""
    model = tiny(attn_implementation="sdpa")
    program = torch.export.export(model, (ids(),), {"use_cache": False}, strict=False)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.linear.default) == 6 * TINY["n_layer"] + 1
    masked = [node for node in program.graph.nodes if "attention" in str(node.target)]
    assert all(not node.kwargs.get("is_causal") for node in masked)
    torch.testing.assert_close(program.module()(ids(), use_cache=False).logits, model(ids()).logits)
