"""What a name in a recipe or on the command line means: a local folder or a Hub id, a recipe that
ships with the package, a tokenizer whose vocabulary is known.

A path that does not exist is never looked up on the Hub.
"""

import functools
import logging
import os
import re
from pathlib import Path
from typing import Any

from nanogpt_hf.errors import UserError
from nanogpt_hf.place import dead_link

logger = logging.getLogger(__name__)

# What may be the name of a repository on the Hub: gpt2, user/name.
HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_DEFAULT_FOLDERS = ("runs", "data", "recipes")


def folder_or_hub_id(name: str) -> str:
    """`name` with ~ expanded if that exists; otherwise `name` itself, a Hub id, with a log line
    that it is looked up.

    Raises UserError if `name` looks like a path (./x, /x, ~/x, a/b/c, runs/x) or begins with an
    existing folder: on the Hub, a stranger might own a repository of that name.
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return path
    if problem := dead_link(Path(path)):
        raise UserError(f"{problem}, or name another folder")
    # Raises an error if Python cannot name such a file here.
    os.fsencode(path)
    owner, slash, _ = name.partition("/")
    if not HUB_ID.fullmatch(name) or (
        slash and (owner in _DEFAULT_FOLDERS or os.path.isdir(owner))
    ):
        raise UserError(
            f"{name}: no such folder; a path is not looked up on the Hub, only user/name is"
        )
    _announce(name)
    return name


@functools.cache
def _announce(name: str) -> None:
    """Log once per name that it is looked up on the Hub."""
    logger.info(f"loading {name} from the Hub", extra={"to_stderr": True})


PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """`recipes` or `recipes/reference`: inside an installed package, next to it in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


def find_recipe(name: Path | str) -> Path:
    """The file of that name if it exists, otherwise the shipped recipe of that name."""
    path = Path(os.path.expanduser(name))
    return path if path.is_file() else shipped_recipes().get(str(name), path)


# The endings of files that are read: of rows, and of text (data/rows.py).
ROW_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXT_ENDINGS = (".txt", ".md", *ROW_ENDINGS)
# Each may be compressed (data/compression.py) or in an archive.
COMPRESSIONS = (".gz", ".bz2", ".xz", ".lzma", ".zst")
ARCHIVE = ".zip"


def short_name(name: str) -> str:
    """Shorten a path or Hub id to a name: `runs/mine/best` -> mine, `texts/my.txt` -> my,
    `openai-community/gpt2` -> gpt2.
    """
    path = Path(name)
    if path.name in ("best", "final"):
        path = path.resolve().parent
    word = path.name.removesuffix(path.suffix if path.suffix in TEXT_ENDINGS else "")
    return re.sub(r"[^\w.-]+", "-", word).strip("-.") or "text"


def text_name(source: str | list[Any]) -> str:
    """A short name for `data.source`, which may be a mixture of several."""
    entries = source if isinstance(source, list) else [{"source": source}]
    # What follows the path of a URL may be a login.
    paths = [str(entry.get("source")).partition("?")[0] for entry in entries]
    return "-".join(map(short_name, paths))[:60]


def data_folder(source: str | list[Any], tokenizer: str) -> str:
    """The folder of prepared data for a text of the user's own: `data/my-bpe`."""
    return f"data/{text_name(source)}-{short_name(tokenizer)}"


GPT2_VOCAB_SIZE = 50257
# The built-in tokenizer `gpt2` has the vocabulary of these models, and is the fastest one for it.
GPT2_NAMES = {
    f"{owner}gpt2{size}"
    for owner in ("", "openai-community/")
    for size in ("", "-medium", "-large", "-xl")
}
# The tokenizers that are made from the text of the source, so that another text gives another one.
CHARACTER_TOKENIZERS = ("char", "char_end")
MADE_TOKENIZERS = (*CHARACTER_TOKENIZERS, "bpe")
# The values of data.order for which a block may begin at any token.
ANY_OFFSET = ("shifted", "random")
# Texts in English have fewer: Tiny Shakespeare has 65. It only matters for estimates before the
# data is prepared.
_ASSUMED_CHARACTERS = 128


def vocab_size_by_name(tokenizer: str, vocab_size: int | None) -> tuple[int, str] | None:
    """The tokens of `data.tokenizer` and how that is known; None for the name or folder of another
    tokenizer.

    `vocab_size` is the one of the recipe, for `bpe`.
    """
    if tokenizer == "bpe" and vocab_size:
        return vocab_size, "of data.vocab_size"
    if tokenizer in GPT2_NAMES:
        return GPT2_VOCAB_SIZE, "GPT-2's"
    if tokenizer in CHARACTER_TOKENIZERS:
        return _ASSUMED_CHARACTERS, "assumed: the number of characters is known after `prepare`"
    return None
