"""Save best/ and final/ of a run: a model folder, or a LoRA adapter for the base model."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.data.tokenizer import save_tokenizer
from nanogpt_hf.export.card import model_card
from nanogpt_hf.export.model_folder import save_model_folder, write_model_folder
from nanogpt_hf.runs.replace import replaced_folder
from nanogpt_hf.runs.state import TrainState


def save_trained(
    folder: Path,
    config: Config,
    model_config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    data: PreparedData,
    state: TrainState,
    machine: str,
) -> None:
    """Write the trained `weights` (our names), replacing `folder` atomically.

    Without LoRA: plain GPT-2. With LoRA: the adapter in peft's format; with `lora.merge` also, plain GPT-2 with the
    adapter merged, and the adapter in `folder`/adapter.
    """
    is_adapter = config.lora.rank is not None and not config.lora.merge
    card = model_card(config, model_config, data.manifest, state, machine, config.finetune.model, is_adapter)
    if config.lora.rank is None:
        save_model_folder(folder, model_config, weights, data.tokenizer, card)
        return
    from nanogpt_hf.model.lora import merged_weights, save_adapter

    adapter = (model_config, config.lora, config.finetune, weights)
    with replaced_folder(folder.resolve()) as partial:
        if config.lora.merge:
            write_model_folder(partial, model_config, merged_weights(weights, config.lora), data.tokenizer, card)
            save_adapter(partial / "adapter", *adapter)
        else:
            save_adapter(partial, *adapter)
            data.tokenizer.model_max_length = model_config.max_position_embeddings
            save_tokenizer(data.tokenizer, partial)
            (partial / "README.md").write_text(card, encoding="utf-8")
