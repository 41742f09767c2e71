"""Find faults of this machine and its network: versions, devices, disk, launch, agreement of the processes, speed of
their communication, and the parts of a step's time. With a RECIPE, all of it for that recipe.

Each line is ok, a warning (works, but slower or with a risk) or a fault (a run would fail, or differ from what the
config states). Exit status: 0 without a fault, 1 with one, 2 for an error on the command line or in the recipe.
"""

import argparse
import dataclasses
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import add_json_argument
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError, UserError, is_out_of_memory
from nanogpt_hf.runs.files import write_json

PATIENCE = 60  # seconds that processes wait for each other
_CPU_TOKENS = 1024  # in a timed micro-batch on a CPU, or one block
PATIENCE_COMPILING = 300  # the first step compiles if the accelerate config says so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="default: a model of 0.8 M parameters")
    parser.add_argument(
        "--run-dir", metavar="DIR", help="the run folder of the run to come (default runs/<recipe name>)"
    )
    add_json_argument(parser, "the findings and their figures")
    parser.epilog = "Set any knob of RECIPE by its name, as for `pretrain`."


class Report:
    """The findings, printed one by one as they are made, so that a hang shows where. Only the main process prints."""

    def __init__(self, prints: bool, backend: str, file: Path | None):
        self.prints, self.backend, self.file = prints, backend, file
        self.findings = []

    def add(self, *findings: Any) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self.prints:
                first = f"{finding.level:<8} {finding.topic:<11} {finding.text}"
                show(first, *finding.lines, sep=f"\n{'':21}")

    def end(self) -> int:
        """Print the counts and write the JSON; return the exit status of the main process, and 0 on the others."""
        if not self.prints:
            return 0
        counts = Counter(finding.level for finding in self.findings)
        warnings, faults = counts["warning"], counts["fault"]
        many = f"{warnings} warning{'s' * (warnings != 1)}, {faults} fault{'s' * (faults != 1)}"
        show(f"{counts['ok']} ok, {many}")
        if self.file:
            write_json(self.file, [dataclasses.asdict(finding) for finding in self.findings])
        return 1 if faults else 0

    def give_up(self, topic: str, what: str, lines: tuple[str, ...] = ()) -> None:
        """Report a fault and exit at once: destroying the process group could hang."""
        from nanogpt_hf.doctor.findings import Finding

        status = 1
        try:
            self.add(Finding("fault", topic, what, lines))
            status = self.end()
        finally:
            os._exit(status)

    @contextmanager
    def together(self, topic: str, seconds: float | None = None) -> Iterator[None]:
        """Around communication: a failure or a hang becomes a fault with advice, and the process exits.

        It has its own timer, because NCCL's timeout kills the process without a report. The other processes' timer is
        longer than the main process's: the first process that exits ends the job.
        """
        from nanogpt_hf.doctor.findings import ADVICE

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


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    if overrides and not arguments.recipe:
        raise UserError(f"cli.py doctor: --{overrides[0][0]}: a knob of a recipe, but no RECIPE is given")
    recipe = load_config(arguments.recipe, overrides) if arguments.recipe else None
    mesh = Mesh.from_environment()
    # The imports below take seconds; mistakes above and --help should not wait for them.
    import torch
    from transformers.utils import logging

    from nanogpt_hf.data.synthetic import vocab_size_of
    from nanogpt_hf.distributed.accelerator import build_accelerator, requested_and_actual
    from nanogpt_hf.doctor import findings, machine, probes
    from nanogpt_hf.model.architecture import count_parameters
    from nanogpt_hf.model.build import build_config
    from nanogpt_hf.planning.estimate import run_bytes
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.runs.machine import describe_host, versions

    logging.disable_progress_bar()
    config = recipe or probes.small_config(mesh.world_size)
    folder = RunFolder(arguments.run_dir or (Path("runs") / config.name if recipe else "runs"))
    report = Report(mesh.is_main, "nccl" if torch.cuda.is_available() else "gloo", arguments.json)

    report.add(*findings.judge_versions(versions(), machine.outside_ranges()))
    report.add(findings.Finding("ok", "machine", describe_host()))
    places, needed = machine.places_of_a_run(folder.path, config.data.dir), None
    if recipe:
        parameters = count_parameters(build_config(config.model, vocab_size_of(config)))
        needed = run_bytes(parameters, 8 * parameters, config.checkpoint.keep)  # AdamW's state is the largest
    report.add(*findings.judge_places(places, needed))
    try:
        with report.together("launch"):
            accelerator = build_accelerator(config, folder)
            if mesh.world_size > 1:
                report.backend = "nccl" if "nccl" in str(accelerator.state.backend) else "gloo"
            gather = probes.build_gather()
    except UserError as error:
        report.add(findings.Finding("fault", "launch", str(error)))
        return report.end()
    asked, obtained = requested_and_actual(accelerator)
    report.add(
        *findings.judge_launch(asked, obtained, mesh.world_size, mesh.local_world_size, torch.cuda.device_count())
    )
    with report.together("processes"):
        processes = gather(machine.this_process(accelerator, places))
    report.add(*findings.judge_processes(processes))
    for host, process in {p.host: p for p in reversed(processes)}.items():
        if host != processes[0].host:
            report.add(*findings.judge_places(process.places, None, host=f"{host}: "))
    examine_a_run(report, config, accelerator, gather, processes, use_prepared=recipe is not None)
    status = report.end()
    accelerator.end_training()
    return status


def examine_a_run(report: Report, config, accelerator, gather, processes, *, use_prepared: bool) -> None:
    """Build what a run of `config` builds, and report whether all processes agree on it and how fast they are."""
    data, source = _agree_on_data(report, config, gather, use_prepared=use_prepared)
    _check_initial_weights(report, config, data, gather)
    _check_batches(report, config, accelerator, data, source, gather)
    _measure_all_reduce(report, accelerator, gather, processes)
    _measure_steps(report, config, accelerator, data, gather)
    if source == config.data.dir and report.prints:  # last: it may take minutes, in which the others need not wait
        _check_bytes(report, config, source)


def _check_bytes(report: Report, config, source: str) -> None:
    from nanogpt_hf.doctor import findings, probes

    report.add(findings.judge_checksums(source, *probes.verify_data(config)))


def _agree_on_data(report: Report, config, gather, *, use_prepared: bool):
    """The prepared data if all processes have the same, else synthetic tokens; and a name for it."""
    from nanogpt_hf.data.synthetic import prepared_if_any, synthetic_data, vocab_size_of
    from nanogpt_hf.doctor import findings

    data, source, problem = prepared_if_any(config, use_prepared)
    with report.together("data"):
        all_sources = gather((source, problem, vocab_size_of(config)))
    for rank, (_, problem, _) in enumerate(all_sources):
        if problem:
            report.add(findings.Finding("fault", "data", f"rank {rank}: {problem}" if rank else problem))
    if data is None or len({source for source, _, _ in all_sources}) > 1:
        source = f"synthetic tokens ({source})"
        data = synthetic_data(config, vocab_size=max(size for _, _, size in all_sources))
    return data, source


def _check_initial_weights(report: Report, config, data, gather) -> None:
    from nanogpt_hf.doctor import findings, probes
    from nanogpt_hf.model.build import build_config, build_model

    model = build_model(build_config(config.model, data.vocab_size), config.train.seed, config.model.init)
    with report.together("parameters"):
        digests = gather(probes.parameter_digests(model))
    report.add(findings.judge_parameters(digests, f"{model.num_parameters():,} as built"))


def _check_batches(report: Report, config, accelerator, data, source: str, gather) -> None:
    from nanogpt_hf.distributed.mesh import Mesh
    from nanogpt_hf.doctor import findings, probes
    from nanogpt_hf.training.micro_batch import build_batches

    batches = build_batches(config, accelerator, Mesh.from_environment(), data.train, config.train.min_micro_batch_size)
    with report.together("data"):
        read = gather(probes.windows_read(batches, 0))
    report.add(findings.judge_data(read, probes.windows_of_step(batches, 0), source))


def _measure_all_reduce(report: Report, accelerator, gather, processes) -> None:
    from nanogpt_hf.doctor import findings, probes

    if len(processes) == 1:
        report.add(findings.Finding("ok", "all-reduce", "n/a with one process"))
        return
    with report.together("all-reduce"):
        rows = probes.all_reduce_times(accelerator.device, gather)
    link = probes.find_link(processes, report.backend)
    report.add(findings.judge_all_reduce(rows, link, report.backend))


def _measure_steps(report: Report, config, accelerator, data, gather) -> None:
    import dataclasses

    from accelerate.utils import DistributedType
    from torch.distributed.tensor import DTensor

    from nanogpt_hf.doctor import findings, probes
    from nanogpt_hf.training.micro_batch import build_batches
    from nanogpt_hf.training.setup import build_run

    # A whole step may take minutes and would show nothing more. On a CPU so may one micro-batch.
    timed, accumulation = config.train.min_micro_batch_size, accelerator.gradient_accumulation_steps
    of_step = accumulation * timed
    if accelerator.device.type == "cpu":
        timed = max(1, min(timed, _CPU_TOKENS // config.data.block_size))
    train = dataclasses.replace(config.train, micro_batch_size=timed)
    with report.together("step", PATIENCE_COMPILING):
        run = build_run(dataclasses.replace(config, train=train), accelerator, data)
        accelerator.gradient_accumulation_steps = 1  # only now: DeepSpeed's engine has set its own
        run.batches = build_batches(run.config, accelerator, run.mesh, data.train, timed)
        seconds = max(gather(probes.warm_up(run)))
        # Shards differ by design. Whole copies have to be equal after steps, too: their gradients were averaged.
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        sharded = deepspeed or any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
        copies = run.mesh.world_size > 1 and not sharded
        digests = gather(probes.parameter_digests(run.model)) if copies else []
    if copies:
        report.add(findings.judge_parameters(digests, f"after {probes.WARM_STEPS} steps"))
    with report.together("step", PATIENCE_COMPILING):
        times = gather(probes.time_steps(run, count=max(1, min(5, int(20 / seconds)))))
    size = f"{timed} × {config.data.block_size} tokens"
    inseparable = "DeepSpeed's engine communicates as it computes" if deepspeed else ""
    report.add(*findings.judge_step(times, size, of_step / timed, report.backend, sharded, inseparable))
