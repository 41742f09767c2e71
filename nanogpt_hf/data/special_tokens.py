"""Special tokens in text: which a tokenizer has, and text in which none is spelled out."""

import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase


def special_tokens(hf: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens of a tokenizer."""
    return {str(token) for token in hf.added_tokens_decoder.values() if token.special} | set(
        hf.all_special_tokens
    )


def breakable(tokens: set[str]) -> list[str]:
    """Return the tokens that a space can break, the longest first."""
    return sorted((token for token in tokens if len(token) > 1), key=lambda t: (-len(t), t))


def pattern_of(tokens: set[str]) -> re.Pattern[str]:
    """Return a pattern that finds the tokens in a text, the longest first."""
    return re.compile("|".join(map(re.escape, breakable(tokens))) or "(?!)")


def broken(value: Any, tokens: re.Pattern[str]) -> Any:
    """Return a value of JSON with the tokens in its texts broken by a space: `<|im_end|>` becomes
    `< |im_end|>`.
    """
    return with_texts(
        value, lambda text: tokens.sub(lambda token: f"{token[0][:1]} {token[0][1:]}", text)
    )


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with its texts changed, also the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): with_texts(item, change) for key, item in value.items()}
    return [with_texts(item, change) for item in value] if isinstance(value, list) else value
