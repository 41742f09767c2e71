"""Preference training: losses of pairs (DPO, IPO, hinge, SimPO, ORPO) and of answers that are
labeled alone (KTO), their steps and their evaluation.

A step's loss is the mean over its pairs or answers.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from nanogpt_hf.config.schema import AlignSection, Config
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.errors import DamagedFileError, UserError
from nanogpt_hf.evaluation.loss import eval_mode, evaluation_indices, rank_batches
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.own_files import reading, warn_once
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.origin import START_WEIGHTS, changes_of_origin, weights_of
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.pairs import NO_TARGET, LabeledAnswers
from nanogpt_hf.training.run import Evaluated, Run, StepResult, start_model_of
from nanogpt_hf.training.step import train_step

logger = logging.getLogger(__name__)
Batch = dict[str, Tensor]


class PairLoss(NamedTuple):
    """Row of LOSSES: the loss of pairs, from the scores of their chosen and rejected answers."""

    loss: Callable[[AlignSection, Tensor, Tensor], Tensor]
    uses_reference: bool = True  # scores are differences to the model before training
    per_token: bool = False  # scores are means over the tokens of an answer


def _dpo(align: AlignSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    x, smoothing = align.beta * (chosen - rejected), align.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


def _simpo(align: AlignSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    margin = 0.5 if align.margin is None else align.margin
    return -F.logsigmoid(align.beta * (chosen - rejected) - margin)


def _orpo(align: AlignSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    # an answer of probability 1 has infinite odds
    scores = (score.clamp(max=-1e-7) for score in (chosen, rejected))
    log_odds = [score - torch.log(-torch.expm1(score)) for score in scores]
    return -chosen - align.beta * F.logsigmoid(log_odds[0] - log_odds[1])


# With c and r the scores of the chosen and the rejected answer: sums of the log-probabilities of
# their tokens, or means; and minus those of the model before training, if the row says so.
LOSSES = {
    # -log σ(β·(c - r)); with label smoothing ε (1 - ε) times it, plus -ε·log σ(-β·(c - r))
    # (Rafailov et al. 2023, arXiv:2305.18290; ε as in Mitchell's note on conservative DPO)
    "dpo": PairLoss(_dpo),
    # (c - r - 1 / (2β))² (Azar et al. 2023, arXiv:2310.12036)
    "ipo": PairLoss(lambda align, c, r: (c - r - 1 / (2 * align.beta)) ** 2, per_token=True),
    # max(0, 1 - β·(c - r)) (SLiC, Zhao et al. 2023, arXiv:2305.10425)
    "hinge": PairLoss(lambda align, c, r: torch.relu(1 - align.beta * (c - r))),
    # -log σ(β·(c - r) - margin) (Meng et al. 2024, arXiv:2405.14734)
    "simpo": PairLoss(_simpo, uses_reference=False, per_token=True),
    # -c - β·log σ(log odds(c) - log odds(r)), odds(c) = eᶜ / (1 - eᶜ): with the loss of
    # supervised fine-tuning (Hong et al. 2024, arXiv:2403.07691)
    "orpo": PairLoss(_orpo, uses_reference=False, per_token=True),
}


def preference_objective(align: AlignSection) -> Objective:
    """The summed loss of the pairs of a batch, which `train_step` divides by the pairs of a step.

    Metrics: the implicit rewards, β times the scores of the answers, and how often that of the
    chosen one is higher.
    """
    row = LOSSES[align.loss or "dpo"]

    def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        scores, lengths = pair_log_probs(model, batch["input_ids"], batch["shift_labels"])
        if row.uses_reference:
            scores = scores - batch["reference"]
        if row.per_token:
            scores = scores / lengths.clamp(min=1)
        is_pair = lengths[:, 0] > 0
        chosen, rejected = torch.where(is_pair[:, None], scores, -1.0).unbind(1)
        values = {
            "loss": row.loss(align, chosen, rejected),
            "accuracy": ((chosen - rejected).sign() + 1) / 2,  # equal ones count half
            "reward_chosen": align.beta * chosen,
            "reward_rejected": align.beta * rejected,
        }
        return _summed(values, is_pair)

    return objective


def kto_objective(align: AlignSection) -> Objective:
    """The summed loss of the answers of a batch: w·(1 - σ(±β·(r - kl))), r being the log-ratio of
    the answer to the model before training, and w and the sign those of its label (Ethayarajh et
    al. 2024, arXiv:2402.01306).

    Metrics: rewards β·r of both labels, and whether the reward is on the right side of the
    estimate.
    """

    def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        scores, lengths = pair_log_probs(
            model, batch["input_ids"][:, :1], batch["shift_labels"][:, :1]
        )
        scores, good = (scores - batch["reference"][:, :1])[:, 0], batch["desirable"]
        margin = torch.where(good, scores - batch["kl"], batch["kl"] - scores)
        weight = torch.where(good, align.desirable_weight, align.undesirable_weight)
        values = {
            "loss": weight * (1 - torch.sigmoid(align.beta * margin)),
            "accuracy": (margin.sign() + 1) / 2,
            "desirable": good.float(),
            "reward_desirable": align.beta * scores * good,
            "reward_undesirable": align.beta * scores * ~good,
        }
        return _summed(values, lengths[:, 0] > 0)

    return objective


def _summed(values: Batch, is_row: Tensor) -> tuple[Tensor, Metrics]:
    """The sums of loss and metrics; evaluations pad batches by empty rows."""
    sums = {name: torch.where(is_row, value, 0.0).sum() for name, value in values.items()}
    return sums.pop("loss"), sums


def pair_log_probs(
    model: nn.Module, input_ids: Tensor, shift_labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of answers, summed over their tokens, and their tokens: (n, 2) each.

    Both inputs are (n, 2, T), or (n, 1, T) of one side. Sequences are padded at their end, which
    needs no mask.
    """
    rows, labels = input_ids.flatten(0, 1), shift_labels.flatten(0, 1)
    logits = model(input_ids=rows, use_cache=False).logits.float()
    counts = labels != NO_TARGET
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    shape = input_ids.shape[:2]
    return (chosen * counts).sum(1).view(shape), counts.sum(1).view(shape)


def preference_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step on the pairs of `step`."""
    fill_reference(run, lambda: False)
    return train_step(run, step, learning_rate)


def kto_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Estimate the KL divergence on the answers of `step`, and take an optimizer step on them."""
    blocks: Any = run.data.train
    fill_reference(run, lambda: False)
    blocks.kl = divergence(run, blocks, run.batches.indices(step))
    result = train_step(run, step, learning_rate)
    accuracy = {"accuracy": result.metrics["accuracy"]}
    return result._replace(metrics=accuracy, figures={"kl": blocks.kl})


def evaluate_preferences(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """The loss on held-out pairs or answers, the share whose rewards are on the right side, and the
    margin between the mean rewards of both sides, if both occur; the same on all processes.
    """
    if not fill_reference(run, stopping):
        return None
    blocks = run.data.validation
    indices, sides = evaluation_indices(blocks, run.config.eval.tokens), ("chosen", "rejected")
    if labeled := isinstance(blocks, LabeledAnswers):
        blocks.kl, sides = divergence(run, blocks, indices), ("desirable", "undesirable")
    means = _mean_metrics(run, blocks, indices, stopping)
    if means is None:
        return None
    if labeled:
        means["kl"], share = blocks.kl, means.pop("desirable")
        for side, part in zip(sides, (share, 1 - share), strict=True):
            reward = means.pop(f"reward_{side}")
            means |= {f"reward_{side}": reward / part} if part > 0 else {}
    rewards = [means[f"reward_{side}"] for side in sides if f"reward_{side}" in means]
    line = f"held-out {'answers' if labeled else 'pairs'}: loss {format_number(means['loss'], 4)}, "
    line += f"accuracy {means['accuracy']:.3f}"
    if len(rewards) == 2:
        means["margin"] = rewards[0] - rewards[1]
        line += f", margin {format_number(means['margin'], 4)}"
    metrics = {f"val/{name}": value for name, value in means.items()}
    return Evaluated(means["loss"], None, metrics, [line], [])


def _batches(run: Run, blocks: Blocks, indices: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
    """Batches of this process; all have equally many."""
    size = run.batches.micro_batch_size
    return rank_batches(run.accelerator, blocks, indices, size, pad=True)


def _mean_metrics(
    run: Run, blocks: Blocks, indices: np.ndarray, stopping: Callable[[], bool]
) -> dict[str, float] | None:
    """The means of the objective's loss and metrics over blocks; None if `stopping()` has ended
    it.
    """
    totals: Metrics = {}
    with torch.no_grad(), eval_mode(run.model):
        for _, batch in _batches(run, blocks, indices):
            loss, metrics = run.objective(run.model, batch)
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0) + value.float()
            if stopping():
                return None
    return {
        name: sum_over_ranks(run.accelerator, total).item() / len(indices)
        for name, total in totals.items()
    }


@torch.no_grad()
def divergence(run: Run, blocks: LabeledAnswers, indices: np.ndarray) -> float:
    """The mean log-ratio of the mismatched pairs of all processes, or 0 if it is negative."""
    total = torch.zeros((), device=run.accelerator.device)
    with eval_mode(run.model):
        for _, batch in _batches(run, blocks, indices):
            sums, lengths = pair_log_probs(
                run.model, batch["input_ids"][:, 1:], batch["shift_labels"][:, 1:]
            )
            total += torch.where(lengths > 0, sums - batch["reference"][:, 1:], 0.0).sum()
    return max(0.0, sum_over_ranks(run.accelerator, total).item() / len(indices))


def read_reference(path: Path, splits: dict[str, Any]) -> Batch:
    """The log-probabilities of each split that were kept; none if there is no file, and, with a
    warning, if it is damaged, was changed after it was written, or is of other rows.
    """
    if not path.is_file():
        return {}
    try:
        with reading(path):
            saved = load_file(path)
            with safe_open(path, "pt") as file:
                recorded = (file.metadata() or {}).get("sha256")
            for name, blocks in splits.items():
                if name not in saved or saved[name].shape != (len(blocks), 2):
                    raise ValueError(f"it has not the {len(blocks):,} rows of {name}")
                is_whole = saved[name].dtype == torch.float32 and saved[name].isfinite().all()
                if not is_whole or not saved[name].any():
                    raise ValueError(f"{name} holds no log-probabilities")
            if recorded != _digest(saved):
                raise ValueError(
                    "it was changed after it was written" if recorded else "it has no checksum"
                )
    except DamagedFileError as error:
        warn_once(f"{error}; its log-probabilities are computed again")
        return {}
    return saved


def reference_content(tensors: Batch) -> bytes:
    """The content of a file of log-probabilities, with their checksum."""
    return save(tensors, {"sha256": _digest(tensors)})


def _digest(tensors: Batch) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def needs_reference(config: Config) -> bool:
    """Whether a run compares with the model before training, in preference training."""
    name = config.align.loss
    # KTO is no row, and has a reference
    return name is not None and (name not in LOSSES or LOSSES[name].uses_reference)


def lost_reference(
    config: Config, folder: RunFolder, data: PreparedData, state: TrainState
) -> str | None:
    """Why a run cannot resume, as a line: it has lost its log-probabilities, and the model to
    compute them again is not the one that it started from. Else None. Only the main process calls
    it.
    """
    splits = {"train": data.train, "validation": data.validation}
    if not needs_reference(config) or not state.step or read_reference(folder.reference, splits):
        return None
    return _start_model_problem(config, folder, state)


def _start_model_problem(config: Config, folder: RunFolder, state: TrainState) -> str | None:
    recorded, name = (state.identity or {}).get("origin", {}), str(config.finetune.model)
    try:
        now = weights_of(name)
    except UserError as error:
        return f"{folder.reference}: is lost or damaged, and so is the start model: {error}"
    changes = changes_of_origin(recorded, now)
    if START_WEIGHTS in recorded and not now:
        changes = [f"{name}: no such folder"]
    if not changes:
        return None
    return (
        f"{folder.reference}: is lost or damaged, and the model whose log-probabilities it had is "
        f"another one: {changes[0]}; bring one of them back, or start again with --overwrite"
    )


def raise_on_all_ranks(problem: str | None) -> None:
    """Raises UserError on all processes if the main process has a problem; a collective."""
    problems: list[str | None] = broadcast_object_list([problem], from_process=0)
    if problems[0]:
        raise UserError(problems[0])


@torch.no_grad()
def fill_reference(run: Run, stopping: Callable[[], bool]) -> bool:
    """Compute the log-probabilities of all rows under the model before training, once: they are
    kept in the run folder. Returns whether they are there; not if `stopping()` has ended it.

    At step 0 that is the model of the run; later, if the file was lost, it is loaded again.
    """
    splits: dict[str, Any] = {"train": run.data.train, "validation": run.data.validation}
    if not needs_reference(run.config) or splits["train"].reference.any():
        return True
    accelerator, saved, filled = run.accelerator, {}, {}
    if run.mesh.is_main:
        saved = read_reference(run.folder.reference, splits)
    is_saved: list[bool] = broadcast_object_list([bool(saved)], from_process=0)
    if not is_saved[0] and run.state.step:
        problem = run.mesh.is_main and _start_model_problem(run.config, run.folder, run.state)
        raise_on_all_ranks(problem or None)
    for name, blocks in splits.items():
        found = saved.get(name, torch.zeros(len(blocks), 2)).to(accelerator.device)
        if not is_saved[0]:
            logger.info(f"log-probabilities of {len(blocks):,} {name} rows before training ...")
            model = run.model if run.state.step == 0 else start_model_of(run)
            with eval_mode(model):
                for rows, batch in _batches(run, blocks, np.arange(len(blocks))):
                    with accelerator.autocast():
                        sums, _ = pair_log_probs(model, batch["input_ids"], batch["shift_labels"])
                    found[torch.from_numpy(rows).to(found.device)] = sums[: len(rows)].float()
                    if stopping():
                        return False
        filled[name] = sum_over_ranks(accelerator, found).cpu()
    run.start_model = None  # frees its memory
    if run.mesh.is_main and not is_saved[0]:
        with written_whole(run.folder.reference) as partial:
            partial.write_bytes(reference_content(filled))
    for name, reference in filled.items():
        splits[name].reference = reference
    return True
