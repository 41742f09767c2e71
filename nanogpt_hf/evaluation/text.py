"""Loss, perplexity and bits per byte on a text, with standard errors: `evaluate --data TEXT`."""

import argparse
import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.values import bounded
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.base import Evaluation, Loaded, Request, Result, Subject, with_error
from nanogpt_hf.formatting import plural

if TYPE_CHECKING:
    from nanogpt_hf.evaluation.corpus import Corpus

_PROTOCOL = (
    "documents joined by end-of-text; the first token is not predicted; bootstrap over windows"
)


class TextLoss(Evaluation):
    asked_by, source = "--data TEXT", "data"
    options = {  # noqa: RUF012
        "--data": {
            "metavar": "TEXT",
            "help": "python-docs, a file, folder, glob, URL, Hub data set, or prepared data",
        },
        "--block-size": {
            "metavar": "N",
            "type": bounded(int, 1),
            "help": "tokens read at once (default: all of the model's)",
        },
        "--stride": {
            "metavar": "N",
            "type": bounded(int, 1),
            "help": "tokens from one window to the next (default: --block-size)",
        },
    }

    def wanted(self, arguments: argparse.Namespace) -> bool:
        return bool(arguments.data)

    def load(self, request: Request) -> Loaded:
        from nanogpt_hf.evaluation.corpus import read_corpus

        arguments, knobs = request.arguments, dict(request.knobs)
        block_size = arguments.block_size or request.positions
        stride = arguments.stride or block_size
        if block_size > request.positions:
            raise UserError(
                f"--block-size: {block_size} is more than the model's {request.positions} positions"
            )
        if stride > block_size:
            raise UserError(
                f"--stride: {stride} is more than the block size {block_size}; tokens would be "
                "skipped"
            )
        split = knobs.pop("split", None)
        data = DataSection(source=arguments.data, **knobs)  # pyright: ignore[reportArgumentType]
        with tempfile.TemporaryDirectory() as scratch:
            corpus = read_corpus(data, split, request.tokenizer, Path(scratch))
        facts = {"tokens_sha256": corpus.stream.sha256()}
        return Loaded(partial(_measure, corpus, block_size, stride, facts), facts)


def _measure(
    corpus: "Corpus", block_size: int, stride: int, facts: dict[str, str], subject: Subject
) -> Iterator[Result]:
    from nanogpt_hf.evaluation.loss import evaluate_text

    size = f"{len(corpus.stream):,} tokens, {corpus.bytes:,} bytes"
    documents = plural(corpus.documents, "document")
    yield Result([f"{subject.name} on {corpus.name}: {documents}, {size}"])
    with subject.bar("window") as progress:
        measured = evaluate_text(
            subject, corpus, block_size=block_size, stride=stride, progress=progress
        )
    if not math.isfinite(measured.loss):
        yield Result(
            [
                f"  the loss is not finite ({measured.loss}): the model's training diverged, or "
                "it is damaged"
            ]
        )
    lines = [
        f"  loss           {with_error(measured.loss, measured.loss_error, 4)} nats per token",
        f"  perplexity     {with_error(measured.perplexity, measured.perplexity_error, 2)}",
        f"  bits per byte  {with_error(measured.bits_per_byte, measured.bits_per_byte_error, 4)}",
        f"  {plural(measured.windows, 'window')} of {block_size:,} tokens, stride {stride:,}: "
        f"{measured.tokens:,} tokens, each predicted once, from at least "
        f"{block_size - stride + 1:,} before it, or from all at the start of the text",
    ]
    figures = {
        **measured.figures(),
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
    yield Result(lines, {"text": figures})
