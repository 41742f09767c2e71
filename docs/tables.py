"""Write the tables that follow from the code: recipes and knobs in recipes.md, what combines in
machines.md, all refused combinations in refusals.md, what may change at a resume in training.md.

`make docs` runs it.
"""

import re
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from nanogpt_hf.config.compatibility import RULES, refused
from nanogpt_hf.config.schema import knob_schema, section_summary
from nanogpt_hf.config.settings import AnySetting, Setting, choice, given
from nanogpt_hf.runs.state import is_fixed

BEGIN = "<!-- What follows is written by docs/tables.py (`make docs`). -->\n"
END = "<!-- End of what is written. -->\n"

# Rows and columns of what combines, and their settings.
_TP = Setting.TENSOR_PARALLELISM
_CP = Setting.CONTEXT_PARALLELISM
_PP = Setting.PIPELINE_STAGES
_FSDP2 = Setting.FSDP2
_ZERO_BUBBLE: set[AnySetting] = {_PP, Setting.ZERO_BUBBLE}
LAYOUTS: dict[str, set[AnySetting]] = {
    "TP": {_TP},
    "TP × FSDP2": {_TP, _FSDP2},
    "CP × FSDP2": {_CP, _FSDP2},
    "CP by ring × FSDP2": {_CP, _FSDP2, Setting.RING_ATTENTION},
    "PP": {_PP},
    "PP × FSDP2": {_PP, _FSDP2},
    "PP, zero bubble": _ZERO_BUBBLE,
    "PP, zero bubble × FSDP2": {*_ZERO_BUBBLE, _FSDP2},
    "PP × HSDP": {_PP, _FSDP2, Setting.HSDP},
    "PP × TP": {_PP, _TP},
    "PP, zero bubble × TP": {*_ZERO_BUBBLE, _TP},
    "PP × TP × DP": {_PP, _TP},
    "PP × TP × FSDP2": {_PP, _TP, _FSDP2},
}
_EP = Setting.EXPERT_PARALLELISM
EXPERT_LAYOUTS: dict[str, set[AnySetting]] = {
    "EP": {_EP},
    "EP × DDP": {_EP},
    "EP × FSDP2": {_EP, _FSDP2},
}
# of any model, for types with blocks of several kinds, or with another kind than attention
KIND_LAYOUTS: dict[str, set[AnySetting]] = {
    "FSDP2": {_FSDP2},
    "HSDP": {_FSDP2, Setting.HSDP},
    "TP": {_TP},
    "CP × FSDP2": {_CP, _FSDP2},
    "PP": {_PP},
    "EP": {_EP},
}
_PLAN = Setting.BLOCKS_WITHOUT_A_PLAN
_OTHER = Setting.OTHER_ATTENTION
_STAGES = Setting.BLOCKS_THAT_ARE_NO_STAGES
KINDS: dict[str, set[AnySetting]] = {
    "gemma3_text": {Setting.WINDOW_OF_ATTENTION, Setting.NO_EXPERTS},
    "gemma4_text": {Setting.WINDOW_OF_ATTENTION, Setting.NO_EXPERTS, _PLAN, _STAGES},
    "lfm2": {_PLAN, _OTHER, Setting.NO_EXPERTS},
    "qwen3_5_text": {_PLAN, _OTHER, Setting.NO_EXPERTS},
    "mamba": {_PLAN, _OTHER, Setting.NO_EXPERTS},
    "granitemoehybrid": {_PLAN, _OTHER},
    "nemotron_h": {_PLAN, _OTHER, _STAGES},
    "deepseek_v3": {_PLAN},
    "gpt_oss": {_PLAN, _OTHER},
}
EXPERT_TYPES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
DENSE_TYPES = ("gpt2", "llama", "qwen3", "nanochat")
FEATURES: dict[str, set[AnySetting]] = {
    **{name: set() for name in (*DENSE_TYPES, *EXPERT_TYPES)},
    "olmo2": {_PLAN},
    "Muon": {*choice("optim.name", "muon")},
    "8-bit state": {*choice("optim.state", "8bit")},
    "LoRA": {*given("lora.rank")},
    "frozen layers": {*given("finetune.freeze_layers")},
    "conversations": {*choice("data.format", "chat")},
    "documents": {*given("data.mask")},
    "bf16": set(),
    "fp16": {Setting.FP16},
    "fp8": {Setting.FP8},
    "compiled": {Setting.COMPILATION},
    "checkpointed": {Setting.ACTIVATION_CHECKPOINTING},
    "selective": {Setting.ACTIVATION_CHECKPOINTING, Setting.SELECTIVE_CHECKPOINTING},
}


def combines(layout: str, feature: str) -> str:
    """Whether a layout and a feature combine: yes or no."""
    layouts = LAYOUTS | EXPERT_LAYOUTS | KIND_LAYOUTS
    features = FEATURES | KINDS
    settings = layouts[layout] | features[feature]
    return "no" if any(refused(settings)) else "yes"


def combination_tables() -> str:
    """What combines: for any model, for experts, for blocks of several kinds."""
    parts = []
    of_any = [name for name in FEATURES if name not in EXPERT_TYPES]
    of_experts = [name for name in FEATURES if name not in (*DENSE_TYPES, "olmo2")]
    tables = (LAYOUTS, of_any), (EXPERT_LAYOUTS, of_experts), (KIND_LAYOUTS, KINDS)
    for layouts, names in tables:
        rows = [[layout, *(combines(layout, name) for name in names)] for layout in layouts]
        parts.append(_table(["layout", *names], rows))
    return "\n" + "\n\n".join(parts) + "\n\n"


def refusal_table() -> str:
    """Every two settings that do not combine; settings with one reason share a row."""
    others: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        why = f"{rule.reason}; {rule.remedy}"
        others.setdefault((rule.a.describe(), why), []).append(rule.b.describe())
    settings: dict[tuple[str, str], list[str]] = {}
    for (a, why), bs in others.items():
        settings.setdefault((", ".join(bs), why), []).append(a)
    listed = [[", ".join(names), bs, why] for (bs, why), names in settings.items()]
    return f"\n{_table(['setting', 'does not combine with', 'reason and remedy'], listed)}\n\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def recipe_table() -> str:
    """Each recipe with the first sentence of its comment."""
    lines = ["", "| recipe | content |", "|---|---|"]
    for path in sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml")):
        comment = takewhile(lambda line: line[:1] == "#", path.read_text("utf-8").splitlines())
        # An indented line is a command.
        prose = [line for line in comment if not line.startswith("#  ")]
        words = " ".join(line.lstrip("# ") for line in prose if line.strip("# "))
        first = re.split(r"[.] (?=[A-Z])|: http", words)[0].rstrip(".")
        lines.append(f"| `{path.stem}` | {first} |")
    return "\n".join([*lines, "", ""])


def knob_tables() -> str:
    """One table per section of a recipe: knob, default, values, meaning."""
    lines = []
    for section, knobs in groupby(knob_schema().items(), lambda item: item[0].partition(".")[0]):
        lines += ["", f"### {section}", "", f"{section_summary(section)}.", ""]
        lines += ["| knob | default | values | meaning |", "|---|---|---|---|"]
        for key, knob in knobs:
            meaning = knob["meaning"].replace("|", "\\|")
            lines.append(f"| `{key}` | {_default(knob)} | {_values(knob)} | {meaning} |")
    return "\n".join([*lines, "", ""])


def _default(knob: dict[str, Any]) -> str:
    default = knob["default"]
    if default in (None, "", [], {}):
        return ""
    if isinstance(default, list):
        default = ", ".join(default)
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(knob: dict[str, Any]) -> str:
    """The types and names that a knob accepts, and its bounds."""
    kinds = knob["types"]
    low = knob["low"]
    high = knob["high"]
    numbers = " or ".join(kind for kind in kinds if kind in ("int", "float"))
    words = [numbers] * bool(numbers)
    words += [kind for kind in kinds if kind not in ("int", "float", "null")]
    words += [f"`{choice}`" for choice in knob["choices"]]
    if "float" in kinds and low is not None and high is not None:
        words[0] += f" {low:g} to {high:g}"
    elif low is not None:
        words[0] += f" ≥ {low:g}"
    return ", ".join(words)


def changing_table() -> str:
    """The knobs that may change at a resume, by section."""
    lines = ["", "| section | knobs that may change at a resume |", "|---|---|"]
    free = [key for key in knob_schema() if not is_fixed(key)]
    for section, keys in groupby(free, lambda key: key.partition(".")[0]):
        lines.append(f"| `{section}` | {', '.join(f'`{key}`' for key in keys)} |")
    return "\n".join([*lines, "", ""])


PAGES = {
    "recipes.md": (recipe_table, knob_tables),
    "machines.md": (combination_tables,),
    "refusals.md": (refusal_table,),
    "training.md": (changing_table,),
}


def updated(name: str) -> str:
    """The page with what is between its marks replaced."""
    page, *parts = Path(__file__).with_name(name).read_text(encoding="utf-8").split(BEGIN)
    for part, table in zip(parts, PAGES[name], strict=True):
        page += BEGIN + table() + END + part.split(END)[1]
    return page


if __name__ == "__main__":
    for name in PAGES:
        Path(__file__).with_name(name).write_text(updated(name), encoding="utf-8")
