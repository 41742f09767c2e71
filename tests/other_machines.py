#!/usr/bin/env python3
"""Run the tests of numbers and processes as on other machines.

    tests/other_machines.py                      # all variations, in three runs
    tests/other_machines.py --alone              # one run for each variation
    tests/other_machines.py avx2 random-order    # one run with these variations
    make test-other-machines                     # the first, in the project's virtual environment

A variation that this machine does not allow is skipped with the reason. The exit status is 1 if a
test failed.
"""

import argparse
import contextlib
import functools
import os
import pwd
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import copytree

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [f"tests/{folder}" for folder in ("model", "optim", "training", "distributed", "methods")]
IS_ROOT = os.getuid() == 0
TMPFS = Path("/dev/shm")

INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
# Variation -> environment variables; what else they change is in `run`.
VARIATIONS: dict[str, dict[str, str]] = {
    "default-isa": dict(zip(INSTRUCTIONS, ("default", "SSE41", "SSE4_2"), strict=True)),
    "avx2": dict(zip(INSTRUCTIONS, ("avx2", "AVX2", "AVX2"), strict=True)),
    **{f"{threads}-threads": {"OMP_NUM_THREADS": str(threads)} for threads in (1, 2, 4)},
    "c-locale": {"LANG": "C", "LC_ALL": "C"},
    # of a user who launches jobs on GPUs from this terminal
    "job-settings": {
        "CUDA_VISIBLE_DEVICES": "7,GPU-none",
        "ACCELERATE_MIXED_PRECISION": "bf17",
        "ACCELERATE_TORCH_DEVICE": "cuda:7",
        "ACCELERATE_USE_FSDP": "perhaps",
        "ACCELERATE_DYNAMO_BACKEND": "nosuch",
        "FSDP_VERSION": "7",
        "PARALLELISM_CONFIG_TP_SIZE": "-3",
        "WORLD_SIZE": "many",
        "RANK": "-1",
    },
    "space-in-path": {},
    "not-root": {},
    "read-only-home": {},
    "tmpfs": {},
    "busy": {},
    "random-order": {},
}
# Variations that do not interfere, and which tests they run.
COMBINED = {
    (
        *("default-isa", "1-threads", "c-locale", "job-settings", "space-in-path"),
        "random-order",
    ): "not slow",
    ("avx2", "4-threads", "not-root", "read-only-home", "tmpfs"): "not slow",
    ("2-threads", "busy"): "long and not slow",
}
# Ends with the program that started it, however that ends.
SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
# Python may be in root's home, which others may not enter; in their own mount namespace they may.
AS_NOBODY = """
mount -t tmpfs tmpfs "$1" && mkdir "$1/upper" "$1/work" &&
mount -t overlay -o "lowerdir=$HOME,upperdir=$1/upper,workdir=$1/work" overlay "$HOME" &&
chmod 755 "$HOME"
shift
exec setpriv --reuid nobody --regid "$(id -g nobody)" --clear-groups env HOME="$1" "${@:2}"
"""


def as_nobody(folder: Path, home: Path, command: list[str]) -> list[str]:
    return ["unshare", "--mount", "bash", "-c", AS_NOBODY, "bash", str(folder), str(home), *command]


@functools.cache
def not_root_obstacle() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        command = as_nobody(Path(folder), TMPFS, [sys.executable, "-c", "import torch"])
        try:
            done = subprocess.run(command, cwd="/", capture_output=True, text=True)
        except FileNotFoundError as error:
            return str(error)
    return done.stderr.strip()[-200:] if done.returncode else None


def obstacle(variation: str) -> str | None:
    """Why this machine cannot run the variation."""
    import torch

    has_avx = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    if variation in ("default-isa", "avx2") and not has_avx:
        return "the CPU has no AVX2"
    if variation == "tmpfs" and not TMPFS.is_dir():
        return f"there is no {TMPFS}"
    if variation in ("not-root", "read-only-home") and IS_ROOT:
        return not_root_obstacle()
    return None


def run(variations: tuple[str, ...], processes: int, seed: int, arguments: list[str]) -> int:
    """Run the tests; return pytest's exit status."""
    environment = dict(os.environ)
    for variation in variations:
        environment |= VARIATIONS[variation]
    with contextlib.ExitStack() as stack:
        place = TMPFS if "tmpfs" in variations else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
        root = ROOT
        python = sys.executable
        arguments = list(arguments)
        for name in ("tmp", "home", "mount"):
            (folder / name).mkdir()
        if "space-in-path" in variations:
            root = folder / "a checkout"
            kept_out = {str(ROOT): {"data", "runs", "build", "dist"}}
            copytree(
                ROOT,
                root,
                ignore=lambda path, names: {
                    name for name in names if name.startswith(".") or name in kept_out.get(path, ())
                },
            )
            (root / ".venv").symlink_to(sys.prefix)
            python = str(root / ".venv" / "bin" / "python")
            arguments.append(f"--basetemp={folder / 'tmp' / 'of the tests'}")
        environment |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(root)}
        command = [python, "-m", "pytest", "-p", "no:cacheprovider"]
        command += ["-n", str(processes), "--dist", "loadfile"] if processes else []
        if "random-order" in variations:
            command += ["--random-order", f"--random-order-seed={seed}"]
        command += arguments
        if IS_ROOT and {"not-root", "read-only-home"} & set(variations):
            folder.chmod(0o755)
            for name in ("tmp", "home"):
                os.chown(folder / name, pwd.getpwnam("nobody").pw_uid, -1)
            command = as_nobody(folder / "mount", folder / "home", command)
        if "read-only-home" in variations:
            (folder / "home").chmod(0o555)
            environment |= {} if IS_ROOT else {"HOME": str(folder / "home")}
        for _ in range(2 if "busy" in variations else 0):
            stack.callback(subprocess.Popen([sys.executable, "-c", SPIN]).kill)
        return subprocess.run(command, cwd=root, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("variations", nargs="*", metavar="VARIATION", help=", ".join(VARIATIONS))
    parser.add_argument("--alone", action="store_true", help="one run for each variation")
    parser.add_argument(
        "-n", type=int, default=2, metavar="N", help="processes of pytest (default: 2)"
    )
    seed = random.randrange(10**6)
    parser.add_argument("--seed", type=int, default=seed, help="of the random order")
    rest = {"nargs": argparse.REMAINDER, "default": []}
    parser.add_argument("--pytest", **rest, help="other tests or options of pytest")
    parsed = parser.parse_args()
    if unknown := set(parsed.variations) - set(VARIATIONS):
        parser.error(f"no such variation: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if parsed.alone:
        chosen = {(name,): "not slow" for name in parsed.variations or VARIATIONS}
    else:
        chosen = {tuple(parsed.variations): "not slow"} if parsed.variations else COMBINED
    obstacles = {name: reason for names in chosen for name in names if (reason := obstacle(name))}
    ok = True
    for names, markers in chosen.items():
        possible = tuple(name for name in names if name not in obstacles)
        if possible:
            label = ", ".join(possible)
            label += f" (seed {parsed.seed})" if "random-order" in possible else ""
            print(f"--- {label}", flush=True)
            arguments = parsed.pytest or ["-m", markers, *FOLDERS]
            status = run(possible, parsed.n, parsed.seed, arguments)
            print(f"--- {label}: {'failed' if status else 'passed'}", flush=True)
            ok = ok and status == 0
    for name, reason in obstacles.items():
        print(f"skipped: {name}: {reason}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
