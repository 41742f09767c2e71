"""What several commands share: arguments and recipes."""

import contextlib
import os
import re
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import NEXT_TOKEN, recipe_method_of
from nanogpt_hf.config.schema import KNOBS, SECTIONS, Config, knob_lines, section_lines
from nanogpt_hf.config.stated import Overrides, stated_knobs
from nanogpt_hf.config.values import bounded, stated
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import STDOUT
from nanogpt_hf.runs.find import find_checkpoint, find_model
from nanogpt_hf.runs.folder import RunFolder

# metavars of files, folders and models
_PATHS = ("CKPT", "DIR", "F", "FILE", "MODEL", "OUT", "PATH", "RECIPE", "RUN")


def _path(text: str) -> str:
    """An argparse type: a path or a name, with ~ expanded."""
    return os.path.expanduser(stated(text))


def size(text: str) -> int:
    """An argparse type: a number of bytes, such as 80GB or 16GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG])(i?)B", text)
    if not match or not float(match[1]):
        raise ArgumentTypeError(f"expected a size such as 80GB or 16GiB, got {text!r}")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMG".index(match[2]) + 1))


def add_option(parser: Any, usage: str, meaning: str, **options: Any) -> None:
    """Add an argument such as `--windows N`, or `recipe RECIPE`; its help ends with its default."""
    name, _, metavar = usage.partition(" ")
    if options.get("default") is not None:
        meaning += f"; default {options['default']}"
    if metavar:
        options["metavar"] = metavar
    if metavar in _PATHS:
        options.setdefault("type", _path)
    parser.add_argument(name, help=meaning, **options)


def add_flag(parser: ArgumentParser, name: str, meaning: str) -> None:
    parser.add_argument(name, action="store_true", help=meaning)


def add_recipe_argument(
    parser: ArgumentParser,
    meaning: str = "a recipe, for example recipes/quickstart.yaml",
    **options: Any,
) -> None:
    """Add RECIPE, and list the sections of knobs in the help."""
    add_option(parser, "recipe RECIPE", meaning, **options)
    list_knobs(parser)


class _Help(Action):
    """`--help`: the options of a command; `--help SECTION`: the knobs of a section, or of all."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> NoReturn:
        # argparse gives None if no word follows --help.
        if values is None:
            parser.print_help()
        elif values in ("all", *SECTIONS):
            show(*knob_lines(None if values == "all" else values), sep="\n")
        else:
            sections = f"no such section of knobs{did_you_mean(values, SECTIONS)}"
            parser.error(f"{option} {values}: {sections}; there are {', '.join(SECTIONS)} and all")
        parser.exit()


def list_knobs(parser: ArgumentParser) -> None:
    """List the sections of knobs in the help; `--help SECTION` then lists the knobs of one."""
    # Over a hundred knobs would hide the few options of the command, so a section is one line here.
    # argparse replaces %(prog)s by the program and the command.
    parser.epilog = "\n".join(
        [
            "knobs of the recipe, set by name, such as --optim.learning_rate 3e-4:",
            *section_lines(),
            "",
            "%(prog)s --help SECTION lists the knobs of a section, --help all every knob.",
        ]
    )
    meaning = "show this message, or the knobs of a section"
    names = ("-h", "--help")
    parser.add_argument(*names, nargs="?", metavar="SECTION", action=_Help, help=meaning)


def add_optional_recipe_argument(parser: ArgumentParser) -> None:
    meaning = "a recipe, for example recipes/gpt2_124m.yaml (default: a model of 0.8 M parameters)"
    add_recipe_argument(parser, meaning, nargs="?")


def load_text_recipe(command: str, recipe: str, overrides: Overrides) -> Config:
    """The resolved recipe of a command that reads text.

    Raises UserError for one of another method.
    """
    method = recipe_method_of(stated_knobs(recipe, overrides).get)
    if method is not NEXT_TOKEN:
        raise UserError(
            f"{program()} {command}: {recipe}: states {method.knob}; its command is "
            f"`{program()} {method.command}`"
        )
    return load_config(recipe, overrides)


def check_steps_known(command: str, values: Mapping[str, Any]) -> None:
    """Raises UserError if a run finds its number of steps when it starts; `values` of knobs."""
    found = {"train.budget": "times its steps", "train.epochs": "counts its steps"}
    for key, finds in found.items():
        if value := values.get(key):
            raise UserError(
                f"{program()} {command}: {key} {value!s:.80}: a run {finds} when it starts; "
                f"set {key} null, and train.max_steps"
            )


def load_optional_recipe(command: str, recipe: str | None, overrides: Overrides) -> Config | None:
    """`load_text_recipe`, or None without a recipe. Raises UserError for knobs without a recipe."""
    if recipe:
        return load_text_recipe(command, recipe, overrides)
    for key, _ in overrides:
        raise UserError(
            f"{program()} {command}: --{key}: a knob of a recipe, but no RECIPE is given"
        )
    return None


def add_model_argument(
    parser: ArgumentParser,
    meaning: str = "a run folder (its best model), a model folder, or a Hub id",
) -> None:
    """Add MODEL, and the step of a run folder's model."""
    add_option(parser, "model MODEL", meaning)
    add_option(
        parser,
        "--step N",
        "of a run folder: the model that it had after N steps, of which it has a checkpoint",
        type=bounded(int, 0),
    )


class Found(NamedTuple):
    """A model that a command reads."""

    folder: str  # the model folder, or the Hub id
    name: str  # what messages and results call it
    run: RunFolder | None = None  # the run, if the model is of a step of one


@contextlib.contextmanager
def found_model(name: str, step: int | None = None) -> Iterator[Found]:
    """Find MODEL; for a step of a run, yield a temporary folder, which is removed at the end.

    Raises UserError if there is none.
    """
    if step is None:
        folder = find_model(name)
        yield Found(folder, folder)
        return
    # Mistakes are reported before torch is imported, which takes seconds.
    run, checkpoint = find_checkpoint(name, step, "--step")

    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.checkpoint.step_model import model_of_step

    disable_progress_bar()
    with model_of_step(run, checkpoint) as folder:
        try:
            yield Found(str(folder), str(checkpoint), run)
        except UserError as error:
            # The user knows the checkpoint, and not the temporary folder.
            if str(folder) not in str(error):
                raise
            raise UserError(str(error).replace(str(folder), str(checkpoint))) from None


def output_file(text: str) -> Path:
    """An argparse type: the path of an output. Rejects at once what cannot be written."""
    path = Path(os.path.expanduser(text))
    if text in ("-", "/dev/stdout"):
        return STDOUT
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text}: is a folder, or in none; name a file")
    # A link is followed, also to a file that does not exist yet.
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ArgumentTypeError(f"{text}: is a link to {target}, in no folder; name a file")
    path_or_folder = target if target.exists() else target.parent
    if not os.access(path_or_folder, os.W_OK):
        raise ArgumentTypeError(f"{text}: cannot be written: permission denied")
    return path


def add_output(parser: ArgumentParser, names: str, meaning: str) -> None:
    help_text = f"{meaning}; - is stdout"
    parser.add_argument(*names.split(), metavar="FILE", type=output_file, help=help_text)


# Short names of knobs: name -> (knob, metavar)
_SHORT_NAMES = {
    "depth": ("model.depth", "N"),
    "from": ("finetune.model", "MODEL"),
    "data": ("data.source", "PATH"),
    "freeze-layers": ("finetune.freeze_layers", "N"),
    "unfreeze-every": ("finetune.unfreeze_every", "K"),
    "lora": ("lora.rank", "R"),
    "task": ("rl.task", "TASK"),
    "loss": ("align.loss", "LOSS"),
    "reward": ("rl.reward", "FILE.py:NAME"),
}


def add_knobs(parser: ArgumentParser, *names: str, **meanings: str) -> None:
    """Add short names of knobs, which `run_NAME` gets as overrides.

    `meanings` replace the meaning of a knob where a command narrows it.
    """
    for name in names:
        key, metavar = _SHORT_NAMES[name]
        meaning = meanings.get(name, KNOBS[key].meaning)
        add_option(parser, f"--{name} {metavar}", f"{meaning} (--{key})", dest=key)


def add_help(parser: ArgumentParser) -> None:
    """Add `--help` to a command that lists no knobs; `list_knobs` has added one with sections."""
    with contextlib.suppress(ArgumentError):
        parser.add_argument("-h", "--help", action="help", help="show this message")


def add_logging_options(parser: ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    quiet = "print results, warnings and errors only: as --log-level warning"
    group.add_argument(
        "-q", "--quiet", action="store_const", const="warning", dest="log_level", help=quiet
    )
    levels = ("debug", "info", "warning", "error")
    add_option(group, "--log-level", "lowest level that is logged (default info)", choices=levels)
