"""Loss, perplexity and bits per byte on a text, with standard errors: `evaluate --data TEXT`."""

import math
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.base import (
    COUNT,
    DATA,
    Evaluation,
    Loaded,
    Option,
    Request,
    Result,
    Subject,
    with_error,
)
from nanogpt_hf.evaluation.corpus import Corpus, corpus_of_texts, read_corpus
from nanogpt_hf.formatting import plural
from nanogpt_hf.runs.find import find_model
from nanogpt_hf.runs.state import MeasuredLoss

if TYPE_CHECKING:
    import numpy as np


_PROTOCOL = (
    "documents joined by end-of-text; the first token is not predicted, and its bytes are not "
    "counted; bootstrap over windows"
)
# A fixed seed, so that the same model and text give the same standard error.
_RESAMPLES = 1000
_SEED = 1337


class TextLoss(Evaluation):
    options = (
        DATA,
        Option("--block-size N", "tokens read at once (default: all of the model's)", COUNT),
        Option("--stride N", "tokens from one window to the next (default: --block-size)", COUNT),
    )

    def wanted(self, arguments: Namespace) -> bool:
        # With --metrics, --data has rows with questions and answers.
        return bool(arguments.data and not arguments.metrics)

    def load(self, request: Request) -> Loaded:
        arguments = request.arguments
        knobs = dict(request.knobs)
        block_size, stride = _window(arguments.block_size, arguments.stride, request.positions)
        # Prepared data has splits, too, and is not described by a section of a recipe.
        split = knobs.pop("split", None)
        data = DataSection(source=arguments.data, **knobs)  # pyright: ignore[reportArgumentType]
        # For a text from a URL, and for what a data set needs while it is read.
        with tempfile.TemporaryDirectory() as scratch:
            corpus = read_corpus(data, split, request.tokenizer, Path(scratch))
        # The processes compare it: all must have read the same text.
        facts = {"tokens_sha256": corpus.stream.sha256()}
        return Loaded(partial(_measure, corpus, block_size, stride, facts), facts)


def measure_texts(
    texts: Sequence[str],
    model: str,
    *,
    block_size: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Figures of `evaluate MODEL --data TEXT` on texts, in this process.

    `model` is a run folder, a model folder or a Hub id. Raises UserError if it cannot be loaded,
    or cannot read the texts.
    """
    from nanogpt_hf.data.hf_tokenizer import check_vocabulary
    from nanogpt_hf.data.tokenizer import build_tokenizer
    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator
    from nanogpt_hf.model.load import load_model

    folder = find_model(model)
    loaded: Any = load_model(folder)
    tokenizer = build_tokenizer(folder, (), knob="")
    check_vocabulary(folder, tokenizer.vocab_size, loaded.config.vocab_size)
    # From here on it is `evaluate`, for texts in memory instead of a source.
    positions = loaded.config.max_position_embeddings
    size, step = _window(block_size, stride, positions)
    corpus = corpus_of_texts(texts, tokenizer)
    accelerator = build_evaluation_accelerator(Mesh())
    subject = Subject(folder, loaded.to(accelerator.device), tokenizer.hf, accelerator, batch_size)
    # The last part of the result has the figures.
    *_, result = _measure(corpus, size, step, {}, subject)
    return result.figures["text"]


def _window(block_size: int | None, stride: int | None, positions: int) -> tuple[int, int]:
    """Tokens of a window, and from one window to the next. Raises UserError if they do not fit."""
    # With a stride above the block size, tokens between two windows would not be predicted.
    size = block_size or positions
    step = stride or size
    if not step <= size <= positions:
        raise UserError(
            f"--stride {step}, --block-size {size}: the stride must be at most the block size, "
            f"and that at most the model's {positions} positions"
        )
    return size, step


def _measure(
    corpus: Corpus, block_size: int, stride: int, facts: dict[str, str], subject: Subject
) -> Iterator[Result]:
    size = f"{len(corpus.stream):,} tokens, {corpus.bytes:,} bytes"
    documents = plural(corpus.documents, "document")
    yield Result([f"{subject.name} on {corpus.name}: {documents}, {size}"])
    found, error, windows = evaluate_text(subject, corpus, block_size, stride)
    if not math.isfinite(found.loss):
        yield Result(["  the loss is not finite: training diverged, or the model is damaged"])
    # The error of a function of the loss, to first order: d exp(x) = exp(x) dx.
    perplexity_error = found.perplexity * error
    bits_error = error / math.log(2) / (found.bytes_per_token or math.nan)
    lines = [
        f"  loss           {with_error(found.loss, error, 4)} nats per token",
        f"  perplexity     {with_error(found.perplexity, perplexity_error, 2)}",
        f"  bits per byte  {with_error(found.bits_per_byte, bits_error, 4)}",
        f"  {windows:,} windows of {block_size:,} tokens, stride {stride:,}: "
        f"{found.tokens:,} tokens, each predicted once, from at least "
        f"{block_size - stride + 1:,} before it, or from all at the start of the text",
    ]
    figures: dict[str, Any] = {
        "loss": found.loss,
        "loss_standard_error": error,
        "perplexity": found.perplexity,
        "perplexity_standard_error": perplexity_error,
        "bits_per_byte": found.bits_per_byte,
        "bits_per_byte_standard_error": bits_error,
        "tokens_predicted": found.tokens,
        "windows": windows,
        "documents": corpus.documents,
        "tokens": len(corpus.stream),
        "bytes": corpus.bytes,
        "data": corpus.name,
        "data_revision": corpus.revision,
        **facts,
        "block_size": block_size,
        "stride": stride,
        "protocol": _PROTOCOL,
    }
    # JSON has no NaN and no infinity.
    for name, value in figures.items():
        if isinstance(value, float) and not math.isfinite(value):
            figures[name] = None
    yield Result(lines, {"text": figures})


def evaluate_text(
    subject: Subject, corpus: Corpus, block_size: int, stride: int
) -> tuple[MeasuredLoss, float, int]:
    """Measure a model, whole on every process, on `corpus`. Return the loss, its standard error
    (nan if there is too little text), and the number of windows. All processes get the same
    numbers.

    A window starts `stride` tokens after the previous one and predicts only tokens that the
    previous one did not: each token has at least block_size - stride + 1 tokens of context, or
    all there are. With stride = block_size the loss is that of evaluate_blocks on all tokens.
    The windows' losses are summed in float64 at the end, so the number of processes does not
    change the result.
    """
    import numpy as np
    import torch
    from tqdm import tqdm

    from nanogpt_hf.data.blocks import TokenBlocks
    from nanogpt_hf.distributed.accelerator import sum_over_ranks
    from nanogpt_hf.evaluation.loss import eval_mode, rank_batches

    accelerator = subject.accelerator
    mesh = subject.mesh
    model = subject.model
    # The last window may be shorter: no token is left out.
    blocks = TokenBlocks(corpus.stream, block_size, stride=stride, partial=True)
    windows = np.arange(len(blocks))
    # Windows overlap by block_size - stride tokens; the earlier window predicted them.
    already_predicted = np.where(windows > 0, block_size - stride, 0)
    # The summed loss of each window. Every process fills in its own windows and leaves 0 elsewhere.
    nats = torch.zeros(len(windows), dtype=torch.float64)
    size = subject.batch_size
    bar = tqdm(total=len(windows), unit="window", disable=not subject.shows_bars, leave=False)
    with torch.no_grad(), eval_mode(model), bar:
        for rows, batch in rank_batches(accelerator, blocks, windows, size, pad=False):
            # (windows of this batch, block_size)
            for row, count in enumerate(already_predicted[rows].tolist()):
                batch["shift_labels"][row, :count] = -100
            with accelerator.autocast():
                losses = model.row_losses(batch["input_ids"], batch["shift_labels"])
            nats[rows] = losses.cpu().double()
            # The other processes have done as many windows meanwhile.
            bar.update(min(size * mesh.dp_cp_size, len(windows) - rows[0]))
    if mesh.world_size > 1:
        nats = sum_over_ranks(accelerator, nats.to(accelerator.device)).cpu()
    counts = blocks.targets_of(windows) - already_predicted
    total = int(counts.sum())
    # The number of windows in a row that share tokens, rounded up.
    windows_at_once = -(-block_size // stride)
    error = bootstrap_error(nats.numpy(), counts, windows_at_once)
    size_of_text = corpus.bytes - corpus.first_bytes
    loss = MeasuredLoss(nats.sum().item() / total, total, size_of_text / total)
    return loss, error, len(windows)


def bootstrap_error(nats: "np.ndarray", counts: "np.ndarray", windows_at_once: int = 1) -> float:
    """The standard error of sum(nats) / sum(counts): its standard deviation over 1,000 resamples of
    the windows (the bootstrap).

    Groups of `windows_at_once` neighbouring windows are drawn together, since overlapping windows
    are not independent. nan for fewer than two groups.
    """
    import numpy as np

    starts = np.arange(0, len(nats), windows_at_once)
    if len(starts) < 2:
        return math.nan
    nats = np.add.reduceat(nats, starts)  # (groups,)
    counts = np.add.reduceat(counts, starts)
    # Raw bits of the generator: no version of NumPy changes them, unlike its distributions.
    bits = np.random.Philox(key=_SEED)
    means = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        # as many groups as there are, drawn with replacement
        resample = bits.random_raw(len(starts)) % np.uint64(len(starts))
        means[i] = nats[resample].sum() / counts[resample].sum()
    return float(means.std(ddof=1))
