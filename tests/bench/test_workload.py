"""The workload takes the loop's steps."""

from nanogpt_hf.bench import clock
from nanogpt_hf.config.names import vocab_size_by_name
from nanogpt_hf.training import methods


def test_workload_step_is_the_loops_step(work, monkeypatch):
    assert clock.train_step is methods.TEXT.step
    taken = []
    monkeypatch.setattr(
        clock, "train_step", lambda run, step, learning_rate: taken.append((step, learning_rate))
    )
    work.step()
    work.step()
    optim = work.run.config.optim
    assert [number for number, _ in taken] == [0, 1]
    assert taken[0][1] == optim.learning_rate > taken[1][1]  # the recipe's schedule


def test_workload_names_synthetic_tokens(work, tmp_path):
    assert work.token_source == f"synthetic tokens ({tmp_path / 'none'} is not prepared yet)"
    assert work.run.model_config.vocab_size == vocab_size_by_name("char", None)[0]
