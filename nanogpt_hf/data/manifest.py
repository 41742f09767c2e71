"""manifest.json: the source, tokenizer and sizes of prepared data, and whether they fit a recipe."""

import dataclasses
import json
import sys
import typing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import KNOBS, Config, DataSection, get_value, kind_options
from nanogpt_hf.data.download import is_url, without_login
from nanogpt_hf.data.shards import ShardFacts
from nanogpt_hf.data.source import file_digest, file_state, local_files
from nanogpt_hf.errors import DataError

MANIFEST = "manifest.json"
FORMAT = 1
_COUNTS = ("documents", "tokens", "bytes", "assistant_tokens", "vocab_size")  # none of them is ever 0

# The knobs that decide the tokens. Prepared data is reused only if all of them are equal.
DECIDING_KNOBS = (
    "source",
    "format",
    "config",
    "split",
    "validation_split",
    "revision",
    "text_column",
    "validation_fraction",
    "validation_seed",
    "max_tokens",
    "tokenizer",
    "vocab_size",
    "bpe_pattern",
)


@dataclass(frozen=True)
class SplitFacts:
    documents: int
    tokens: int
    bytes: int  # of UTF-8 text; of conversations, of their answers only
    assistant_tokens: int | None = None  # of conversations: tokens that are part of an answer
    sha256: str | None = None  # of the tokens; older versions did not record it
    shards: dict[str, ShardFacts] | None = None  # by file name; older versions did not record them

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token that counts in the loss."""
        return self.bytes / (self.assistant_tokens or self.tokens)


@dataclass(frozen=True)
class Manifest:
    """Source, tokenizer and sizes of prepared data."""

    format: int
    recipe: dict[str, Any]  # the deciding knobs; of imported tokens, those that apply
    revision: str
    file_state: str | None  # of local files, to notice that they changed
    tokenizer_hash: str
    vocab_size: int
    end_of_text_id: int | None  # the token that ends each document; None for a single document
    train: SplitFacts
    validation: SplitFacts
    versions: dict[str, str]
    start_of_text_id: int | None = None  # the token before each document; None if the tokenizer puts none there

    def content(self) -> dict[str, Any]:
        """What identifies the tokens: equal for the same text and tokenizer."""
        facts = {name: getattr(self, name) for name in ("revision", "tokenizer_hash", "vocab_size")}
        for name in ("train", "validation"):
            split = getattr(self, name)
            facts |= {f"{name} tokens": split.tokens, f"{name} sha256": split.sha256}
        return facts


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`, or None. Raises DataError if it is not ours."""
    try:
        if not (folder / MANIFEST).is_file():
            return None
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise DataError(f"{folder}: prepared in format {raw['format']}, not {FORMAT}; remove it to prepare again")
        raw["recipe"].setdefault("format", "text")  # older versions had only this one
        if "vocab_size" in raw["recipe"]:
            raw["recipe"].setdefault("bpe_pattern", "gpt2")  # and only this one
            raw["recipe"].setdefault("max_tokens", None)  # and no limit
        manifest = Manifest(**raw | {name: _split_facts(raw[name]) for name in ("train", "validation")})
        _check_types(manifest)
        for knob, value in manifest.recipe.items():
            _check_type(f"recipe: {knob}", value, KNOBS[f"data.{knob}"].kind)
        for split in (manifest.train, manifest.validation):
            if (split.assistant_tokens is None) != (manifest.recipe["format"] != "chat"):
                raise ValueError(f"assistant_tokens is {split.assistant_tokens} of format {manifest.recipe['format']}")
        return manifest
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder / MANIFEST}: not a manifest of prepared data: {error}; remove the folder to prepare it again"
        ) from None


def _split_facts(raw: dict[str, Any]) -> SplitFacts:
    if "answered" in raw:  # its name in older versions
        raw = {"assistant_tokens" if name == "answered" else name: value for name, value in raw.items()}
    if raw.get("shards") is not None:
        raw = raw | {"shards": {name: ShardFacts(**facts) for name, facts in raw["shards"].items()}}
    facts = SplitFacts(**raw)
    for part in (facts, *(facts.shards or {}).values()):
        _check_types(part)
    return facts


def _check_types(facts: Any) -> None:
    for name, kind in typing.get_type_hints(type(facts)).items():
        _check_type(name, getattr(facts, name), kind)


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raises TypeError for a value of another type than annotated, and for a count below zero."""
    options = tuple(typing.get_origin(option) or option for option in kind_options(kind))
    types = tuple(type(option) if isinstance(option, str) else option for option in options)  # a Literal's
    if isinstance(value, bool) or not isinstance(value, (*types, *[int] * (float in types))):
        raise TypeError(f"{name} is {value!r:.40}")
    if name in _COUNTS and value is not None and value < 1:
        raise ValueError(f"{name} is {value}")


def _same(knob: str, prepared: Any, wanted: Any) -> bool:
    if knob == "source" and prepared and wanted:
        return prepared == wanted or (not is_url(wanted) and Path(prepared) == Path(wanted))
    return prepared == wanted


def check_fits(manifest: Manifest, data: DataSection) -> None:
    """Raises DataError if prepared data does not fit the recipe."""
    for knob in (knob for knob in DECIDING_KNOBS if knob in manifest.recipe):
        prepared, wanted = manifest.recipe[knob], getattr(data, knob)
        if not _same(knob, prepared, wanted):
            if knob == "source":
                prepared, wanted = without_login(prepared or ""), without_login(wanted)
            raise DataError(
                f"{data.dir}: prepared with data.{knob} {prepared!r}, the recipe says {wanted!r}; "
                "choose another --data.dir, or remove the folder to prepare it again"
            )
    if is_url(data.one_source) and data.sha256 and manifest.revision != f"sha256:{data.sha256.lower()}":
        raise DataError(f"{data.dir}: prepared from a text with {manifest.revision}, not the recipe's {data.sha256}")
    if manifest.file_state:
        try:
            files = local_files(data)
        except DataError:
            if data.format == "datatrove":  # its tokens are read where they are
                raise
            return  # the text is on the machine that prepared it
        if files and file_state(files) != manifest.file_state and file_digest(files) != manifest.revision:
            raise DataError(
                f"{data.dir}: {data.source} has changed since it was prepared; "
                "choose another --data.dir, or remove the folder to prepare it again"
            )


def fitting_manifest(folder: Path, data: DataSection) -> Manifest | None:
    """The manifest in `folder`, or None. Raises DataError if it does not fit the recipe."""
    if manifest := read_manifest(folder):
        check_fits(manifest, data)
    return manifest


def identity(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What must be equal on all machines of a run: every knob except paths and reports, and the tokens."""
    local = ("data.source", "data.dir", "data.num_proc", "data.streaming", "tracking.", "hub.")
    facts = {key: get_value(config, key) for key in KNOBS if not key.startswith(local)}
    return facts | {f"the data's {name}": value for name, value in manifest.content().items()}


def tool_versions() -> dict[str, str]:
    """Versions of the libraries that make tokens."""
    tools = {name: version(name) for name in ("datasets", "tokenizers", "tiktoken")}
    return tools | {"python": sys.version.split()[0]}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
