"""The compiler of a run as one text, which has what decides its kernels: a dynamo_backend, a
dynamo_mode other than the default, and `regional` if each block is compiled by itself, for example
`inductor, max-autotune-no-cudagraphs`.
"""

import itertools

BACKENDS = ("no", "eager", "aot_eager", "inductor")
# The first is the default.
MODES = ("default", "max-autotune-no-cudagraphs")


def compiler_text(backend: str, mode: str, *, is_regional: bool) -> str:
    """Return the text; "" for no backend, and `no` for the backend NO."""
    backend = backend.lower()
    if backend in ("", "no"):
        return backend
    return ", ".join([backend, *[mode] * (mode != MODES[0]), *["regional"] * is_regional])


def compiler_parts(text: str) -> tuple[str, str, bool]:
    """Return backend, mode, and whether each block is compiled by itself. Raises ValueError for a
    text that names no compiler.
    """
    for parts in itertools.product(BACKENDS, MODES, (False, True)):
        backend, mode, is_regional = parts
        if compiler_text(backend, mode, is_regional=is_regional) == text:
            return parts
    raise ValueError(f"{text!r:.60} is no dynamo_backend")
