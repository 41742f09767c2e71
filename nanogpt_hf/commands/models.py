"""Open the model that the user names, with its tokenizer."""

from typing import TYPE_CHECKING

from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def open_model(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """MODEL in evaluation mode, and its tokenizer. Raises UserError if one is missing or they do not fit."""
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.tokenizer import check_vocabulary, load_tokenizer
    from nanogpt_hf.model.build import load_model

    disable_progress_bar()
    folder = find_model(name)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    check_vocabulary(folder, len(tokenizer), model.config.vocab_size)
    return model, tokenizer
