"""Render a chat prompt with a model's chat template, which may be hostile."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import transformers

from nanogpt_hf.errors import DataError, one_line

# Templates render in milliseconds, and no context is as long.
_SECONDS, _CHARACTERS = 2.0, 10_000_000


class _TimeUp(BaseException):
    """Not an Exception, so that neither a template nor a library can catch it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeUp in the block after `seconds`. Python allows it in the main thread and on Unix only."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def give_up(*_: object) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def render_prompt(tokenizer: transformers.PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The prompt for the answer to the last of `messages`.

    transformers renders templates in Jinja's sandbox, which protects the system, but does not stop endless loops.
    Raises DataError in one line for a template that fails, takes 2 seconds, or writes more than 10 million characters.
    """
    try:
        with _time_limit(_SECONDS):
            text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except _TimeUp:
        raise DataError(
            f"the model's chat template takes more than {_SECONDS:g} seconds; choose another model"
        ) from None
    except Exception as error:  # whatever the template's own expressions raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"the model's chat template fails ({reason:.200}); choose another model") from None
    if len(text) > _CHARACTERS:
        raise DataError(f"the model's chat template writes {len(text):,} characters; choose another model")
    return text
