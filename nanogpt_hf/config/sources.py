"""Sources of a mixture: check the entries of `data.source`; the data section and the integer
weight of each source.
"""

import dataclasses
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.schema import KNOBS, Config, DataSection, Knob, get_value
from nanogpt_hf.config.values import convert_entries

# Knobs of `data` that an entry may set for its own source.
_OF_A_SOURCE = ("format", "config", "split", "validation_split", "revision", "text_column")
_OF_A_SOURCE += ("validation_fraction", "sha256", "streaming", "max_tokens", "max_bad_rows")
_TEXT = KNOBS["data.dir"]
_SHARE = "share of the samples, relative to the other weights"
_KEYS = {
    "source": _TEXT,
    "weight": Knob("weight", int | float, None, _SHARE, 0, None),
    "name": _TEXT,
    "dir": _TEXT,
    **{key: KNOBS[f"data.{key}"] for key in _OF_A_SOURCE},
}
_EXAMPLE = "{source: web.txt, weight: 0.7}"
_NAME = re.compile(r"[\w-][\w.-]{0,99}")
# The order of the sources in one period is a table in memory, so periods are bounded. After a whole
# number of periods the weights are met exactly.
_LONGEST_PERIOD = 1_000_000


class Source(NamedTuple):
    """One source of a mixture."""

    name: str
    # The samples of this source in each period of the mixture. The weights of all sources have no
    # common divisor.
    weight: int
    # The section of a recipe of this source alone, with its own folder.
    data: DataSection


def read_sources(entries: list[Any]) -> list[dict[str, Any]]:
    """The entries of `data.source`, converted and named. Raises ValueError for a wrong one."""
    sources = convert_entries(entries, _KEYS, ("source", "weight"), _EXAMPLE)
    names = []
    for source in sources:
        name = source.setdefault("name", short_name(source["source"]))
        # The name of a source is the name of its folder of prepared data.
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: {name!r:.80}: expected letters, digits, -, _ and dots")
        if name in names:
            raise ValueError(f"two sources are named {name}; set another `name` for one of them")
        names.append(name)
    # Raises ValueError if the period of the mixture is too long.
    _integer_weights(sources)
    return sources


def _integer_weights(sources: list[dict[str, Any]]) -> list[int]:
    """The weights as the smallest integers in the same, exact proportion; 0.7 is seven tenths.

    Raises ValueError if their sum, the period of the mixture, is too large.
    """
    # By its text, 0.7 is exactly 7/10, while the float nearest to 0.7 is not. With the least common
    # multiple of the denominators as the unit, all weights are integers; dividing them by their
    # greatest common divisor makes the period as short as it can be.
    fractions = [Fraction(str(source["weight"])) for source in sources]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    counts = [int(fraction * unit) for fraction in fractions]
    if not any(counts) or min(counts) < 0:
        raise ValueError("the weights of all sources are 0, or one is negative")
    counts = [count // math.gcd(*counts) for count in counts]
    if sum(counts) > _LONGEST_PERIOD:
        raise ValueError(
            f"the weights {', '.join(str(source['weight']) for source in sources)} are met exactly "
            f"only after more than {_LONGEST_PERIOD:,} samples; round them"
        )
    return counts


def short_name(source: str) -> str:
    """`texts/my.txt` -> my, `user/set` -> set: a name for a folder."""
    path = Path(re.sub(r"[?#].*", "", source) if "://" in source else source)
    word = path.stem if re.fullmatch(r"\.[a-z]\w{0,7}", path.suffix) else path.name
    return re.sub(r"[^\w.-]+", "-", word).strip("-.")[:60] or "text"


def is_mixture(data: DataSection) -> bool:
    return isinstance(data.source, list)


def chats(data: DataSection) -> bool:
    """Whether a model that is trained on the sources is prompted by messages."""
    return any(FORMATS[source.data.format].chats for source in sources_of(data))


def learns_parts(data: DataSection) -> bool:
    """Whether a source has documents of which only a part is learned, such as answers."""
    return any(FORMATS[source.data.format].learned for source in sources_of(data))


def packs(config: Config) -> bool:
    """Whether blocks hold several documents that must not attend to each other."""
    if config.rl.task or config.align.loss:
        # Questions and pairs have blocks of their own, which are not packed.
        return False
    for source in sources_of(config.data):
        if source.data.mask or source.data.packing in FORMATS[source.data.format].apart:
            return True
    return False


def sources_of(data: DataSection) -> list[Source]:
    """The sources of a mixture, or the only source: for each, its name, weight and data section."""
    if isinstance(data.source, str):
        return [Source(short_name(data.source), 1, data)]
    sources = []
    for entry, weight in zip(data.source, _integer_weights(data.source), strict=True):
        own = {key: entry[key] for key in _OF_A_SOURCE if key in entry}
        folder = entry.get("dir") or f"{data.dir}/{entry['name']}"
        sources.append(
            Source(
                entry["name"],
                weight,
                dataclasses.replace(data, source=entry["source"], dir=folder, **own),
            )
        )
    return sources


def source_text(data: DataSection) -> str:
    """The source for messages; of a mixture `0.7 web.txt + 0.3 books/*.txt`."""
    if isinstance(data.source, str):
        return data.source
    return " + ".join(f"{entry['weight']} {entry['source']}" for entry in data.source)


def knob_text(config: Config, key: str) -> str:
    """The value of a knob as text, for tables."""
    return source_text(config.data) if key == "data.source" else str(get_value(config, key))


def learns_teacher_alone(config: Config) -> bool:
    """Whether a run on questions learns its teacher alone: rewards are measured only."""
    distill = config.distill
    return bool(config.rl.task and distill.teacher and distill.weight == 1)
