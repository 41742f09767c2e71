"""Encode documents or conversations as token ids, in several processes, and write them as arrow shards."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.examples import examples_sha256
from nanogpt_hf.data.interruption import Interrupted
from nanogpt_hf.data.manifest import SplitFacts
from nanogpt_hf.data.shards import describe_shards
from nanogpt_hf.data.tokenizer import Tokenizer
from nanogpt_hf.data.tokens import TokenStream, token_dtype
from nanogpt_hf.errors import DataError

SHARD_BYTES = 500_000_000
PARALLEL_FROM_BYTES = 20_000_000  # below, starting processes costs more than they save
_NUMBERED = {"document": datasets.Value("int64")}


def encode_split(
    documents: datasets.Dataset,
    tokenizer: Tokenizer,
    end_of_text_id: int | None,
    chat: ChatFormat | None,
    num_proc: int | None,
    target: Path,
    *,
    first: int | None = None,
) -> datasets.Dataset:
    """Encode texts, or conversations with `chat`: rows of token ids and of `bytes` of text, in the file `target`.

    Each text starts with the token that the tokenizer itself puts there, if any, and ends with `end_of_text_id` if that
    is not None. Texts that are empty are left out, and a conversation may give several rows. With `first`, the number
    of the first document, the rows have the number of their `document`.
    """
    processes = number_of_processes(documents, num_proc)
    if chat:
        return _encode_conversations(documents, chat, processes, target, first)
    return _encode_texts(documents, tokenizer, end_of_text_id, processes, target, first)


def count_rows(rows: datasets.Dataset, documents: int) -> SplitFacts:
    """The counts of encoded rows, which hold conversations of `documents` documents, or a text each."""
    chat = "assistant_mask" in rows.column_names
    tokens = size = assistant_tokens = 0
    for table in _tables(rows):
        tokens += sum(len(chunk.flatten()) for chunk in table["input_ids"].chunks)
        size += sum(table["bytes"].to_pylist())
        if chat:
            masks = (chunk.flatten().to_numpy() for chunk in table["assistant_mask"].chunks)
            assistant_tokens += sum(int(mask.sum(dtype=np.int64)) for mask in masks)
    count = documents if chat else rows.num_rows
    return SplitFacts(count, tokens, size, assistant_tokens=assistant_tokens if chat else None)


def _tables(rows: datasets.Dataset) -> Iterator[Any]:
    """Arrow tables of the rows, one for each record batch to write."""
    yield from rows.with_format("arrow").iter(1000)


def save_split(rows: datasets.Dataset, facts: SplitFacts, folder: Path) -> SplitFacts:
    """Write rows of `input_ids` as arrow shards; return their facts with the checksums."""
    itemsize = np.dtype(rows.features["input_ids"].feature.dtype).itemsize
    number_of_shards = max(1, min(-(-facts.tokens * itemsize // SHARD_BYTES), rows.num_rows))
    # The same rows give the same bytes, however they were stored before. So nothing is written of the source's own data
    # set, such as its size, and rows are copied first: arrow would pad a slice with bytes of its neighbours.
    info = datasets.DatasetInfo(features=rows.features)
    empty = datasets.Dataset(rows.features.arrow_schema.empty_table(), info, fingerprint=rows._fingerprint)
    empty.save_to_disk(folder, num_shards=number_of_shards)  # the names of the shards, which are overwritten
    for number, path in enumerate(sorted(folder.glob("*.arrow"))):
        with ArrowWriter(path=str(path), features=rows.features) as writer:
            shard = rows.shard(number_of_shards, number, contiguous=True)
            for table in _tables(shard):
                writer.write_table(table.take(np.arange(table.num_rows)))
            writer.finalize()
    sha256 = TokenStream.open(folder).sha256() if facts.assistant_tokens is None else examples_sha256(folder)
    return replace(facts, sha256=sha256, shards=describe_shards(folder))


def save_counted(rows: datasets.Dataset, documents: int, folder: Path, data: DataSection) -> SplitFacts:
    """Write the encoded rows of a split; return its facts. Raises DataError if there is no token."""
    counts = count_rows(rows, documents)
    if not counts.tokens:
        raise DataError(f"data.source: {data.one_source}: too little text: none is left for {folder.name}")
    return save_split(rows.remove_columns("bytes"), counts, folder)


def number_of_processes(text: datasets.Dataset, num_proc: int | None) -> int:
    """Number of processes that tokenize: `num_proc`, or one per core if the text is large enough for that to pay.

    At most four per core: more are of no use, and each takes memory.
    """
    size = text.data.nbytes * text.num_rows // max(1, text.data.num_rows)  # a selection has the data of all rows
    cores = allowed_cores()
    return min(text.num_rows, 4 * cores, num_proc or (cores if size > PARALLEL_FROM_BYTES else 1))


def _encode_texts(
    text: datasets.Dataset,
    tokenizer: Tokenizer,
    end_of_text_id: int | None,
    num_proc: int,
    target: Path,
    first: int | None,
) -> datasets.Dataset:
    """Rows of text -> rows of `input_ids` and the text's `bytes`, in the file `target`; without empty rows."""
    # Not `tokenizer` itself: the closure of `encode` is sent to every process, and tokenizer.hf takes a second each.
    name, encode_batch, vocab_size = tokenizer.name, tokenizer.encode_batch, tokenizer.vocab_size
    kind = token_dtype(vocab_size)
    start, end = ([] if i is None else [i] for i in (tokenizer.start_of_text_id, end_of_text_id))

    def encode(batch: dict[str, list[str]], numbers: list[int] | None = None) -> dict[str, list]:
        texts = [text for text in batch["text"] if text]  # rows of a Hub data set may be empty or null
        rows = []
        for ids in encode_batch(texts) if texts else []:
            if len(ids) and ids.max() >= vocab_size:
                raise DataError(f"data.tokenizer: {name} gave id {ids.max()}, beyond its own vocabulary")
            # checked above: larger ids would wrap
            rows.append(np.concatenate((start, ids, end), dtype=kind, casting="unsafe"))
        columns = {"input_ids": rows, "bytes": [len(text.encode()) for text in texts]}
        if numbers is not None:
            columns["document"] = [(first or 0) + n for n, text in zip(numbers, batch["text"], strict=True) if text]
        return columns

    return _map(text, encode, {"input_ids": np.dtype(kind).name}, num_proc, target, first is not None)


def _encode_conversations(
    conversations: datasets.Dataset, chat: ChatFormat, num_proc: int, target: Path, first: int | None
) -> datasets.Dataset:
    """Rows of messages -> rows of `input_ids`, `assistant_mask` (1 for tokens of answers) and the answers' `bytes`.

    They are written to the file `target`.
    """
    kind = token_dtype(len(chat.hf))

    def encode(batch: dict[str, list], numbers: list[int] | None = None) -> dict[str, list]:
        if numbers is None:
            by_document = [chat.examples(batch["messages"])]
        else:
            by_document = [chat.examples([messages]) for messages in batch["messages"]]
        examples = [example for own in by_document for example in own]
        columns = {
            "input_ids": [np.asarray(example.input_ids, dtype=np.uint32).astype(kind) for example in examples],
            "assistant_mask": [np.asarray(example.assistant_mask, dtype=np.uint8) for example in examples],
            "bytes": [example.bytes for example in examples],
        }
        if numbers is not None:
            columns["document"] = [(first or 0) + n for n, own in zip(numbers, by_document, strict=True) for _ in own]
        return columns

    lists = {"input_ids": np.dtype(kind).name, "assistant_mask": "uint8"}
    return _map(conversations, encode, lists, num_proc, target, first is not None)


def _map(
    rows: datasets.Dataset, encode: Callable, lists: dict[str, str], num_proc: int, target: Path, numbered: bool
) -> datasets.Dataset:
    """The rows that `encode` makes, in the file `target`: `lists`, `bytes`, and with `numbered` their `document`."""
    features = {name: datasets.List(datasets.Value(dtype)) for name, dtype in lists.items()}
    features |= {"bytes": datasets.Value("int64")} | (_NUMBERED if numbered else {})
    if not rows.num_rows:  # `map` would leave them as they are
        return datasets.Dataset.from_dict({name: [] for name in features}, datasets.Features(features))
    try:
        return rows.map(
            encode,
            batched=True,
            with_indices=numbered,
            remove_columns=rows.column_names,
            features=datasets.Features(features),
            num_proc=num_proc if num_proc > 1 else None,
            cache_file_name=str(target),  # the default leaves a Hub data set's tokens in its cache
            load_from_cache_file=False,
            new_fingerprint=target.stem,  # the default hashes the tokenizer, which takes seconds
            desc="tokenizing",
        )
    except Exception as error:
        # At an interruption datasets asks its processes for their results, and raises the timeout of that instead.
        context = error.__context__
        while context:
            if isinstance(context, KeyboardInterrupt | Interrupted):
                raise context from None
            context = context.__context__
        raise
