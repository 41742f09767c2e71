"""Digests of what a run reads again when it resumes, besides its data and its checkpoint: the model
that it starts from, and that model's tokenizer; as digests of their files.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.own_files import file_sha256, read_json, reading
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import RunFolder

# Fields of a config.json that change no number of the model.
_NAMES = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
# Files with weights; a folder with files of the first pattern is read without the second.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
START_WEIGHTS = "finetune.model: weights"
_START_CONFIG = "finetune.model: config.json"
_TOKENIZER = ("tokenizer*", "chat_template*", "vocab.*", "merges.txt", "special_tokens_map.json")


def origin_of(config: Config, *, resumes: bool) -> dict[str, str]:
    """Return the digests that a resumed run must find again, by name.

    A checkpoint has all weights, so those of `finetune.model` decide a resumed run only if they are
    its reference, or if adapters are saved that refer to them. Preference training reads them
    again if it has lost what it computed with them; a start records them for that. Of models on
    the Hub the recipe has the commit.
    """
    finetune = config.finetune
    found: dict[str, str] = {}
    if not finetune.model or not Path(finetune.model).is_dir():
        return found
    found[_START_CONFIG] = config_digest(Path(finetune.model) / "config.json")
    if _reads_weights(config) or (config.align.loss and not resumes):
        found |= weights_of(finetune.model)
    # Only methods that read questions or pairs tokenize during the run: text is prepared before.
    if (config.rl.task or config.align.loss) and Path(config.data.tokenizer).is_dir():
        found["data.tokenizer"] = _files_digest(Path(config.data.tokenizer), _TOKENIZER)
    return found


def needed_at_resume(config: Config, origin: dict[str, str]) -> dict[str, str]:
    """Return the digests of a start (`origin_of`) without the ones that only a start needs."""
    return {
        name: digest
        for name, digest in origin.items()
        if name != START_WEIGHTS or _reads_weights(config)
    }


def _reads_weights(config: Config) -> bool:
    """Return whether a resumed run reads the weights of its start model again in any case."""
    return bool(config.lora.rank or (config.rl.task and config.rl.kl))


def weights_of(model: str) -> dict[str, str]:
    """Return the digest of the weights in a model folder, by name; none of a model on the Hub."""
    # Of a model on the Hub the recipe has the commit, which decides its files.
    folder = Path(model)
    if not folder.is_dir():
        return {}
    # A folder may have its weights twice, as safetensors and as pickles: the first are read.
    patterns = next(([p] for p in _WEIGHTS if any(folder.glob(p))), ["*.safetensors", "*.bin"])
    return {START_WEIGHTS: _files_digest(folder, patterns)}


def began_in_folder(origin: dict[str, str]) -> bool:
    """Whether a run started from a model in a folder (`origin_of`)."""
    return _START_CONFIG in origin


def check_start_folder(run: RunFolder, model: str | None, origin: dict[str, str]) -> None:
    """Raises RunFolderError if a run started from a model in a folder that is not here: on the Hub,
    a stranger may own a repository of its name.
    """
    if model and began_in_folder(origin) and not os.path.isdir(model):
        raise RunFolderError(
            f"finetune.model {model}: the folder that {run.path} started from is not here",
            "put it back, or go to the folder where the run began; a run that has not ended "
            f"continues with {program()} resume {shlex.quote(str(run.path))}",
        )


def lost_start(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line if a run began with a model in a folder, and now finds none there (`origin_of`)."""
    is_lost = began_in_folder(before) and not began_in_folder(now)
    return ["finetune.model: was a folder, which is gone"] * is_lost


def changes_of_origin(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line for each digest of `now` that was another one before."""
    return [
        short_digests(f"{name} changed: {before[name]} -> {digest}")
        for name, digest in now.items()
        if before.get(name, digest) != digest
    ]


def short_digests(text: str) -> str:
    """A text with the first 8 digits of each digest in it."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1", text)


def config_digest(path: Path) -> str:
    """Return the digest of the fields of a config.json that decide numbers of the model."""
    facts = read_json(path, dict[str, Any])
    # Sorted, since two versions of transformers may write the fields in another order.
    deciding = {name: value for name, value in facts.items() if name not in _NAMES}
    return f"sha256:{hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()}"


def _files_digest(folder: Path, patterns: Iterable[str]) -> str:
    digest = hashlib.sha256()
    # Names and contents, in the order of names: a folder lists its files in any order.
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        with reading(path):
            content = file_sha256(path)
        digest.update(f"{path.name} {content}\n".encode())
    return f"sha256:{digest.hexdigest()}"
