"""Every knob of an experiment, once: its type, default, unit, bounds and one line of meaning.

The machine (devices, processes, precision, sharding, compile) is not here: accelerate's config owns it.
A new knob is one line below; `--help`, the checks and the resolved recipe follow from it.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

LARGEST = 10**15  # an integer knob without an upper bound of its own; far beyond what any run counts


def knob(default: Any, meaning: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with its one line of meaning and its inclusive bounds."""
    metadata = {"meaning": meaning, "low": low, "high": high}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSection:
    depth: int | None = knob(
        None, "size dial: width, heads, learning rate, batch and steps for this many blocks", low=1, high=1000
    )
    aspect_ratio: int = knob(64, "with model.depth: channels per block, and channels of a head", low=1, high=10_000)
    n_layer: int = knob(12, "transformer blocks", low=1, high=1000)
    n_head: int = knob(12, "attention heads a block; divides n_embd", low=1, high=10_000)
    n_embd: int = knob(768, "width of the residual stream", low=1, high=100_000)
    n_positions: int = knob(1024, "longest context the model has positions for, in tokens", low=1, high=100_000_000)
    pad_vocab_to_multiple_of: int = knob(
        1, "round the embedding's rows up from the tokenizer's size: 64 is fast on GPUs", low=1, high=1_000_000
    )
    bias: bool = knob(False, "biases in Linear and LayerNorm (GPT-2 has them, nanoGPT leaves them out)")
    dropout: float = knob(0.0, "dropout probability on embeddings, attention and residuals", low=0, high=0.99)
    activation_function: Literal["gelu", "gelu_new"] = knob("gelu", "gelu is exact, gelu_new is OpenAI's tanh form")
    init: Literal["gpt2", "zero_residual"] = knob(
        "gpt2", "initial weights: GPT-2's, or with zeros in the layers that write to the residual stream"
    )


@dataclass(frozen=True)
class DataSection:
    source: str = knob("", "python-docs, a file, folder, glob or http(s) URL, or a Hub data set's name")
    format: Literal["text", "chat"] = knob("text", "text to go on from, or conversations: loss on the answers only")
    sha256: str | None = knob(None, "expected sha256 of a URL's content")
    config: str | None = knob(None, "configuration of a Hub data set")
    split: str = knob("train", "split of a Hub data set to train on")
    validation_split: str | None = knob(
        None, "split of a Hub data set to validate on; left out, a fraction is held out"
    )
    revision: str | None = knob(None, "commit or tag of a Hub data set")
    text_column: str = knob("text", "column that holds the text of a row")
    validation_fraction: float = knob(0.0005, "share held out: a lone document's tail, else documents", low=0, high=0.5)
    validation_seed: int = knob(2357, "seed that draws the documents held out", low=0, high=2**64 - 1)
    tokenizer: str = knob("gpt2", "char, gpt2, bpe (trained on the text), or a Hugging Face tokenizer's name or folder")
    vocab_size: int | None = knob(
        None, "bpe: tokens of the vocabulary: 256 bytes, merges, end-of-text", low=257, high=1_000_000
    )
    num_proc: int | None = knob(
        None, "processes that tokenize; left out, one a core where the text is large", low=1, high=1024
    )
    dir: str = knob("", "folder of the prepared tokens; left out, data/<recipe name>")
    block_size: int = knob(1024, "tokens of context in a training example", low=1, high=100_000_000)
    order: Literal["shuffled", "random"] = knob("shuffled", "every block once an epoch, or windows at random offsets")
    packing: Literal["packed", "padded"] = knob(
        "packed", "chat: several conversations in a block, blind to each other, or one and padding"
    )


@dataclass(frozen=True)
class OptimSection:
    name: Literal["adamw", "muon"] = knob(
        "adamw", "muon: Muon for the matrices inside the blocks, AdamW for all other parameters"
    )
    learning_rate: float = knob(6e-4, "peak learning rate; with muon, that of the parameters under AdamW", low=0)
    # Jordan et al. 2024 (github.com/KellerJordan/Muon), for the update scale `original`
    muon_learning_rate: float = knob(0.02, "Muon's peak learning rate; it follows the same schedule", low=0)
    muon_momentum: float = knob(0.95, "Muon's Nesterov momentum", low=0, high=0.999999)
    muon_scale: Literal["original", "match_rms_adamw"] = knob(
        "original", "scale of Muon's updates; match_rms_adamw: as large as AdamW's, so that its learning rate fits"
    )
    min_learning_rate: float = knob(6e-5, "learning rate at the end of the decay", low=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = knob(
        "cosine", "shape after warm-up; wsd is warm-up, stable, linear decay"
    )
    warmup_steps: int = knob(2000, "steps of linear warm-up", low=0)
    decay_fraction: float = knob(0.2, "wsd: last share of the steps that decays", low=0, high=1)
    weight_decay: float = knob(0.1, "decoupled decay of matrices and embeddings (never biases or LayerNorm)", low=0)
    beta1: float = knob(0.9, "AdamW's momentum", low=0, high=0.999999)
    beta2: float = knob(0.95, "AdamW's second-moment decay", low=0, high=0.999999)
    max_grad_norm: float = knob(1.0, "gradients are clipped to this norm; 0 clips nothing", low=0)
    state: Literal["float32", "8bit"] = knob("float32", "precision of AdamW's state; 8bit needs torchao")


@dataclass(frozen=True)
class TrainSection:
    max_steps: int = knob(600_000, "optimizer steps", low=1)
    tokens_per_parameter: float = knob(
        20.0, "with model.depth: training tokens for each parameter; 20 is compute-optimal", low=0.001, high=1e6
    )
    tokens_per_step: int = knob(
        491_520, "tokens in an optimizer step, over all processes and micro-batches", low=1, high=10_000_000_000
    )
    micro_batch_size: int | Literal["auto"] = knob(
        12, "sequences in one forward pass of one process; auto takes the most that fit", low=1, high=10_000_000
    )
    seed: int = knob(1337, "seed of the weights, the order of the data and dropout", low=0, high=2**64 - 1)
    rollback_ratio: float | None = knob(
        None, "go back to the newest checkpoint, and past its data, at a loss this many times its average", low=1
    )
    max_time: str | None = knob(None, "save and stop after this time, for example 11h30m or 45m (exit status 75)")

    @property
    def min_micro_batch_size(self) -> int:
        """The smallest micro-batch size that a run of this recipe may have: 1 for auto."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size


@dataclass(frozen=True)
class EvalSection:
    every: int = knob(1000, "steps between evaluations", low=1)
    tokens: int | Literal["all"] = knob(2_457_600, "validation tokens in one evaluation, or all", low=1)
    patience: int | None = knob(
        None, "stop when this many evaluations in a row brought no better validation loss; left out, never", low=1
    )
    tasks: list[str] = knob([], "lm-eval tasks run at each evaluation: names or YAML files")  # noqa: RUF009
    tasks_limit: int | None = knob(None, "questions asked of each task, its first ones; left out, all", low=1)
    samples: list[str] = knob([], "texts to continue at step 0 and at each evaluation, shown in the report")  # noqa: RUF009
    sample_tokens: int = knob(100, "tokens written after each of eval.samples", low=1, high=1_000_000)


@dataclass(frozen=True)
class CheckpointSection:
    every: int = knob(1000, "steps between checkpoints", low=1)
    keep: int = knob(2, "newest checkpoints kept, and always the newest one that is known to be sound", low=1)


@dataclass(frozen=True)
class TrackingSection:
    every: int = knob(10, "steps between training lines in metrics.jsonl and the trackers", low=1)
    trackers: list[str] = knob([], "accelerate's trackers by name: wandb, tensorboard, ...")  # noqa: RUF009
    project: str = knob("nanogpt_hf", "project name given to the trackers")
    layers: bool = knob(False, "layer by layer: norms, update ratios, attention logits, activations")


# The linear layers of a block, which LoRA can adapt: attention's four and the MLP's two.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "fc", "proj"]


@dataclass(frozen=True)
class FinetuneSection:
    model: str | None = knob(None, "what to start from: a Hub id, a model folder, a run folder; left out, scratch")
    revision: str | None = knob(None, "commit or tag of a Hub id; left out, the newest, which is then written down")
    freeze_layers: int | None = knob(
        None, "keep the embeddings and this many blocks from the bottom as they are", low=0
    )
    unfreeze_every: int | None = knob(
        None, "steps after which the topmost frozen block thaws, and so on down; the embeddings thaw last", low=1
    )
    layer_decay: float = knob(1.0, "learning rate of a layer as a share of the one above it", low=0.01, high=1)


@dataclass(frozen=True)
class LoraSection:
    rank: int | None = knob(
        None, "train two thin matrices of this rank beside each target; left out, no LoRA", low=1, high=100_000
    )
    alpha: float | None = knob(None, "their product is scaled by alpha / rank; left out, 2 x rank", low=0)
    dropout: float = knob(0.0, "dropout probability on what goes into them", low=0, high=0.99)
    targets: list[str] = knob(LORA_TARGETS, "linear layers that get them")  # noqa: RUF009
    merge: bool = knob(False, "write whole models with the adapter added in, which open as plain GPT-2")
    quantize: Literal["8bit", "4bit"] | None = knob(None, "hold the frozen weights in 8 or 4 bits (needs bitsandbytes)")


@dataclass(frozen=True)
class HubSection:
    push: Literal["best", "final"] | None = knob(
        None, "push to the Hub: each new best model as the run goes, or the last"
    )
    repo: str | None = knob(None, "repository to push to, as user/name; made at the first push if it is not there")
    private: bool = knob(False, "make the repository a private one")
    license: str | None = knob(None, "licence for the model card, by the Hub's name for it, for example apache-2.0")


@dataclass(frozen=True)
class Choice:
    """A knob's value that follows from `model.depth`, and the reason for it (config/dial.py)."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Config:
    """A resolved recipe. `name` is the recipe's name, which run and data folders take when not told otherwise."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    finetune: FinetuneSection = field(default_factory=FinetuneSection)
    lora: LoraSection = field(default_factory=LoraSection)
    hub: HubSection = field(default_factory=HubSection)
    name: str = "run"
    dial: tuple[Choice, ...] = ()  # what model.depth chose, to show; no part of the recipe


@dataclass(frozen=True)
class Knob:
    """One row of the schema, as `--help` and the checks need it."""

    key: str
    kind: Any  # the annotation: int, float, bool, str, list[str], or a union or Literal of those
    default: Any
    meaning: str
    low: float | None
    high: float | None  # integers have LARGEST beside it


# Knobs of older versions: the default they had, and what replaces them. A recipe may still hold them; they are ignored.
REMOVED_KNOBS: dict[str, tuple[Any, str]] = {
    "model.vocab_size": (None, "the tokenizer decides; use model.pad_vocab_to_multiple_of to pad it"),
    "optim.moments": ("float32", "use optim.state"),
    "finetune.prompts": ([], "use eval.samples"),
    "finetune.sample_tokens": (100, "use eval.sample_tokens"),
}

SECTIONS = tuple(f.name for f in fields(Config) if f.name not in ("name", "dial"))


def _knobs() -> dict[str, Knob]:
    table = {}
    for section in SECTIONS:
        defaults = getattr(Config(), section)
        kinds = typing.get_type_hints(type(defaults))
        for f in fields(defaults):
            key = f"{section}.{f.name}"
            table[key] = Knob(key, kinds[f.name], getattr(defaults, f.name), **f.metadata)
    return table


KNOBS: dict[str, Knob] = _knobs()


def get_value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def replace_knobs(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with other values of some knobs: replace_knobs(config, {"train.seed": 7})."""
    changes: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = value
    sections = {section: replace(getattr(config, section), **knobs) for section, knobs in changes.items()}
    return replace(config, **sections)


def kind_options(kind: Any) -> tuple[Any, ...]:
    """The plain types and literal values that an annotation allows: `int | Literal["all"]` -> (int, "all")."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return tuple(option for part in typing.get_args(kind) for option in kind_options(part))
    return (kind,)
