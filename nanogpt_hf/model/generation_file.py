"""Check a model's generation config, whose ids that end a text are read: transformers takes any
value.
"""

import json
import math
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from nanogpt_hf.errors import UserError, one_line


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def check_generation_file(folder: Path) -> None:
    """Raises UserError if generation_config.json in `folder`, if there is one, is not a JSON object
    of finite numbers that transformers can read.
    """
    file = folder / GENERATION_CONFIG_NAME
    if not file.is_file():
        return
    try:
        text = file.read_text(encoding="utf-8")
        # JSON has no NaN, but Python reads and writes it.
        fields = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        GenerationConfig.from_dict(fields)
    # transformers raises an AttributeError if a field has the wrong type.
    except Exception as error:
        raise UserError(
            f"{file}: cannot be read: {one_line(error)}; correct it, or remove the file: the model "
            "needs none"
        ) from None


def check_end_ids(name: str, model: PreTrainedModel) -> None:
    """Raises UserError if the generation config of the model that was read from `name` has an
    eos_token_id that is no token.

    An id that config.json states too may be beyond the vocabulary: transformers gives models with
    fewer tokens GPT-2's id by default, and it is never generated.
    """
    # One id or a list of ids, in both files.
    value: Any = getattr(model.generation_config, "eos_token_id", None)
    known: Any = model.config.eos_token_id
    known = known if isinstance(known, list) else [known]
    vocab_size: int = model.config.vocab_size
    for end in value if isinstance(value, list) else [value]:
        if end is None or (type(end) is int and (0 <= end < vocab_size or end in known)):
            continue
        raise UserError(
            f"{name}: {GENERATION_CONFIG_NAME}: eos_token_id {value!r} is not a token from 0 to "
            f"{vocab_size - 1:,} or a list of such; correct it, or remove the field"
        )
