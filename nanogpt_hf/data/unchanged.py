"""Refuse local files that change while they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanogpt_hf.data.manifest import file_digest, file_state
from nanogpt_hf.errors import DataError


class FilesBefore:
    """The state and the digest of a source's files, made before they are read."""

    def __init__(self, source: str, files: list[Path]):
        self._source = source
        self._files = files
        # In this order: a change while the digest is computed gives another state at the end.
        self.state = file_state(files)
        self.revision = _revision(files)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context that reads the files. Raises DataError at its end if they have changed: what was
        read would be of two texts, of which the digest names one.
        """
        try:
            yield
        except Exception:
            # A row that is cut may be one that another program writes.
            self._check()
            raise
        self._check()

    def _check(self) -> None:
        try:
            # A time alone proves nothing: the content decides, as it does for later calls.
            if file_state(self._files) == self.state or _revision(self._files) == self.revision:
                return
        except DataError as error:
            # A file was removed. Another error is one of the disk.
            if not isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                raise
        raise changed_while_read(self._source)


def _revision(files: list[Path]) -> str:
    return f"sha256:{file_digest(files)}"


def changed_while_read(source: str) -> DataError:
    return DataError(
        f"data.source: {source}: has changed while it was read; start again when no other program "
        "writes it"
    )
