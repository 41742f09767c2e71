"""GPU peaks by name."""

import pytest
import torch

from nanogpt_hf.model import GPTConfig
from nanogpt_hf.model.architecture import GPT2
from nanogpt_hf.planning.hardware import bf16_peak, peak_flops


def test_flops_of_gpt2_small_equal_nanogpt():
    # 6 · (124,439,808 − 1024 · 768 positions) + 12 layers · 12 heads · 64 width · 1024 tokens · 12
    assert GPT2.flops_per_token(GPTConfig(), 1024) == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", 1307e12),
        ("Tesla T4", None),
    ],
)
def test_bf16_peak_matches_whole_words_of_the_name(name, peak):
    assert bf16_peak(name) == peak


def test_peak_flops_of_cpu_is_unknown():
    assert peak_flops(torch.device("cpu")) is None
