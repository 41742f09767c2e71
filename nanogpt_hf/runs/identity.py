"""Identity of a run: the knobs that a resume may not change, and its data.

Checkpoints record it.
"""

import re
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import source_text
from nanogpt_hf.runs.redact import redact, redact_tree

if TYPE_CHECKING:
    from nanogpt_hf.data.manifest import Manifest

_FIXED = (
    "model.",
    "data.",
    "optim.name",
    "train.seed",
    "train.tokens_per_step",
    "train.gradient_groups",
    "train.stages",
    "finetune.",
    "lora.",
    "rl.",
    "align.",
    "distill.",
)
_FREE = ("data.dir", "data.num_threads", "data.max_epochs", "data.streaming", "lora.merge")
_FREE += ("rl.eval_questions", "rl.eval_samples", "rl.reward_seconds", "rl.reward_errors")
# sizes that the dial chose are in the knobs that it sets
_FREE += ("model.depth", "model.aspect_ratio")
# parts of the data's identity whose name alone does not explain them
_SHOWN = {"teacher": "distill.teacher", "weights": "data.source: weights"}


def is_fixed(key: str) -> bool:
    """Whether a resumed run must have the knob's first value: those of model, data, order,
    optimizer, step and seed.
    """
    return key.startswith(_FIXED) and not key.startswith(_FREE)


def run_identity(config: Config, manifest: "Manifest") -> dict[str, Any]:
    """The fixed knobs and the data of a run.

    The tokens count, not the path of the text or of the prepared data.
    """
    knobs = {key: get_value(config, key) for key in KNOBS if is_fixed(key) and key != "data.source"}
    knobs = redact_tree(knobs)  # a checkpoint may be shared
    return {
        "knobs": knobs,
        "data": {"source": redact(source_text(config.data)), **manifest.content()},
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between the identity in a checkpoint and this run's, as `key: before -> now`."""
    lines = [
        f"{key}: {old} -> {value}"
        for key, value in now["knobs"].items()
        if (old := before["knobs"].get(key, KNOBS[key].default)) != value
    ]
    old, new = before["data"], now["data"]
    changed = [name for name in new if name != "source" and old.get(name) != new[name]]
    if new.get("train sha256") and changed == ["revision"]:
        return lines  # the same tokens, from files that are split or stored otherwise
    return lines + [
        f"{_SHOWN.get(name, f'data {name}')}: {_short(old.get(name))} -> {_short(new[name])}"
        for name in changed
    ]


def _short(value: Any) -> str:
    """A fact with the first 8 digits of each hash in it."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{32,}\b", r"\1", str(value))
