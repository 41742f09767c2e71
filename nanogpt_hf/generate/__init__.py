"""Text generation: `generate_tokens` hands tokens on as they arrive (`sample`, `chat`, `serve`, the
samples of an evaluation). `generate_completions` completes many prompts (reinforcement learning,
the answers to a task's questions). `TextStream` decodes tokens to text.
"""

from nanogpt_hf.generate.completions import Completions, generate_completions
from nanogpt_hf.generate.ends import answer_end_ids, end_ids_of
from nanogpt_hf.generate.stream import TextStream
from nanogpt_hf.generate.tokens import continue_text, generate_tokens

__all__ = [
    "Completions",
    "TextStream",
    "answer_end_ids",
    "continue_text",
    "end_ids_of",
    "generate_completions",
    "generate_tokens",
]
