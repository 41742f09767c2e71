"""What a model writes as it learns: the recipe's `eval.samples`, continued at every evaluation."""

import logging

import torch
import transformers
from accelerate import Accelerator

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.chat_prompt import render_prompt
from nanogpt_hf.data.tokenizer import encode_ordinary
from nanogpt_hf.errors import DataError, DivergedError, UserError
from nanogpt_hf.generate import continue_text

logger = logging.getLogger(__name__)

_TEMPERATURE = 0.8


class TrainingSamples:
    """The prompts of `eval.samples` as token ids, read before the first step, so that a mistake stops the run there.

    One that the tokenizer cannot express is left out and said: a recipe is run on texts that its author did not know.
    Raises UserError where a prompt is empty.
    """

    def __init__(self, config: Config, tokenizer: transformers.PreTrainedTokenizerBase):
        self.config, self.tokenizer, self.prompts = config, tokenizer, []
        for prompt in config.eval.samples:
            text = prompt
            if config.data.format == "chat":
                text = render_prompt(tokenizer, [{"role": "user", "content": prompt}])
            try:
                ids = encode_ordinary(tokenizer, text)
            except DataError as error:
                logger.info(f"eval.samples: {prompt!r:.80} is left out: {str(error).partition('; ')[0]}")
                continue
            if not ids:
                raise UserError("eval.samples: a prompt must not be empty: give the model a text to go on from")
            self.prompts.append((prompt, ids))

    def write(self, accelerator: Accelerator, model: torch.nn.Module, step: int) -> list[dict[str, str]]:
        """[{"prompt": ..., "text": what the model wrote after it}, ...], at temperature 0.8; all processes call it.

        What is drawn depends on the recipe's seed and on `step` only, and training's own randomness is left alone. All
        processes write all of it, each the same: where the model is sharded, none could alone.
        """
        if not self.prompts:
            return []
        whole, was_training = accelerator.unwrap_model(model), model.training
        model.eval()
        written = []
        try:
            self._write(whole, accelerator, step, written)
        except DivergedError as error:
            if accelerator.is_main_process:
                logger.warning(f"step {step:,}: eval.samples: no sample is written: {str(error).partition(';')[0]}")
        model.train(was_training)
        return written

    def _write(
        self, model: torch.nn.Module, accelerator: Accelerator, step: int, written: list[dict[str, str]]
    ) -> None:
        # Compiled blocks would be compiled anew for every length of a text.
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
