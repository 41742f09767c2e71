"""Encode documents or conversations as token ids, in several processes, and write them as arrow shards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np

from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.examples import examples_sha256
from nanogpt_hf.data.manifest import SplitFacts
from nanogpt_hf.data.shards import describe_shards
from nanogpt_hf.data.tokenizer import Tokenizer
from nanogpt_hf.data.tokens import TokenStream
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
    numbered: bool = False,
) -> datasets.Dataset:
    """Encode texts, or conversations with `chat`: rows of token ids and of `bytes` of text, in the file `target`.

    Each text starts with the token that the tokenizer itself puts there, if any, and ends with `end_of_text_id` if that
    is not None. Texts that are empty are left out, and a conversation may give several rows; with `numbered` the rows
    have the number of their `document`.
    """
    processes = number_of_processes(documents, num_proc)
    if chat:
        return _encode_conversations(documents, chat, processes, target, numbered)
    return _encode_texts(documents, tokenizer, end_of_text_id, processes, target, numbered)


def count_rows(rows: datasets.Dataset, documents: int) -> SplitFacts:
    """The counts of encoded rows, which hold conversations of `documents` documents, or a text each."""
    tokens = sum(len(chunk.flatten()) for chunk in rows.data.column("input_ids").chunks)
    chat = "assistant_mask" in rows.column_names
    assistant_tokens = _assistant_tokens(rows) if chat else None
    count = documents if chat else rows.num_rows
    return SplitFacts(count, tokens, sum(rows["bytes"]), assistant_tokens=assistant_tokens)


def save_split(rows: datasets.Dataset, facts: SplitFacts, folder: Path) -> SplitFacts:
    """Write rows of `input_ids` as arrow shards; return their facts with the checksums."""
    itemsize = np.dtype(rows.features["input_ids"].feature.dtype).itemsize
    shards = -(-facts.tokens * itemsize // SHARD_BYTES)
    # Without what the source's own data set was, such as its size: one machine and merged parts write the same bytes.
    info = datasets.DatasetInfo(features=rows.features)
    rows = datasets.Dataset(rows.data, info, indices_table=rows._indices, fingerprint=rows._fingerprint)
    rows.save_to_disk(folder, num_shards=max(1, min(shards, rows.num_rows)))
    sha256 = TokenStream.open(folder).sha256() if facts.assistant_tokens is None else examples_sha256(folder)
    return replace(facts, sha256=sha256, shards=describe_shards(folder))


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
    numbered: bool,
) -> datasets.Dataset:
    """Rows of text -> rows of `input_ids` and the text's `bytes`, in the file `target`; without empty rows."""
    # Not `tokenizer` itself: the closure of `encode` is sent to every process, and tokenizer.hf takes a second each.
    name, encode_batch, vocab_size = tokenizer.name, tokenizer.encode_batch, tokenizer.vocab_size
    kind = np.uint16 if vocab_size <= 2**16 else np.uint32
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
            columns["document"] = [number for number, text in zip(numbers, batch["text"], strict=True) if text]
        return columns

    return _map(text, encode, {"input_ids": np.dtype(kind).name}, num_proc, target, numbered)


def _encode_conversations(
    conversations: datasets.Dataset, chat: ChatFormat, num_proc: int, target: Path, numbered: bool
) -> datasets.Dataset:
    """Rows of messages -> rows of `input_ids`, `assistant_mask` (1 for tokens of answers) and the answers' `bytes`.

    They are written to the file `target`.
    """
    kind = np.uint16 if len(chat.hf) <= 2**16 else np.uint32

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
            columns["document"] = [n for n, own in zip(numbers, by_document, strict=True) for _ in own]
        return columns

    lists = {"input_ids": np.dtype(kind).name, "assistant_mask": "uint8"}
    return _map(conversations, encode, lists, num_proc, target, numbered)


def _map(
    rows: datasets.Dataset, encode: Callable, lists: dict[str, str], num_proc: int, target: Path, numbered: bool
) -> datasets.Dataset:
    """The rows that `encode` makes, in the file `target`: `lists`, `bytes`, and with `numbered` their `document`."""
    features = {name: datasets.List(datasets.Value(dtype)) for name, dtype in lists.items()}
    features |= {"bytes": datasets.Value("int64")} | (_NUMBERED if numbered else {})
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


def _assistant_tokens(rows: datasets.Dataset) -> int:
    chunks = rows.data.column("assistant_mask").chunks
    return sum(int(chunk.flatten().to_numpy().sum(dtype=np.int64)) for chunk in chunks)
