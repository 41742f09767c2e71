"""Prepare data: text or conversations -> arrow shards of token ids and a manifest.

The folder is complete or absent, also if several processes prepare it.
"""

import itertools
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import datasets

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.chat_template import chat_format
from nanogpt_hf.data.datatrove import describe_token_files
from nanogpt_hf.data.download import without_login
from nanogpt_hf.data.encode import encode_split, save_counted
from nanogpt_hf.data.hold_out import hold_out
from nanogpt_hf.data.manifest import MANIFEST, Manifest, fitting_manifest, read_manifest
from nanogpt_hf.data.mixed_manifest import find_manifest
from nanogpt_hf.data.parts import prepare_in_parts
from nanogpt_hf.data.place import make_once, parts_of
from nanogpt_hf.data.prepared import write_facts
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.data.source import check_source, load_documents
from nanogpt_hf.data.tokenizer import build_tokenizer, end_of_text_id_of
from nanogpt_hf.errors import DataError


def prepare(config: Config) -> tuple[Manifest, bool]:
    """Prepare `config.data`, each source of a mixture in its own folder.

    Return the manifest and whether anything had to be done. Safe to call from several processes at once: one prepares,
    the others wait for it. An interruption leaves nothing but complete parts, SIGKILL nothing that looks complete.
    Raises DataError if the text cannot be read or the folder contains something else, and Stopped at a signal.
    """
    if not shows_bars():
        datasets.disable_progress_bars()
    if not is_mixture(config.data):
        return _prepare_source(config.data)
    if read_manifest(Path(config.data.dir)):
        raise DataError(
            f"{config.data.dir}: holds the prepared data of one source, and the recipe mixes several; "
            "choose another --data.dir"
        )
    done = [_prepare_source(source.data)[1] for source in sources_of(config.data)]
    manifest = find_manifest(config.data)
    assert manifest is not None  # each source has one now
    return manifest, any(done)


def _prepare_source(data: DataSection) -> tuple[Manifest, bool]:
    folder = Path(data.dir).resolve()  # of a link, its target: no folder can be renamed over the link itself
    in_parts = data.streaming or data.max_tokens is not None
    try:
        manifest, now = make_once(
            folder,
            find=lambda: fitting_manifest(folder, data),
            check=lambda: check_source(data, folder) if in_parts else check_preparable(data, folder),
            write=lambda partial: (prepare_in_parts if in_parts else _prepare_in)(partial, data),
            last=MANIFEST,
            kept="finished parts are kept for the same command" if in_parts else "nothing was kept",
        )
        if in_parts:
            shutil.rmtree(parts_of(folder), ignore_errors=True)
        return manifest, now
    except MemoryError:
        source = without_login(data.one_source)
        raise DataError(f"data.source: {source}: too large for the memory of this machine") from None


def check_preparable(data: DataSection, folder: Path) -> None:
    """Raises DataError if this data cannot be prepared in `folder` by one machine."""
    check_source(data, folder)
    if any(parts_of(folder).glob("*-of-*")):
        raise DataError(
            f"{folder}: parts of it are in {parts_of(folder)}; run `prepare --merge` when all are prepared, or remove "
            "them to prepare the data on one machine"
        )


def _texts(splits: Collection[datasets.Dataset]) -> Iterator[str]:
    """Every text, and of conversations every message."""
    rows = sum(split.num_rows for split in splits)
    for row in datasets.utils.tqdm(itertools.chain(*splits), "reading for the tokenizer", rows, unit=" documents"):
        if "messages" in row:
            yield from (message["content"] for message in row["messages"])
        else:
            yield row["text"] or ""


def _prepare_in(folder: Path, data: DataSection) -> Manifest:
    if data.format == "datatrove":
        tokenizer = build_tokenizer(data.tokenizer, ())
        return write_facts(folder, data, tokenizer, *describe_token_files(data, tokenizer))
    scratch = folder / "scratch"
    scratch.mkdir()
    documents = load_documents(data, scratch)
    splits = dict(zip(("train", "validation"), hold_out(documents, data), strict=True))
    # `char` has to know the characters of both splits; `bpe` learns from the training split alone.
    read = [splits["train"]] if data.tokenizer == "bpe" else splits.values()
    tokenizer = build_tokenizer(data.tokenizer, _texts(read), data.vocab_size, data.bpe_pattern)
    chat = chat_format(tokenizer.hf, data.tokenizer) if data.format == "chat" else None
    # A single document needs no end-of-text token (nor does the cut through it).
    several = documents.validation is not None or len(documents.train) > 1
    end_of_text_id = end_of_text_id_of(tokenizer.hf) if several else None
    facts = {}
    for name, split in splits.items():
        target = scratch / f"{name}.arrow"
        rows = encode_split(split, tokenizer, end_of_text_id, chat, data.num_proc, target)
        facts[name] = save_counted(rows, split.num_rows, folder / name, data)
    shutil.rmtree(scratch)
    return write_facts(folder, data, tokenizer, documents.revision, end_of_text_id, facts)
