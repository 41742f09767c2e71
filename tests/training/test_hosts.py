"""Training on two hosts: two network namespaces of this machine joined by a virtual cable."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assertions import assert_same_experiment
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
# Two programs import torch, which takes ten seconds.
pytestmark = [pytest.mark.long, pytest.mark.slow]
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # known inside the two namespaces only
OPTIONS = {
    "model__dropout": 0.1,
    "train__max_steps": 10,
    "train__micro_batch_size": 2,
    "optim__schedule": "constant",  # so a longer run starts with the same steps
    "optim__learning_rate": 2e-3,
    "eval__every": 5,
    "checkpoint__every": 5,
    "checkpoint__keep": 5,
}


class Host:
    """A network namespace, and a process in it that runs the commands it receives (host.py)."""

    def __init__(self, rank: int, name: str, folder: Path):
        self.rank = rank
        self.namespace = name
        self.folder = folder
        self.interface = f"{name}e"
        self.log = folder.parent / f"host{rank}.log"
        ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        self.environment = {name: str(value) for name, value in ranks.items()}
        self.environment["MASTER_ADDR"] = ADDRESSES[0]
        self.program = self.start(str(Path(__file__).with_name("host.py")), stdin=subprocess.PIPE)

    def start(self, *words: str, **options) -> subprocess.Popen:
        command = ["ip", "netns", "exec", self.namespace, sys.executable, *words]
        environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": self.interface}
        options["env"] = os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)

    def answer(self, kind: str) -> int:
        # a failed test may leave an old answer; a status must not be taken for a process id to kill
        while (words := self.program.stdout.readline().split())[0] != kind:
            pass
        return int(words[1])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts, each with its own folder; they share only the network."""
    names = [f"ng{os.getpid() % 100_000}{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            a, b = (f"name {name}e netns {name}".split() for name in names)  # the cable's ends
            ip("link", "add", *a, "type", "veth", "peer", *b)
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", f"{name}e")
                for interface in ("lo", f"{name}e"):
                    ip("-n", name, "link", "set", interface, "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(
                f"network namespaces cannot be made here (Linux, ip and root are needed): {error}"
            )
        created = []
        for rank, name in enumerate(names):
            folder = tmp_path_factory.mktemp(f"host{rank}")
            created.append(Host(rank, name, folder))
            stack.callback(created[-1].program.communicate, timeout=30)  # closing stdin ends it
        yield created


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe):
    return make_recipe(
        tmp_path_factory.mktemp("recipe") / "two_hosts.yaml", **OPTIONS, data__dir="data"
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, recipe):
    """The same recipe on one process."""
    folder = tmp_path_factory.mktemp("one_process")
    words = ["--run-dir", str(folder / "run"), "--data.dir", str(folder / "data")]
    assert main(["pretrain", str(recipe), *words]) == 0
    return RunFolder(folder / "run")


ports = iter(range(29600, 29700))


def send_both(
    hosts, arguments, folders=(None, None), *, peer_timeout=60, busy=0, environment=()
) -> None:
    """Start a run on both hosts; the second prepares its data for `busy` seconds more."""
    port = next(ports)
    for host, folder in zip(hosts, folders, strict=True):
        command = {
            "environment": host.environment | {"MASTER_PORT": str(port)} | dict(environment),
            "folder": str(folder or host.folder),
            "log": str(host.log),
            "arguments": ["pretrain", *map(str, arguments)],
            "peer_timeout": peer_timeout,
            "busy": busy * host.rank,
        }
        host.program.stdin.write(json.dumps(command) + "\n")
        host.program.stdin.flush()
        host.process = host.answer("process")


def statuses(hosts) -> list[int]:
    return [host.answer("status") for host in hosts]


def wait_for_step(run: RunFolder, step: int) -> None:
    end = time.monotonic() + 60
    while not (run.metrics.exists() and f'"step": {step},' in run.metrics.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_two_hosts_with_shared_files_equal_one_process(hosts, one_process, recipe, tmp_path):
    # the real launcher and the shipped config, without GPUs and bf16
    launch = ["-m", "accelerate.commands.launch", "--num_cpu_threads_per_process=1"]
    launch += [
        f"--config_file={ROOT}/accelerate_configs/multi_node_ddp.yaml",
        f"--main_process_ip={ADDRESSES[0]}",
    ]
    launch += ["--num_processes=2", "--mixed_precision=no", "--dynamo_backend=no"]
    ours = [str(ROOT / "cli.py"), "pretrain", str(recipe), "--run-dir", "run"]
    processes = [
        host.start(*launch, f"--machine_rank={host.rank}", *ours, cwd=tmp_path) for host in hosts
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_same_experiment(RunFolder(tmp_path / "run"), one_process, samples=False)


def test_two_hosts_without_shared_files_stop_and_resume(hosts, one_process, recipe):
    # the signal goes to the second host; only the first has a run folder, and each has its own
    # data, which the second prepares for longer than a host without a heartbeat is waited for
    words = [recipe, "--run-dir", "run", "--train.max_steps", "100000"]
    send_both(hosts, words, peer_timeout=6, busy=8)
    run = RunFolder(hosts[0].folder / "run")
    wait_for_step(run, 6)
    os.kill(hosts[1].process, signal.SIGTERM)
    assert statuses(hosts) == [75, 75]
    assert "saved (another process asked for it)" in hosts[0].log.read_text()
    assert [path.name for path in hosts[1].folder.glob("[!.]*")] == ["data"]
    for folder in run.checkpoint_folders():
        if folder != run.checkpoint(5):
            shutil.rmtree(folder)
    # the second host has no checkpoint: the first decides to resume
    send_both(hosts, [recipe, "--run-dir", "run", "--auto-resume"])
    assert statuses(hosts) == [0, 0]
    assert f"resuming from {Path('run/checkpoints/step_00000005')}" in hosts[0].log.read_text()
    assert_same_experiment(run, one_process, samples=False)


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def test_sharded_run_without_a_shared_folder_is_one_line(hosts, recipe, tmp_path):
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    send_both(hosts, [recipe, "--run-dir", "run"], folders, environment=FSDP2)
    assert statuses(hosts) == [2, 2], hosts[0].log.read_text()
    for host, folder in zip(hosts, folders, strict=True):
        assert "--run-dir" in host.log.read_text().splitlines()[-1]
        assert "Traceback" not in host.log.read_text()
        assert not (folder / "run").exists()


def test_difference_between_hosts_is_one_line_on_both(hosts, recipe, tmp_path, text_file):
    folders = tmp_path / "first", tmp_path / "second"
    for folder, word in zip(folders, ("cat", "cow"), strict=True):
        folder.mkdir()
        (folder / "input.txt").write_text(text_file.read_text().replace("cat", word))
    send_both(hosts, [recipe, "--data.source", "input.txt", "--run-dir", "run"], folders)
    assert statuses(hosts) == [2, 2]
    for host in hosts:
        output = host.log.read_text()
        assert "Traceback" not in output
        assert "process 1 on " in output
        assert "has the data's revision 'sha256:" in output.splitlines()[-1]
    assert not (folders[0] / "run").exists()


@pytest.mark.parametrize("event", ["killed", "disconnected"])
def test_lost_host_ends_the_other_with_one_line(hosts, recipe, tmp_path, event):
    first, second = hosts
    words = [recipe, "--run-dir", "run", "--train.max_steps", "100000"]
    send_both(hosts, words, (tmp_path, tmp_path), peer_timeout=4)
    run = RunFolder(tmp_path / "run")
    wait_for_step(run, 6)
    start = time.monotonic()
    try:
        if event == "killed":
            os.kill(second.process, signal.SIGKILL)
        else:
            ip("-n", second.namespace, "link", "set", second.interface, "down")
        assert statuses(hosts) == [1, -signal.SIGKILL if event == "killed" else 1]
    finally:
        ip("-n", second.namespace, "link", "set", second.interface, "up")
    assert time.monotonic() - start < 60
    line = first.log.read_text().splitlines()[-1]
    assert line.startswith("lost another process: ")
    assert line.endswith(f"continues from {Path('run/checkpoints', run.newest_checkpoint().name)}")
    assert "Traceback" not in first.log.read_text()
