"""Serve a model as OpenAI's API does, with a chat page: a run folder, a model folder, or a model on the Hub.

Any client of that API can use http://localhost:8000/v1: models, completions, and chat completions if the model has a
chat template. http://localhost:8000 is the chat page. Ctrl-C ends the server.
"""

import argparse
import functools
import importlib.util
import logging
from pathlib import Path

from nanogpt_hf.commands.arguments import add_model_argument, number
from nanogpt_hf.commands.models import autocast, build_generation_accelerator, open_model
from nanogpt_hf.errors import UserError

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default %(default)s, this machine")
    parser.add_argument("--port", type=number(int, 0, 65535), default=8000, help="0 is a free one; default %(default)s")


def served_name(name: str) -> str:
    """The name of a model in the API: that of its run or folder without the path, or its Hub id."""
    path = Path(name)
    if not path.is_dir():
        return name
    path = path.resolve()
    return path.parent.name if path.name in ("best", "final") else path.name


def run(arguments: argparse.Namespace) -> None:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"serve: {' and '.join(missing)} not installed; run `pip install 'nanogpt_hf[serve]'`")

    from nanogpt_hf.serving.server import Server, is_loopback, listen

    accelerator = build_generation_accelerator()
    if not accelerator.is_main_process:
        return
    with listen(arguments.host, arguments.port) as listener:
        model, tokenizer = open_model(arguments.model)
        precision = functools.partial(autocast, accelerator)
        name = served_name(arguments.model)
        server = Server(name, model.to(accelerator.device), tokenizer, precision, arguments.host)
        host, port = listener.getsockname()[:2]
        if not is_loopback(arguments.host):
            _log.warning("--host %s: all who can reach this machine can use the model; there is no password", host)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _log.info("%s: the API is at %s/v1, the chat page at %s; Ctrl-C ends the server", name, url, url)
        server.run(sockets=[listener])
