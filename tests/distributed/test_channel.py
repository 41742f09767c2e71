"""Messages and files through the launcher's key-value store, between threads as between processes."""

import threading
import time

import pytest
from torch.distributed import TCPStore

from nanogpt_hf.distributed import channel
from nanogpt_hf.distributed.channel import Channel
from nanogpt_hf.errors import LostProcess

CHUNKS = [b"a" * 5, b"\0\xff" * 2**21, *(bytes([n]) for n in range(20))]  # 4 MiB is the largest chunk of a file


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


def send_all(sender: Channel) -> None:
    send = sender.sender("file", "result")
    for data in (*CHUNKS, b""):
        send(memoryview(data))


def in_thread(action) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_file_arrives_in_chunks_of_which_few_are_in_the_store(connected, store):
    def send() -> None:
        sender = connected()
        send_all(sender)
        sender.post("report", {"files": 1})

    thread, main, received, held = in_thread(send), connected(), [], []
    before = 1  # the store counts its own keys
    for data in main.receive("file", "report"):
        received.append(data)
        time.sleep(0.02)
        held.append(store.num_keys() - before)
    assert received == CHUNKS
    assert max(held) <= 4
    assert main.wait_for("report", last_reader=True) == {"files": 1}
    thread.join()
    assert store.num_keys() <= before + 1


def test_receive_ends_with_the_message_of_a_sender_that_failed(connected):
    sender, main = connected(), connected()
    send = sender.sender("file", "result")
    send(b"first")
    sender.post("report", {"error": "none"})
    assert list(main.receive("file", "report")) == [b"first"]
    assert list(main.receive("second file", "report")) == []


def test_sender_ends_if_the_receiver_has_failed(connected):
    sender, main = connected(), connected()
    threading.Timer(0.1, lambda: main.post("result", {"RunFolderError": "full"})).start()
    with pytest.raises(OSError, match="the receiver has ended"):
        send_all(sender)


WAITS = {
    "message": lambda waiting: waiting.wait_for("never"),
    "chunk": lambda waiting: list(waiting.receive("never", "report")),
    "room for a chunk": send_all,
}


@pytest.mark.parametrize("wait", WAITS)
def test_abandoned_channel_raises_lost_process(connected, wait):
    waiting = connected()

    def abandon() -> None:
        while waiting.waiting_since is None:
            time.sleep(0.001)
        waiting.abandoned = True

    in_thread(lambda: (time.sleep(0.1), abandon()))
    with pytest.raises(LostProcess):
        WAITS[wait](waiting)


def test_one_process_posts_without_a_store():
    alone = Channel()
    alone.post("key", {})
    alone.finish("read", 1)
    assert alone.waiting_since is None
