"""The code of a data format: how its source is read, encoded and opened as blocks.

config/formats.py has a row of facts for each format, and names the file whose FORMAT is its code.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.encode import Encode
from nanogpt_hf.data.files import find_files
from nanogpt_hf.data.manifest import Manifest, SplitFacts
from nanogpt_hf.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Format:
    """The code of a value of `data.format`.

    A format whose source holds text has `document`, `texts` and `encoder`; one whose source holds
    tokens has `describe`.
    """

    endings: tuple[str, ...]  # of its files in a folder
    # The blocks of a split. The arguments are the prepared folder, the split and its manifest.
    blocks: Callable[[Path, str, Manifest, DataSection], Blocks]
    # Reads a row, or a whole file of plain text. Raises ValueError if it is no document. A false
    # document, such as "" and None, is an empty row of a Hub data set.
    document: Callable[[Any, DataSection], Any] | None = None
    # All texts of a document: what a tokenizer that is made from the data has to know.
    texts: Callable[[Any], Iterable[str]] | None = None
    # Makes the encoder, from the tokenizer and the id that ends each document, None if there is
    # one document.
    encoder: Callable[[Tokenizer, int | None], Encode] | None = None
    reads_plain_text: bool = False  # whether it reads files that have no rows, such as .txt
    # Whether several threads may encode at once. Then a document that cannot be encoded ends the
    # preparation; else it is a bad row, which data.max_bad_rows may leave out.
    in_threads: bool = False
    # Whether the encoder puts the tokenizer's start-of-text token before each document.
    starts_documents: bool = False
    # Cuts the only document of a source into its train and its validation part, by the fraction
    # of the latter. None: a source needs two documents.
    cut: Callable[[Any, float], tuple[Any, Any]] | None = None
    # The token that ends an answer, which ends a generated text, too. Raises DataError if it is
    # not certain.
    end_of_turn: Callable[[PreTrainedTokenizerBase], int | None] = lambda hf: None
    # The id that ends each document, None without one, and the facts of both splits.
    describe: (
        Callable[[DataSection, Tokenizer], tuple[int | None, dict[str, SplitFacts]]] | None
    ) = None


def format_of(data: DataSection) -> Format:
    """The code of the recipe's format."""
    return importlib.import_module(f"nanogpt_hf.data.{FORMATS[data.format].code}").FORMAT


def local_files(data: DataSection) -> list[Path]:
    """`find_files` of the recipe's source and format; token files without tokens are left out."""
    files = find_files(data.one_source, format_of(data).endings)
    if FORMATS[data.format].has_tokens:
        return [path for path in files if path.stat().st_size]
    return files
