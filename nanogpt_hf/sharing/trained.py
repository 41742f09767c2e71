"""What a run leaves in best/ and final/: a model folder, or an adapter for the model that it started from."""

from pathlib import Path

import torch
import transformers

from nanogpt_hf.config.schema import Config
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.sharing.card import adapter_card, model_card
from nanogpt_hf.sharing.export import replaced_folder, save_model_folder, write_model_folder


def save_trained(
    folder: Path,
    config: Config,
    model_config: GPTConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: transformers.PreTrainedTokenizerBase,
    facts: dict[str, str],
) -> None:
    """Write what was trained (`weights`, our names), replacing what may be in `folder` in one move.

    That is a plain GPT-2; after LoRA the adapter in peft's format, or with `lora.merge` a plain GPT-2 with the adapter
    added in, and the adapter itself in `folder`/adapter.
    """
    if config.finetune.model:
        facts = {"started from": f"`{config.finetune.model}`"} | facts
    card = model_card(config, model_config, facts)
    if config.lora.rank is None:
        save_model_folder(folder, model_config, weights, tokenizer, card)
        return
    from nanogpt_hf.model.lora import merged_weights, save_adapter

    adapter = (model_config.n_layer, config.lora, config.finetune, weights)
    with replaced_folder(folder) as partial:
        if config.lora.merge:
            write_model_folder(partial, model_config, merged_weights(weights, config.lora), tokenizer, card)
            save_adapter(partial / "adapter", *adapter)
        else:
            save_adapter(partial, *adapter)
            tokenizer.model_max_length = model_config.n_positions
            tokenizer.save_pretrained(partial)
            (partial / "README.md").write_text(adapter_card(config, facts), encoding="utf-8")
