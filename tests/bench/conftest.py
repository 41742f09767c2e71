"""The workload fixture."""

import pytest

from nanogpt_hf.config.schema import Config, DataSection, ModelSection, OptimSection, TrainSection


@pytest.fixture
def work(forget_accelerate, monkeypatch, tmp_path):
    """A tiny model on synthetic tokens with two micro-batches per step, as `bench` builds it."""
    from nanogpt_hf.bench.workload import build_workload
    from nanogpt_hf.distributed.accelerate_config import check_launch
    from nanogpt_hf.distributed.accelerator import build_accelerator
    from nanogpt_hf.distributed.mesh import Mesh
    from nanogpt_hf.runs.folder import RunFolder

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_accelerate()
    config = Config(
        model=ModelSection(n_layer=1, n_head=2, n_embd=16, n_positions=8),
        data=DataSection(tokenizer="char", block_size=8, dir=str(tmp_path / "none")),
        optim=OptimSection(warmup_steps=0),
        train=TrainSection(micro_batch_size=2, tokens_per_step=32),
    )
    accelerator = build_accelerator(check_launch(config, Mesh()), RunFolder(tmp_path))
    yield build_workload(accelerator, config, use_prepared=True)
    forget_accelerate()
