"""Estimate the memory of sampling answers: the key-value cache, prompts that are read while it is
full, and the logits of a token for each row.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.generate.cache import starts_mergeable
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.planning.kept_bytes import cache_bytes

# Bytes for each logit of a draw (generate/draws.py): it, divided by the temperature, its
# probability, and a cumulative sum in float64.
_BYTES_OF_A_DRAW = 4 + 4 + 4 + 8


@dataclass(frozen=True)
class Sampling:
    """Answers that a process samples at once."""

    rows: int
    # Different prompts among them, and the tokens of one.
    prompts: int
    prompt: int
    # Tokens of a prompt with its answer.
    columns: int

    def parts(self, model: PreTrainedModel, launch: Launch) -> dict[str, float]:
        """Bytes of the parts that sampling adds to the weights, at its peak."""
        sizes = model.config
        logits = float(_BYTES_OF_A_DRAW * self.rows * sizes.vocab_size)
        # The memory of states and convolutions is not known; `estimate` refuses them.
        if not starts_mergeable(sizes):
            return {"logits": logits}
        cache = self.rows * cache_bytes(model, launch, self.columns)
        of_prompt = cache_bytes(model, launch, self.prompt)
        # The newest prompt is kept, since the next row may have it, too.
        cache += of_prompt
        # The next prompts are read while all rows are full. Then their keys and values are copied,
        # row by row.
        read = self.prompts * of_prompt
        tokens = self.prompts * self.prompt
        architecture = architecture_of(model)
        inner = architecture.inner_width(architecture.blocks(model)[-1], sizes)
        passing = tokens * (
            2 * launch.residual_bytes * sizes.hidden_size + 2 * launch.compute_bytes * inner
        )
        joining = {"cache": cache + read + max(0.0, read - passing), "activations": passing}
        # A token is appended to the keys or the values of a layer by a copy.
        of_a_layer = cache / (2 * sizes.num_hidden_layers)
        drawing = {"cache": cache + max(0.0, of_a_layer - logits), "logits": logits}
        return max(joining, drawing, key=lambda parts: sum(parts.values()))
