"""The knobs of every run: steps, evaluation, checkpoints, tracking and the Hub."""

from dataclasses import dataclass
from typing import Any, Literal

from nanogpt_hf.config.knobs import knob, only_with, only_without
from nanogpt_hf.config.methods import LAYOUTS
from nanogpt_hf.config.settings import FSDP2, Setting, choice, given, rules

# Choices without which nothing reads a knob, where several knobs have the same.
_WITH_DEPTH = only_with("model.depth")
_WITH_PUSH = only_with("hub.push")


@dataclass(frozen=True)
class TrainSection:
    """Steps, batch, seed, stages and exactness of the run."""

    max_steps: int = knob(
        600_000,
        "optimizer steps",
        1,
        read=(
            only_without("train.budget", remedy="set train.budget null"),
            only_without("train.epochs", remedy="set train.epochs null"),
        ),
    )
    epochs: int | float | None = knob(
        None,
        "train for this number of passes over the training data, such as 3 or 0.5, instead of "
        "train.max_steps: the run counts its steps when it has the data, and records them",
        0.001,
        1_000_000,
        read=(only_without("train.budget"), only_without("model.depth")),
    )
    budget: str | None = knob(
        None,
        "train for this time, such as 55m or 11h30m, instead of train.max_steps: steps are timed "
        "at the start, and the run records how many fit",
        read=only_without("model.depth"),
    )
    # Hoffmann et al. 2022, arXiv:2203.15556, table 3: about 20 tokens per parameter give the lowest
    # loss for the FLOPs of the run.
    tokens_per_parameter: float = knob(
        20.0, "with model.depth: tokens per parameter; 20 is optimal", 0.001, 1e6, read=_WITH_DEPTH
    )
    tokens_per_step: int = knob(
        491_520, "tokens in an optimizer step, over all processes", 1, 10_000_000_000
    )
    micro_batch_size: int | Literal["auto"] = knob(
        12, "sequences in a forward pass of a process; auto: all that fit", 1, 10_000_000
    )
    seed: int = knob(1337, "seed of initial weights, data order, dropout and samples", 0, 2**64 - 1)
    gradient_groups: int | None = knob(
        None,
        "sum gradients in this many fixed groups, a power of two: as many processes, or a half, a "
        "quarter, ..., end with the same bytes (default: the fastest order)",
        1,
        65_536,
    )
    deterministic: bool = knob(
        False,
        "on a GPU, use only kernels whose bytes repeat, so that a resumed run ends bit for bit; "
        "slower there, and always so on a CPU",
    )
    rollback_ratio: float | None = knob(
        None, "if the loss exceeds this multiple of its average, go back and skip the data", 1
    )
    max_time: str | None = knob(
        None, "save and stop after this time, such as 11h30m or 45m (exit status 75)"
    )
    stages: list[dict[str, Any]] | None = knob(  # noqa: RUF009
        None,
        "knobs that change at a step, such as [{at: 1000, optim.schedule: wsd}] (default: none)",
    )

    @property
    def steps_from(self) -> str | None:
        """The knob from which a run finds its number of steps when it starts; None if
        `max_steps` is that number.
        """
        if self.budget is not None:
            return "train.budget"
        return None if self.epochs is None else "train.epochs"

    @property
    def min_micro_batch_size(self) -> int:
        """The smallest micro-batch size that a run of this recipe may have: 1 for auto."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size


@dataclass(frozen=True)
class EvalSection:
    """Evaluations during training: how often, and tokens, tasks and samples of each."""

    every: int = knob(1000, "steps between evaluations", 1)
    tokens: int | Literal["all"] = knob(
        2_457_600, "validation tokens per evaluation, or all", 1, read=only_without("rl.task")
    )
    patience: int | None = knob(
        None, "stop after this many evaluations without a better one (default: never)", 1
    )
    tasks: list[str] = knob(  # noqa: RUF009
        [], "lm-eval tasks to run at each evaluation: names or YAML files"
    )
    tasks_limit: int | None = knob(
        None,
        "number of questions per task, the first ones (default: all)",
        1,
        read=only_with("eval.tasks"),
    )
    samples: list[str] = knob(  # noqa: RUF009
        [], "prompts to continue at step 0 and at each evaluation, for the report"
    )
    sample_tokens: int = knob(
        100,
        "tokens generated for each of eval.samples",
        1,
        1_000_000,
        read=only_with("eval.samples"),
    )
    metrics: list[str] = knob(  # noqa: RUF009
        [], "metrics of the evaluate library on answers to held-out rows: names, folders or files"
    )
    metric_rows: int = knob(
        100, "held-out rows that eval.metrics compares", 1, read=only_with("eval.metrics")
    )


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are written, and how many are kept."""

    every: int = knob(1000, "steps between checkpoints", 1)
    keep: int = knob(
        2, "newest checkpoints to keep; the newest one known to be finite is kept too", 1
    )


@dataclass(frozen=True)
class TrackingSection:
    """Metrics of training, and the trackers that get them."""

    every: int = knob(10, "steps between training metrics in metrics.jsonl and the trackers", 1)
    trackers: list[str] = knob(  # noqa: RUF009
        [], "names of accelerate's trackers: wandb, tensorboard, ..."
    )
    # A label of the experiment that no number depends on. It may stand in a recipe without
    # trackers, so that trackers can be added on the command line.
    project: str = knob("nanogpt_hf", "project name for the trackers")
    layers: bool = knob(False, "log for each layer: norms of gradient and weights, update ratio")


@dataclass(frozen=True)
class HubSection:
    """Pushes to the Hub: when, where and under which license."""

    push: Literal["best", "final"] | None = knob(
        None,
        "push to the Hub: every new best model during the run, or the final model",
        read=only_with("hub.repo"),
    )
    repo: str | None = knob(
        None, "repository to push to, as user/name; the first push creates it", read=_WITH_PUSH
    )
    private: bool = knob(False, "create a private repository", read=_WITH_PUSH)
    license: str | None = knob(
        None, "license in the model card, by the Hub's name for it, such as apache-2.0"
    )


# What the knobs of this file do not combine with.
RULES = [
    *rules(
        given("eval.metrics"),
        given("rl.task", "align.loss"),
        "its evaluations measure answers of their own",
        "leave it out",
    ),
    *rules(
        given("train.stages"),
        given("finetune.model"),
        "only pretraining has stages",
        "leave it out",
    ),
    *rules(
        given("train.stages"),
        Setting.DEEPSPEED,
        "DeepSpeed keeps the batch of its start",
        FSDP2,
    ),
    *rules(
        given("train.budget"),
        given("train.stages", "finetune.unfreeze_every", "rl.task", "align.loss"),
        "it times the first steps, and later ones take another time",
        "set train.max_steps",
    ),
    *rules(
        given("train.epochs"),
        given("train.stages", "rl.task"),
        "their steps do not follow from the size of the training data",
        "set train.max_steps",
    ),
    *rules(
        choice("train.micro_batch_size", "auto"),
        Setting.DEEPSPEED,
        "DeepSpeed keeps the batch of its start",
        "set a number",
    ),
    *rules(
        choice("train.micro_batch_size", "auto"),
        given(
            "train.stages", "finetune.unfreeze_every", "rl.task", "align.loss", "distill.teacher"
        ),
        "auto measures a first step on text, of one model",
        "set a number",
    ),
    *rules(
        given("train.rollback_ratio"),
        given("rl.task", "align.loss"),
        "its loss has no trend",
        "leave it out",
    ),
    *rules(
        given("train.gradient_groups"),
        given("rl.task", "align.loss") + choice("train.micro_batch_size", "auto"),
        "its sums depend on processes or on free memory",
        "leave it out",
    ),
    *rules(
        given("train.gradient_groups", "eval.metrics"),
        LAYOUTS,
        "it needs whole models or FSDP2's shards, and whole sequences",
        "use accelerate_configs/ddp.yaml or fsdp2.yaml",
    ),
    *rules(
        given("train.gradient_groups"),
        Setting.GRADIENT_COMPRESSION,
        "its sums equal the sums of one process",
        "set ddp_comm_hook no",
    ),
    *rules(
        given("tracking.layers"),
        Setting.DEEPSPEED,
        "DeepSpeed gives no access to gradients and weights",
        FSDP2,
    ),
    *rules(
        given("train.gradient_groups"),
        Setting.FSDP2_IN_BF16,
        "FSDP2 rounds the parameters, one process the products",
        "use accelerate_configs/ddp.yaml",
    ),
]
