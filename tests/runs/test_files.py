"""Outputs that the user names."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from nanogpt_hf.runs.files import write_json


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm to write to")
def test_file_in_shared_memory_is_replaced():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "x.json"
        for number in (1, 2):
            write_json(file, {"a": number})
        assert json.loads(file.read_text()) == {"a": 2}


def test_output_for_a_descriptor_follows_what_it_has(tmp_path):
    with (tmp_path / "log").open("w") as opened:
        opened.write("before\n")
        opened.flush()
        write_json(Path(f"/dev/fd/{opened.fileno()}"), {})
    assert (tmp_path / "log").read_text() == "before\n{}\n"
