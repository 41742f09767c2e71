"""What a training step of a recipe holds and computes, by its method."""

from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.methods.distillation import beta_of, read_teacher_config
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.planning.sampling import Sampling
from nanogpt_hf.planning.teacher import Teacher


def footprint_arguments(config: Config) -> dict[str, Any]:
    """Arguments of `footprint` for a step of a recipe, without its micro-batches."""
    method = method_of(config)
    teacher = planned_teacher(config)
    return {
        "block_size": config.data.block_size,
        "optim": config.optim,
        "sequences": method.sequences,
        # With a teacher the model's own cross-entropy is not enough.
        "row_loss": "sum" if teacher else method.row_loss,
        "teacher": teacher,
        "sampling": partial(sampling_of, config) if config.rl.task else None,
        "keeps_start": bool(config.rl.task and config.rl.kl),
    }


def planned_teacher(config: Config) -> Teacher | None:
    """The teacher of a recipe without its weights; None without one. Raises UserError if there is
    no such model.
    """
    if config.distill.teacher is None:
        return None
    return Teacher(
        _without_weights(config.distill.teacher),
        is_mixture=0 < beta_of(config) < 1,
        has_rewards=bool(config.rl.task) and config.distill.weight < 1,
    )


@lru_cache(maxsize=4)
def _without_weights(teacher: str) -> PreTrainedModel:
    """One model for all layouts, by which their counts are cached, too."""
    config = read_teacher_config(teacher)
    return architecture_of(config).on_meta(config)


def sampling_of(config: Config, micro_batch_size: int) -> Sampling:
    """Answers that a process samples at once, the longest that a block has room for."""
    rl = config.rl
    rows = rl.batch_size or micro_batch_size
    # Answers to a question are neighbors; an evaluation has fewer for each.
    samples = min(rl.samples, rl.eval_samples)
    prompt = max(1, config.data.block_size - rl.max_new_tokens)
    return Sampling(rows, -(-rows // samples), prompt, config.data.block_size)


def flops_per_token(config: Config, model: PreTrainedModel) -> float:
    """FLOPs of a token of a block, of which a method may read several sequences."""
    method = method_of(config)
    flops = architecture_of(model).flops_per_token(model.config, config.data.block_size)
    # A pass without a gradient is a third of a forward and a backward pass.
    passes = method.sequences * method.updates(config) + method.forward_only(config) / 3
    flops *= passes
    if teacher := planned_teacher(config):
        of_teacher = architecture_of(teacher.model)
        each = of_teacher.flops_per_token(teacher.model.config, config.data.block_size)
        flops += each * method.updates(config) / 3
    return flops
