"""The knobs of fine-tuning, LoRA and the methods of training (config/methods.py)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from nanogpt_hf.config.knobs import Reader, knob, loss_term, only_above, only_with
from nanogpt_hf.config.settings import FSDP2, Setting, choice, given, rules

# Choices without which nothing reads a knob, where several knobs have the same.
_WITH_A_MODEL = only_with("finetune.model", remedy="give --from MODEL")
_WITH_KTO = only_with("align.loss", "kto")


# The linear layers of a block of gpt2, which LoRA can adapt: attention's four and the MLP's two.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "fc", "proj"]


@dataclass(frozen=True)
class FinetuneSection:
    """The model to start from, and the layers of it that are frozen."""

    model: str | None = knob(
        None, "model to start from: a Hub id, model folder or run folder (default: none)"
    )
    revision: str | None = knob(
        None,
        "commit or tag of a Hub id (default: the newest, which the run records)",
        read=_WITH_A_MODEL,
    )
    freeze_layers: int | None = knob(
        None, "freeze the embeddings and this many blocks, from the bottom", 0, read=_WITH_A_MODEL
    )
    unfreeze_every: int | None = knob(
        None,
        "unfreeze one block, from the top, every this many steps; the embeddings last",
        1,
        read=only_with("finetune.freeze_layers"),
    )
    layer_decay: float = knob(
        1.0, "factor of the learning rate from each layer to the one below it", 0.01, 1
    )
    rope_theta: float | None = knob(
        None,
        "base of the rotary wavelengths (default: as it is; YaRN if model.n_positions grows)",
        1,
        read=_WITH_A_MODEL,
    )


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters: rank, layers, merging, quantized weights."""

    # Nothing reads the knobs of this section without a rank.
    READER: ClassVar[Reader] = only_with("lora.rank", remedy="give --lora RANK")

    rank: int | None = knob(
        None,
        "rank of the LoRA adapters (default: none, train all weights)",
        1,
        100_000,
        read=_WITH_A_MODEL,
    )
    alpha: float | None = knob(
        None, "the adapters' product is scaled by alpha / rank (default: 2 × rank)", 0
    )
    dropout: float = knob(0.0, "dropout probability on the adapters' input", 0, 0.99)
    targets: list[str] = knob(  # noqa: RUF009
        LORA_TARGETS, "linear layers with an adapter (default: all of a block; these are gpt2's)"
    )
    merge: bool = knob(
        False, "write whole models with the adapters merged in, which transformers opens"
    )
    quantize: Literal["8bit", "4bit"] | None = knob(
        None, "quantize the frozen weights (needs bitsandbytes)"
    )


@dataclass(frozen=True)
class RlSection:
    """Reinforcement learning: task, reward and completions."""

    READER: ClassVar[Reader] = only_with("rl.task", remedy="give --task TASK to `rl`")

    task: str | None = knob(
        None,
        "questions with verifiable answers: arithmetic, reasoning_gym:NAME, or gsm8k, "
        "multiple_choice, exact or regex on the conversations of data.source (default: no "
        "reinforcement learning)",
    )
    options: dict[str, Any] = knob(  # noqa: RUF009
        {}, "options of a task of reasoning-gym, such as {max_terms: 3}"
    )
    reward: str | None = knob(
        None,
        "a Python function for the reward, such as my_reward.py:score (default: the task's own)",
    )
    reward_seconds: float = knob(
        5.0, "time limit of the reward of one completion, and of a call of a tool", 0.01, 86_400
    )
    reward_errors: Literal["stop", "zero"] = knob(
        "stop", "if the reward raises, takes too long or is not finite: stop, or reward 0"
    )
    tools: list[str] = knob(  # noqa: RUF009
        [],
        "tools that an answer may call: calculator, or Python files of functions, such as "
        "my_tools.py (default: none)",
    )
    max_turns: int = knob(
        8, "maximum turns of an answer with its calls of tools", 2, 1000, read=only_with("rl.tools")
    )
    samples: int = knob(8, "completions per question", 1, 100_000)
    max_new_tokens: int = knob(256, "maximum tokens of a completion", 1, 1_000_000)
    temperature: float = knob(1.0, "temperature of sampling, in training and evaluation", 0.01)
    batch_size: int | None = knob(
        None, "completions generated at once (default: train.micro_batch_size)", 1, 10_000_000
    )
    scale_advantages: bool = knob(
        False, "divide advantages by the standard deviation of the question's rewards"
    )
    updates: int = knob(1, "optimizer updates on the completions of a step", 1, 1000)
    clip: float | None = knob(
        None,
        "clip the importance ratio to 1 ± this; needs rl.updates above 1",
        0,
        read=only_above("rl.updates", 1),
    )
    clip_high: float | None = knob(
        None,
        "clip the importance ratio above 1 to 1 + this (default: rl.clip)",
        0,
        read=only_with("rl.clip"),
    )
    loss: Literal["grpo", "cispo", "gspo"] = knob(
        "grpo",
        "what rl.clip does beyond it: grpo takes a token's gradient away; cispo keeps it, with a "
        "weight of at most 1 + rl.clip_high; gspo clips the ratio of a whole answer",
        read=only_with("rl.clip"),
    )
    kl: float = knob(0.0, "weight of the KL divergence to the model that the run started from", 0)
    eval_questions: int = knob(100, "held-out questions at each evaluation", 1)
    eval_samples: int = knob(4, "k of pass@k: completions per held-out question", 1, 100_000)


@dataclass(frozen=True)
class AlignSection:
    """Preference training: the loss and its weights."""

    READER: ClassVar[Reader] = only_with(
        "align.loss", remedy="train by `align`, or give --align.loss"
    )

    loss: Literal["dpo", "ipo", "hinge", "simpo", "orpo", "kto"] | None = knob(
        None, "loss of preference pairs, or of labeled answers (kto) (default: none)"
    )
    beta: float = knob(0.1, "weight of the log-ratio; for orpo, weight of the odds ratio", 1e-6)
    label_smoothing: float = knob(
        0.0,
        "dpo: share of pairs that are taken for swapped",
        0,
        0.5,
        read=only_with("align.loss", "dpo"),
    )
    margin: float | None = knob(
        None,
        "simpo: how far the chosen answer should be ahead (default: 0.5)",
        0,
        read=only_with("align.loss", "simpo"),
    )
    desirable_weight: float = knob(
        1.0, "kto: weight of the loss of good answers", 0, read=_WITH_KTO
    )
    undesirable_weight: float = knob(
        1.0, "kto: weight of the loss of bad answers", 0, read=_WITH_KTO
    )


@dataclass(frozen=True)
class DistillSection:
    """Distillation: the teacher, and its share of the loss."""

    READER: ClassVar[Reader] = only_with("distill.teacher")

    teacher: str | None = loss_term(
        None,
        "model whose distribution is learned too: a Hub id, model folder or run folder with the "
        "same tokenizer (default: none)",
    )
    weight: float = knob(
        0.5,
        "share of the divergence from the teacher in the loss; the rest: the next token, and with "
        "rl.task the rewards",
        0,
        1,
    )
    temperature: float = knob(
        1.0, "the logits of teacher and student are divided by this", 0.01, 1000
    )
    beta: float | None = knob(
        None,
        "divergence: 0 forward KL, 1 reverse KL, between them generalized Jensen-Shannon "
        "(default: 0; with rl.task 1)",
        0,
        1,
    )
    on_policy: float = knob(
        1.0,
        "share of the questions that the student answers; of the others it learns the reference "
        "answer",
        0,
        1,
        read=only_with("rl.task"),
    )


# What the knobs of this file do not combine with.
RULES = [
    *rules(
        given("lora.rank"),
        given("finetune.freeze_layers"),
        "LoRA freezes the whole model",
        "leave finetune.freeze_layers out",
    ),
    *rules(
        (*given("lora.rank"), Setting.FROZEN_EMBEDDINGS),
        Setting.NEW_TOKENS,
        "the new tokens would not be learned",
        "leave it out",
    ),
    *rules(
        given("lora.rank"),
        Setting.OTHER_POSITIONS,
        "an adapter is opened with its base's positions",
        "leave model.n_positions and finetune.rope_theta out",
    ),
    *rules(
        given("lora.quantize"),
        given("lora.merge"),
        "an adapter cannot be merged into quantized weights",
        "leave lora.merge out, and merge with `export RUN OUT`",
    ),
    *rules(
        given("finetune.unfreeze_every"),
        given("rl.task", "align.loss"),
        "not supported there",
        "leave it out",
    ),
    *rules(
        given("distill.on_policy"),
        choice("rl.task", "regex"),
        "its reference answers are patterns",
        "leave it out",
    ),
    *rules(
        given("lora.rank"),
        Setting.TENSOR_PARALLELISM,
        "matrices of adapters are not split",
        FSDP2,
    ),
    *rules(
        given("lora.rank", "finetune.freeze_layers", "finetune.layer_decay"),
        Setting.PIPELINE_STAGES,
        "it is not supported there",
        FSDP2,
    ),
    *rules(
        given("lora.quantize"),
        (Setting.FSDP2, Setting.DEEPSPEED, Setting.EXPERT_PARALLELISM),
        "weights in 8 or 4 bits cannot be sharded",
        "use accelerate_configs/ddp.yaml",
    ),
    *rules(
        choice("lora.quantize", "4bit"),
        Setting.CPU,
        "bitsandbytes 0.50 packs the weights at the first evaluation, and cannot unpack them",
        "use 8bit, or a GPU",
    ),
    *rules(
        given("finetune.unfreeze_every"),
        Setting.DEEPSPEED,
        "DeepSpeed has one step count for all parameters, and unfrozen ones start at 0",
        FSDP2,
    ),
]
