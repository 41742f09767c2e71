"""GPU peaks by name; free memory within the limits of cgroups."""

from types import SimpleNamespace

import psutil
import pytest

from nanogpt_hf.model import GPTConfig
from nanogpt_hf.model.architecture import GPT2
from nanogpt_hf.planning.hardware import bf16_peak, free_memory


def test_flops_of_gpt2_small_equal_nanogpt():
    # 6 · (124,439,808 − 1024 · 768 positions) + 12 layers · 12 heads · 64 width · 1024 tokens · 12
    assert GPT2.flops_per_token(GPTConfig(), 1024) == 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GB200", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_bf16_peak_matches_whole_words_of_the_name(name, peak):
    assert bf16_peak(name) == peak


V2 = {"max": "5000", "current": "3000", "stat": "anon 9\nactive_file 500\ninactive_file 1"}
V1 = {
    "limit_in_bytes": "5000",
    "usage_in_bytes": "3000",
    "stat": "cache 9\nactive_file 1\ntotal_active_file 500\ntotal_inactive_file 1",
}
UNLIMITED = {"limit_in_bytes": "9223372036854771712"}
HIERARCHY = {"stat": V1["stat"] + "\nhierarchical_memory_limit 4000"}


@pytest.mark.parametrize(
    ("own", "folder", "files", "free"),
    [
        ("0::/a/b\n", "a/b", V2, 2501),
        ("0::/a/b\n", "a", V2, 2501),  # the limit of a cgroup above
        # A container may see its own cgroup as the root.
        ("0::/other\n", ".", V2, 2501),
        ("0::/a/b\n", "a/b", V2 | {"max": "max"}, None),
        ("0::/a/b\n", "a/b", V2 | {"current": "9000"}, 0),
        ("4:memory:/a/b\n0::/\n", "memory/a/b", V1, 2501),
        ("5:cpu,memory:/a/b\n", "memory/a", V1, 2501),
        # A container has the files of its own cgroup alone, and sees its path on the host.
        ("4:memory:/host/a\n", "memory", V1, 2501),
        ("4:memory:/a/b\n", "memory/a", V1 | UNLIMITED, None),
        ("4:memory:/a/b\n", "memory/a/b", V1 | UNLIMITED | HIERARCHY, 1501),
        ("4:memory:/a/b\n", "memory/a/b", V1 | {"usage_in_bytes": "9000"}, 0),
        ("4:memory:/a/b\n", "memory/a/b", V1 | {"stat": "nonsense"}, None),
        ("nonsense", "a", {}, None),
    ],
)
def test_free_memory_is_within_the_limits_of_cgroups(
    tmp_path, monkeypatch, own, folder, files, free
):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
    (tmp_path / "own").write_text(own)
    (tmp_path / "root" / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "root" / folder / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path / "root", tmp_path / "own") == (10**6 if free is None else free)
