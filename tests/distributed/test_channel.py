"""Messages through the launcher's key-value store, between threads as between processes."""

import threading
import time

import pytest
from torch.distributed import TCPStore

from nanogpt_hf.distributed import channel
from nanogpt_hf.distributed.channel import Channel
from nanogpt_hf.errors import LostProcess


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connected(monkeypatch, store):
    """A function that makes a channel with a connection of its own."""
    monkeypatch.setattr(channel, "connect_store", lambda name: TCPStore("127.0.0.1", store.port))

    def connect() -> Channel:
        made = Channel()
        made.connect("test")
        return made

    return connect


def in_thread(action) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_message_arrives_and_its_last_reader_deletes_it(connected, store):
    main, before = connected(), store.num_keys()
    thread = in_thread(lambda: connected().post("report", {"files": 1}))
    assert main.wait_for("result", "report", last_reader=True) == {"files": 1}
    thread.join()
    assert store.num_keys() == before


def test_abandoned_channel_raises_lost_process(connected):
    waiting = connected()

    def abandon() -> None:
        while waiting.waiting_since is None:
            time.sleep(0.001)
        waiting.abandoned = True

    in_thread(abandon)
    with pytest.raises(LostProcess):
        waiting.wait_for("never")


def test_one_process_posts_without_a_store():
    alone = Channel()
    alone.post("key", {})
    alone.finish("read", 1)
    assert alone.waiting_since is None
