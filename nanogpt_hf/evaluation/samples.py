"""Samples during training: the recipe's `eval.samples`, continued at every evaluation."""

import logging
from typing import Any

import torch
import transformers
from accelerate import Accelerator

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import has_conversations
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.tokenizer import prompt_ids
from nanogpt_hf.errors import DataError, DivergedError, UserError
from nanogpt_hf.evaluation.loss import eval_mode
from nanogpt_hf.generate import continue_text

logger = logging.getLogger(__name__)

_TEMPERATURE = 0.8


class TrainingSamples:
    """The prompts of `eval.samples` as token ids, encoded before the first step to report mistakes early.

    A prompt that the tokenizer cannot encode is skipped with a message, since a recipe may be used with other text.
    Raises UserError if a prompt is empty and the tokenizer has no start token.
    """

    def __init__(self, config: Config, tokenizer: transformers.PreTrainedTokenizerBase):
        self.config, self.tokenizer, self.prompts = config, tokenizer, []
        is_chat = has_conversations(config.data) and config.eval.samples
        chat = ChatFormat(tokenizer, fixed_day=True) if is_chat else None
        for prompt in config.eval.samples:
            try:
                ids = chat.prompt_ids([{"role": "user", "content": prompt}]) if chat else prompt_ids(tokenizer, prompt)
            except DataError as error:
                logger.info(f"eval.samples: {prompt!r:.80} is skipped: {str(error).partition('; ')[0]}")
                continue
            except ValueError as error:
                raise UserError(f"eval.samples: {error}") from None
            self.prompts.append((prompt, ids))

    def write(self, accelerator: Accelerator, model: torch.nn.Module, step: int) -> list[dict[str, str]]:
        """[{"prompt": ..., "text": its continuation}, ...] at temperature 0.8. All processes call it.

        The samples depend only on the recipe's seed and `step`; the random state of training is not touched. All
        processes generate the same text, as a sharded model requires.
        """
        if not self.prompts:
            return []
        unwrapped: Any = accelerator.unwrap_model(model)
        written = []
        with eval_mode(model):
            try:
                self._write(unwrapped, accelerator, step, written)
            except DivergedError as error:
                if accelerator.is_main_process:
                    reason = str(error).partition(";")[0]
                    logger.warning(f"step {step:,}: eval.samples: no sample is generated: {reason}")
        return written

    def _write(
        self, model: transformers.PreTrainedModel, accelerator: Accelerator, step: int, written: list[dict[str, str]]
    ) -> None:
        # Compiled blocks would be recompiled for every length.
        with accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            for number, (prompt, ids) in enumerate(self.prompts):
                text = continue_text(
                    model,
                    self.tokenizer,
                    ids,
                    max_new_tokens=self.config.eval.sample_tokens,
                    temperature=_TEMPERATURE,
                    seed=derive_seed(self.config.train.seed, "samples", step, number),
                    to_the_end=True,
                )
                written.append({"prompt": prompt, "text": text})
