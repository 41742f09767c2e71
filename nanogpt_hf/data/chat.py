"""Format `chat`: each document is a conversation, of which the answers alone are learned."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.chat_examples import AnswerFinder, answer_finder
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.conversations import conversation_of
from nanogpt_hf.data.examples import masked_blocks
from nanogpt_hf.data.formats import Encode, Format
from nanogpt_hf.data.messages import Conversation, texts_of
from nanogpt_hf.data.rows import ROW_ENDINGS
from nanogpt_hf.data.shards import Row, token_dtype
from nanogpt_hf.data.tokenizer import Tokenizer


def _encoder(tokenizer: Tokenizer, _: int | None) -> Encode:
    """Encode conversations by the tokenizer's chat template, which ends the answers itself."""
    finder = answer_finder(tokenizer.hf, tokenizer.name)
    kind = token_dtype(tokenizer.vocab_size)

    def encode(conversations: list[Conversation], first: int) -> list[Row]:
        # A template that rewrites earlier turns gives several examples of one conversation, a row
        # each, with the number of the conversation.
        return [
            Row(
                first + example.conversation,
                np.array(example.input_ids, dtype=kind),
                example.bytes,
                np.array(example.assistant_mask, dtype=np.uint8),
            )
            for example in finder.examples(conversations)
        ]

    return encode


def _end_of_turn(hf: PreTrainedTokenizerBase) -> int:
    return AnswerFinder(ChatFormat(hf)).end_of_turn_id()


FORMAT = Format(
    endings=ROW_ENDINGS,
    document=lambda row, _: conversation_of(row),
    texts=texts_of,
    encoder=_encoder,
    blocks=masked_blocks,
    end_of_turn=_end_of_turn,
)
