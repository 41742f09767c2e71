"""Join the parts of prepared data: the folder equals that of data prepared at once, byte for byte."""

import math
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow
from datasets.table import InMemoryTable

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.download import without_login
from nanogpt_hf.data.encode import save_counted
from nanogpt_hf.data.hold_out import held_out_rows
from nanogpt_hf.data.manifest import MANIFEST, Manifest, fitting_manifest
from nanogpt_hf.data.part_facts import PartFacts, check_part, parts_folder, parts_in, read_part, tokenizer_of
from nanogpt_hf.data.place import make_once
from nanogpt_hf.data.prepared import write_facts
from nanogpt_hf.data.shards import check_bytes
from nanogpt_hf.data.source import Part, file_digests, files_of_part, find_files
from nanogpt_hf.data.tokenizer import end_of_text_id_of, vocabulary_hash
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import plural


def merge_parts(data: DataSection) -> tuple[Manifest, bool]:
    """Make the prepared folder of all parts, and remove them; return the manifest and whether it was made now.

    Raises DataError if a part is missing, damaged, or does not agree with the others, the recipe or the text.
    """
    folder = Path(data.dir).resolve()
    manifest, merged = make_once(
        folder,
        find=lambda: fitting_manifest(folder, data),
        check=lambda: None,
        write=lambda partial: join_parts(partial, data),
        last=MANIFEST,
    )
    shutil.rmtree(parts_folder(data), ignore_errors=True)
    return manifest, merged


def join_parts(folder: Path, data: DataSection) -> Manifest:
    """Write the prepared data of all parts to `folder`; the parts stay. Raises DataError as `merge_parts`."""
    source = parts_folder(data)
    found = parts_in(source)
    if not found:
        raise DataError(f"{source}: holds no parts; run `prepare --shard 0/N` to `--shard N-1/N` first")
    numbers = sorted({number for _, number in found})
    if len(numbers) > 1:
        raise DataError(
            f"{source}: holds parts of {' and of '.join(map(str, numbers))}; remove those that do not belong here"
        )
    number = numbers[0]
    missing = sorted(set(range(number)) - {index for index, _ in found})
    folders = [source / f"{index}-of-{number}" for index in range(missing[0] if missing else number)]
    parts = [facts for facts in map(read_part, folders) if facts]
    enough = data.streaming and sum(facts.tokens["train"] for facts in parts) > (data.max_tokens or math.inf)
    if missing and not enough:
        raise DataError(
            f"{source}: {len(missing)} of {number} parts are missing: {', '.join(map(str, missing[:20]))}; prepare "
            f"them with --shard {missing[0]}/{number}"
        )
    tokenizer, _ = tokenizer_of(data)
    for path, facts in zip(folders, parts, strict=True):
        check_part(path, facts, data)
        for name, ours, theirs in (
            ("libraries", facts.versions, parts[0].versions),
            ("tokenizer", facts.tokenizer_hash, vocabulary_hash(tokenizer.hf)),
            ("splits", list(facts.splits), list(parts[0].splits)),
        ):
            if ours != theirs:
                raise DataError(f"{path}: made with other {name} than part 0: {ours} and {theirs}; prepare it again")
        for split, shards in facts.splits.items():
            check_bytes(path / split, shards)
    revision = _revision(data, folders, parts)
    facts = {}
    for split in parts[0].splits:
        rows, document_of_row = _join(folders, parts, split)
        count = total = sum(part.documents[split] for part in parts)
        if data.max_tokens is not None and rows.num_rows:
            count = _documents_within(data.max_tokens, rows, document_of_row, count)
        drawn = split == "train" and "validation" not in parts[0].splits
        if count < 1 + drawn:
            within, remedy = "", "leave data.streaming out"
            if data.max_tokens is not None:
                within, remedy = " within data.max_tokens", "raise data.max_tokens, or leave it and data.streaming out"
            raise DataError(
                f"data.source: {without_login(data.one_source)}: {plural(count, 'document')}{within}, which is too few "
                f"to hold some out; {remedy}"
            )
        chosen = dict(zip(("train", "validation"), held_out_rows(count, data), strict=True)) if drawn else {}
        for name, documents in (chosen or {split: np.arange(count)}).items():
            is_own = np.zeros(total, dtype=bool)
            is_own[documents] = True
            own = _select(rows, np.flatnonzero(is_own[document_of_row]), name)
            facts[name] = save_counted(own, len(documents), folder / name, data)
    return write_facts(folder, data, tokenizer, revision, end_of_text_id_of(tokenizer.hf), facts)


def _select(rows: datasets.Dataset, indices: np.ndarray, fingerprint: str) -> datasets.Dataset:
    """The rows of these numbers. `Dataset.select` would make a list of Python's integers of them."""
    table = pyarrow.table({"indices": pyarrow.array(indices, pyarrow.uint64())})
    return datasets.Dataset(rows.data, rows.info, indices_table=InMemoryTable(table), fingerprint=fingerprint)


def _join(folders: list[Path], parts: list[PartFacts], split: str) -> tuple[datasets.Dataset, np.ndarray]:
    """The rows of all parts, and the number of the document of each row."""
    joined = [datasets.Dataset.load_from_disk(str(folder / split)) for folder in folders]
    counts = [part.documents[split] for part in parts]
    firsts = np.cumsum(counts) - counts
    numbers = [first + rows.data.column("document").to_numpy() for first, rows in zip(firsts, joined, strict=True)]
    return datasets.concatenate_datasets(joined).remove_columns("document"), np.concatenate(numbers)


def _documents_within(limit: int, rows: datasets.Dataset, document_of_row: np.ndarray, count: int) -> int:
    """The number of first documents that have at most `limit` tokens in all."""
    offsets = (chunk.offsets.to_numpy() for chunk in rows.data.column("input_ids").chunks)
    lengths = np.concatenate([np.diff(of_chunk) for of_chunk in offsets])
    within = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), limit, side="right"))
    return int(document_of_row[within]) if within < len(document_of_row) else count


def _revision(data: DataSection, folders: list[Path], parts: list[PartFacts]) -> str:
    """The revision of the whole source. Raises DataError if the parts were not made from the text that is here."""
    files = find_files(data.one_source)
    if not files:
        if len({facts.revision for facts in parts}) > 1:
            raise DataError(
                f"{folders[0].parent}: the parts were made from different revisions of the source; set data.revision "
                "and prepare them again"
            )
        return parts[0].revision
    groups = [files_of_part(files, Part(facts.index, facts.number)) for facts in parts]
    if groups[0] == groups[-1] == files:
        groups = [files]
    whole, digests = file_digests(groups)
    for path, facts, digest in zip(folders, parts, digests * (len(parts) // len(digests)), strict=True):
        if facts.revision != digest:
            raise DataError(f"{path}: its text has changed since it was prepared; remove it to prepare it again")
    return whole
