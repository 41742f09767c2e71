"""The knobs of section `model`: architecture, sizes and initial weights."""

from dataclasses import dataclass
from typing import Any, Literal

from nanogpt_hf.config.knobs import knob, only_with, only_without

# Choices without which nothing reads a knob, where several knobs have the same.
_WITH_DEPTH = only_with("model.depth")
_GPT2 = only_with(
    "model.architecture", "gpt2", remedy="set fields of the architecture's config in model.extra"
)
_OTHER_ARCHITECTURE = only_without(
    "model.architecture", "gpt2", remedy="set another model.architecture"
)


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
