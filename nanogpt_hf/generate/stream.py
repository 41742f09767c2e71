"""Decode tokens to text as they arrive."""

from collections.abc import Sequence

import transformers

from nanogpt_hf.data.answer_format import AnswerFormat


class TextStream:
    """Decodes tokens to text as soon as characters are complete: a character may be spread over
    several tokens. Special tokens have no text, unless they are marks of a form of answers.

    transformers' TextStreamer would hold text back until the next space, which text of
    characters may not have.
    """

    _CONTEXT = 8  # tokens of the prompt; more than enough for a whole character

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        prompt_ids: Sequence[int] = (),
        form: AnswerFormat | None = None,
    ):
        self.tokenizer = tokenizer
        self._form = form
        # Tokens since the last complete character but one. Tokens whose text was returned, or is in
        # the prompt, are the context for the others: some tokenizers decode a token differently at
        # the start of a text.
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._returned = len(self._ids)

    def add(self, token: int) -> str:
        """Text that `token` completes, '' while a character is incomplete."""
        self._ids.append(token)
        return self._new_text(complete=False)

    def end(self) -> str:
        """Rest of the text, incomplete characters included."""
        return self._new_text(complete=True)

    def _decode(self, ids: list[int]) -> str:
        if self._form:
            return str(self.tokenizer.decode(self._form.visible(ids)))
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _new_text(self, complete: bool) -> str:
        # The text is decoded with its context and without the new tokens; the difference is new. A
        # half character decodes to the replacement character at the end.
        text = self._decode(self._ids)
        if not complete and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._decode(self._ids[: self._returned])) :]
        if new:  # special tokens have no text: they cannot be the context
            self._ids = self._ids[self._returned :]
            self._returned = len(self._ids)
        return new
