"""nanoGPT grown up inside the Hugging Face ecosystem."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanogpt_hf.model import GPTConfig, GPTForCausalLM, GPTModel

__version__ = "0.1.0"
__all__ = ["GPTConfig", "GPTForCausalLM", "GPTModel", "__version__"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: only those who ask for the model wait for them.
    if name in __all__:
        import nanogpt_hf.model

        return getattr(nanogpt_hf.model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
