"""Initial weights with which the heads of the first block look back: head 1 attends to the token
before its own, head 2 to the one before that, and so on.

With learned positions (GPT-2), a position is a sum of waves along orthonormal directions c_k, s_k:

    p_t = Σ_k cos(w_k·t)·c_k + sin(w_k·t)·s_k,  k = 1 ... W,  W = half the dimensions of a head

A head's keys are the coordinates of p_t along these directions. Its queries are the coordinates of
p_t turned back by the head's offset o: the angle w_k·t becomes w_k·(t - o). So the score of query i
and key j is proportional to Σ_k cos(w_k·(i - j - o)), which is largest at j = i - o. With
w_k = (k - 1/2)·π/W it is 0 at all others: the sum is sin(π·d)/(2·sin(π·d/2W)) at d = i - j - o. It
comes back at d = 4·W, so in longer contexts the waves are spaced unevenly (by the golden ratio).

With rotary positions (Llama, Qwen3), every token gets the same direction u in its embedding. A tied
head cannot see it: it adds the same number to all logits. Keys map u to 1 in the fastest rotary
pairs, and queries map it to the pair turned back by the offset. The rotation of keys by w·j and of
queries by w·i then gives the same sum of cosines with the rotary frequencies.

All of this is only where training begins; every weight is learned.
"""

import math
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.errors import UserError
from nanogpt_hf.model.configuration_gpt import GPTConfig

# Types whose heads are rotated as a whole, the first half of a head with the second, as in Llama.
ROTARY = ("llama", "mistral", "qwen2", "qwen3")
_POSITIONS = 1.5  # standard deviation of positions by the standard deviation of token embeddings
# Score of the token that a head looks at, with learned and with rotary positions; all others begin
# near 0. A softmax of e⁶⁰ to 1 is one-hot, of e¹² to 1 nearly.
_PEAK = 60.0
_ROTARY_PEAK = 12.0


def check_look_back(config: PreTrainedConfig) -> None:
    """Raises UserError if heads cannot look back in such a model."""
    kind = config.model_type
    if kind not in (GPTConfig.model_type, *ROTARY):
        known = ", ".join(ROTARY)
        raise UserError(f"model.init: look_back is written for gpt2, {known}, not for {kind}")
    if _head_size(config) < 8:
        raise UserError(
            "model.init: look_back needs heads of 8 dimensions or more, and these have "
            f"{_head_size(config)}"
        )


def look_back(model: PreTrainedModel, attention: Any) -> None:
    """Let the heads of the first block, whose module is `attention`, begin by looking back.

    Adds to the weights that `model` has. Draws from torch's generator.
    """
    size = _head_size(model.config)
    has_norms = hasattr(attention, "q_norm")
    with torch.no_grad():
        if isinstance(model.config, GPTConfig):
            frequencies, first, second, gain = _wave_positions(model, size // 2)
        else:
            frequencies, first, second, gain = _mark_tokens(model, size, has_norms)
        # Two rows of a head for each wave, one in each half, since rotary positions turn these two
        # with each other: (2, W).
        rows = torch.arange(len(frequencies)) + torch.tensor([[0], [size // 2]])
        for keys in attention.k_proj.weight.split(size):
            keys[rows[0]] += gain * first
            keys[rows[1]] += gain * second
        for head, queries in enumerate(attention.q_proj.weight.split(size)):
            # Head number h looks h + 1 tokens back: cos(a - b) = cos a · cos b + sin a · sin b, and
            # sin(a - b) likewise, turn the coordinates by that angle.
            angles = frequencies[:, None] * (head + 1)
            queries[rows[0]] += gain * (angles.cos() * first + angles.sin() * second)
            queries[rows[1]] += gain * (angles.cos() * second - angles.sin() * first)
        for norm in ("q_norm", "k_norm") if has_norms else ():
            # Normalized and scaled, queries and keys have a product of size · scale².
            attention.get_submodule(norm).weight.fill_((_ROTARY_PEAK / size**0.5) ** 0.5)


# frequencies (W,), directions c_k and s_k (W, width), gain of queries and keys
Waves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]


def _wave_positions(model: Any, waves: int) -> Waves:
    """Make the positions of a GPT-2 sums of waves."""
    config = model.config
    places = torch.arange(config.n_positions)
    # Evenly spaced waves are in phase again after 4·W positions, so a longer context gets uneven
    # ones.
    frequencies = (torch.arange(waves) + 0.5) * math.pi / waves
    if config.n_positions > 4 * waves:
        uneven = torch.arange(waves) * (5**0.5 - 1) / 2 % 1
        frequencies = (torch.arange(waves) + uneven) * math.pi / waves
    # Orthonormal directions of a random matrix. In float64, so that other CPUs round to the same
    # float32.
    directions = torch.linalg.qr(torch.randn(config.n_embd, config.n_embd).double())[0].float()
    first, second, *_ = directions.split(waves)
    angles = places[:, None] * frequencies
    positions = math.sqrt(config.n_embd / waves) * (angles.cos() @ first + angles.sin() @ second)
    model.transformer.wpe.weight.copy_(_POSITIONS * config.initializer_range * positions)
    # A normalized input has variance 1 in each of n_embd values. This is the share of positions in
    # it, tokens being the rest.
    variance = _POSITIONS**2 / (1 + _POSITIONS**2) * config.n_embd
    return frequencies, first, second, math.sqrt(_PEAK * (2 * waves) ** 0.5 / variance)


def _mark_tokens(model: Any, size: int, has_norms: bool) -> Waves:
    """Add one direction to the embeddings of all tokens."""
    frequencies = model.model.rotary_emb.inv_freq[: size // 8].float()  # the fastest
    width = model.config.hidden_size
    direction = torch.randint(2, (width,)) * 2.0 - 1
    model.get_input_embeddings().weight += model.config.initializer_range * direction
    first = direction.expand(len(frequencies), -1)
    # The direction has half of the variance of a normalized input. Norms of queries and keys set
    # the peak: more would only hide what queries and keys say of the token.
    value = 2**0.5 if has_norms else math.sqrt(_ROTARY_PEAK * size**0.5 / len(frequencies))
    return frequencies, first, torch.zeros_like(first), value * 2**0.5 / width


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
