"""What an evaluation is: its options of `evaluate`, what it loads, and what it measures.

An evaluation is one file with a subclass of `Evaluation`, and a row of `EVALUATIONS` (table.py).
`evaluate` and training use the same object. The file imports torch inside functions, since
`evaluate --help` reads the options.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.values import bounded
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.formatting import format_number

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from nanogpt_hf.data.tokenizer import Tokenizer

COUNT = bounded(int, 1)


class Option(NamedTuple):
    """An option of `evaluate`."""

    usage: str  # as in `--limit N`
    meaning: str
    kind: Callable[[str], Any] = str

    @property
    def flag(self) -> str:
        return self.usage.partition(" ")[0]

    def given(self, arguments: Namespace) -> Any:
        """Its value, None if it is not given."""
        return getattr(arguments, self.flag[2:].replace("-", "_"))


# of several evaluations
TASKS = Option(
    "--tasks A,B",
    "lm-eval tasks: names, patterns or YAML files; or rl:NAME, a task of the `rl` command, for "
    "pass@k",
)
LIMIT = Option("--limit N", "number of questions per task, the first ones (default: all)", COUNT)


class Result(NamedTuple):
    """A part of what an evaluation found."""

    lines: Sequence[str] = ()  # for the console
    # For the JSON of `evaluate`; during training numbers by the name of a metric.
    figures: Mapping[str, Any] = {}
    samples: Sequence[dict[str, str]] = ()  # prompt and text, for the report of a run


@dataclass(frozen=True)
class Subject:
    """A model to measure. All processes measure it together, and get the same results."""

    name: str
    model: Any  # as accelerate prepared it; whole on every process in `evaluate`
    tokenizer: "PreTrainedTokenizerBase"
    accelerator: "Accelerator"
    batch_size: int
    step: int = 0  # the step of training
    bars: bool = False  # whether this process shows live progress bars

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.accelerator)

    @contextmanager
    def bar(
        self, unit: str, total: int | None = None, title: str = ""
    ) -> Iterator[Callable[[int], object]]:
        """A live bar on the main process's terminal; yields its update function."""
        from tqdm import tqdm

        with tqdm(desc=title, total=total, unit=unit, disable=not self.bars, leave=False) as bar:
            yield bar.update


Measure = Callable[[Subject], Iterator[Result]]


class Loaded(NamedTuple):
    """An evaluation that is ready to measure, any number of times."""

    measure: Measure
    facts: Mapping[str, Any] = {}  # values of JSON that all processes must share


@dataclass(frozen=True)
class Request:
    """The options of `evaluate`, and the opened model."""

    arguments: Namespace
    knobs: Mapping[str, Any]  # knobs of `data`, for the source that the options name
    model: Any
    tokenizer: "Tokenizer"

    @property
    def positions(self) -> int:
        return self.model.config.max_position_embeddings


class Evaluation:
    """A kind of measurement: a row of `EVALUATIONS`."""

    # of `evaluate`; none may be given if the evaluation is not asked for
    options: ClassVar[tuple[Option, ...]] = ()
    asked_by = ""  # the option that asks for it, for messages
    source = ""  # the argument with the name of data that the knobs of `data` describe

    def wanted(self, arguments: Namespace) -> bool:
        """Whether the options of `evaluate` ask for it: the first does."""
        return bool(self.options and self.options[0].given(arguments))

    def load(self, request: Request) -> Loaded:
        """Load what it needs, on every process. Raises UserError if that cannot be used."""
        raise NotImplementedError

    def load_for_training(
        self, config: Config, tokenizer: "PreTrainedTokenizerBase"
    ) -> Measure | None:
        """Load what it needs at every evaluation of a run; None if the recipe does not ask for it.

        Raises UserError if that cannot be used.
        """
        return None


def with_error(value: float, error: float, digits: int) -> str:
    """3.1234 ± 0.0045"""
    return format_number(value, digits) + (
        f" ± {format_number(error, digits)}" if math.isfinite(error) else ""
    )
