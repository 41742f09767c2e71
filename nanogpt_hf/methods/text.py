"""Training on text and conversations: the next token, and a teacher's distribution of it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nanogpt_hf.config.methods import NEXT_TOKEN
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import PreparedData, load_prepared
from nanogpt_hf.data.summary import repetition_warnings, split_warnings, summary_lines
from nanogpt_hf.evaluation.loss import evaluate_blocks, evaluate_data
from nanogpt_hf.formatting import format_number
from nanogpt_hf.methods.distillation import load_with_teacher
from nanogpt_hf.methods.method import Method
from nanogpt_hf.methods.run import Evaluated, Run
from nanogpt_hf.methods.terms import text_objective
from nanogpt_hf.runs.metrics import Score

logger = logging.getLogger(__name__)


def load_text(config: Config) -> PreparedData:
    """Prepare text or conversations if they are not, and open them."""
    manifest, prepared_now = prepare(config)
    logger.info(f"{config.data.dir}: {'prepared' if prepared_now else 'is prepared already'}")
    data = load_prepared(config, manifest)
    for line in summary_lines(config, data):
        logger.info(line)
    for line in (*split_warnings(config, data.manifest), *repetition_warnings(config, data)):
        logger.warning(line)
    return data


def evaluate_validation(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """Measure the loss on the same validation data at every call, and on each source of a mixture.

    `stopping` is called after every batch; if it returns true, the evaluation ends and is None.
    """
    evaluate = partial(
        evaluate_blocks,
        run.accelerator,
        run.model,
        run.objective,
        micro_batch_size=run.batches.micro_batch_size,
        stopping=stopping,
    )
    # A mixture is measured source by source, with the same function.
    evaluated = evaluate_data(evaluate, run.data, run.config.eval.tokens)
    if evaluated is None:
        return None
    result, by_source = evaluated
    metrics = {
        "val/loss": result.loss,
        "val/perplexity": result.perplexity,
        "val/bits_per_byte": result.bits_per_byte,
    }
    metrics |= {f"val/loss/{name}": part.loss for name, part in by_source.items()}
    metrics |= {f"val/bits_per_byte/{name}": part.bits_per_byte for name, part in by_source.items()}
    lines = [
        f"validation loss {format_number(result.loss, 4)} "
        f"(perplexity {format_number(result.perplexity, 2)}, "
        f"{format_number(result.bits_per_byte, 3)} bits per byte)"
    ]
    # In bits per byte, models with different tokenizers compare.
    if by_source:
        losses = (f"{name} {format_number(part.loss, 4)}" for name, part in by_source.items())
        lines.append(f"  {', '.join(losses)}")
    return Evaluated(result.loss, result, metrics, lines, [])


TEXT = Method(
    "the next token",
    recipe=NEXT_TOKEN,
    load=load_text,
    objective=text_objective,
    evaluate=evaluate_validation,
    describe_best=lambda score: f"best validation loss {format_number(score, 4)}",
    # Losses per token do not compare between tokenizers or texts; bits per byte do.
    scored_by=("data.tokenizer", "data.source"),
    score_across=Score("val/bits_per_byte", "bits per byte", "validation bits per byte"),
    uses_prepared_data=True,
)
# The teacher is a term of the same objective; it has to be loaded with the data.
DISTILLATION = replace(
    TEXT,
    name="distillation",
    is_meant=lambda config: config.distill.teacher is not None,
    load=lambda config: load_with_teacher(config, load_text),
)
