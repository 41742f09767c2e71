"""The commands that train: pretrain, finetune, rl and align."""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import (
    add_flags,
    add_knobs,
    add_option,
    add_recipe_argument,
    list_knobs,
    load_text_recipe,
)
from nanogpt_hf.config.compatibility import recipe_settings
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.finetune import POLICY, PREFERENCES
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import naming, planned_tokens, stage_lines, stages_of
from nanogpt_hf.console import show
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.training.finetuning import check_tokenizer, finetune_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nanogpt_hf.data.manifest import Manifest


def add_pretrain_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser)
    add_knobs(parser, "depth")
    _add_run_arguments(parser)


def add_finetune_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser, "a recipe, for example recipes/finetune_lora.yaml", nargs="?")
    add_knobs(parser, "from", "data", "freeze-layers", "unfreeze-every", "lora")
    _add_run_arguments(parser)
    parser.epilog = f"{parser.epilog}\n\nIts defaults: docs/finetuning.md, or --dry-run."


def add_rl_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser, "a recipe, for example recipes/arithmetic_rl.yaml", nargs="?")
    questions = "the questions, with reference answers: as conversations for `finetune`"
    add_knobs(parser, "from", "task", "data", "reward", "lora", data=questions)
    _add_run_arguments(parser)
    parser.epilog = f"{parser.epilog}\n\nIts defaults: docs/alignment.md, or --dry-run."


def add_align_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser, "a recipe with pairs", nargs="?")
    add_knobs(
        parser,
        *("from", "data", "loss", "lora"),
        data="rows with prompt, chosen and rejected (kto: prompt, completion and label)",
    )
    _add_run_arguments(parser)
    parser.epilog = f"{parser.epilog}\n\nIts defaults: docs/alignment.md, or --dry-run."


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--run-dir DIR", "the run folder (default runs/<recipe name>)")
    flags = {
        "--resume": "continue from the newest checkpoint in the run folder",
        "--overwrite": "delete the run that is in the run folder",
        "--auto-resume": "--resume if there is a checkpoint, otherwise start from step 0",
        "--dry-run": "print the resolved recipe and its size, then exit",
    }
    add_flags(parser, flags)
    list_knobs(parser)


def run_pretrain(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    """Train a GPT or any text-only decoder from scratch: prepare data, write a run folder."""
    config = load_text_recipe("pretrain", arguments.recipe, overrides)
    if config.finetune.model:
        raise UserError(
            f"{arguments.recipe}: starts from {config.finetune.model}; use `cli.py "
            "finetune` instead"
        )
    _run(config, arguments)


def run_finetune(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    """Fine-tune any text-only decoder: all weights, the upper blocks only, or LoRA adapters.

    It comes from the Hub, a model folder or a run: GPT-2, Llama, Qwen3, SmolLM3, ...

    No recipe is needed: cli.py finetune --from gpt2 --data my.txt
    """
    config, base = finetune_config(arguments.recipe, overrides)
    vocabulary = check_tokenizer(config, base)

    def check_tokenizer_of_data(manifest: "Manifest") -> None:
        if manifest.tokenizer_hash != vocabulary:
            raise DataError(
                f"{config.data.dir}: prepared with another tokenizer than "
                f"{config.data.tokenizer}; prepare it again"
            )

    _run(config, arguments, base, check_tokenizer_of_data)


def run_rl(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    """Reinforcement learning on verifiable answers: sample answers to the questions of a task, and
    reward the right ones.

    No recipe is needed: cli.py rl --from runs/arithmetic_sft --task arithmetic
    """
    config, base = finetune_config(arguments.recipe, overrides, POLICY)
    check_tokenizer(config, base)
    _run(config, arguments, base)


def run_align(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    """Preference training: make chosen answers more probable than rejected ones, by DPO, IPO,
    hinge, SimPO or ORPO, or good answers than bad ones, by KTO.

    No recipe is needed: cli.py align --from runs/arithmetic_sft --data pairs.jsonl
    """
    config, base = finetune_config(arguments.recipe, overrides, PREFERENCES)
    check_tokenizer(config, base)
    _run(config, arguments, base)


def _run(
    config: Config,
    arguments: argparse.Namespace,
    base: "PreTrainedConfig | None" = None,
    check: Callable[["Manifest"], None] = lambda manifest: None,
) -> None:
    """Train `config` as the options of `_add_run_arguments` state; `base` is the configuration of
    the model that it starts from.
    """
    if arguments.dry_run:
        _dry_run(config, arguments.mesh, base)
        return
    with _permanent_imports():
        from nanogpt_hf.training.loop import train
        from nanogpt_hf.training.start import prepare_run

    options = ("run_dir", "resume", "overwrite", "auto_resume", "mesh")
    train(prepare_run(config, check=check, **{name: getattr(arguments, name) for name in options}))


@contextmanager
def _permanent_imports() -> Iterator[None]:
    """Context in which the libraries are imported: the garbage collector never scans the 400,000
    objects that they create, which takes 0.4 s.
    """
    is_first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if is_first:  # else this process has objects that do not live to its end
        gc.freeze()


def _dry_run(config: Config, mesh: Mesh, base: "PreTrainedConfig | None") -> None:
    """Print the resolved recipe, and the parameters and tokens of its run as far as they are known
    without its data.

    In processes of a launcher, raises UserError if the recipe does not fit the accelerate config.
    """
    from nanogpt_hf.data.manifest import find_manifest
    from nanogpt_hf.data.tokenizer import known_vocab_size
    from nanogpt_hf.model.architecture import count_parameters
    from nanogpt_hf.model.build import build_config, describe_trainable, meta_model
    from nanogpt_hf.optim.optimizer import check_combination, kind_of

    kind_of(config.optim)  # raises if there is none
    check_combination(recipe_settings(config))
    if mesh.world_size > 1:
        from nanogpt_hf.distributed.accelerate_config import check_launch

        for stage in stages_of(config):
            with naming(stage):
                check_launch(stage.config, mesh)
    if base is not None:
        show(f"{config.finetune.model}: {describe_trainable(meta_model(config, base), config)}\n")
    try:
        vocab_size, source = known_vocab_size(config.data, find_manifest(config.data))
        # a mistake in it ends the command here
        parameters = count_parameters(build_config(config.model, vocab_size))
        sizes = [f"parameters: {parameters:,}", f"vocabulary: {vocab_size:,} tokens, {source}"]
    except DataError as error:
        sizes = [f"parameters: not known before `prepare`: {error}"]
    show(config_to_yaml(config))
    tokens, steps = config.train.tokens_per_step, config.train.max_steps
    total = planned_tokens(config)
    sizes.append(f"tokens per step: {tokens:,}; tokens in {steps:,} steps: {total:,}")
    show(*dial_lines(config), *stage_lines(config), *sizes, "nothing was started", sep="\n")
