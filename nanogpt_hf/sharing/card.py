"""The model card: what a model is, how it was made, how to open it."""

from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config
from nanogpt_hf.model.build import count_parameters
from nanogpt_hf.model.configuration_gpt import GPTConfig


def model_card(config: Config, model_config: GPTConfig, facts: dict[str, str]) -> str:
    """README.md of a model folder, with the front matter that the Hub reads. `facts` become the rows of a table."""
    recipe = f"\n## Recipe\n\n```yaml\n{config_to_yaml(config).rstrip()}\n```\n"
    return _card(config.name, model_config, f"trained on `{config.data.source}` with nanogpt_hf", facts) + recipe


def adapter_card(config: Config, facts: dict[str, str]) -> str:
    """README.md of a LoRA adapter: how it opens, and what it was trained on and from."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- nanogpt_hf
---

# {config.name}

A LoRA adapter of rank {config.lora.rank} for `{config.finetune.model}`, trained on `{config.data.source}` with
nanogpt_hf. peft opens it, together with the model that it was trained on:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

| | |
|---|---|
{rows}

## Recipe

```yaml
{config_to_yaml(config).rstrip()}
```
"""


def imported_card(name: str, model_config: GPTConfig, facts: dict[str, str]) -> str:
    """README.md of a model that nanoGPT trained: there is no recipe of ours to show."""
    return _card(name, model_config, "trained by nanoGPT and imported with nanogpt_hf", facts)


def _card(name: str, model_config: GPTConfig, origin: str, facts: dict[str, str]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
- nanogpt_hf
---

# {name}

A GPT-2 with {count_parameters(model_config):,} parameters ({model_config.n_layer} layers, {model_config.n_head} heads,
{model_config.n_embd} wide, {model_config.n_positions} positions), {origin}.
It is a plain GPT-2 checkpoint: transformers opens it without any other code.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

| | |
|---|---|
{rows}
"""
