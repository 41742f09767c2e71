"""Show the data of a step of a run: its sequences, their places in the data, text and losses."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import send_to_device
from tqdm import tqdm

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import config_at, stages_of
from nanogpt_hf.config.step_size import accumulation_steps
from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.data.examples import row_lengths
from nanogpt_hf.data.mixture import as_mixture
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.evaluation.loss import eval_mode
from nanogpt_hf.formatting import shows_bars
from nanogpt_hf.methods.run import Run
from nanogpt_hf.training.micro_batch import build_batches


@torch.no_grad()
def sequences_of(run: Run, step: int) -> list[dict[str, Any]]:
    """The sequences of a step, the one with the highest loss under the run's weights first."""
    run = at_step(run, step)
    found = []
    blocks = run.batches.blocks
    with eval_mode(run.model):
        for index in tqdm(_indices(run, step), unit="sequence", disable=not shows_bars()):
            number = np.array([index])
            # A batch of one sequence: its loss is summed over its own targets.
            batch: Any = send_to_device(blocks.batch(number), run.accelerator.device)
            loss = run.objective(run.model, batch)[0].item() / max(1, blocks.num_targets(number))
            found.append({"loss": loss, **_place_of(run, index), "text": _text_of(run, index)})
    return sorted(found, key=lambda sequence: -sequence["loss"])


def steps_with(run: Run, text: str, last: int) -> list[int]:
    """Find the steps up to `last` in which some sequence contains `text`."""
    found = []
    for stage in stages_of(run.config):
        now = at_step(run, stage.first + 1)
        # Cached, since the steps of several epochs see the same sequences.
        contains = cache(lambda index, now=now: text in _text_of(now, index))
        steps = range(stage.first + 1, min(stage.last, last) + 1)
        steps = tqdm(steps, unit="step", disable=not shows_bars())
        found += [step for step in steps if any(map(contains, _indices(now, step)))]
    return found


def at_step(run: Run, step: int) -> Run:
    """The run with the data of another step's stage."""
    config = config_at(run.config, step - 1)
    accelerator = run.accelerator
    if config.first_step == run.config.first_step:
        return run
    data = load_prepared(config)
    size = config.train.min_micro_batch_size
    accelerator.gradient_accumulation_steps = accumulation_steps(config, run.mesh.dp_size)
    batches = build_batches(config, accelerator, data.train, size)
    return replace(run, config=config, data=data, batches=batches)


def _indices(run: Run, step: int) -> list[int]:
    """The numbers of the sequences of a step."""
    # After a rollback, a step sees the data of a later one.
    return run.batches.indices(step - 1 + run.state.skipped_steps).tolist()


def _text_of(run: Run, index: int) -> str:
    """The text of a block, up to the last token that is learned."""
    batch = run.batches.blocks.batch(np.array([index]))
    # (block_size,)
    inputs = batch["input_ids"][0]
    targets = batch["shift_labels"][0]
    # The rest of the block is padding, or ids that nothing is learned from.
    end = int((targets != -100).nonzero().max()) + 1
    return str(run.data.tokenizer.decode(torch.cat([inputs[:end], targets[end - 1 : end]])))


def _place_of(run: Run, index: int) -> dict[str, Any]:
    """Where a block is in the prepared data: source, numbers of documents, tokens."""
    blocks = as_mixture(run.batches.blocks)
    number = int(blocks.owners(np.array(index)))
    source = sources_of(run.config.data)[number]
    part = cast(Any, blocks.parts[number])
    place: dict[str, Any] = {"source": source.name}
    # The blocks of a mixture are numbered one source after another.
    own = index - sum(blocks.lengths[:number])
    # Conversations and rows of documents know their documents.
    if not isinstance(part, TokenBlocks):
        return place | {"documents": part.documents_of(own)}
    tokens = own * part.stride + np.array([0, part.block_size])
    if not FORMATS[source.data.format].has_tokens:
        ends = _document_ends(source.data.dir)
        first, last = np.searchsorted(ends, tokens, side="right").tolist()
        place["documents"] = list(range(first, last + 1))
    return place | {"tokens": tokens.tolist()}


@cache
def _document_ends(folder: str) -> np.ndarray:
    """The number of the token after each document."""
    return np.cumsum(row_lengths(Path(folder) / "train"))
