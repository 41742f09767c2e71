"""Sources that are built in: Python's documentation, and generated additions and subtractions."""

import zlib
from collections.abc import Iterator

import numpy as np

from nanogpt_hf.config.seeds import derive_seed

ARITHMETIC = "arithmetic"
BUILT_IN = ("python-docs", ARITHMETIC)  # sources that are neither files nor downloads
_LARGEST = 99  # operand
_DOCUMENTS, _LINES = 2_000, 50  # documents and lines of the text
_ROWS = 10_000
_HELD_OUT_SHARE = 10  # one question in ten


def python_docs() -> str:
    from pydoc_data.topics import topics

    return "\n\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def is_held_out(question: str) -> bool:
    """Whether a generated question is held out: by its text, so that it is in one split only."""
    return zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0


def arithmetic_question(seed: int, index: int, *, held_out: bool) -> tuple[str, str]:
    """Question `index` and its answer, such as ("12+7", "19"); a pure function of its arguments."""
    draws = np.random.Philox(key=derive_seed(seed, "questions", int(held_out), index))
    while True:
        first, second, sign = (int(bits) for bits in draws.random_raw(3))
        first, second = first % (_LARGEST + 1), second % (_LARGEST + 1)
        question, answer = (
            (f"{first}+{second}", first + second)
            if sign % 2
            else (f"{first}-{second}", first - second)
        )
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
