"""The arithmetic of a token."""

import torch

from nanogpt_hf.model import GPTConfig
from nanogpt_hf.training.throughput import flops_per_token, peak_flops


def test_flops_of_gpt2_small_are_nanogpts():
    # 6 · (124,439,808 − 1024 · 768 positions) + 12 layers · 12 heads · 64 wide · 1024 tokens · 12
    assert flops_per_token(GPTConfig(), 1024) == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024


def test_an_unknown_device_has_no_peak():
    assert peak_flops(torch.device("cpu")) is None
