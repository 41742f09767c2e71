"""The class of evaluations: options of `evaluate`, data to load, a measurement.

An evaluation is one file with a subclass of `Evaluation`, and a row of `EVALUATIONS` (table.py).
`evaluate` and training use the same object. The file imports torch inside functions, since
`evaluate --help` reads the options.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.values import bounded, stated
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.formatting import format_number

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from nanogpt_hf.data.tokenizer import Tokenizer

# The type of an option that counts something: anything below 1 is refused by argparse.
COUNT = bounded(int, 1)


class Option(NamedTuple):
    """An option of `evaluate`."""

    usage: str  # flag and metavar: `--limit N`
    meaning: str
    kind: Callable[[str], Any] = stated
    names_source: bool = False  # the value names data, which the knobs of `data` describe

    @property
    def flag(self) -> str:
        return self.usage.partition(" ")[0]

    def given(self, arguments: Namespace) -> Any:
        """Its value, None if it is not given."""
        # argparse's name of --block-size is block_size
        return getattr(arguments, self.flag[2:].replace("-", "_"))


# Several evaluations have these options. One object serves all, so that `evaluate` adds it once.
TASKS = Option(
    "--tasks A,B",
    "lm-eval tasks: names, patterns or YAML files; or rl:NAME, a task of the `rl` command, for "
    "pass@k",
)
LIMIT = Option(
    "--limit N",
    "number of questions per task, the first ones (default: all; of generated questions 500)",
    COUNT,
)
DATA = Option(
    "--data TEXT",
    "text to measure: a file, folder, URL, data set or prepared data (default: the validation "
    "split of a run's own text); with --metrics, rows of conversations",
    names_source=True,
)
TEMPERATURE = Option(
    "--temperature T",
    "temperature of answers (default: 0 for one answer, 1 for several)",
    bounded(float, 0),
)
MAX_NEW_TOKENS = Option(
    "--max-new-tokens N", "maximum tokens of an answer (default: 256, or what fits)", COUNT
)


class Result(NamedTuple):
    """A part of what an evaluation found. A long evaluation yields several, to be shown early."""

    lines: Sequence[str] = ()  # shown on the console
    # `evaluate` writes them to its JSON, in which they may be nested. Training logs them as
    # metrics, so there they are plain numbers, by names with a prefix: {"cloze/accuracy": 0.5}.
    figures: Mapping[str, Any] = {}
    samples: Sequence[dict[str, str]] = ()  # prompt and text, for the report of a run


@dataclass(frozen=True)
class Subject:
    """A model to measure. All processes measure it together, and get the same results."""

    name: str
    # In `evaluate` it is whole on every process, in training it is what accelerate prepared.
    model: Any
    tokenizer: "PreTrainedTokenizerBase"
    accelerator: "Accelerator"
    batch_size: int
    step: int = 0  # the step of training
    shows_bars: bool = False  # whether this process shows live progress bars

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.accelerator)


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

    # The options of `evaluate` for it. The first one asks for it; without that one the others are
    # refused. An evaluation that only training asks for has none.
    options: ClassVar[tuple[Option, ...]] = ()
    # The knob by which a recipe asks for it: a run measures it if the knob has a value that is not
    # empty. Without a knob, runs do not measure it.
    knob = ""

    @property
    def asked_by(self) -> str:
        """The option that asks for it, for messages."""
        return self.options[0].usage

    def wanted(self, arguments: Namespace) -> bool:
        """Whether the options of `evaluate` ask for it."""
        return bool(self.options and self.options[0].given(arguments))

    def load(self, request: Request) -> Loaded:
        """Load data for `evaluate`, on every process. Raises UserError if it cannot be used."""
        raise NotImplementedError

    def load_for_training(self, config: Config, tokenizer: "PreTrainedTokenizerBase") -> Measure:
        """Load data for the evaluations of a run whose recipe asks for it. Raises UserError if the
        data cannot be used.
        """
        raise NotImplementedError


def with_error(value: float, error: float, digits: int) -> str:
    """3.1234 ± 0.0045"""
    number = format_number(value, digits)
    # Too few questions or windows have no standard error, which is then nan.
    if not math.isfinite(error):
        return number
    return f"{number} ± {format_number(error, digits)}"
