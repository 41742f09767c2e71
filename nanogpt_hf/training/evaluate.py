"""The evaluation of a run at a step: the loss on validation data, or rewards on held-out questions."""

from collections.abc import Callable
from typing import NamedTuple

from nanogpt_hf.config.schema import Config
from nanogpt_hf.evaluation.loss import evaluate_data
from nanogpt_hf.formatting import format_number
from nanogpt_hf.runs.state import Evaluation
from nanogpt_hf.training.policy import evaluate_policy
from nanogpt_hf.training.run import Run


class Evaluated(NamedTuple):
    """An evaluation of either kind."""

    score: float  # the model with the lowest is the best: validation loss, or minus the mean reward
    evaluation: Evaluation | None  # of validation data
    metrics: dict[str, float]
    lines: list[str]  # for the console
    samples: list[dict[str, str]]  # answers to held-out questions


def evaluate_run(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """Evaluate on the same data at every call. All processes call it and get the same numbers.

    `stopping` is called after every batch of validation data; if it returns true, the evaluation ends and is None.
    """
    if run.config.rl.task:
        return _evaluate_answers(run)
    evaluated = evaluate_data(
        run.accelerator,
        run.mesh,
        run.model,
        run.objective,
        run.data,
        micro_batch_size=run.batches.micro_batch_size,
        tokens=run.config.eval.tokens,
        stopping=stopping,
    )
    if evaluated is None:
        return None
    result, by_source = evaluated
    metrics = {"val/loss": result.loss, "val/perplexity": result.perplexity, "val/bits_per_byte": result.bits_per_byte}
    metrics |= {f"val/loss/{name}": part.loss for name, part in by_source.items()}
    metrics |= {f"val/bits_per_byte/{name}": part.bits_per_byte for name, part in by_source.items()}
    lines = [
        f"validation loss {format_number(result.loss, 4)} (perplexity {format_number(result.perplexity, 2)}, "
        f"{format_number(result.bits_per_byte, 3)} bits per byte)"
    ]
    if by_source:
        lines.append(f"  {', '.join(f'{name} {format_number(part.loss, 4)}' for name, part in by_source.items())}")
    return Evaluated(result.loss, result, metrics, lines, [])


def _evaluate_answers(run: Run) -> Evaluated:
    metrics, examples = evaluate_policy(run)
    shown = ", ".join(f"{name.removeprefix('val/')} {value:.4g}" for name, value in metrics.items())
    return Evaluated(-metrics["val/reward"], None, metrics, [f"held-out questions: {shown}"], examples)


def describe_best(config: Config, score: float) -> str:
    """The score of the best model in words."""
    if config.rl.task:
        return f"best mean reward {-score:.4f}"
    return f"best validation loss {format_number(score, 4)}"
