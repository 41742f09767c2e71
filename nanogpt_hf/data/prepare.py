"""Text -> arrow shards of token ids and a manifest that says what they are. Whole or absent, whoever else is at it."""

import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import filelock
import numpy as np
import transformers

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.data.source import PYTHON_DOCS, Documents, file_digest, file_state, find_files, is_url, load_documents
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, vocabulary_hash
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.errors import DataError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
FORMAT = 1
_SHARD_BYTES = 500_000_000
_PARALLEL_FROM_BYTES = 20_000_000  # below, starting processes costs more than they save

# The knobs that decide which tokens come out. Prepared data is reused only where all of them agree.
_DECIDING = (
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
    recipe: dict[str, Any]  # the deciding knobs
    revision: str
    file_state: str | None  # of local files, to notice that they changed
    tokenizer_hash: str
    vocab_size: int
    end_of_text_id: int | None  # the token that ends each document, where the source has several
    train: SplitFacts
    validation: SplitFacts
    versions: dict[str, str]


@dataclass(frozen=True)
class PreparedData:
    """Prepared tokens, ready to train on."""

    train: TokenStream
    validation: TokenStream
    tokenizer: transformers.PreTrainedTokenizerBase
    manifest: Manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`, None where there is none. Raises DataError for one that is not ours."""
    try:
        raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        splits = {name: SplitFacts(**raw.pop(name)) for name in ("train", "validation")}
        manifest = Manifest(**raw, **splits)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST}: not a manifest of prepared data: {error}") from None
    if manifest.format != FORMAT:
        raise DataError(f"{folder}: prepared data of format {manifest.format}, not {FORMAT}; remove it to prepare anew")
    return manifest


def _same(knob: str, prepared: Any, wanted: Any) -> bool:
    if knob == "source" and prepared and wanted:
        return prepared == wanted or (not is_url(wanted) and Path(prepared) == Path(wanted))
    return prepared == wanted


def _check_fits(manifest: Manifest, data: DataSection) -> None:
    """Raises DataError where prepared data is not what the recipe asks for."""
    for knob in _DECIDING:
        prepared, wanted = manifest.recipe[knob], getattr(data, knob)
        if not _same(knob, prepared, wanted):
            raise DataError(
                f"{data.dir}: prepared with data.{knob} {prepared!r}, the recipe says {wanted!r}; "
                "choose another --data.dir, or remove the folder to prepare it anew"
            )
    if manifest.file_state and not is_url(data.source):
        try:
            files = find_files(data.source)
        except DataError:
            return  # the text stayed behind on the machine that prepared it; the tokens are what counts
        if files and file_state(files) != manifest.file_state and file_digest(files) != manifest.revision:
            raise DataError(
                f"{data.dir}: {data.source} has changed since it was prepared; "
                "choose another --data.dir, or remove the folder to prepare it anew"
            )


def prepare(config: Config) -> tuple[Manifest, bool]:
    """Prepare `config.data` in its folder; return the manifest and whether anything had to be done.

    Safe to call from several processes at once: one prepares, the others wait for it. An interruption leaves nothing
    that looks finished. Raises DataError where the text cannot be read or the folder holds something else.
    """
    folder = Path(config.data.dir)
    if manifest := read_manifest(folder):
        _check_fits(manifest, config.data)
        return manifest, False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: exists and holds no {MANIFEST}; choose another --data.dir")
    if config.data.source != PYTHON_DOCS and not is_url(config.data.source):
        find_files(config.data.source)  # complains before any folder is made
    partial = folder.parent / f".{folder.name}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.parent / f".{folder.name}.lock"):
            if manifest := read_manifest(folder):  # another process was faster
                _check_fits(manifest, config.data)
                return manifest, False
            shutil.rmtree(partial, ignore_errors=True)  # what a killed process left: nobody else is at it now
            partial.mkdir()
            try:
                manifest = _prepare_in(partial, config.data)
                if folder.exists():
                    folder.rmdir()
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    return manifest, True


def load_prepared(config: Config) -> PreparedData:
    """Open prepared data. Raises DataError where it is missing, unfit for the recipe, or too short for a block."""
    folder = Path(config.data.dir)
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data; run `prepare` first")
    _check_fits(manifest, config.data)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if vocabulary_hash(tokenizer) != manifest.tokenizer_hash:
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that made these tokens; prepare the data anew")
    train, validation = (TokenStream.open(folder / split) for split in ("train", "validation"))
    if len(train) <= config.data.block_size:
        raise DataError(
            f"data.block_size: {config.data.block_size} tokens and a next one are more than "
            f"the {len(train):,} training tokens in {folder}"
        )
    if len(validation) < 2:
        raise DataError(f"{folder}: {len(validation)} validation tokens; raise data.validation_fraction")
    return PreparedData(train, validation, tokenizer, manifest)


def _hold_out(documents: Documents, data: DataSection) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Train and validation text: a lone document is cut near its end, otherwise whole documents are drawn by seed."""
    if documents.validation is not None:
        return documents.train, documents.validation
    count = len(documents.train)
    if count == 1:
        text = documents.train[0]["text"]
        cut = int(len(text) * (1 - data.validation_fraction))
        parts = (datasets.Dataset.from_dict({"text": [part]}) for part in (text[:cut], text[cut:]))
        return tuple(parts)
    held_out = max(1, round(count * data.validation_fraction))
    # argsort of raw bits: a permutation that no version of NumPy changes
    bits = np.random.Philox(key=data.validation_seed).random_raw(count)
    order = np.argsort(bits, kind="stable")
    return documents.train.select(np.sort(order[held_out:])), documents.train.select(np.sort(order[:held_out]))


def _tokenize(text: datasets.Dataset, tokenizer: Tokenizer, end_of_text_id: int | None, num_proc: int) -> Any:
    """Rows of text -> rows of `input_ids` and the text's `bytes`."""
    kind = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    ending = [] if end_of_text_id is None else [end_of_text_id]

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        rows = []
        for ids in tokenizer.encode_batch(batch["text"]):
            if len(ids) and ids.max() >= tokenizer.vocab_size:
                raise DataError(f"data.tokenizer: {tokenizer.name} gave id {ids.max()}, beyond its own vocabulary")
            rows.append(np.append(ids, ending).astype(kind))  # checked: astype would wrap larger ids silently
        return {"input_ids": rows, "bytes": [len(t.encode()) for t in batch["text"]]}

    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value(np.dtype(kind).name)), "bytes": datasets.Value("int64")}
    )
    return text.map(
        encode,
        batched=True,
        remove_columns=text.column_names,
        features=features,
        num_proc=num_proc if num_proc > 1 else None,
        load_from_cache_file=False,
        desc="tokenizing",
    )


def _prepare_in(folder: Path, data: DataSection) -> Manifest:
    scratch = folder / "scratch"
    scratch.mkdir()
    documents = load_documents(data, scratch)
    splits = dict(zip(("train", "validation"), _hold_out(documents, data), strict=True))
    texts = (row["text"] for split in splits.values() for row in split)
    tokenizer = build_tokenizer(data.tokenizer, texts)
    # A lone document has no neighbour to be told apart from, so nothing marks its end (nor the cut through it).
    several = documents.validation is not None or len(documents.train) > 1
    end_of_text_id = tokenizer.hf.eos_token_id if several else None
    facts = {}
    for name, split in splits.items():
        large = split.num_rows > 1 and (split.data.nbytes if split._indices is None else documents.train.data.nbytes)
        num_proc = data.num_proc or (len(os.sched_getaffinity(0)) if large > _PARALLEL_FROM_BYTES else 1)
        rows = _tokenize(split, tokenizer, end_of_text_id, min(num_proc, split.num_rows))
        lengths = [len(chunk.flatten()) for chunk in rows.data.column("input_ids").chunks]
        facts[name] = SplitFacts(rows.num_rows, sum(lengths), sum(rows["bytes"]))
        itemsize = np.dtype(rows.features["input_ids"].feature.dtype).itemsize
        shards = -(-facts[name].tokens * itemsize // _SHARD_BYTES)
        tokens = rows.remove_columns("bytes")
        tokens.save_to_disk(folder / name, num_shards=max(1, min(shards, tokens.num_rows)))
    tokenizer.hf.save_pretrained(folder / TOKENIZER)
    local = [] if data.source == PYTHON_DOCS or is_url(data.source) else find_files(data.source)
    manifest = Manifest(
        format=FORMAT,
        recipe={knob: getattr(data, knob) for knob in _DECIDING},
        revision=documents.revision,
        file_state=file_state(local) if local else None,
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=end_of_text_id,
        **facts,
        versions={name: version(name) for name in ("datasets", "tokenizers", "tiktoken")}
        | {"python": sys.version.split()[0]},
    )
    shutil.rmtree(scratch)
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return manifest
