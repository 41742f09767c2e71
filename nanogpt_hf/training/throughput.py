"""How much arithmetic a token costs, and what share of the device's peak a run reaches."""

import re

import torch

# Dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets (NVIDIA's A100, H100, H200, L4, L40,
# L40S and HGX B200, an eighth of it; its Ada whitepaper for the 4090, with float32 sums; AMD's MI300X), where a figure
# "with sparsity" counts half. The first match counts. Apple publishes none for its chips.
BF16_PEAKS = (
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
    ("MI300X", 1307e12),
)


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 peak in FLOP/s, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return peak_of(name)


def peak_of(name: str) -> float | None:
    """The bf16 peak of a device by its name, None for one that is not in the table (or a laptop's namesake)."""
    if "Laptop" in name:
        return None
    return next((peak for part, peak in BF16_PEAKS if re.search(rf"\b{part}\b", name)), None)
