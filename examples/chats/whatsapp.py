"""Read a chat that WhatsApp has exported as text.

python examples/chats/whatsapp.py "WhatsApp Chat.txt" chat.jsonl --me Ada
"""

import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rows import Message, write_rows

# "[31.12.25, 23:59:58] Ada: text" on iOS, "12/31/25, 11:59 PM - Ada: text" on Android. The date is
# written as the telephone's language does.
_START = re.compile(
    r"\[?(?P<date>\d{1,4}[./-]\d{1,2}[./-]\d{1,4}),? (?P<time>\d{1,2}[:.]\d{2}(?:[:.]\d{2})?)"
    r" ?(?P<half>[AaPp]\.? ?[Mm]\.?)?(?:\]| -) (?P<rest>.*)"
)
# Marks of direction and narrow spaces, which WhatsApp puts around names, times and attachments.
_MARKS = str.maketrans({"\u200f": "", "\u202f": " ", "\u00a0": " "})
# iOS begins its own texts (encryption, attachments) with this mark, and some lines, too.
_OWN = "\u200e"
_NO_TEXT = re.compile(r"<[^<>]*(omitted|attached)[^<>]*>|.* omitted|This message was deleted\.?")


def read(path: Path) -> Iterator[Message]:
    text = path.read_text(encoding="utf-8-sig").translate(_MARKS)
    lines = [line.removeprefix(_OWN) for line in text.splitlines()]
    starts = [_START.fullmatch(line) for line in lines]
    day_is_first = is_day_first([match["date"] for match in starts if match])
    chat = path.stem
    found = []
    for line, match in zip(lines, starts, strict=True):
        if match is None:
            # A line without a date continues the message before.
            if found:
                found[-1][2].append(line)
            continue
        sender, colon, text = match["rest"].partition(": ")
        # Android's own lines (encryption, who joined) have no sender.
        is_own = not colon or text.startswith(_OWN)
        found.append((time_of(match, day_is_first), None if is_own else sender, [text]))
    for time, sender, parts in found:
        text = "\n".join(part for part in parts if not _NO_TEXT.fullmatch(part)).strip()
        if sender is not None and text:
            yield Message(chat, time, sender, text)
    if not found:
        raise ValueError("no line begins with a date")


def is_day_first(dates: list[str]) -> bool:
    """Whether 3/4 is the third of April: unless some date shows that the month is first."""
    parts = [re.split(r"[./-]", date) for date in dates]
    return not any(len(part[0]) < 3 and int(part[1]) > 12 for part in parts)


def time_of(match: re.Match, day_is_first: bool) -> datetime:
    numbers = [int(part) for part in re.split(r"[./-]", match["date"])]
    if numbers[0] > 31:
        year, month, day = numbers
    elif day_is_first:
        day, month, year = numbers
    else:
        month, day, year = numbers
    hour, minute, *seconds = (int(part) for part in re.split(r"[:.]", match["time"]))
    if match["half"]:
        hour = hour % 12 + (12 if match["half"][0] in "Pp" else 0)
    return datetime(year + 2000 if year < 100 else year, month, day, hour, minute, *seconds)


if __name__ == "__main__":
    sys.exit(write_rows(read, None, __doc__.splitlines()[0]))
