"""The servers of tests/serving/, for the tests of a GPU."""

from serving.conftest import running

__all__ = ["running"]
