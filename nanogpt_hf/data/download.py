"""Download a file from a URL, perhaps with a login in it, and check its sha256."""

import hashlib
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from nanogpt_hf.errors import DataError


def is_url(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def without_login(source: str) -> str:
    """A source for messages: a URL without its user and password."""
    return re.sub(r"(?<=//)[^/?#]*@", "", source, count=1) if is_url(source) else source


def _quoted(part: str) -> str:
    """A part of a URL in ASCII; existing escapes are kept."""
    return urllib.parse.quote(part, safe="/%:@!$&'()*+,;=~?")


def _opener(url: str) -> tuple[str, urllib.request.OpenerDirector]:
    """The URL in ASCII without its login, and an opener that sends the login only to that host.

    Raises ValueError if it is not a URL.
    """
    parts = urllib.parse.urlsplit(url)
    login, _, address = parts.netloc.rpartition("@")
    host = urllib.parse.urlsplit(f"//{address}")
    if not host.hostname or host.port == 0:  # reading an invalid port raises ValueError
        raise ValueError("no host")
    address = address if address.isascii() else address.encode("idna").decode()
    passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
    if login:
        user, _, password = login.partition(":")
        root = f"{parts.scheme}://{address}/"
        passwords.add_password(
            None, root, urllib.parse.unquote(user), urllib.parse.unquote(password), is_authenticated=True
        )
    plain = urllib.parse.urlunsplit((parts.scheme, address, _quoted(parts.path), _quoted(parts.query), ""))
    return plain, urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(passwords))


def download(url: str, folder: Path, *, sha256: str | None, knobs: tuple[str, str]) -> Path:
    """Download a file into `folder`, and check its sha256 if that is given.

    `knobs` name the URL and the sha256 in error messages. Raises DataError if it cannot be downloaded, or is another
    file; a password in the URL is never printed.
    """
    digest = hashlib.sha256()
    try:
        plain, opener = _opener(url)
    except ValueError:  # the error might quote a part of a password
        raise DataError(
            f"{knobs[0]}: cannot be downloaded: not a URL; in a user name or password write / as %2F, : as %3A, "
            "@ as %40, ? as %3F and # as %23"
        ) from None
    target = folder / (Path(urllib.parse.urlsplit(url).path).name or "download.txt")
    url = without_login(url)
    try:
        with opener.open(plain, timeout=60) as response, target.open("wb") as file:
            while block := response.read(1 << 20):
                digest.update(block)
                file.write(block)
            if response.length:  # read() with a size does not report a lost connection
                raise OSError(f"the connection ended {response.length:,} bytes early")
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # the connection is left open with it
        raise DataError(f"{knobs[0]}: {url}: cannot be downloaded: {getattr(error, 'reason', error)}") from None
    if sha256 and digest.hexdigest() != sha256.lower():
        raise DataError(f"{knobs[1]}: {url} has sha256 {digest.hexdigest()}, not {sha256}; nothing was kept")
    return target
