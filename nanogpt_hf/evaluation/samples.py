"""Samples during training: the prompts of `eval.samples`, continued at every evaluation."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import chats
from nanogpt_hf.errors import DataError, DivergedError, UserError
from nanogpt_hf.evaluation.base import Evaluation, Measure, Result, Subject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Below 1, so that even an early model writes words; at 0 it would repeat one line.
_TEMPERATURE = 0.8


class Samples(Evaluation):
    knob = "eval.samples"

    def load_for_training(self, config: Config, tokenizer: "PreTrainedTokenizerBase") -> Measure:
        """Encode the prompts before the first step, to report mistakes early.

        A prompt that the tokenizer cannot encode is skipped with a message, since a recipe may be
        used with other text. Raises UserError if a prompt is empty and the tokenizer has no start
        token.
        """
        from nanogpt_hf.data.chat_template import ChatFormat
        from nanogpt_hf.data.hf_tokenizer import prompt_ids

        chat = ChatFormat(tokenizer) if chats(config.data) else None
        encoded = []
        for prompt in config.eval.samples:
            try:
                # A model that learns conversations is asked the prompt as a user would ask it.
                if chat:
                    ids = chat.prompt_ids([{"role": "user", "content": prompt}])
                else:
                    ids = prompt_ids(tokenizer, prompt)
            except DataError as error:
                logger.info(f"eval.samples: {prompt!r:.80} is skipped: {error}")
                continue
            except ValueError as error:
                raise UserError(f"eval.samples: {error}") from None
            encoded.append((prompt, ids))
        return partial(_write, config, encoded)


def _write(
    config: Config, encoded: list[tuple[str, list[int]]], subject: Subject
) -> Iterator[Result]:
    """Continue each prompt at temperature 0.8.

    The samples depend only on the recipe's seed and the step; the random state of training is not
    touched. All processes generate the same text, as a sharded model requires.
    """
    import torch

    from nanogpt_hf.evaluation.loss import eval_mode
    from nanogpt_hf.generate import continue_text

    samples = []
    accelerator = subject.accelerator
    model: Any = accelerator.unwrap_model(subject.model)
    # The text grows by a token at a time, and a compiled model would be compiled again for each
    # length.
    eager = torch.compiler.set_stance("force_eager")
    try:
        with eval_mode(subject.model), accelerator.autocast(), eager:
            for number, (prompt, ids) in enumerate(encoded):
                text = continue_text(
                    model,
                    subject.tokenizer,
                    ids,
                    max_new_tokens=config.eval.sample_tokens,
                    temperature=_TEMPERATURE,
                    # A resumed run writes the same samples as an uninterrupted one.
                    seed=derive_seed(config.train.seed, "samples", subject.step, number),
                    to_the_end=True,
                )
                samples.append({"prompt": prompt, "text": text})
    except DivergedError as error:
        # Samples alone are no reason to end a run: its own checks of the loss decide that.
        if accelerator.is_main_process:
            logger.warning(f"step {subject.step:,}: eval.samples: no sample is generated: {error}")
    yield Result(samples=samples)
