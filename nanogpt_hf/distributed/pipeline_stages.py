"""Stages of a model for pipeline parallelism: the whole model without the layers of the other
stages.

A model of four blocks on two stages. A dash is a module that passes on what it gets:

    stage 0:  embedding  block 0  block 1     -        -      -     AbsentHead
    stage 1:     -          -        -     block 2  block 3  norm   head

So the parameters have the whole model's names, and a stage is checkpointed as any model. The
forward pass of the model's own class has two uses:

- In a training step the schedule calls one stage for one micro-batch (`ModelStage.micro_batch`): it
  takes token ids or the output of the stage before, and returns its own output or the loss.
- Called on all stages at once it evaluates and generates: hidden states pass from stage to stage by
  `Links`, and all get the loss or logits of the last.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.model.architecture import GPT2, architecture_of, padding_rows
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.head_gpt import CACHE, Head

Answer = TypeVar("Answer")


class Links:
    """Sends tensors between stages outside of training, without gradients. This base class sends
    nothing.
    """

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Receive the output of the stage before; `hidden` has its shape."""
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Send the output of this stage to the next one."""

    def from_last(self, output: torch.Tensor) -> torch.Tensor:
        """Send the `output` of the last stage to all; on the others it has the shape only."""
        return output


class AbsentBlock(nn.Module):
    """In place of a block of another stage: returns its input.

    The one just before this stage's first block receives its input instead, and the one just after
    the last sends its output (`transfer`).
    """

    def __init__(self, index: int, transfer: Callable[[torch.Tensor], torch.Tensor] | None):
        super().__init__()
        self.index = index
        self.transfer = transfer

    def forward(self, hidden, *args, **kwargs):
        if (cache := kwargs.get(CACHE)) is not None:
            # The cache counts the positions so far by the keys of the first block, (B, 0, T, 0).
            no_heads = hidden.new_zeros(len(hidden), 1, hidden.shape[1], 1)
            cache.update(no_heads, no_heads, self.index)
        return self.transfer(hidden) if self.transfer else hidden

    def compile(self, *args, **kwargs):
        """Nothing: it only communicates."""


class AbsentEmbedding(nn.Module):
    """In place of an embedding on later stages: zeros of its shape, (B, T, C), which the output of
    the stage before then replaces.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, ids):
        return torch.zeros(*ids.shape, self.width, device=ids.device)


class AbsentHead(Head):
    """In place of the head on earlier stages: returns the last stage's loss or logits."""

    def __init__(self, rows: int, links: Links):
        nn.Module.__init__(self)
        self.rows = rows
        self.links = links

    def forward(self, hidden, targets=None, vocab_size=0, row_loss=None):
        # logits (B, T, V), or the summed loss: a scalar
        shape = (*hidden.shape[:-1], self.rows) if targets is None else ()
        return self.links.from_last(torch.empty(shape, device=hidden.device))


class ModelStage:
    """Stage `index` of `count`, cut from a whole model in place, with the blocks of
    `split_blocks`.
    """

    def __init__(self, model: PreTrainedModel, index: int, count: int, links: Links):
        self.model = model
        self.links = links
        self.is_first = index == 0
        self.is_last = index == count - 1
        # A tied head is copied to the first and to the last stage. These are the names of its
        # matrix in the whole model, and here.
        self.tied_name = ""
        self.tied_here = ""
        # In a micro-batch of training: what this stage has got, and what its last block returned.
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._forward = model.forward
        # lm-eval calls it, and embedding or head are missing.
        vars(model)["tie_weights"] = lambda *args, **kwargs: None
        self._cut(index, count)

    def _cut(self, index: int, count: int) -> None:
        model = self.model
        config = model.config
        architecture = architecture_of(model)
        blocks = architecture.blocks(model)
        names = {id(module): name for name, module in model.named_modules()}
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        own = split_blocks(len(blocks), head_in_blocks(model), count)[index]
        norm = architecture.final_norm(model)
        if head.weight is embedding.weight and (self.is_first or self.is_last):
            self.tied_name = f"{names[id(embedding)]}.weight"
            self.tied_here = f"{names[id(embedding if self.is_first else head)]}.weight"
        transfers = {own.start - 1: self._receive, own.stop: self._send}
        for i in range(len(blocks)):
            if i not in own:
                blocks[i] = AbsentBlock(i, transfers.get(i))
        if not self.is_first:
            # tokens, and positions if the model learns them
            for absent in architecture.embeddings(model):
                model.set_submodule(names[id(absent)], AbsentEmbedding(config.hidden_size))
        if self.is_last:
            head.register_forward_hook(lambda head, inputs, output: self._to_all(output))
        else:
            # A norm without parameters may be one module that blocks use, too.
            if any(True for _ in norm.parameters()):
                model.set_submodule(names[id(norm)], nn.Identity())
            rows = config.vocab_size + padding_rows(config)
            model.set_submodule(names[id(head)], AbsentHead(rows, self.links))

    def micro_batch(self, inputs: torch.Tensor, **batch: Any) -> Any:
        """Compute the output of this stage, (B, T, C), for token ids (B, T), or for the output of
        the stage before; on the last stage the summed loss.
        """
        self._input = inputs
        # Later stages get hidden states where the model takes embeddings, so that autograd has a
        # gradient for the stage before.
        name = "input_ids" if self.is_first else "inputs_embeds"
        arguments = {name: inputs, "use_cache": False, **batch}
        try:
            if self.is_last:
                return self._forward(**arguments, num_items_in_batch=1, skip_logits=True).loss
            # Without the head. The AbsentBlock after the last own block has noted its output.
            self.model.base_model(**arguments)
            return self._output
        finally:
            self._input = self._output = None

    # Called by the AbsentBlocks next to this stage's own blocks. In a micro-batch of training the
    # schedule sends and receives; else `links` does.

    def _receive(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.links.receive(hidden) if self._input is None else self._input

    def _send(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._input is None:
            self.links.send(hidden)
        else:
            self._output = hidden
        return hidden

    def _to_all(self, output: torch.Tensor) -> torch.Tensor:
        return self.links.from_last(output) if self._input is None else output


def head_in_blocks(model: PreTrainedModel) -> float:
    """Size of the head in blocks: of their parameters, and so of their multiplications."""
    block = architecture_of(model).blocks(model)[0]
    head: Any = model.get_output_embeddings()
    return head.weight.numel() / sum(parameter.numel() for parameter in block.parameters())


def split_blocks(blocks: int, head: float, count: int) -> list[range]:
    """Share the blocks over `count` stages, for a head that computes as much as `head` blocks.

    The last stage gets as many blocks as make it as fast as the others on average, at least one.
    The others differ by at most one; the first has the fewest, since it holds the activations of
    most micro-batches.
    """
    # A fair share is (blocks + head) / count; the head takes `head` of the last stage's share. Each
    # other stage needs one block at least.
    last = min(max(1, round((blocks + head) / count - head)), blocks - count + 1)
    ends = [(blocks - last) * i // (count - 1) for i in range(count)] + [blocks]
    return [range(*ends[i : i + 2]) for i in range(count)]


def own_blocks(blocks: nn.ModuleList) -> list[nn.Module]:
    """Blocks of this stage; all of a model that is not cut."""
    return [block for block in blocks if not isinstance(block, AbsentBlock)]


def once_per_section(
    probe: Callable[[ModelSection], Answer],
) -> Callable[[ModelSection], Answer]:
    """Remember the answer about each section: `estimate --gpus` asks for every layout."""
    answers: dict[str, Answer] = {}

    @functools.wraps(probe)
    def remembered(section: ModelSection) -> Answer:
        key = repr(section)
        if key not in answers:
            answers[key] = probe(section)
        return answers[key]

    return remembered


def tiny_model(section: ModelSection) -> PreTrainedModel:
    """A tiny model of the same architecture, with weights large enough that a difference shows."""
    sizes: dict[str, Any] = {"n_head": min(2, section.n_head), "n_embd": 32, "n_positions": 16}
    # Experts have widths of their own, such as moe_intermediate_size.
    sizes["extra"] = {
        name: min(value, 32)
        if name.endswith("intermediate_size") and isinstance(value, int)
        else value
        for name, value in section.extra.items()
    }
    # A list in model.extra has a value for each block: then their number has to stay.
    if not any(isinstance(value, list) for value in section.extra.values()):
        sizes["n_layer"] = 2
    tiny = dataclasses.replace(section, n_kv_head=None, n_inner=None, **sizes)
    model = build_model(build_config(tiny, vocab_size=64), seed=0).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            # Initial weights are small, and norms are 1: layers left out would hardly show.
            wave = torch.sin(torch.arange(parameter.numel()) * (1.7 + number))
            parameter.add_(wave.view(parameter.shape), alpha=0.2)
    return model


@once_per_section
def stages_problem(section: ModelSection) -> str | None:
    """Say why a model of this architecture is not cut into stages, if it is not.

    A tiny one is cut into two. If their loss is another one than the whole's, the model does more
    between its blocks than pass on hidden states.
    """
    if section.architecture == GPT2.name:
        return None
    try:
        whole = tiny_model(section)
        ids = torch.arange(32).view(2, 16)
        with torch.no_grad():
            first = ModelStage(copy.deepcopy(whole), 0, 2, Links())
            last = ModelStage(copy.deepcopy(whole), 1, 2, Links())
            expected = whole(
                input_ids=ids, shift_labels=ids + 1, num_items_in_batch=1, use_cache=False
            ).loss
            loss = last.micro_batch(first.micro_batch(ids), shift_labels=ids + 1)
    except Exception as error:
        # Whatever its forward pass does not find in a stage, or cannot compute there.
        return f"it cannot be cut into stages: {error!s:.80}"
    same = torch.allclose(loss, expected, rtol=1e-4)
    return None if same else "its stages compute another loss than the whole"
