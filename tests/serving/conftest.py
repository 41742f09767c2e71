"""Servers for the tests of serving/."""

import signal
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from transformers import AutoTokenizer

from nanogpt_hf.commands.generate import open_model
from nanogpt_hf.data.chat_template import chat_format
from nanogpt_hf.model import GPTConfig, GPTForCausalLM


@pytest.fixture(scope="session")
def running():
    """A function (model folder, name) -> context with a server in a thread of this process; it
    has a `port`.
    """
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from nanogpt_hf.serving.server import Server, listen

    @contextmanager
    def running(folder, name):
        with listen("127.0.0.1", 0) as listener:
            server = Server(name, *open_model(str(folder)), nullcontext, "127.0.0.1")
            server.port = listener.getsockname()[1]
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield server
            finally:
                server.handle_exit(signal.SIGTERM, None)
                thread.join(30)
            assert not thread.is_alive()

    return running


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory, byte_tokenizer):
    """A model folder with a chat template; its answers are letters without sense."""
    path = tmp_path_factory.mktemp("chat") / "parrot"
    config = GPTConfig(
        vocab_size=257,
        n_positions=256,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=256,
        eos_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPTForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    chat_format(tokenizer, "bytes")
    tokenizer.save_pretrained(path)
    return path
