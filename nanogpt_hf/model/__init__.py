from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM, GPTModel

__all__ = ["GPTConfig", "GPTForCausalLM", "GPTModel"]
