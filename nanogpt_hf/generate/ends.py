"""Tokens that end a text."""

import contextlib

import transformers

from nanogpt_hf.data.chat_examples import AnswerFinder
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.hf_tokenizer import end_of_text_id_of
from nanogpt_hf.errors import DataError


def end_ids_of(model: transformers.PreTrainedModel) -> set[int]:
    """Tokens that end a text of the model: chat models list theirs in generation_config.json,
    others in config.
    """
    found = set[int]()
    for config in (model.config, model.generation_config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return found


def answer_end_ids(model: transformers.PreTrainedModel, chat: ChatFormat) -> set[int]:
    """Tokens that end an answer in a chat."""
    found = end_ids_of(model)
    end_of_text = end_of_text_id_of(chat.hf)
    if end_of_text is not None:
        found.add(end_of_text)
    # A template without a certain end of an answer: the model's own ends are enough.
    with contextlib.suppress(DataError):
        found.add(AnswerFinder(chat).end_of_turn_id())
    return found
