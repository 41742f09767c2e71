"""Refuse text with bytes that are no UTF-8, or of UTF-16, with the remedy."""

AS_UTF8 = "; write the file in UTF-8, for example by iconv"


def utf8(text: str, remedy: str = AS_UTF8) -> str:
    """Return a text. Raises ValueError if bytes of it were no UTF-8, which Python has read with the
    error handler `surrogateescape`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            text.encode("utf-8", "surrogateescape").decode()
        except UnicodeDecodeError as error:
            raise not_utf8(error, remedy) from None
    return text


def not_utf8(error: UnicodeDecodeError, remedy: str = AS_UTF8) -> ValueError:
    """The error of a text that is not UTF-8, for the error of Python."""
    byte = error.object[error.start]
    return ValueError(f"not UTF-8: byte {byte:#04x} in position {error.start}{remedy}")


def without_nul(text: str, remedy: str = AS_UTF8) -> str:
    """Return a text. Raises ValueError if it has NUL bytes: English in UTF-16 has them, and without
    a byte order mark it is valid UTF-8.
    """
    if "\0" in text:
        raise ValueError(f"holds NUL bytes: binary data or UTF-16, no text in UTF-8{remedy}")
    return text
