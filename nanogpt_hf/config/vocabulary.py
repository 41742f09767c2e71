"""Vocabulary sizes that follow from the recipe alone, before any file of a tokenizer is read."""

GPT2_VOCAB_SIZE = 50257
# The built-in tokenizer `gpt2` has the vocabulary of these models, and is the fastest one for it.
GPT2_NAMES = {
    f"{owner}gpt2{size}"
    for owner in ("", "openai-community/")
    for size in ("", "-medium", "-large", "-xl")
}
_ASSUMED_CHARACTERS = 128  # Tiny Shakespeare has 65


def vocab_size_by_name(tokenizer: str, vocab_size: int | None) -> tuple[int, str] | None:
    """The tokens of `data.tokenizer` and how that is known; None for the name or folder of another
    tokenizer.

    `vocab_size` is the one of the recipe, for `bpe`.
    """
    if tokenizer == "bpe" and vocab_size:
        return vocab_size, "of data.vocab_size"
    if tokenizer in GPT2_NAMES:
        return GPT2_VOCAB_SIZE, "GPT-2's"
    if tokenizer == "char":
        return _ASSUMED_CHARACTERS, "assumed: the number of characters is known after `prepare`"
    return None
