"""Tokens per second of generation, data loader and tokenizer; seconds of a checkpoint."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from nanogpt_hf.bench.clock import Spread, spread, time_of
from nanogpt_hf.bench.workload import Workload
from nanogpt_hf.completions import generate_completions
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.errors import UserError
from nanogpt_hf.generate import generate_tokens
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.checkpoint_writer import CheckpointWriter

_CPU = torch.device("cpu")
_NEW_TOKENS = 128
_ROWS = 16  # samples at once
_DOCUMENTS = 64  # source files of Python's library for the tokenizer, about 2 MB


def _rate(device: torch.device, work: Callable[[], int], windows: int) -> Spread:
    """Tokens per second of `work`, which returns their number; the first call is warm-up."""
    tokens = work()
    return spread([tokens / time_of(device, work) for _ in range(windows)])


@torch.no_grad()
def generation_rates(work: Workload, windows: int) -> dict[str, Spread] | None:
    """Tokens per second of samples, up to 128 tokens or the context.

    One greedy sample with and without the KV cache (`sample` uses it), sixteen samples at once,
    as in reinforcement learning, and one sample by transformers' `generate`. None with several
    processes, which may share the model.
    """
    if work.run.mesh.world_size > 1:
        return None
    model = cast(PreTrainedModel, work.run.accelerator.unwrap_model(work.run.model))
    new = min(_NEW_TOKENS, work.run.model_config.max_position_embeddings - 1)
    device = work.run.accelerator.device
    model.eval()

    def with_cache() -> int:
        return sum(
            1 for _ in generate_tokens(model, [0], max_new_tokens=new, temperature=0.0, end_ids=())
        )  # it could end at once

    def without_cache() -> int:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for _ in range(new):
            logits = model(ids, use_cache=False, logits_to_keep=1).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return new

    def batched() -> int:
        options = {"seeds": range(_ROWS), "max_new_tokens": new, "temperature": 1.0, "end_ids": ()}
        return int(generate_completions(model, [[0]] * _ROWS, **options).lengths.sum())

    def by_transformers() -> int:
        options = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": True,
            "top_k": 0,
            "pad_token_id": 0,
        }
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        generate: Any = model.generate
        return generate(ids, attention_mask=torch.ones_like(ids), **options).shape[1] - 1

    kinds = {
        "with cache": with_cache,
        "without": without_cache,
        f"{_ROWS} at once": batched,
        "by transformers' generate": by_transformers,
    }
    rates = {kind: _rate(device, sample, windows) for kind, sample in kinds.items()}
    model.train()
    return rates


def loader_rate(work: Workload, windows: int) -> Spread:
    """Tokens per second of the batches of one process."""
    batches = work.run.batches
    step = batches.micro_batch_size * batches.accumulation * batches.blocks.block_size
    draws = max(1, 100_000 // step)

    def draw() -> int:
        for number in range(draws):
            for _ in batches.micro_batches(number):
                pass
        return draws * step

    return _rate(_CPU, draw, windows)


def tokenizer_rate(data: DataSection, windows: int) -> Spread:
    """Tokens per second of the recipe's tokenizer in one process, on source files of Python's own
    library.

    Raises UserError if there is no such tokenizer.
    """
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:_DOCUMENTS]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = build_tokenizer(data.tokenizer, texts, data.vocab_size, data.bpe_pattern)
    return _rate(_CPU, lambda: sum(map(len, tokenizer.encode_batch(texts))), windows)


def or_reason(measure: Callable[[], Any]) -> Any:
    """The measurement, or the reason why there is none."""
    try:
        return measure()
    except UserError as error:
        return f"n/a: {error}"


def checkpoint_times(work: Workload, windows: int) -> dict[str, Any]:
    """Bytes of a checkpoint; seconds that training waits for it, of the next step, and until it is
    on the disk: saved into a temporary folder in the current one.

    The first is not counted: it allocates the memory for the copy. Raises RunFolderError if it
    cannot be written.
    """
    run, device = work.run, work.run.accelerator.device
    waits, steps, writes = [], [], []
    with _temporary_folder(work) as folder:
        writer = CheckpointWriter(run.accelerator, folder, keep=1)
        for number in range(1, windows + 2):
            writer.wait()  # else the one before would count
            state, start = TrainState(step=number, last_finite_step=number), time.perf_counter()
            waits.append(
                time_of(device, lambda state=state: writer.save(run.model, run.optimizer, state))
            )
            # every other one is timed alone: a step would share the machine with the write
            if number % 2:
                writer.wait()
                writes.append(time.perf_counter() - start)
            else:
                steps.append(time_of(device, work.step))
        writer.wait()
        newest = folder.newest_checkpoint()
        size = sum(file.stat().st_size for file in newest.iterdir()) if newest else 0
    return {
        "bytes": size,
        "wait_seconds": spread(waits[1:]),
        "next_step_seconds": spread(steps),
        "write_seconds": spread(writes),
    }


@contextmanager
def _temporary_folder(work: Workload) -> Iterator[RunFolder]:
    """A folder of the main process, for all processes."""
    is_main = work.run.mesh.is_main
    made = (
        tempfile.TemporaryDirectory(prefix=".bench_", dir="." if os.access(".", os.W_OK) else None)
        if is_main
        else None
    )
    path = [made.name if made else ""]
    try:
        broadcast_object_list(path, from_process=0)
        yield RunFolder(Path(path[0]))
    finally:
        work.run.accelerator.wait_for_everyone()
        if made:
            made.cleanup()
