"""Sources that are built in: Python's documentation, and generated additions and subtractions."""

import zlib
from collections.abc import Iterator

import numpy as np

from nanogpt_hf.config.seeds import derive_seed

ARITHMETIC = "arithmetic"
BUILT_IN = ("python-docs", ARITHMETIC)  # sources that are neither files nor downloads
# Numbers up to 99 have 20,000 questions: few enough to learn, too many for a small model to store.
_LARGEST = 99
# The sizes of the generated sources. Another size would be another source: the revision counts.
_DOCUMENTS = 2_000
_LINES = 50  # each document has
_ROWS = 10_000
_HELD_OUT_SHARE = 10  # one question in ten


def python_docs() -> str:
    # Python comes with topics of its own documentation, for `help()`, so no download is needed.
    from pydoc_data.topics import topics

    return "\n\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def is_held_out(question: str) -> bool:
    """Whether a generated question is held out: by its text, so that it is in one split only."""
    return zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0


def arithmetic_question(seed: int, index: int, *, held_out: bool) -> tuple[str, str]:
    """Question `index` and its answer, such as ("12+7", "19"); a pure function of its arguments."""
    # A stream of random bits for each question, so that any of them can be drawn alone.
    draws = np.random.Philox(key=derive_seed(seed, "questions", int(held_out), index))
    while True:
        first, second, sign = (int(bits) for bits in draws.random_raw(3))
        first %= _LARGEST + 1
        second %= _LARGEST + 1
        if sign % 2:
            question = f"{first}+{second}"
            answer = first + second
        else:
            question = f"{first}-{second}"
            answer = first - second
        # Draw again until the question is of the wanted split: about ten times for a held-out one.
        if is_held_out(question) == held_out:
            return question, str(answer)


def arithmetic_text() -> Iterator[str]:
    """Documents of lines such as `12+7=19`, of questions that are not held out."""
    for document in range(_DOCUMENTS):
        questions = range(document * _LINES, (document + 1) * _LINES)
        lines = ("=".join(arithmetic_question(0, number, held_out=False)) for number in questions)
        yield "".join(f"{line}\n" for line in lines)


def arithmetic_rows() -> Iterator[dict[str, str]]:
    """Rows of a question and its answer, of questions that are not held out."""
    for number in range(_ROWS):
        question, answer = arithmetic_question(1, number, held_out=False)
        yield {"prompt": question, "completion": answer}
