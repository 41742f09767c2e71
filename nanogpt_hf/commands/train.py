"""The commands that train, and prepare the text: prepare, pretrain, finetune, rl, align, resume."""

import gc
import logging
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import (
    add_flag,
    add_knobs,
    add_option,
    add_recipe_argument,
    list_knobs,
    load_text_recipe,
)
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.methods import (
    NEXT_TOKEN,
    POLICY,
    PREFERENCES,
    RecipeMethod,
    recipe_method_of,
)
from nanogpt_hf.config.names import find_recipe
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.stages import planned_tokens, stage_lines
from nanogpt_hf.config.stated import Overrides
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.console import release, show
from nanogpt_hf.data.manifest import find_manifest
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.methods.resolve import missing_path, resolve_from_model
from nanogpt_hf.program import program
from nanogpt_hf.runs.find import find_run
from nanogpt_hf.runs.folder import run_folder
from nanogpt_hf.runs.recipe import read_recipe_to_train

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)


def add_prepare_arguments(parser: ArgumentParser) -> None:
    add_recipe_argument(parser)


def run_prepare(arguments: Namespace, overrides: Overrides) -> None:
    """Tokenize a recipe's text or conversations into arrow shards, or verify those there are.

    A corpus for many machines: launch/tokenize_corpus.py, which uses datatrove.
    """
    config = load_text_recipe("prepare", arguments.recipe, overrides)

    from nanogpt_hf.data.prepare import prepare
    from nanogpt_hf.data.prepared import check_prepared, load_prepared
    from nanogpt_hf.data.summary import split_warnings, summary_lines

    # A second call reads the manifest only.
    prepared_now = prepare(config)[1]
    logger.info(f"{config.data.dir}: {'prepared' if prepared_now else 'is prepared already'}")
    data = load_prepared(config)
    for line in summary_lines(config, data):
        logger.info(line)
    for line in split_warnings(config, data.manifest):
        logger.warning(line)
    # Data that was prepared before may have been damaged since; loading it checks sizes only.
    if not prepared_now:
        check_prepared(config.data)
        logger.info("  verified: every byte is as it was written")


def _add_run_arguments(parser: ArgumentParser, recipe: str, *knobs: str, **meanings: str) -> None:
    """Add the arguments of a command that trains; one that starts from a model needs no recipe."""
    # The model states its own sizes, and the other knobs have defaults.
    from_model = "from" in knobs
    nargs = "?" if from_model else None
    add_recipe_argument(parser, f"a recipe, for example {recipe}", nargs=nargs)
    add_knobs(parser, *knobs, **meanings)
    without = ", without a recipe runs/<model>-<data>" if from_model else ""
    add_option(parser, "--run-dir DIR", f"the run folder (default runs/<recipe name>{without})")
    add_flag(parser, "--resume", "continue from the newest checkpoint in the run folder")
    add_flag(parser, "--overwrite", "delete the run that is in the run folder")
    automatic = "--resume if there is a checkpoint, otherwise start from step 0"
    add_flag(parser, "--auto-resume", automatic)
    dry_run = "print the knobs that are read and the size, check what --resume checks, then exit"
    add_flag(parser, "--dry-run", dry_run)


def add_pretrain_arguments(parser: ArgumentParser) -> None:
    _add_run_arguments(parser, "recipes/quickstart.yaml", "depth")


def run_pretrain(arguments: Namespace, overrides: Overrides) -> None:
    """Train a GPT or any text-only decoder from scratch: prepare data, write a run folder."""
    _check_recipe_of_resume(arguments)
    config = load_text_recipe("pretrain", arguments.recipe, overrides)
    # Training such a recipe from scratch would ignore the model that it names.
    if start := config.finetune.model:
        raise UserError(
            f"{arguments.recipe}: starts from {start}; use `{program()} finetune` instead"
        )
    _run(config, arguments)


def add_finetune_arguments(parser: ArgumentParser) -> None:
    knobs = ("from", "data", "freeze-layers", "unfreeze-every", "lora")
    _add_run_arguments(parser, "recipes/finetune_lora.yaml", *knobs)


def run_finetune(arguments: Namespace, overrides: Overrides) -> None:
    """Fine-tune any text-only decoder: all weights, the upper blocks only, or LoRA adapters.

    The model comes from the Hub, a model folder or a run: GPT-2, Llama, Qwen3, SmolLM3, ...

    No recipe is needed: nanogpt-hf finetune --from gpt2 --data my.txt
    docs/finetuning.md lists the defaults, and --dry-run prints them.
    """
    _run_from_model(arguments, overrides)


def add_rl_arguments(parser: ArgumentParser) -> None:
    knobs = ("from", "task", "data", "reward", "lora")
    questions = "questions with reference answers, as conversations: a file, URL or Hub data set"
    _add_run_arguments(parser, "recipes/arithmetic_rl.yaml", *knobs, data=questions)


def run_rl(arguments: Namespace, overrides: Overrides) -> None:
    """Train a model by reinforcement learning: sample answers to the questions of a task, and
    reward the right ones.

    No recipe is needed: nanogpt-hf rl --from runs/arithmetic_sft --task arithmetic
    docs/alignment.md describes a step, and --dry-run prints the defaults.
    """
    _run_from_model(arguments, overrides, POLICY)


def add_align_arguments(parser: ArgumentParser) -> None:
    knobs = ("from", "data", "loss", "lora")
    pairs = "pairs of answers, or for kto labeled answers: a file, URL or Hub data set"
    _add_run_arguments(parser, "recipes/arithmetic_align.yaml", *knobs, data=pairs)


def run_align(arguments: Namespace, overrides: Overrides) -> None:
    """Train a model by preferences: make chosen answers more probable than rejected ones, by DPO,
    IPO, hinge, SimPO or ORPO, or good answers more probable than bad ones, by KTO.

    Rows of --data have prompt, chosen and rejected; for kto prompt, completion and label.

    No recipe is needed: nanogpt-hf align --from runs/arithmetic_sft --data pairs.jsonl
    docs/alignment.md describes the losses, and --dry-run prints the defaults.
    """
    _run_from_model(arguments, overrides, PREFERENCES)


def add_resume_arguments(parser: ArgumentParser) -> None:
    add_option(parser, "run RUN", "the run folder")
    dry_run = "print the recipe, what has changed in it and the checkpoint, then exit"
    add_flag(parser, "--dry-run", dry_run)
    list_knobs(parser)


def run_resume(arguments: Namespace, overrides: Overrides) -> None:
    """Continue a run from its newest checkpoint, by its own recipe.

    The run may be of any command that trains. Knobs that may change during a run are set as for
    that command, for example --train.max_steps 2000; what differs is printed before the first step.
    """
    run = find_run(arguments.run)
    config = read_recipe_to_train(run, overrides)
    # From here on it is the command that began the run, with --resume.
    run_arguments = {"run_dir": run.path, "resume": True, "auto_resume": False, "overwrite": False}
    arguments = Namespace(recipe=str(run.recipe), **vars(arguments) | run_arguments)
    start = config.finetune.model
    if start is not None and not os.path.isdir(start):
        # It imports torch.
        from nanogpt_hf.checkpoint.reader import check_recorded_start

        check_recorded_start(run, config)
    missing = missing_path(config)
    remedy = "resume it in the folder where it began"
    if missing is None and "data.dir" not in dict(overrides):
        missing = _data_of_elsewhere(config, run.path)
        remedy += ", or name the prepared data by --data.dir"
    if missing:
        raise UserError(
            f"{run.path}: its recipe names {missing}, which is not in this folder; {remedy}"
        )
    if config.finetune.model is None:
        _run(config, arguments)
    else:
        _run_from_model(arguments, overrides, recipe_method_of(partial(get_value, config)))


def _data_of_elsewhere(config: Config, run: Path) -> str | None:
    """The knob of the prepared data of a run that began in another folder, with its value: else it
    would be prepared again here. None if it is here, or may have been removed.
    """
    # A run below this folder began here, or in one with the same relative paths.
    if run.resolve().is_relative_to(Path.cwd()) or os.path.isabs(config.data.dir):
        return None
    method = recipe_method_of(partial(get_value, config))
    if method is not NEXT_TOKEN or find_manifest(config.data):
        return None
    return f"data.dir {config.data.dir}"


def _check_recipe_of_resume(arguments: Namespace) -> None:
    """Raises UserError if the recipe of a run that resumes is gone, since `resume` needs none."""
    if arguments.recipe is None or not (arguments.resume or arguments.auto_resume):
        return
    recipe = find_recipe(arguments.recipe)
    run = run_folder(recipe.stem, arguments.run_dir)
    if run.recipe.is_file() and not os.path.lexists(recipe):
        raise UserError(
            f"{recipe}: no such recipe; `{program()} resume {shlex.quote(str(run.path))}` "
            "continues the run by its own recipe"
        )


def _run_from_model(
    arguments: Namespace, overrides: Overrides, method: RecipeMethod = NEXT_TOKEN
) -> None:
    """Train a model further, on text or by a method."""
    _check_recipe_of_resume(arguments)
    config, base = resolve_from_model(arguments.recipe, overrides, method)
    _run(config, arguments, base)


def _run(config: Config, arguments: Namespace, base: "PreTrainedConfig | None" = None) -> None:
    """Train `config` as the options of `_add_run_arguments` state; `base` is the configuration of
    the model that it starts from.
    """
    if arguments.dry_run:
        _dry_run(config, arguments, base)
        return
    # These imports take seconds; mistakes above and --help should not wait for them.
    with _permanent_imports():
        from nanogpt_hf.training.loop import train
        from nanogpt_hf.training.start import prepare_run

    options = ("run_dir", "resume", "overwrite", "auto_resume", "mesh")
    run = prepare_run(config, **{name: getattr(arguments, name) for name in options})
    # With -q no line follows before the end.
    release()
    train(run)


@contextmanager
def _permanent_imports() -> Iterator[None]:
    """Context in which the libraries are imported: the garbage collector never scans the 400,000
    objects that they create, which would take 0.4 s.
    """
    is_first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    # If torch was imported before, this process may have objects that it will not need to its end.
    if is_first:
        gc.freeze()


def _dry_run(config: Config, arguments: Namespace, base: "PreTrainedConfig | None") -> None:
    """Print the knobs that the run reads, then its plan: stages, parameters and tokens as far as
    they are known without its data, and what --resume would do.

    In processes of a launcher, raises UserError if the recipe does not fit the accelerate config.
    """
    from nanogpt_hf.data.hf_tokenizer import known_vocab_size
    from nanogpt_hf.data.prepared import check_knobs_of_prepared
    from nanogpt_hf.methods.table import method_of
    from nanogpt_hf.model.architecture import count_parameters
    from nanogpt_hf.model.build import describe_trainable, meta_model, model_of_run
    from nanogpt_hf.training.epochs import with_steps_of_known_data
    from nanogpt_hf.training.resume import check_resume, remedies_of_run

    mesh: Mesh = arguments.mesh
    if mesh.world_size > 1:
        from nanogpt_hf.distributed.accelerate_config import check_launch

        check_launch(config, mesh)
    may_resume = arguments.resume or arguments.auto_resume
    folder = run_folder(config.name, arguments.run_dir)
    with remedies_of_run(folder, config) if may_resume else nullcontext():
        config = with_steps_of_known_data(config)
    try:
        vocab_size, source = known_vocab_size(config.data, find_manifest(config.data))
        # Building the configuration finds mistakes in the sizes of the model.
        parameters = count_parameters(model_of_run(config, vocab_size).config)
        sizes = [f"parameters: {parameters:,}", f"vocabulary: {vocab_size:,} tokens, {source}"]
    except DataError as error:
        # The vocabulary of a text's own tokenizer is known when the text has been read.
        sizes = [f"parameters: not known before `prepare`: {error}"]
    # Of a model to fine-tune: how many of its parameters are trained.
    if base is not None:
        trainable = describe_trainable(meta_model(config, base), config)
        sizes.insert(0, f"{config.finetune.model}: {trainable}")
    read = read_knobs(config)
    unread = plural(len(KNOBS) - len(read), "knob")
    tokens = config.train.tokens_per_step
    if config.train.budget:
        total = f"as many steps as fit into {config.train.budget}, timed when a run starts"
    elif config.train.epochs:
        total = f"as many steps as {config.train.epochs:g} epochs take, counted after `prepare`"
    else:
        total = f"tokens in {config.train.max_steps:,} steps: {planned_tokens(config):,}"
    sizes.append(f"tokens per step: {tokens:,}; {total}")
    # What a resume would refuse, it is better to know before a job is queued.
    if may_resume and mesh.is_main:
        options = {name: getattr(arguments, name) for name in ("resume", "auto_resume")}
        sizes += check_resume(config, arguments.run_dir, **options)
    if method_of(config).uses_prepared_data:
        # A run would refuse it, and the vocabulary above would be another one.
        check_knobs_of_prepared(config.data)
    show(config_to_yaml(config, read))
    left_out = f"{unread} that this run does not read: left out above"
    lines = [left_out, *dial_lines(config), *stage_lines(config), *sizes]
    show(*lines, "nothing was started", sep="\n")
