"""manifest.json: source, tokenizer and sizes of prepared data; one for all sources of a mixture."""

import dataclasses
import hashlib
import json
import sys
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from nanogpt_hf.config.schema import KNOBS, Config, DataSection, get_value
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.errors import DamagedFileError, DataError
from nanogpt_hf.own_files import as_type, read_json, reading

MANIFEST = "manifest.json"
FORMAT = 2  # the version of manifest.json; another one cannot be read
SPLITS = ("train", "validation")
# The remedy for prepared data of another recipe or text.
OTHER_FOLDER = (
    "choose another --data.dir, or, if no run is to resume with it, remove the folder to prepare "
    "it again"
)
TEACHER_CONFIG = "teacher config"  # a key of `Manifest.content`

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
    "max_bad_rows",
    "tokenizer",
    "vocab_size",
    "bpe_pattern",
)


def tool_versions() -> dict[str, str]:
    """Versions of the libraries that make tokens."""
    tools = {name: version(name) for name in ("datasets", "tokenizers", "tiktoken")}
    return tools | {"python": sys.version.split()[0]}


def file_state(files: list[Path]) -> str:
    """A fingerprint of names, sizes and times: equal only if the files are unchanged, or changed
    within the resolution of the file system's times and kept their sizes.
    """
    states = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        states.append((path.as_posix(), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def file_digest(files: list[Path]) -> str:
    """Return the sha256 of all files' contents, with a zero byte between two files."""
    digest = hashlib.sha256()
    for number, path in enumerate(files):
        # Without the zero byte, text that moves from one file to the next would not be noticed.
        digest.update(b"\0" * (number > 0))
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


class Shard(TypedDict):
    """What the manifest has of a file of tokens."""

    sha256: str


@dataclass(frozen=True)
class SplitFacts:
    documents: int
    tokens: int
    bytes: int  # UTF-8 text; if only a part of a document is learned, of that part
    # The number of tokens that are learned, such as answers; None if all are. Prepared folders have
    # this name in their files, from the time when conversations were the only such documents.
    assistant_tokens: int | None = None
    sha256: str | None = None  # digest of the tokens that we wrote
    shards: dict[str, Shard] | None = None  # None if the tokens are in the source

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token that counts in the loss."""
        return self.bytes / (self.assistant_tokens or self.tokens)


class PreparedSource(NamedTuple):
    """One prepared source of a mixture."""

    name: str
    weight: int
    data: DataSection
    manifest: "Manifest"


@dataclass(frozen=True)
class Manifest:
    """Source, tokenizer and sizes of prepared data.

    The manifest of a mixture describes its sources as one, with sums of their counts, and is not
    written. `teacher` and `teacher_config` are not written either: they belong to a run.
    """

    recipe: dict[str, Any]  # the deciding knobs; of imported tokens, those that apply
    revision: str
    tokenizer_hash: str
    vocab_size: int
    end_of_text_id: int | None  # the token that ends each document; None for a single document
    train: SplitFacts
    validation: SplitFacts
    format: int = FORMAT
    versions: dict[str, str] = field(default_factory=tool_versions)
    file_state: str | None = None  # sizes and times of local files, to notice that they changed
    # the token before each document; None if the tokenizer puts none there
    start_of_text_id: int | None = None
    left_out: int = 0  # rows that could not be used
    # What follows is not written. A mixture has sources. A run with distillation has the hashes of
    # its teacher's weights and configuration: another teacher gives other targets.
    sources: tuple[PreparedSource, ...] = ()
    teacher: str | None = None
    teacher_config: str | None = None

    def content(self) -> dict[str, Any]:
        """What identifies the tokens: equal for the same text and tokenizer."""
        facts = {name: getattr(self, name) for name in ("revision", "tokenizer_hash", "vocab_size")}
        for name in SPLITS:
            split = getattr(self, name)
            facts |= {f"{name} tokens": split.tokens, f"{name} sha256": split.sha256}
        # Another weight is another order of the same tokens, so it is part of their identity.
        weights = ", ".join(f"{source.name} {source.weight}" for source in self.sources)
        extra = {"weights": weights, "teacher": self.teacher, TEACHER_CONFIG: self.teacher_config}
        return facts | {name: value for name, value in extra.items() if value}


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest in `folder`, or None. Raises DataError if it is not ours, or is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        raw = read_json(path, dict[str, Any])
        with reading(path):
            if raw.get("format") != FORMAT:
                raise ValueError(f"format {raw.get('format')!r:.40}, not {FORMAT}")
            return _checked(as_type(raw, Manifest))
    except DamagedFileError as error:
        reason = str(error).removeprefix(f"{path}: ").removeprefix("is damaged: ")
        raise DataError(
            f"{path}: not a manifest of prepared data: {reason}; remove the folder to prepare it "
            "again"
        ) from None


def _checked(manifest: Manifest) -> Manifest:
    """A manifest whose knobs and counts may be. Raises ValueError for others."""
    if unknown := manifest.recipe.keys() - DECIDING_KNOBS:
        raise ValueError(f"recipe.{min(unknown)}: unknown knob")
    as_type(manifest.recipe.get("source"), str, "recipe.source")
    # Whatever counts tokens or bytes is 0 or more. Two must be at least 1, so 1 is taken off.
    counts: dict[str, Any] = {"vocab_size": manifest.vocab_size - 1}
    counts |= {name: getattr(manifest, name) for name in ("end_of_text_id", "start_of_text_id")}
    for name in SPLITS:
        split = getattr(manifest, name)
        counts |= {f"{name}.{key}": value for key, value in vars(split).items()}
        counts[f"{name}.bytes"] -= min(1, split.tokens)
    for name, value in counts.items():
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{name}: is too low")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    facts = dataclasses.asdict(manifest)
    # They belong to a mixture or a run, not to a folder.
    del facts["sources"], facts["teacher"], facts["teacher_config"]
    # Other processes may read the file at any time, so it is replaced as a whole.
    partial = folder / f".{uuid.uuid4().hex}"
    partial.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST)


def identity(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What must be equal on all machines of a run: every knob except paths and reports, and the
    tokens.
    """
    # Where the data is, and how it is read or reported, may differ between machines.
    local = ("data.source", "data.dir", "data.num_threads", "data.streaming", "tracking.", "hub.")
    facts = {key: get_value(config, key) for key in KNOBS if not key.startswith(local)}
    return facts | {f"the data's {name}": value for name, value in manifest.content().items()}


def find_manifest(data: DataSection) -> Manifest | None:
    """Read the manifest of prepared data, for a mixture one of all sources; None if a source is
    not prepared.

    Raises DataError for a manifest that is not ours, and for sources with different tokenizers.
    """
    if not is_mixture(data):
        return read_manifest(Path(data.dir))
    sources = []
    for name, weight, section in sources_of(data):
        manifest = read_manifest(Path(section.dir))
        if manifest is None:
            return None
        sources.append(PreparedSource(name, weight, section, manifest))
    return mixed_manifest(sources)


def mixed_manifest(sources: list[PreparedSource]) -> Manifest:
    # One model reads all sources, so the ids have to mean the same in all of them.
    manifests = [source.manifest for source in sources]
    first = manifests[0]
    for source in sources[1:]:
        if source.manifest.tokenizer_hash != first.tokenizer_hash:
            raise DataError(
                f"{source.data.dir}: prepared with another tokenizer than {sources[0].data.dir}; "
                "remove the folder whose tokenizer is the wrong one to prepare it again"
            )

    def digest(parts: list[Any]) -> str:
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def total(split: str) -> SplitFacts:
        splits = [getattr(manifest, split) for manifest in manifests]
        checksums = [facts.sha256 for facts in splits]
        answers = [facts.assistant_tokens for facts in splits]
        return SplitFacts(
            documents=sum(facts.documents for facts in splits),
            tokens=sum(facts.tokens for facts in splits),
            bytes=sum(facts.bytes for facts in splits),
            assistant_tokens=None if None in answers else sum(answer or 0 for answer in answers),
            sha256=None if None in checksums else digest(checksums),
        )

    # Only what all sources have in common describes the mixture.
    recipes = [manifest.recipe.items() for manifest in manifests]
    return dataclasses.replace(
        first,
        recipe=dict(item for item in recipes[0] if all(item in other for other in recipes)),
        revision=f"sha256:{digest([manifest.revision for manifest in manifests])}",
        file_state=None,
        left_out=sum(manifest.left_out for manifest in manifests),
        train=total("train"),
        validation=total("validation"),
        sources=tuple(sources),
    )
