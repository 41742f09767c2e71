"""A method: one kind of training, as a row of `METHODS` (methods/table.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nanogpt_hf.config.methods import NEXT_TOKEN, RECIPE_METHODS, RecipeMethod
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.methods.run import Evaluated, Run
from nanogpt_hf.model.architecture import Objective
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Score
from nanogpt_hf.runs.state import TrainState

VALIDATION_LOSS = Score("val/loss", "val loss", "validation loss (nats per token)")


@dataclass(frozen=True)
class Method:
    """A kind of training: all that the package asks of it."""

    # In messages: `trained by NAME`.
    name: str
    # What recipes know of it without torch: its knob, defaults and layouts (config/methods.py).
    # Variants of a method, such as one with a teacher, have the same.
    recipe: RecipeMethod
    # What it trains and evaluates on; every process calls it. Raises UserError.
    load: Callable[[Config], PreparedData]
    objective: Callable[[Config, PreparedData], Objective]
    # The evaluation of a step, the same on all processes; None if `stopping()` has ended it.
    evaluate: Callable[[Run, Callable[[], bool]], Evaluated | None]
    # The score of the best model in words.
    describe_best: Callable[[float], str]
    # By what a sweep ranks its runs: the figure that chooses best/. The scores of runs that differ
    # in one of the knobs `scored_by` do not compare: these runs are ranked by `score_across`.
    score: Score = VALIDATION_LOSS
    scored_by: tuple[str, ...] = ()
    score_across: Score | None = None
    # What has to be there before a step is taken, such as sampled answers. Returns figures to log,
    # the same on all processes.
    begin_step: Callable[[Run, int], dict[str, float]] = lambda run, step: {}
    # Optimizer updates on the data of one step.
    updates: Callable[[Config], int] = lambda config: 1
    # The given number of blocks, as long as they can be, of tokens that mean nothing: for a run
    # that is only measured. None: random tokens of text will do.
    full_blocks: Callable[[Config, int], Blocks] | None = None
    # In estimates: what a block is, the sequences of it that a step reads with a gradient, and
    # those that it reads without one.
    noun: str = "blocks"
    sequences: int = 1
    forward_only: Callable[[Config], int] = lambda config: 0
    # What the objective gives the model in place of its own cross-entropy: "tokens" is the loss of
    # each token (`token_losses`), "sum" a summed loss of logits.
    row_loss: Literal["", "tokens", "sum"] = ""
    # Why a run cannot resume, as a line, if it lost something that only its start had; else None.
    # Only the main process calls it.
    resume_problem: Callable[[Config, RunFolder, PreparedData, TrainState], str | None] = (
        lambda config, folder, data, state: None
    )
    # Whether a recipe that chooses `recipe` means this variant of it.
    is_meant: Callable[[Config], bool] = lambda config: True
    # Whether its blocks are prepared data. Then a step follows from them and the weights alone, and
    # `verify` and `branch` can repeat it.
    uses_prepared_data: bool = False

    def __post_init__(self) -> None:
        # Else no rule would refuse the layouts that do not honour its objective.
        if self.recipe not in (NEXT_TOKEN, *RECIPE_METHODS):
            raise ValueError(f"{self.name}: list its recipe in RECIPE_METHODS, config/methods.py")
