"""Documents apart without a mask of all pairs: equal to the mask. Flex attention runs on the CPU
here, whose gradients torch computes, but refuses by a check that is left out.
"""

import functools
import re

import decoder_types as types
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as integration

from allocations import peak_allocation
from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import packed_attention
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.model.head_gpt import CACHE
from nanogpt_hf.model.packed_attention import attend_apart
from nanogpt_hf.model.recompute import recompute_blocks

MODELS = {
    "gpt2": {},
    "llama": {"architecture": "llama", "n_kv_head": 2},
    "qwen3": {"architecture": "qwen3", "n_kv_head": 1},
    # logits are capped, every other layer has a window
    "gemma2": {"architecture": "gemma2", "extra": {"sliding_window": 20}},
}
TABLE = types.PAGE.read_text(encoding="utf-8").split(types.BEGIN)[1].split("Refused:")[0]
# torch warns of its own parts when it compiles
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]
# The lengths of the documents in two rows: blocks of flex have 128 positions.
DOCUMENTS = ((70, 30, 100), (1, 129, 70))


@pytest.fixture
def way(monkeypatch):
    """Choose `flex` or document by document (`alone`), for sequences of any length.

    Masks are compiled without code for this CPU, which takes half a minute.
    """
    compile_ = torch.compile

    def choose(name: str, backend: str = "aot_eager") -> None:
        monkeypatch.setattr(torch, "compile", functools.partial(compile_, backend=backend))
        monkeypatch.setattr(packed_attention, "FLEX_DEVICES", ["cpu"] if name == "flex" else [])
        monkeypatch.setattr(packed_attention, "MIN_POSITIONS", 2)
        monkeypatch.setattr(packed_attention, "MIN_HEAD", 1)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    # torch's kernels for CPUs have no backward pass: its reference for every operation
    monkeypatch.setattr(
        integration.WrappedFlexAttention, "__call__", lambda self: flex_attention.flex_attention
    )
    return choose


@pytest.fixture
def masks(monkeypatch) -> list[object]:
    """The masks that models get."""
    made = []
    register = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register

    def noting(name, function):
        def build(**options):
            made.append(function(**options))
            return made[-1]

        register(name, build)

    monkeypatch.setattr(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "register", noting)
    return made


def build(name: str, **knobs):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 256}
    model = build_model(build_config(ModelSection(**sizes | MODELS[name] | knobs), 50), seed=0)
    return spread(model)


def spread(model):
    """The model with weights so large that attention matters."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def loss_and_gradient(model, documents=DOCUMENTS, tokens=50, precision=torch.float32):
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in row]) for row in documents]
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(tokens, positions.shape, generator=generator)
    model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = model(
            input_ids=ids, position_ids=positions, shift_labels=ids.roll(-1, 1), use_cache=False
        ).loss
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def difference(one, other) -> float:
    """The larger of the relative differences of losses and gradients."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other, strict=True))


@pytest.mark.one_row_per("kind")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["flex", "alone"])
def test_loss_and_gradient_equal_those_with_a_mask(name, kind, way, masks):
    way(kind)
    model = build(name)
    with_mask = loss_and_gradient(model)
    half = loss_and_gradient(model, precision=torch.bfloat16)
    attend_apart(model)
    assert difference(loss_and_gradient(model), with_mask) < 1e-5
    # no farther from float32 than with a mask
    rounding = difference(half, with_mask)
    assert (
        difference(loss_and_gradient(model, precision=torch.bfloat16), with_mask) < 1.2 * rounding
    )
    expected = "BlockMask" if kind == "flex" else "Tensor" if name == "gemma2" else "DocumentMask"
    assert {type(mask).__name__ for mask in masks} == {expected}
    # calls that pack nothing are as before, also with a cache
    ids = torch.arange(9)[None]
    model.eval()
    with torch.no_grad():
        together = model(ids, use_cache=False).logits
        first = model(ids[:, :5], use_cache=True)
        rest = model(ids[:, 5:], **{CACHE: first[CACHE]}, use_cache=True).logits
    torch.testing.assert_close(rest, together[:, 5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["flex", "alone"])
def test_no_mask_of_all_pairs_is_built(kind, way, monkeypatch):
    way(kind, "inductor")
    model = build("gpt2", n_positions=2048)
    length = 2048
    attend_apart(model)
    positions = torch.cat([torch.arange(256)] * 8).expand(2, -1)
    embeddings = torch.zeros(2, length, 64)

    def mask(own: str = model.config._attn_implementation):
        model.config._attn_implementation = own
        return masking_utils.create_causal_mask(model.config, embeddings, None, None, positions)

    mask()  # compiled
    pairs = 2 * length * length
    assert peak_allocation(mask) < pairs / 10
    assert peak_allocation(lambda: mask("sdpa")) >= pairs
    if kind == "flex":
        compiled = mask()
        monkeypatch.setattr(torch, "compile", lambda function: function)
        for name in ("kv_num_blocks", "full_kv_num_blocks"):
            assert torch.equal(getattr(compiled, name), getattr(mask(), name))
        assert torch.equal(compiled.to_dense(), mask().to_dense())


def test_other_lengths_compile_nothing(way):
    way("flex")
    model = build("llama")
    attend_apart(model)
    for block in architecture_of(model).blocks(model):
        block.compile(backend="aot_eager")
    torch._dynamo.reset()
    counters.clear()
    compiled = loss_and_gradient(model)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs
    assert not counters["graph_break"]
    plain = build("llama")
    assert difference(compiled, loss_and_gradient(plain)) < 1e-5
    other = ((100, 100), (50, 150))
    assert difference(loss_and_gradient(model, other), loss_and_gradient(plain, other)) < 1e-5
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("level", ["true", "selective"])
@pytest.mark.parametrize("kind", ["flex", "alone"])
def test_blocks_computed_again(kind, level, way):
    way(kind)
    model = build("gpt2")
    with_mask = loss_and_gradient(model)
    attend_apart(model)
    recompute_blocks(model, level)
    assert difference(loss_and_gradient(model), with_mask) < 1e-5


def test_what_keeps_the_mask(masks):
    short = build("gpt2")
    attend_apart(short)
    loss_and_gradient(short)
    assert {type(mask) for mask in masks} == {torch.Tensor}  # on a CPU, and short
    for model in (
        # Each head has 8 values.
        build("gpt2", n_head=8),
        build("gpt2", architecture="doge"),
        build("gpt2", architecture="granite_swa"),  # sinks
        build("gpt2", architecture="stablelm"),  # transformers runs it without flex
    ):
        before = model.config._attn_implementation
        attend_apart(model)
        assert model.config._attn_implementation == before


def test_dropout_keeps_the_mask_in_training_only(way, masks):
    way("alone")
    model = build("gpt2", dropout=0.1)
    positions = torch.tensor([[*range(20), *range(30)]])
    inputs = {"input_ids": positions % 7, "position_ids": positions, "use_cache": False}
    logits = []
    for attend in (lambda model: None, attend_apart):
        attend(model)
        with torch.no_grad():
            logits.append(model.eval()(**inputs).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    loss_and_gradient(model.train())
    assert [type(mask) for mask in masks] == [packed_attention.DocumentMask, torch.Tensor]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", re.findall("`(.*?)`", TABLE))
def test_type_of_the_table(architecture, way):
    model = types.tiny(architecture)
    for name, value in model.config.to_dict().items():
        if "drop" in name and value:
            setattr(model.config, name, 0)
    try:
        check_causal(model, packs=True)
    except UserError:
        pytest.skip("documents are padded: its tokens do not mix by attention alone")
    with_mask = loss_and_gradient(spread(model), ((10, 2, 20), (1, 14, 17)), types.VOCAB)
    own = model.config._attn_implementation
    for kind in ("flex", "alone"):
        way(kind)
        model.set_attn_implementation(own)
        attend_apart(model)
        found = loss_and_gradient(model, ((10, 2, 20), (1, 14, 17)), types.VOCAB)
        assert difference(found, with_mask) < 1e-5, kind
