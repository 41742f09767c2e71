"""The knobs of the optimizer: rates, their schedule, kinds of parameters, terms of the loss."""

from dataclasses import dataclass
from typing import Any, Literal

from nanogpt_hf.config.knobs import knob, loss_term, only_with, only_without
from nanogpt_hf.config.optimizers import OPTIMIZERS
from nanogpt_hf.config.schedules import ENDLESS, SCHEDULES
from nanogpt_hf.config.settings import Setting

# Choices without which nothing reads a knob, where several knobs have the same.
_WITH_BETAS = only_with("optim.name", *(n for n, row in OPTIMIZERS.items() if row.has_betas))
_WITH_MUON = only_with("optim.name", "muon")
_WITH_AN_END = only_without("optim.schedule", *ENDLESS)

# Kinds of parameters, for optim.rates, optim.betas and optim.weight_decays.
FAMILIES = (
    # The token embedding, and a head that is tied to it.
    "tokens",
    "head",
    "positions",
    # Gains of norms, and biases.
    "vectors",
    "query_key_value",
    "attention_output",
    "mlp_in",
    "mlp_out",
)
# The kinds that are matrices inside the blocks, which Muon updates.
MATRIX_FAMILIES = FAMILIES[4:]
# Jordan et al. 2024 (github.com/KellerJordan/Muon). It suits the update scale `original`, with
# which a rate does not depend on the size of a matrix.
_MUON_RATE = 0.02
# The largest value of a decay of a moment: 1 would never read a gradient.
LARGEST_BETA = 0.999999


def tenth_of(rate: float) -> float:
    """A tenth in three digits, as a person would write it in a recipe."""
    return float(f"{rate / 10:.3g}")


@dataclass(frozen=True)
class OptimSection:
    """Optimizer, learning rates and their schedule."""

    # The defaults of AdamW are those in nanoGPT's config/train_gpt2.py: the peak is GPT-3's for
    # 124 M parameters (Brown et al. 2020, arXiv:2005.14165, table 2.1), and so are the betas, the
    # maximum norm and the weight decay (appendix B).
    name: Literal[tuple(OPTIMIZERS)] = knob(  # pyright: ignore[reportInvalidTypeForm]
        "adamw", "; or ".join(row.meaning for row in OPTIMIZERS.values())
    )
    learning_rate: float = knob(
        6e-4, "peak learning rate; with muon, the rate of the parameters that AdamW updates", 0
    )
    muon_learning_rate: float | None = knob(
        None,
        "Muon's peak learning rate; it follows the same schedule (default: 0.02, or with "
        "match_rms_adamw optim.learning_rate)",
        0,
        # A recipe may state the number that was the default for all optimizers.
        read=_WITH_MUON._replace(idle=(_MUON_RATE,)),
    )
    rates: dict[str, Any] = knob(  # noqa: RUF009
        {},
        "factors of the learning rate for some parameters, such as {positions: 0.1, mlp_in: 2}: "
        + ", ".join(FAMILIES),
    )
    muon_momentum: float = knob(0.95, "Muon's Nesterov momentum", 0, LARGEST_BETA, read=_WITH_MUON)
    muon_scale: Literal["original", "match_rms_adamw"] = knob(
        "original",
        "scale of Muon's updates; match_rms_adamw fits AdamW's learning rate",
        read=_WITH_MUON,
    )
    min_learning_rate: float | None = knob(
        None,
        "learning rate at the end of the decay (default: a tenth of optim.learning_rate)",
        0,
        read=_WITH_AN_END,
    )
    schedule: Literal[tuple(SCHEDULES)] = knob(  # pyright: ignore[reportInvalidTypeForm]
        "cosine",
        "; ".join(
            (
                "decay after warm-up",
                *(f"{n}: {s.meaning}" for n, s in SCHEDULES.items() if s.meaning),
            )
        ),
    )
    warmup_steps: int | float = knob(
        2000, "steps of linear warm-up, or below 1 this share of train.max_steps", 0
    )
    decay_steps: int | None = knob(
        None,
        "step at which the decay ends (default: train.max_steps)",
        1,
        read=(
            _WITH_AN_END,
            only_without("train.budget"),
            only_without("train.epochs"),
        ),
    )
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
    weight_decays: dict[str, Any] = knob(  # noqa: RUF009
        {},
        "weight decay of some parameters, such as {tokens: 0.001, head: 0.01}, by the names of "
        "optim.rates",
    )
    balance_loss: float = loss_term(
        0.0,
        "mixtures of experts: weight of a loss that gives all experts equal work",
        0,
        # It is a function of all routers and of whole sequences.
        layouts=(Setting.DEEPSPEED, Setting.TENSOR_PARALLELISM, Setting.EXPERT_PARALLELISM),
    )
    beta1: float = knob(0.9, "decay of AdamW's first moment", 0, LARGEST_BETA, read=_WITH_BETAS)
    beta2: float = knob(0.95, "decay of AdamW's second moment", 0, LARGEST_BETA, read=_WITH_BETAS)
    betas: dict[str, Any] = knob(  # noqa: RUF009
        {},
        "beta1 and beta2 of some parameters that AdamW updates, such as {tokens: [0.7, 0.99]}, by "
        "the names of optim.rates",
        read=_WITH_BETAS,
    )
    max_grad_norm: float = knob(
        1.0, "maximum gradient norm; larger gradients are clipped; 0: no clipping", 0
    )
    state: Literal["float32", "8bit"] = knob(
        "float32", "precision of AdamW's state; 8bit needs torchao"
    )

    @property
    def lowest_learning_rate(self) -> float:
        """The learning rate at the end of the decay: the stated one, or a tenth of the peak."""
        stated = self.min_learning_rate
        return tenth_of(self.learning_rate) if stated is None else stated

    @property
    def peak_muon_rate(self) -> float:
        """Muon's peak learning rate: the stated one, or the default of its scale of updates."""
        if self.muon_learning_rate is not None:
            return self.muon_learning_rate
        # These updates are as large as AdamW's: Liu et al. 2025, arXiv:2502.16982, section 2.2.
        return self.learning_rate if self.muon_scale == "match_rms_adamw" else _MUON_RATE

    def longest_warmup(self, end: int) -> int:
        """The steps before the decay of a schedule that ends at step `end`. A longer warm-up would
        end in a rate that falls at once.
        """
        return end - SCHEDULES[self.schedule].decay_steps(end, self)

    def warmup_in(self, max_steps: int) -> int | float:
        """The steps of warm-up in a run of `max_steps`."""
        steps = self.warmup_steps
        return round(steps * max_steps) if steps < 1 else steps
