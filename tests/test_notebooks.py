"""The notebooks run from the first cell to the last, here with few steps, in an empty folder."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {"STEPS": "20", "RATES": '"1e-3,3e-3"'}
# What each leaves: files, and how many pictures it shows.
RESULTS = {
    "first_gpt": (["runs/first_gpt/final/model.safetensors", "runs/first_code/report.html"], 1),
    "inside_a_gpt": (["runs/inside_look_back/report.html", "runs/inside_rates/sweep.json"], 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for name, value in SMALL.items():
            cell.source = re.sub(rf"^{name} = \S+", f"{name} = {value}", cell.source, flags=re.M)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    # A command that fails does not end a notebook; its last line says so.
    assert "nothing was started" not in text
    assert "Traceback" not in text
    files, pictures = RESULTS[path.stem]
    assert all((tmp_path / file).is_file() for file in files), text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stem in RESULTS
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
