"""The knobs of a recipe: type, default, bounds and meaning of each.

The machine (devices, processes, precision, sharding, compilation) is in accelerate's config
instead. A new knob is one line below; `--help`, the conversion of values and the resolved recipe
follow from it.
"""

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from types import NoneType
from typing import Any, ClassVar, Literal

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.knobs import (
    FROM_A_URL,
    FROM_COLUMNS,
    FROM_THE_HUB,
    Reader,
    knob,
    loss_term,
    only_above,
    only_with,
    only_without,
)
from nanogpt_hf.config.optimizers import OPTIMIZERS
from nanogpt_hf.config.settings import Setting

LARGEST = 10**15  # upper bound of an integer knob that states none; far beyond any count of a run

# Choices without which nothing reads a knob, where several knobs have the same.
_WITH_DEPTH = only_with("model.depth")
_GPT2 = only_with(
    "model.architecture", "gpt2", remedy="set fields of the architecture's config in model.extra"
)
_OTHER_ARCHITECTURE = only_without(
    "model.architecture", "gpt2", remedy="set another model.architecture"
)
_COLUMN_FORMAT = only_with(
    "data.format", *(name for name, row in FORMATS.items() if row.reads_column)
)
_UNENCODED_FORMAT = only_without(
    "data.format", *(name for name, row in FORMATS.items() if row.has_tokens)
)
_WITH_BPE = only_with("data.tokenizer", "bpe")
_WITH_ADAMW = only_with("optim.name", "adamw", "muon")
_WITH_MUON = only_with("optim.name", "muon")
_WITH_A_MODEL = only_with("finetune.model", remedy="give --from MODEL")
_WITH_KTO = only_with("align.loss", "kto")
_WITH_PUSH = only_with("hub.push")
_ON_TEXT = (only_without("rl.task"), only_without("align.loss"))


@dataclass(frozen=True)
class ModelSection:
    """Architecture, sizes and initial weights of the model."""

    architecture: str = knob(
        "gpt2", "gpt2, or a text-only decoder of transformers: llama, qwen3, nanochat, olmo2, ..."
    )
    depth: int | None = knob(
        None,
        "size dial: number of blocks; width, learning rate, batch and steps follow",
        1,
        1000,
    )
    aspect_ratio: int = knob(
        64,
        "with model.depth: width of the model per block, and width of a head",
        1,
        10_000,
        read=_WITH_DEPTH,
    )
    n_layer: int = knob(12, "transformer blocks", 1, 1000)
    n_head: int = knob(12, "attention heads per block; divides n_embd", 1, 10_000)
    n_embd: int = knob(768, "width of the residual stream", 1, 100_000)
    n_positions: int = knob(1024, "longest context, in tokens", 1, 100_000_000)
    n_kv_head: int | None = knob(
        None,
        "heads of keys and values (default: n_head); divides n_head",
        1,
        10_000,
        read=_OTHER_ARCHITECTURE,
    )
    n_inner: int | None = knob(
        None,
        "width of the MLP (default: 4 × n_embd; gated 8/3 × n_embd)",
        1,
        1_000_000,
        read=_OTHER_ARCHITECTURE,
    )
    extra: dict[str, Any] = knob(  # noqa: RUF009
        {},
        "other fields of the architecture's config, by their names in transformers",
        read=_OTHER_ARCHITECTURE,
    )
    pad_vocab_to_multiple_of: int = knob(
        1,
        "round the rows of the embedding up to a multiple of this; 64 is fast on GPUs",
        1,
        1_000_000,
    )
    bias: bool = knob(False, "gpt2: biases in Linear and LayerNorm layers", read=_GPT2)
    dropout: float = knob(
        0.0, "gpt2: dropout probability on embeddings, attention and residuals", 0, 0.99, read=_GPT2
    )
    activation_function: Literal["gelu", "gelu_new"] = knob(
        "gelu", "gpt2: gelu_new is the tanh approximation", read=_GPT2
    )
    init: Literal["own", "gpt2", "zero_residual", "look_back"] = knob(
        "own",
        "initial weights: own, the architecture's; gpt2, with the layers that write to the "
        "residual stream scaled by 1/√(2·n_layer); zero_residual, with zeros in these layers; "
        "look_back, with heads of the first block that begin by looking 1, 2, 3, ... tokens back",
        read=only_without("finetune.model"),
    )


@dataclass(frozen=True)
class DataSection:
    """The text: its source and format, tokenizer, prepared folder and blocks."""

    source: str | list[dict[str, Any]] = knob(  # noqa: RUF009
        "",
        "the text: python-docs, arithmetic, a file, folder, glob, http(s) URL, or a Hub data "
        "set's name; or a list of {source, weight}, which are mixed",
    )
    max_epochs: float | None = knob(
        None, "warn before a run that reads a source more often (default: never)", 0, read=_ON_TEXT
    )
    format: Literal[tuple(FORMATS)] = knob(  # pyright: ignore[reportInvalidTypeForm]
        "text", "; ".join(row.meaning for row in FORMATS.values())
    )
    sha256: str | None = knob(None, "expected sha256 of the file at a URL", read=FROM_A_URL)
    config: str | None = knob(None, "configuration of a Hub data set", read=FROM_THE_HUB)
    split: str = knob("train", "split of a Hub data set to train on", read=FROM_THE_HUB)
    validation_split: str | None = knob(
        None,
        "split of a Hub data set to validate on (default: validation_fraction)",
        read=FROM_THE_HUB,
    )
    revision: str | None = knob(None, "commit or tag of a Hub data set", read=FROM_THE_HUB)
    text_column: str = knob(
        "text", "column with the text of a row", read=(*_ON_TEXT, _COLUMN_FORMAT, FROM_COLUMNS)
    )
    streaming: bool = knob(
        False, "read a Hub data set as it arrives, without its files on the disk", read=FROM_THE_HUB
    )
    max_tokens: int | None = knob(
        None,
        "read only the first documents of each split, up to this many tokens (default: all)",
        1,
    )
    max_bad_rows: float = knob(
        0.0,
        "rows that cannot be used are left out, up to this number, or below 1 this share of the "
        "rows read (0: refuse the first)",
        0,
    )
    validation_fraction: float = knob(
        0.0005,
        "share held out: the end of a single document, or whole documents",
        0,
        0.5,
        read=only_without("data.validation_split", idle=(0,)),
    )
    validation_seed: int = knob(
        2357,
        "seed of the choice of documents to hold out",
        0,
        2**64 - 1,
        read=only_without("data.validation_split"),
    )
    tokenizer: str = knob(
        "gpt2", "char, gpt2, bpe (trained on the text), or the name or folder of another"
    )
    vocab_size: int | None = knob(
        None,
        "bpe: number of tokens: 256 bytes, the merges and end-of-text",
        257,
        1_000_000,
        read=_WITH_BPE,
    )
    bpe_pattern: Literal["gpt2", "gpt4"] = knob(
        "gpt2",
        "bpe: how text is split before merging; gpt4: digits in threes, no case in 's",
        read=_WITH_BPE,
    )
    num_threads: int | None = knob(
        None,
        "threads that tokenize text (default: one per core)",
        1,
        1024,
        read=(*_ON_TEXT, _UNENCODED_FORMAT),
    )
    dir: str = knob("", "folder of the prepared data (default: data/<recipe name>)")
    block_size: int = knob(1024, "tokens in a training sequence", 1, 100_000_000)
    order: Literal["shuffled", "random"] = knob(
        "shuffled", "every block once per epoch, or windows at random offsets"
    )
    packing: Literal["packed", "padded", "documents"] = knob(
        "packed",
        "text: end to end, or rows that begin with a document (documents), padded; chat: several "
        "conversations per block, apart in attention (packed), or one and padding (padded)",
        read=_ON_TEXT,
    )
    mask: Literal["documents"] | None = knob(
        None, "text: documents do not attend to others, and their positions begin at 0"
    )

    @property
    def one_source(self) -> str:
        """The source if it is not a mixture; of a mixture, config/sources.py gives the data
        section of each source.
        """
        assert isinstance(self.source, str)
        return self.source


# Kinds of parameters whose learning rate optim.rates can multiply.
FAMILIES = (
    "tokens",  # token embedding, and a head that is tied to it
    "head",
    "positions",
    "vectors",  # gains of norms, biases
    "query_key_value",
    "attention_output",
    "mlp_in",
    "mlp_out",
)


@dataclass(frozen=True)
class OptimSection:
    """Optimizer, learning rates and their schedule."""

    name: Literal[tuple(OPTIMIZERS)] = knob(  # pyright: ignore[reportInvalidTypeForm]
        "adamw", "; or ".join(row.meaning for row in OPTIMIZERS.values())
    )
    learning_rate: float = knob(
        6e-4, "peak learning rate; with muon, the rate of the parameters that AdamW updates", 0
    )
    # Jordan et al. 2024 (github.com/KellerJordan/Muon), for the update scale `original`
    muon_learning_rate: float = knob(
        0.02, "Muon's peak learning rate; it follows the same schedule", 0, read=_WITH_MUON
    )
    rates: dict[str, Any] = knob(  # noqa: RUF009
        {},
        "factors of the learning rate for some parameters, such as {positions: 0.1, mlp_in: 2}: "
        + ", ".join(FAMILIES),
    )
    muon_momentum: float = knob(0.95, "Muon's Nesterov momentum", 0, 0.999999, read=_WITH_MUON)
    muon_scale: Literal["original", "match_rms_adamw"] = knob(
        "original",
        "scale of Muon's updates; match_rms_adamw fits AdamW's learning rate",
        read=_WITH_MUON,
    )
    min_learning_rate: float = knob(
        6e-5,
        "learning rate at the end of the decay",
        0,
        read=only_without("optim.schedule", "constant"),
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = knob(
        "cosine", "decay after warm-up; wsd: constant, then linear decay at the end"
    )
    warmup_steps: int = knob(2000, "steps of linear warm-up", 0)
    decay_fraction: float = knob(
        0.2,
        "wsd: share of the steps that the decay takes",
        0,
        1,
        read=only_with("optim.schedule", "wsd"),
    )
    weight_decay: float = knob(
        0.1, "decoupled decay of matrices and embeddings (never biases or LayerNorm)", 0
    )
    balance_loss: float = loss_term(
        0.0,
        "mixtures of experts: weight of a loss that gives all experts equal work",
        0,
        # It is a function of all routers and of whole sequences.
        layouts=(Setting.DEEPSPEED, Setting.TENSOR_PARALLELISM, Setting.EXPERT_PARALLELISM),
    )
    beta1: float = knob(0.9, "decay of AdamW's first moment", 0, 0.999999, read=_WITH_ADAMW)
    beta2: float = knob(0.95, "decay of AdamW's second moment", 0, 0.999999, read=_WITH_ADAMW)
    max_grad_norm: float = knob(
        1.0, "maximum gradient norm; larger gradients are clipped; 0: no clipping", 0
    )
    state: Literal["float32", "8bit"] = knob(
        "float32", "precision of AdamW's state; 8bit needs torchao"
    )


@dataclass(frozen=True)
class TrainSection:
    """Steps, batch, seed, stages and exactness of the run."""

    max_steps: int = knob(600_000, "optimizer steps", 1)
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
    metric_rows: int = knob(100, "held-out rows that eval.metrics compares", 1)


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
    project: str = knob("nanogpt_hf", "project name for the trackers")
    layers: bool = knob(False, "log for each layer: norms of gradient and weights, update ratio")


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
    reward_seconds: float = knob(5.0, "time limit of the reward of one completion", 0.01, 86_400)
    reward_errors: Literal["stop", "zero"] = knob(
        "stop", "if the reward raises, takes too long or is not finite: stop, or reward 0"
    )
    samples: int = knob(8, "completions per question", 2, 100_000)
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
    kl: float = knob(0.0, "weight of the KL divergence to the model that the run started from", 0)
    eval_questions: int = knob(100, "held-out questions at each evaluation", 1)
    eval_samples: int = knob(4, "k of pass@k: completions per held-out question", 1, 100_000)


@dataclass(frozen=True)
class AlignSection:
    """Preference training: the loss and its weights."""

    READER: ClassVar[Reader] = only_with("align.loss", remedy="train by `align`")

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
        0.5, "share of the KL divergence to the teacher in the loss; the rest: the next token", 0, 1
    )
    temperature: float = knob(
        1.0, "the logits of teacher and student are divided by this", 0.01, 1000
    )


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


@dataclass(frozen=True)
class Choice:
    """A knob's value that follows from `model.depth`, and the reason for it (config/dial.py)."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Config:
    """A resolved recipe.

    `name` is the recipe's name, the default name of its run folder and data folder.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    finetune: FinetuneSection = FinetuneSection()
    lora: LoraSection = LoraSection()
    rl: RlSection = RlSection()
    align: AlignSection = AlignSection()
    distill: DistillSection = DistillSection()
    hub: HubSection = HubSection()
    name: str = "run"
    dial: tuple[Choice, ...] = ()  # what model.depth chose, for display; not part of the recipe
    # of a recipe that holds in a later stage (config/stages.py): the whole one, and its first step
    whole: "Config | None" = None
    begins: int = 0

    @property
    def recipe(self) -> "Config":
        """The recipe with all its stages."""
        return self.whole or self


@dataclass(frozen=True)
class Knob:
    """A knob of the schema as `--help` and the conversion of values read it."""

    key: str
    kind: Any  # the annotation: int, float, bool, str, list[str], or a union or Literal of those
    default: Any
    meaning: str
    low: float | None
    high: float | None  # for integers, None means LARGEST
    readers: tuple[Reader, ...] = ()
    layouts: tuple[Setting, ...] | None = None  # of a knob that adds a term to the loss


SECTIONS = tuple(f.name for f in fields(Config) if is_dataclass(f.default))


def _knobs() -> dict[str, Knob]:
    table = {}
    for section in SECTIONS:
        defaults = getattr(Config(), section)
        kinds = typing.get_type_hints(type(defaults))
        chosen_by: Reader | None = getattr(defaults, "READER", None)
        for f in fields(defaults):
            key = f"{section}.{f.name}"
            declared = Knob(key, kinds[f.name], getattr(defaults, f.name), **f.metadata)
            others = {key, *(reader.key for reader in declared.readers)}
            if chosen_by and chosen_by.key not in others:
                declared = replace(declared, readers=(chosen_by, *declared.readers))
            table[key] = declared
    return table


KNOBS: dict[str, Knob] = _knobs()


def get_value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def knob_values(config: Config) -> dict[str, Any]:
    """The values of all knobs by key."""
    return {key: get_value(config, key) for key in KNOBS}


def replace_knobs(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with other values of some knobs, such as {"train.seed": 7}."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def kind_options(kind: Any) -> tuple[Any, ...]:
    """The types and literals of an annotation: `int | Literal["all"]` -> (int, "all")."""
    split = typing.get_origin(kind) in (Literal, types.UnionType, typing.Union)
    parts = typing.get_args(kind) if split else ()
    return tuple(option for part in parts for option in kind_options(part)) or (kind,)


_TYPE_NAMES = {NoneType: "null", list: "list", dict: "mapping"}


def knob_schema() -> dict[str, dict[str, Any]]:
    """Every knob: its types, values that are names, default, inclusive bounds and meaning."""
    schema = {}
    for key, declared in KNOBS.items():
        options = kind_options(declared.kind)
        kinds = [typing.get_origin(o) or o for o in options if not isinstance(o, str)]
        schema[key] = {
            "types": [_TYPE_NAMES.get(kind) or kind.__name__ for kind in kinds],
            "choices": [option for option in options if isinstance(option, str)],
            "default": declared.default,
            "low": declared.low,
            "high": declared.high,
            "meaning": declared.meaning,
        }
    return schema


def section_lines() -> list[str]:
    """The sections of a recipe in `--help`: the name and one line each."""
    return [f"  {name:<11} {section_summary(name)}" for name in SECTIONS]


def knob_lines(section: str | None = None) -> list[str]:
    """The knobs of a section, or of all sections: name, meaning, choices and default."""
    lines = []
    for name, knobs in groupby(knob_schema().items(), lambda item: item[0].partition(".")[0]):
        if section not in (None, name):
            continue
        lines += ["", f"{name}: {section_summary(name)}"]
        for key, described in knobs:
            names = described["choices"]
            choices = f" [{'|'.join(names)}]" if len(names) > 1 else ""
            value = described["default"]
            default = "" if value in (None, "") else f" (default {value})"
            lines.append(f"  --{key:<32} {described['meaning']}{choices}{default}")
    return lines[1:]


def section_summary(section: str) -> str:
    """The first line of the docstring of a section, without its full stop."""
    docstring = inspect.getdoc(type(getattr(Config(), section))) or ""
    return docstring.partition("\n")[0].rstrip(".")
