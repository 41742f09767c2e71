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
    changed = {name for name in new if old.get(name) != new[name]} - {"source"}
    if "weights" in changed:
        lines.append(f"data.source: weights {old.get('weights')} -> {new['weights']}")
        changed.remove("weights")
    tokenizer = changed & {"tokenizer_hash", "vocab_size"}
    if tokenizer:
        lines.append(f"tokenizer: {_tokenizer(old)} -> {_tokenizer(new)}")
        changed &= {"revision"}  # another tokenizer alone changes the ids
    elif new.get("train sha256"):  # the same tokens, from files that are split or stored otherwise
        changed.discard("revision")
    if "teacher" in changed:
        lines.append(f"distill.teacher: weights of {old.get('teacher')} -> {new['teacher']}")
        changed.remove("teacher")
    if changed:
        lines.append(f"text: {_text(old)} -> {_text(new)}")
    return lines


def _tokenizer(data: dict[str, Any]) -> str:
    return f"{data['vocab_size']:,} tokens (sha256 {data['tokenizer_hash'][:8]})"


def _text(data: dict[str, Any]) -> str:
    # reinforcement learning adds a digest of the questions and one of the reward file
    revision = re.sub(r"sha256:(\w{8})\w*", r"sha256 \1", data["revision"])
    tokens = f"{data['train tokens']:,} + {data['validation tokens']:,} tokens"
    return f"{data['source']} ({revision}, {tokens})"
