"""nanogpt_hf: pretrain, fine-tune and share GPTs inside the Hugging Face ecosystem."""

# typing's, which type checkers know by its name. No module is imported here: until `__main__` runs,
# Ctrl-C prints a traceback of Python's.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from nanogpt_hf.config.load import load_config
    from nanogpt_hf.config.schema import Config
    from nanogpt_hf.data.prepare import prepare
    from nanogpt_hf.errors import Stopped, UserError
    from nanogpt_hf.export.hub import push
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM, GPTModel
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.runs.metrics import read_metrics
    from nanogpt_hf.training.loop import train
    from nanogpt_hf.training.start import prepare_run

__version__ = "0.1.0"
__all__ = [
    "Config",
    "GPTConfig",
    "GPTForCausalLM",
    "GPTModel",
    "RunFolder",
    "Stopped",
    "UserError",
    "__version__",
    "load_config",
    "prepare",
    "prepare_run",
    "push",
    "read_metrics",
    "train",
]

# public name -> the module that defines it
_MODULES = {
    "Config": "config.schema",
    "GPTConfig": "model",
    "GPTForCausalLM": "model",
    "GPTModel": "model",
    "RunFolder": "runs.folder",
    "Stopped": "errors",
    "UserError": "errors",
    "load_config": "config.load",
    "prepare": "data.prepare",
    "prepare_run": "training.start",
    "push": "export.hub",
    "read_metrics": "runs.metrics",
    "train": "training.loop",
}


def __getattr__(name: str) -> "Any":
    # torch and transformers take seconds to import: only programs that use a name wait for what it
    # needs.
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(f"nanogpt_hf.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
