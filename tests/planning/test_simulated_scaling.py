"""The simulated tables of docs/performance.md: they are what the code prints, and near published throughputs."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("simulated_scaling", DOCS / "simulated_scaling.py")
sys.modules["simulated_scaling"] = simulation = importlib.util.module_from_spec(spec)  # dataclasses look it up
spec.loader.exec_module(simulation)
PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")


def test_simulated_table_of_gpt2_is_in_the_docs():
    lines = simulation.scaling_table([simulation.GPT2_XL])
    assert len(lines) == 6
    assert all(line in PAGE for line in lines)


@pytest.mark.slow
def test_simulated_tables_are_in_the_docs():
    for line in [*simulation.scaling_table(simulation.SIZES[1:]), *simulation.published_table()]:
        assert line in PAGE


@pytest.mark.slow
def test_simulated_steps_are_within_a_tenth_of_published_ones():
    # the share of the peak is fitted to the first row of each GPU: here the network, the model and the batch are others
    for row in simulation.PUBLISHED[1:]:
        rate, _ = simulation.simulated(row)
        assert 0.89 < rate / row.tokens_per_second < 1.1, row
