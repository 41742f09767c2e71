"""Report of `doctor`: collect and print findings, count them, and turn a hang between processes into a fault."""

import dataclasses
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor.findings import ADVICE, Finding
from nanogpt_hf.errors import DataError, is_out_of_memory
from nanogpt_hf.formatting import plural
from nanogpt_hf.runs.files import write_json

PATIENCE = 60  # seconds that processes wait for each other


class Report:
    """The findings, printed one by one as they are made, so that a hang shows where. Only the main process prints."""

    def __init__(self, show: Callable[[str], None], file: Path | None):
        self.prints, self.show, self.file = Mesh.from_environment().is_main, show, file
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self.prints:
                first = f"{finding.level:<8} {finding.topic:<11} {finding.text}"
                self.show(f"\n{'':21}".join([first, *finding.lines]))

    def end(self) -> int:
        """Print the counts and write the JSON; return the exit status of the main process, and 0 on the others."""
        if not self.prints:
            return 0
        counts = Counter(finding.level for finding in self.findings)
        faults = counts["fault"]
        self.show(f"{counts['ok']} ok, {plural(counts['warning'], 'warning')}, {plural(faults, 'fault')}")
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
        """Around communication: a failure or a hang becomes a fault with advice, and the process exits.

        It has its own timer, because NCCL's timeout kills the process without a report. The other processes' timer is
        longer than the main process's: the first process that exits ends the job.
        """
        seconds = seconds or PATIENCE
        alone = Mesh.from_environment().world_size == 1
        late = f"no response from the other processes within {seconds:g} s"
        limit = seconds if self.prints else 2 * seconds
        clock = threading.Timer(limit, self.give_up, (topic, late, ADVICE[self.backend]))
        clock.daemon = True
        if not alone:
            clock.start()
        try:
            yield
        except DataError as error:  # wrong tokens, found only when they are read
            self.give_up(topic, str(error))
        except (RuntimeError, MemoryError) as error:  # gloo and NCCL raise RuntimeError too
            if is_out_of_memory(error):
                if not self.prints:
                    raise
                advice = "halve train.micro_batch_size, or shard: accelerate_configs/fsdp2.yaml"
                self.give_up(topic, f"out of memory: {advice}")
            if alone:
                raise
            reason = re.sub(r"^\[\S+\] |\. .*", "", " ".join(str(error).split()))  # without source location and details
            self.give_up(topic, f"communication between the processes failed: {reason}", ADVICE[self.backend])
        finally:
            clock.cancel()
