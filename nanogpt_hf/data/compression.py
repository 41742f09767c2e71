"""Open compressed files: all streams of a file, one after another."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from typing import IO, Any

import pyarrow

_AT_ONCE = 1 << 17  # bytes that are read from a compressed file at once


class _Streams(io.RawIOBase):
    """Bytes of the compressed streams in a file, one after another.

    The files of the modules bz2 and lzma ignore whatever follows a whole stream, so they lose the
    rows of one that is damaged, or comes after padding.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]):
        self._file = file
        self._begin = begin
        self._stream = begin()
        self._number = 1  # the stream's, for messages

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            # After the end of a stream comes padding, another stream, or the end of the file.
            data = b""
            if self._stream.eof:
                data = self._stream.unused_data
                # Zeros are padding.
                while not (data := data.lstrip(b"\0")):
                    if not (data := self._file.read(_AT_ONCE)):
                        return 0
                self._stream = self._begin()
                self._number += 1
            elif self._stream.needs_input and not (data := self._file.read(_AT_ONCE)):
                raise ValueError(f"compressed stream {self._number} has no end; copy it again")
            try:
                part = self._stream.decompress(data, len(buffer))
            except (OSError, lzma.LZMAError) as error:
                raise ValueError(
                    f"compressed stream {self._number} is damaged, or is none: {error}; copy it "
                    "again"
                ) from None
            # A stream may give nothing until it has read more.
            if part:
                buffer[: len(part)] = part
                return len(part)


def _streams(begin: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda file: io.BufferedReader(_Streams(file, begin), _AT_ONCE)


# What opens a file of each ending.
DECOMPRESS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": _streams(bz2.BZ2Decompressor),
    ".xz": _streams(lzma.LZMADecompressor),
    ".lzma": _streams(lzma.LZMADecompressor),
    ".zst": lambda file: pyarrow.input_stream(file, compression="zstd"),
}
