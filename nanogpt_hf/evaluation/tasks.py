"""Run lm-eval tasks on a model: tasks of lm-eval by name, or a YAML file with its data in the same
folder.
"""

import contextlib
import copy
import importlib.util
import io
import logging
import math
import os
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError, did_you_mean, one_line
from nanogpt_hf.evaluation.base import (
    LIMIT,
    TASKS,
    Evaluation,
    Loaded,
    Measure,
    Request,
    Result,
    Subject,
    with_error,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Prefix of the tasks of the `rl` command: lm-eval has some of the same names, such as gsm8k.
QUESTIONS = "rl:"
# Resamples for a standard error that has no formula; lm-eval's default, 100,000, takes minutes.
_RESAMPLES = 1000
# lm-eval's defaults, to ask the same questions with the same solved examples
_PYTHON_SEED = 0
_OTHER_SEED = 1234

# task -> metric -> value; lm-eval adds <metric>_stderr if it can compute it
Scores = dict[str, dict[str, float]]


class LmEvalTasks(Evaluation):
    options = (TASKS, LIMIT)
    knob = "eval.tasks"

    def wanted(self, arguments: Namespace) -> bool:
        return bool(task_names(arguments, of_rl=False))

    def load(self, request: Request) -> Loaded:
        loaded = load_tasks(task_names(request.arguments, of_rl=False))
        return Loaded(partial(_measure, loaded, request.arguments.limit))

    def load_for_training(self, config: Config, tokenizer: "PreTrainedTokenizerBase") -> Measure:
        loaded = load_tasks(config.eval.tasks, "eval.tasks")
        return partial(_measure_in_training, loaded, config.eval.tasks_limit)


def task_names(arguments: Namespace, *, of_rl: bool) -> list[str]:
    """The names in --tasks that are tasks of the `rl` command, or else the other names."""
    names = [name.strip() for name in (arguments.tasks or "").split(",") if name.strip()]
    return [name for name in names if name.startswith(QUESTIONS) == of_rl]


def _measure(loaded: dict[str, Any], limit: int | None, subject: Subject) -> Iterator[Result]:
    scores = run_tasks(subject, loaded, limit)
    first = f", first {limit} questions" if limit else ""
    for name, metrics in scores.items():
        lines = [f"{subject.name} on task {name}{first}"]
        for metric, value in metrics.items():
            # A standard error is shown behind its metric.
            if not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr", math.nan)
                lines.append(f"  {metric:<14} {with_error(value, error, 4)}")
        yield Result(lines)
    version = metadata.version("lm_eval")
    yield Result(figures={"tasks": scores, "tasks_limit": limit, "lm_eval_version": version})


def _measure_in_training(
    loaded: dict[str, Any], limit: int | None, subject: Subject
) -> Iterator[Result]:
    figures = {}
    shown = []
    for name, metrics in run_tasks(subject, loaded, limit).items():
        for metric, value in metrics.items():
            figures[f"task/{name}/{metric}"] = value
            if not metric.endswith("_stderr"):
                shown.append(f"{name}/{metric} {value:.4g}")
    yield Result([f"  {', '.join(shown)}"], figures)


def load_tasks(names: list[str], where: str = "--tasks") -> dict[str, Any]:
    """Load lm-eval's task objects, with their data, by `tasks`, `groups` and `group_map`. A name
    may be a pattern.

    Raises UserError if lm-eval is missing, a task is unknown, or its data cannot be loaded.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"{where}: needs lm-eval; run `pip install 'nanogpt_hf[lm-eval]'`")
    files = [name for name in names if Path(name).suffix in (".yaml", ".yml")]
    with _quietly():
        import numpy as np
        from lm_eval.tasks import TaskManager

        # Some tasks draw random numbers while they are loaded.
        random.seed(_PYTHON_SEED)
        np.random.seed(_OTHER_SEED)
        # Reading lm-eval's 14,000 names takes seconds, and files do not need them.
        manager = TaskManager(include_defaults=len(files) < len(names))
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in names:
            path = Path(os.path.expanduser(name))
            is_file = name in files
            try:
                # A local task names its data files relative to its own folder.
                with contextlib.chdir(path.parent if is_file else os.curdir):
                    if is_file:
                        found = [_read_local_task(path.name)]
                    else:
                        found = manager.match_tasks([name])
                    if not found:
                        raise ValueError(f"no such task{did_you_mean(name, manager.all_tasks)}")
                    part = manager.load(found)
            except Exception as error:
                # The network, the Hub, a loading script or a package that the task needs may fail,
                # each with errors of its own types.
                reason = one_line(error) or type(error).__name__
                raise UserError(f"{where}: {name} cannot be loaded: {reason}") from None
            for kind in loaded:
                loaded[kind] |= part[kind]
        for name, task in loaded["tasks"].items():
            # Such as HumanEval. A command that measures must not run what a model happens to write.
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(
                    f"{where}: {name} runs code that the model writes; use lm-eval's "
                    "own program for it"
                )
            # As lm-eval's own program does: no examples unless the task asks for some, and the same
            # ones every time.
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=_OTHER_SEED)
    return loaded


def _read_local_task(file: str) -> dict[str, Any]:
    """Read a task's YAML. `!function`, which would run code, raises an error of YAML."""
    task = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if "task" not in task or "include" in task:
        raise ValueError("it needs a line such as `task: my_task`, and no `include`")
    return task


def prefix_token_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The token to put before a text, so that its first token can be predicted."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return cast(int, token_id)
    # A vocabulary of characters has neither; a new line is the best start that it has.
    return tokenizer.get_vocab().get("\n", 0)


def run_tasks(subject: Subject, loaded: dict[str, Any], limit: int | None = None) -> Scores:
    """Run loaded tasks, at most `limit` questions of each. All processes call it and get the same
    scores.

    Processes with a whole model share the questions; with a sharded one, all processes run all
    questions. Raises UserError if the tokenizer cannot encode a question.
    """
    import torch
    from accelerate.utils import broadcast_object_list

    from nanogpt_hf.evaluation.loss import eval_mode

    accelerator = subject.accelerator
    model = subject.model
    mesh = subject.mesh
    with _quietly(subject.shows_bars), eval_mode(model):
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        unwrapped: Any = accelerator.unwrap_model(model)
        # lm-eval adds a padding token, which must not be saved with the model.
        own = copy.deepcopy(subject.tokenizer)
        # lm-eval cuts long texts itself; transformers would only warn about them.
        own.model_max_length = sys.maxsize
        lm: Any = cast(Any, HFLM)(
            pretrained=unwrapped,
            tokenizer=own,
            batch_size=subject.batch_size,
            max_length=unwrapped.config.max_position_embeddings,
            prefix_token_id=prefix_token_id(own),
            trust_remote_code=False,
        )
        lm._device = accelerator.device  # a sharded model may report another
        # lm-eval gives each process every n-th question, and needs at least one for each.
        fewest = min(
            min(len(task.eval_docs), limit or sys.maxsize) for task in loaded["tasks"].values()
        )
        if not mesh.is_sharded and fewest >= mesh.world_size:
            lm._rank = mesh.rank
            lm._world_size = mesh.world_size
            lm.accelerator = accelerator
        try:
            with torch.no_grad(), accelerator.autocast():
                answer: Any = evaluate(
                    lm, task_dict=loaded, limit=limit, log_samples=False, bootstrap_iters=_RESAMPLES
                )
        except Exception as error:
            # the tokenizers library's message for a character without a token
            if "UNK" not in str(error):
                raise
            raise UserError(
                "the model's tokenizer has no token for some character of the tasks' text"
            ) from None
    # Only the first process has the answer.
    results: list[Any] = [None if answer is None else _plain(answer["results"])]
    if mesh.world_size > 1:
        broadcast_object_list(results, from_process=0)
    return results[0]


def _plain(results: dict[str, dict[str, Any]]) -> Scores:
    """Keep the numbers: {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": ...} becomes {"acc":
    0.5}. A filter's name stays, as in "acc,strict".
    """
    scores: Scores = {}
    for task, metrics in results.items():
        scores[task] = {}
        for key, value in metrics.items():
            if "," in key and isinstance(value, int | float):
                scores[task][key.removesuffix(",none")] = float(value)
    return scores


@contextlib.contextmanager
def _quietly(show_progress: bool = False) -> Iterator[None]:
    """Context without lm-eval's log and warnings, and without its progress bars if there is no
    terminal.
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    # Its resampling would otherwise fork this process, which has threads: a fork may hang.
    os.environ["DISABLE_MULTIPROC"] = "1"
    shown = sys.stderr if show_progress and sys.stderr.isatty() else io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(shown),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
