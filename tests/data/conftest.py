"""Fixtures of several files: write a source of text into the test's folder."""

import pytest


@pytest.fixture
def write(tmp_path):
    """A function that writes a file, a text or bytes, below the test's folder; returns its path."""

    def write(name, data):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write
