"""Load metrics of the `evaluate` library, and compute them with their standard errors."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.time_limit import TimeUpError, time_limit

if TYPE_CHECKING:
    from evaluate import EvaluationModule

# Each resample computes all metrics again, and ROUGE takes about a millisecond for a row.
RESAMPLES = 100
_SEED = 1337
# For one computation of the metrics. A model-based one, such as BERTScore, takes minutes.
SECONDS = 1800


class Metric(NamedTuple):
    """A loaded metric, and whether it compares numbers of classes instead of texts."""

    name: str
    module: "EvaluationModule"
    compares_classes: bool


def load_metrics(names: Sequence[str], where: str) -> list[Metric]:
    """Load metrics of the `evaluate` library: folders and files here, or names on the Hub.

    A metric is a program, so only those that the user has named are loaded. `where` is the option
    or knob with the names. Raises UserError if one cannot be loaded, with the reason.
    """
    import evaluate

    if not names:
        raise UserError(f"{where}: give a metric, such as rouge, or a folder with one")
    metrics: list[Metric] = []
    for name in names:
        path = os.path.expanduser(name)
        # Figures of the same name get this as a prefix.
        short = Path(path).stem
        if short in (metric.name for metric in metrics):
            raise UserError(f"{where}: {short}: named twice")
        # The library would look a path that does not exist up on the Hub.
        if not os.path.exists(path) and (os.sep in path or path.endswith(".py")):
            raise UserError(f"{where}: {name}: no such file or folder")
        try:
            # Otherwise the library writes the texts of each computation to a cache file.
            with _output_on_stderr():
                module = evaluate.load(path, keep_in_memory=True)
            features = module.features
            # A metric such as BLEU takes one reference for a text, or a list of them.
            columns = features[0] if isinstance(features, list) else features
            dtype = str(getattr(columns["predictions"], "dtype", ""))
        # A metric runs its own code, which may even end the program, and the library raises errors
        # of many types.
        except (Exception, SystemExit) as error:
            raise UserError(f"{where}: {name}: {_reason(name, error)}") from None
        if not {"predictions", "references"} <= set(columns):
            inputs = ", ".join(columns)
            raise UserError(
                f"{where}: {name}: compares {inputs}; a metric of predictions and references "
                "is needed"
            )
        metrics.append(Metric(short, module, dtype.startswith(("int", "uint", "bool"))))
    return metrics


def _reason(name: str, error: BaseException) -> str:
    """Why a metric cannot be loaded, and the remedy."""
    if isinstance(error, FileNotFoundError | ConnectionError):
        return (
            "no such folder, and it cannot be loaded from the Hub; check the name "
            "(https://huggingface.co/evaluate-metric) and the network, or give a folder with "
            f"{Path(name).name}.py"
        )
    return f"{type(error).__name__}: {one_line(error)}"


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Context in which what a metric writes to file descriptor 1, itself or by a program that it
    starts, goes to stderr: stdout may be the JSON of `--json -`.
    """
    sys.stdout.flush()
    try:
        stdout = os.dup(1)
    except OSError:
        # A program without stdout has nothing to protect.
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


class _TooSlowError(UserError):
    """A computation has reached its time limit; the next one would, too."""


def class_numbers(texts: Sequence[str], references: Sequence[str]) -> list[int]:
    """Number texts by the place of the equal reference among all sorted references; a text that
    equals none gets a number of its own. White space at both ends does not count.
    """
    classes = sorted({reference.strip() for reference in references})
    numbers = {text: number for number, text in enumerate(classes)}
    return [numbers.get(text.strip(), len(classes)) for text in texts]


def compute_metrics(
    metrics: Sequence[Metric], predictions: Sequence[str], references: Sequence[str]
) -> dict[str, Any]:
    """Compute all metrics by `evaluate.combine`; figures by name, plain numbers and lists.

    Raises UserError for a metric that cannot compare these texts.
    """
    import evaluate

    figures: dict[str, Any] = {}
    # Metrics of classes, such as accuracy, get numbers; all others get the texts.
    for compares_classes in (False, True):
        modules = {
            metric.name: metric.module
            for metric in metrics
            if metric.compares_classes == compares_classes
        }
        if not modules:
            continue
        inputs: dict[str, Sequence[Any]] = {"predictions": predictions, "references": references}
        if compares_classes:
            inputs = {name: class_numbers(texts, references) for name, texts in inputs.items()}
        names = ", ".join(modules)
        try:
            with time_limit(SECONDS), _output_on_stderr():
                # Names that two metrics share get the names of their modules as prefixes.
                computed = evaluate.combine(modules).compute(**inputs)
            if not isinstance(computed, Mapping):
                raise TypeError(f"expected figures by name, got {computed!r:.40}")
            plain = _plain(computed)
        except TimeUpError:
            raise _TooSlowError(
                f"{names}: takes more than {SECONDS} seconds for {len(predictions):,} answers; "
                "compare fewer rows (--limit, eval.metric_rows), or correct it"
            ) from None
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{names}: cannot be computed for these answers: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from None
        figures |= plain
    return figures


def _plain(value: Any) -> Any:
    """A value of a metric as JSON has it: NumPy's numbers as Python's, None for NaN.

    Raises TypeError for a value that has no form in JSON.
    """
    if isinstance(value, Mapping):
        return {" ".join(str(key).split()): _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | str):
        return value
    # JSON has integers of any size; readers of it have not.
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    raise TypeError(f"a figure is {value!r:.40}, which is no number, text or list")


def numbers_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures that are single numbers."""
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def standard_errors(
    metrics: Sequence[Metric], predictions: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """Standard errors of the metrics over resamples of the rows: the bootstrap, which needs no
    formula and holds for metrics of a whole corpus such as BLEU. Empty for a single row.
    """
    import numpy as np

    rows = len(predictions)
    if rows < 2:
        return {}
    # Raw bits of the generator: no version of NumPy changes them, unlike its distributions.
    bits = np.random.Philox(key=_SEED)
    found: dict[str, list[float]] = {}
    for _ in range(RESAMPLES):
        drawn = [int(number) % rows for number in bits.random_raw(rows)]
        try:
            figures = compute_metrics(
                metrics, [predictions[row] for row in drawn], [references[row] for row in drawn]
            )
        # All rows of a resample may be equal, for which a correlation has no value: then this
        # resample is missing, as for a figure that is not finite.
        except _TooSlowError:
            raise
        except UserError:
            continue
        # A figure that is not finite in a resample is missing there.
        for name, value in numbers_of(figures).items():
            found.setdefault(name, []).append(value)
    return {
        name: float(np.std(values, ddof=1)) for name, values in found.items() if len(values) > 1
    }
