"""Numbers, durations, byte counts and plurals as text."""

import math

from nanogpt_hf.formatting import format_bytes, format_duration, format_number, plural


def test_format_number_keeps_large_losses_short():
    values = (12.3456, 999_999_999, 1e304, math.inf, math.nan)
    assert [format_number(value, 2) for value in values] == [
        "12.35",
        "999999999.00",
        "1e+304",
        "inf",
        "nan",
    ]


def test_format_duration():
    assert [format_duration(seconds) for seconds in (0.4, 59.6, 125, 3725, 4e6)] == [
        *("0 s", "1 min 0 s", "2 min 5 s", "1 h 2 min", "1,111 h 6 min")
    ]


def test_format_bytes():
    assert [format_bytes(size) for size in (12_345, 3e6, 2.5e9)] == ["0.0 MB", "3.0 MB", "2.5 GB"]


def test_plural():
    assert [plural(1, "process"), plural(2, "process"), plural(1000, "tensor")] == [
        *("1 process", "2 processes", "1,000 tensors")
    ]
