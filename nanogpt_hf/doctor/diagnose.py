"""Diagnose a machine: build the accelerator that a run builds, measure, and report findings."""

import dataclasses
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.synthetic import vocab_size_of
from nanogpt_hf.distributed.accelerate_config import requested_settings
from nanogpt_hf.distributed.accelerator import actual_settings, build_accelerator
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor import findings, machine, probes
from nanogpt_hf.doctor.findings import ADVICE, Finding
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.model.build import build_config
from nanogpt_hf.planning.estimate import run_bytes
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.machine import describe_host, versions

PATIENCE = 60  # seconds that processes wait for each other


class Report:
    """The findings, printed one by one as they are made, so that a hang shows where.

    Only the main process prints.
    """

    def __init__(self, show: Callable[[str], None], file: Path | None, mesh: Mesh):
        self.prints, self.show, self.file = mesh.is_main, show, file
        self.alone = mesh.world_size == 1
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self.prints:
                first = f"{finding.level:<8} {finding.topic:<11} {finding.text}"
                self.show(f"\n{'':21}".join([first, *finding.lines]))

    def end(self) -> int:
        """Print the counts and write the JSON; return the exit status of the main process, and 0
        on the others.
        """
        if not self.prints:
            return 0
        counts = Counter(finding.level for finding in self.findings)
        faults = counts["fault"]
        self.show(
            f"{counts['ok']} ok, {plural(counts['warning'], 'warning')}, {plural(faults, 'fault')}"
        )
        if self.file:
            write_json(self.file, [dataclasses.asdict(finding) for finding in self.findings])
        return 1 if faults else 0

    def give_up(self, topic: str, text: str, lines: tuple[str, ...] = ()) -> None:
        """Report a fault and exit at once: destroying the process group could hang."""
        status = 1
        try:
            self.add(Finding("fault", topic, text, lines))
            status = self.end()
        finally:
            os._exit(status)

    @contextmanager
    def together(self, topic: str, seconds: float | None = None) -> Iterator[None]:
        """Around communication: a failure or a hang becomes a fault with advice, and the process
        exits.

        It has its own timer, because NCCL's timeout kills the process without a report. The
        other processes' timer is longer than the main process's: the first process that exits
        ends the job.
        """
        seconds = seconds or PATIENCE
        late = f"no response from the other processes within {seconds:g} s"
        limit = seconds if self.prints else 2 * seconds
        clock = threading.Timer(limit, self.give_up, (topic, late, ADVICE[self.backend]))
        clock.daemon = True
        if not self.alone:
            clock.start()
        try:
            yield
        except RuntimeError as error:  # from gloo and NCCL
            if self.alone:
                raise
            # without source location and details
            reason = re.sub(r"^\[\S+\] |\. .*", "", " ".join(str(error).split()))
            self.give_up(
                topic,
                f"communication between the processes failed: {reason}",
                ADVICE[self.backend],
            )
        finally:
            clock.cancel()


def diagnose(recipe: Config | None, run_dir: str | None, report: Report, mesh: Mesh) -> int:
    """Report on this machine, without a recipe for a small model; return the exit status."""
    config = recipe or probes.small_config(mesh.world_size)
    folder = RunFolder(run_dir or (Path("runs") / config.name if recipe else "runs"))

    report.add(*findings.judge_versions(versions(), machine.outside_ranges()))
    report.add(findings.Finding("ok", "machine", describe_host()))
    places, needed = machine.places_of_a_run(folder.path, config.data.dir), None
    if recipe:
        parameters = count_parameters(build_config(config.model, vocab_size_of(config)))
        # AdamW's state is the largest
        needed = run_bytes(parameters, 8 * parameters, config.checkpoint.keep)
    report.add(*findings.judge_places(places, needed))
    try:
        with report.together("launch"):
            accelerator = build_accelerator(config, folder, mesh)
            if mesh.world_size > 1:
                report.backend = "nccl" if "nccl" in str(accelerator.state.backend) else "gloo"
            gather = probes.build_gather(mesh.world_size)
    except UserError as error:
        report.add(findings.Finding("fault", "launch", str(error)))
        return report.end()
    requested, actual, gpus = (
        requested_settings(),
        actual_settings(accelerator),
        torch.cuda.device_count(),
    )
    report.add(
        *findings.judge_launch(requested, actual, mesh.world_size, mesh.local_world_size, gpus)
    )
    with report.together("processes"):
        processes = gather(machine.this_process(accelerator, places))
    report.add(*findings.judge_processes(processes))
    for host, process in {p.host: p for p in reversed(processes)}.items():
        if host != processes[0].host:
            report.add(*findings.judge_places(process.places, None, host=f"{host}: "))
    if len(processes) == 1:
        report.add(findings.Finding("ok", "all-reduce", "n/a with one process"))
    else:
        with report.together("all-reduce"):
            rows, equal = probes.all_reduce_times(accelerator.device, gather)
        link = probes.find_link(processes, report.backend)
        report.add(findings.judge_all_reduce(rows, equal, link, report.backend))
    status = report.end()
    accelerator.end_training()
    return status
