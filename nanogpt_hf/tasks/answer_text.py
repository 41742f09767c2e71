"""Read the choice of an answer: the letter of a choice, or the number after ####.

docs/alignment.md states the rules, tests/tasks/test_answers.py has a table of answers.
"""

import re
import unicodedata
from fractions import Fraction

# Commands of LaTeX that only change how their argument looks.
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\f?boxed\s*\{([^{}]*)\}")
_MATH = re.compile(r"\\[()\[\],;! ]|\$")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LINE_MARK = re.compile(r"^[ \t]*(?:[#>]+|[-+•→])[ \t]+", re.MULTILINE)

# A word of one letter. The letters in `B12`, `C++`, `X-ray`, `U.S.` and `B's` are no choices.
_WORD = r"(?<![\w./\-])(?<!\w['’])([A-Za-z])(?![\w+#^]|['’.\-]\w|\s*=)"
_OPEN = r"[(\[{'\"‘“]{0,4}"
_CLOSE = r"[)\]}'\"’”]{0,4}"
_LETTER = _OPEN + _WORD + _CLOSE
# After one of these words, `A` and `I` are letters of a choice, not the article and the pronoun.
_REASON = r"(?:because|since|as|due|given|for|is|was|which)\b"
_END = r"(?=\s*(?:[.,;:!?—–-]|$|\n|(?:because|since|as)\b))"
# Words between `answer` and its letter.
_FILLER = (
    r"(?:[\s:=,→–—-]|(?:is|was|are|be|would|should|must|could|may|might|has|seems|appears|to|therefore|thus|"
    r"probably|likely|most|definitely|clearly|indeed|obviously|now|the|that|it|it's|final|"
    r"option|choice|letter|answer|i think|i believe)\b){0,60}"
)
_COPULA = r"\s*(?::|=|\b(?:is|was|would|should|must|seems)\b)"
_NAMED = [
    re.compile(pattern + _LETTER, re.IGNORECASE)
    for pattern in (
        rf"\banswers?\b{_FILLER}",
        rf"\b(?:option|choice|letter){_COPULA}{_FILLER}",
        rf"\b(?:choose|chose|pick|picked|select|selected|(?:go|going|went) with)\b{_FILLER}",
    )
]
_RIGHT = re.compile(rf"{_LETTER}\s+is\s+(?:the\s+)?(?:correct|right|best|true|answer)\b")
_FIRST = re.compile(rf"\s*(?:(?:option|choice|letter)\s+)?{_LETTER}", re.IGNORECASE)
_ALONE = re.compile(rf"^[ \t]*{_LETTER}[ \t.:]*$", re.MULTILINE)
_SUGGESTED = re.compile(
    r"\b(?:it is|it's|it must be|think|believe|guess|say|leaves|leaving|so|hence|thus|therefore)\b"
    rf"{_FILLER}{_LETTER}{_END}",
    re.IGNORECASE,
)
# Words before a statement that take it back.
_NEGATED = re.compile(
    r"(?:\b(?:wrong|incorrect|false|other|if|whether|not|never|cannot)|n['’]t)"
    r"(?:\s+(?:think|believe|say|agree))?(?:\s+that)?(?:\s+the)?\s*$",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"\s*(?:(?:is|was)\s+(?:not|wrong|incorrect|false)|(?:is|was)n['’]t|cannot|can['’]t)\b"
)
# More letters, as in `A or B` and `A, B and C`.
_SEVERAL = re.compile(
    rf"\s*(?:,|/|&|\bor\b|\band\b)\s*(?:or\s+|and\s+)?{_OPEN}([A-Za-z])"
    r"(?=[)\]}'\"’”]*(?:\s*(?:[.,;:/&!?)]|$|\n|or\b|and\b)))"
)


def chosen_letter(text: str) -> str | None:
    """Find the letter of the choice that an answer makes, in upper case; None if it makes none or
    names several.

    The last statement such as `the answer is B` counts. Without one, these are candidates, and the
    last of them counts: a letter at the beginning of the answer, a letter alone on a line, and a
    suggestion such as `I think it's B`.
    """
    # A reasoning model weighs all choices before it answers.
    text = _plain(text.rpartition("</think>")[2])
    text = _BOXED.sub(r" The answer is \1.\n", text)
    text = _TAG.sub(lambda tag: ".\n" if tag[1] else " The answer is ", text).strip()
    if named := _statements([*_NAMED, _RIGHT], text):
        return _last(named, text)
    first = _FIRST.match(text)
    begins = [first] if first and _is_choice(first, text, first=True) else []
    return _last([*begins, *_statements([_ALONE, _SUGGESTED], text)], text)


def _plain(text: str) -> str:
    """Remove marks of Markdown and LaTeX, and make wide characters plain ones."""
    text = _MATH.sub(" ", unicodedata.normalize("NFKC", text))
    text = _LINE_MARK.sub("", re.sub(r"[*`_~]", "", text))
    # Commands are nested, as in \textbf{\text{B}}: each round removes the innermost ones.
    while (plain := _STYLE.sub(r"\1", text)) != text:
        text = plain
    return text


def _statements(patterns: list[re.Pattern[str]], text: str) -> list[re.Match[str]]:
    """The statements that no later word withdraws."""
    found = [match for pattern in patterns for match in pattern.finditer(text)]
    return [match for match in found if _is_choice(match, text)]


def _is_choice(match: re.Match[str], text: str, *, first: bool = False) -> bool:
    """Whether the letter is one of a choice: no article, no pronoun, not excluded."""
    letter = match[1]
    after = text[match.end() :]
    if _NEGATED.search(text[max(0, match.start() - 60) : match.start()]):
        return False
    if first and _REJECTED.match(after):
        return False
    followed = re.match(r"[ \t]+['\"]?\w", after) and match.end() == match.end(1)
    reason = re.match(rf"[ \t]+{_REASON}", after, re.IGNORECASE)
    several = _SEVERAL.match(after)
    # Before another word, `A dog` is an article and `I think` a pronoun, and at the beginning of an
    # answer a small letter is a word of another language.
    if followed and not reason and not several:
        return letter not in "AaIi" and (letter.isupper() or not first)
    return True


def _last(statements: list[re.Match[str]], text: str) -> str | None:
    """The letter of the last statement; None if it names several, or there is none."""
    if not statements:
        return None
    last = max(statements, key=lambda match: match.start(1))
    return None if _SEVERAL.match(text, last.end()) else last[1].upper()


# Digits of a number. No answer has more, and a power of ten with a huge exponent would fill the
# memory.
_LONGEST = 100
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_DIGITS = r"\d+(?:[,_'’]\d+|(?:\{,\}|[ ])\d{3}(?!\d))*"
_VALUE = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE]([+-]?\d+)|\s*(?:×|x|\*|\\times)\s*10\s*\^\s*\{?([+-]?\d+)\}?)?"
_NUMBER = re.compile(
    r"[\s=(\[{'\"]*([+-]?)\s*(?:[$€£¥₹]|USD|EUR|GBP)?\s*([+-]?)\s*"
    rf"(?:(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)|({_VALUE}){_POWER})"
)
# After one of these, a number is a part of a list, an expression, a date or a time.
_MORE = re.compile(
    r"\s*(?:[,;]+|(?:or|and|to|x)\b|x|[-+*/×^:]|\\times)\s*[$€£¥]?\d|[.](?:\d|[eE]\d)|\s+\d|\d"
)


def final_number(text: str) -> Fraction | None:
    """Find the number after the last #### that has one; None if there is none, or several."""
    # Only the rest of the line counts: a model may write on after its answer.
    for part in reversed(re.split("#{4,}", text)[1:]):
        line = next(iter(part.strip().splitlines()), "")
        number = _NUMBER.match(_plain_number(line))
        if number:
            return _value(number)
    return None


def _plain_number(line: str) -> str:
    """Remove marks of Markdown and LaTeX, and everything up to the last equals sign."""
    # 10² is 10^2, and 2½ is 2 1/2, before NFKC makes 102 and 21/2 of them.
    line = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{m[0].translate(_SUPERSCRIPTS)}", line)
    line = re.sub("[¼-¾⅐-⅞]", r" \g<0>", line)
    line = unicodedata.normalize("NFKC", line)
    line = re.sub("[\u2212\u2013]", "-", line).replace("\u2044", "/")
    line = re.sub(r"(?<![\w ])\*+|\*+(?![\w ])|`|^\*+|\*+$", "", line)
    line = re.sub(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r" \1/\2", line)
    while (plain := _BOXED.sub(r"\1", _STYLE.sub(r" \1", line))) != line:
        line = plain
    line = re.sub(r"\\[()\[\],;!]|\\(?=[$%])", "", line)
    line = line.replace("$", " ") if line.count("$") == 2 else line
    return line.rpartition("=")[2] if re.search(r"\d\s*=\s*\S", line) else line


def _value(number: re.Match[str]) -> Fraction | None:
    """The exact value of a number; None if it is too long, or a part of something larger."""
    # Either a fraction (whole, numerator, denominator), or a decimal with a power of ten.
    sign, second, whole, numerator, denominator, value, exponent, power = number.groups()
    if len(number[0]) > _LONGEST or _MORE.match(number.string, number.end()):
        return None
    if denominator:
        if not int(denominator):
            return None
        size = Fraction(int(whole or 0)) + Fraction(int(numerator), int(denominator))
    else:
        tens = int(exponent or power or 0)
        if abs(tens) > _LONGEST:
            return None
        size = Fraction(re.sub(r"[^\d.]", "", value)) * Fraction(10) ** tens
    return -size if "-" in sign + second else size
