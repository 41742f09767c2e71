"""manifest.json: what prepared data is, and whether it is what a recipe asks for."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import KNOBS, Config, DataSection, get_value
from nanogpt_hf.data.source import file_digest, file_state, find_files, is_url
from nanogpt_hf.errors import DataError

MANIFEST = "manifest.json"
FORMAT = 1

# The knobs that decide which tokens come out. Prepared data is reused only where all of them agree.
DECIDING_KNOBS = (
    "source",
    "config",
    "split",
    "validation_split",
    "revision",
    "text_column",
    "validation_fraction",
    "validation_seed",
    "tokenizer",
)


@dataclass(frozen=True)
class SplitFacts:
    documents: int
    tokens: int
    bytes: int  # of UTF-8 text

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens


@dataclass(frozen=True)
class Manifest:
    """What prepared data is: where from, by which tokenizer, how much."""

    format: int
    recipe: dict[str, Any]  # the deciding knobs; of tokens made elsewhere, those that mean something for them
    revision: str
    file_state: str | None  # of local files, to notice that they changed
    tokenizer_hash: str
    vocab_size: int
    end_of_text_id: int | None  # the token that ends each document, where the source has several
    train: SplitFacts
    validation: SplitFacts
    versions: dict[str, str]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`, None where there is none. Raises DataError for one that is not ours."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise DataError(f"{folder}: prepared in format {raw['format']}, not {FORMAT}; remove it to prepare it anew")
        splits = {name: SplitFacts(**raw.pop(name)) for name in ("train", "validation")}
        return Manifest(**raw, **splits)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST}: not a manifest of prepared data: {error}") from None


def _same(knob: str, prepared: Any, wanted: Any) -> bool:
    if knob == "source" and prepared and wanted:
        return prepared == wanted or (not is_url(wanted) and Path(prepared) == Path(wanted))
    return prepared == wanted


def check_fits(manifest: Manifest, data: DataSection) -> None:
    """Raises DataError where prepared data is not what the recipe asks for."""
    for knob in (knob for knob in DECIDING_KNOBS if knob in manifest.recipe):
        prepared, wanted = manifest.recipe[knob], getattr(data, knob)
        if not _same(knob, prepared, wanted):
            raise DataError(
                f"{data.dir}: prepared with data.{knob} {prepared!r}, the recipe says {wanted!r}; "
                "choose another --data.dir, or remove the folder to prepare it anew"
            )
    if is_url(data.source) and data.sha256 and manifest.revision != f"sha256:{data.sha256.lower()}":
        raise DataError(f"{data.dir}: prepared from a text with {manifest.revision}, not the recipe's {data.sha256}")
    if manifest.file_state:
        try:
            files = find_files(data.source)
        except DataError:
            return  # the text stayed behind on the machine that prepared it; the tokens are what counts
        if files and file_state(files) != manifest.file_state and file_digest(files) != manifest.revision:
            raise DataError(
                f"{data.dir}: {data.source} has changed since it was prepared; "
                "choose another --data.dir, or remove the folder to prepare it anew"
            )


def identity(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What has to be the same on all machines of a run: every knob but places and reports, and what the tokens are."""
    local = ("data.source", "data.dir", "data.num_proc", "tracking.", "hub.")
    facts = {key: get_value(config, key) for key in KNOBS if not key.startswith(local)}
    for name in ("revision", "tokenizer_hash", "vocab_size"):
        facts[f"the data's {name}"] = getattr(manifest, name)
    for name in ("train", "validation"):
        facts[f"the data's {name} tokens"] = getattr(manifest, name).tokens
    return facts


def tool_versions() -> dict[str, str]:
    """What had a hand in the tokens, for the manifest."""
    tools = {name: version(name) for name in ("datasets", "tokenizers", "tiktoken")}
    return tools | {"python": sys.version.split()[0]}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
