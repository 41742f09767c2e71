"""The formats of data: one row each, with what the checks and messages of a recipe need to know.

A row names the file of `data/` that has the format's code, which may import torch. This file may
not: `--help` and the checks of a recipe read it.
"""

from typing import NamedTuple

from nanogpt_hf.config.names import ANY_OFFSET, MADE_TOKENIZERS
from nanogpt_hf.config.settings import FSDP2, Rule, Setting, choice, given, rules


class FormatRow(NamedTuple):
    """The facts of a value of `data.format`."""

    meaning: str  # its part of the help text of data.format
    # The module in data/ whose FORMAT reads, encodes and opens the data; see data/formats.py.
    code: str
    noun: str = "document"  # the name of one document in messages
    # The part of a document that alone is learned, in the plural, such as "answers". The encoder
    # then gives a mask with each row. None: every token is learned.
    learned: str | None = None
    # Whether a block may begin at any token, as the values ANY_OFFSET of data.order ask: that would
    # cut a document whose parts differ.
    any_offset: bool = False
    # Whether data.packing documents and data.mask apply: documents are texts, each a row of tokens.
    packs_documents: bool = False
    # The values of data.packing for which a block holds several documents that must not attend to
    # each other.
    apart: tuple[str, ...] = ()
    # Whether the source holds tokens, which are read in place, instead of text to encode.
    has_tokens: bool = False
    reads_column: bool = False  # whether a row is the text in its column data.text_column
    chats: bool = False  # whether prompts of the trained model are messages


FORMATS = {
    "text": FormatRow(
        meaning="text",
        code="text",
        any_offset=True,
        packs_documents=True,
        reads_column=True,
    ),
    "chat": FormatRow(
        meaning="conversations, whose answers alone are learned",
        code="chat",
        noun="conversation",
        learned="answers",
        apart=("packed",),
        chats=True,
    ),
    "datatrove": FormatRow(
        meaning="token files of datatrove",
        code="datatrove",
        any_offset=True,
        has_tokens=True,
    ),
}


def rules_of(name: str, row: FormatRow) -> list[Rule]:
    """The rules of what does not combine with a format, as its row implies them."""
    form = choice("data.format", name)
    found: list[Rule] = []
    if row.has_tokens:
        made = f"it is made from text, and {name} has made the tokens"
        tokenizers = choice("data.tokenizer", *MADE_TOKENIZERS)
        found += rules(tokenizers, form, made, "name the tokenizer that it used")
        limits = given("data.streaming", "data.max_tokens")
        found += rules(limits, form, "its tokens are read whole", "leave it out")
        found += rules(given("data.max_bad_rows"), form, "its tokens have no rows", "leave it out")
        pairs = "pairs are rows of text or messages"
        found += rules(form, given("align.loss"), pairs, "leave it out")
    if row.learned:
        end = f"no token ends its {row.learned}"
        found += rules(choice("data.tokenizer", "char"), form, end, "use gpt2")
        remedy = f"name a file of {row.noun}s"
        found += rules(choice("data.source", "python-docs"), form, "it is text", remedy)
    if row.chats:
        turns = "its text has no tokens for the turns of a conversation"
        found += rules(choice("data.tokenizer", "char_end"), form, turns, "use gpt2")
    if not row.chats:
        answers = "its texts have no answers to compare"
        found += rules(
            given("eval.metrics"), form, answers, "train on conversations, or leave it out"
        )
    if not row.any_offset:
        cut = f"it would cut {row.noun}s"
        found += rules(choice("data.order", *ANY_OFFSET), form, cut, "use shuffled")
    if not row.packs_documents:
        documents = choice("data.packing", "documents") + given("data.mask")
        text = "only rows of text are documents there"
        found += rules(documents, form, text, "leave it out")
    if row.apart:
        remedy = f"set a cp_size that divides the heads, or {FSDP2}"
        found += rules(form, Setting.RING_ATTENTION, "its kernels take no masks", remedy)
    return found
