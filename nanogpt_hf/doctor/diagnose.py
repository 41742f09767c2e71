"""Diagnose a machine, or this machine for a recipe: build what a run builds, measure, and report findings."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.data.synthetic import prepared_if_any, synthetic_data, vocab_size_of
from nanogpt_hf.distributed.accelerate_config import requested_settings
from nanogpt_hf.distributed.accelerator import actual_settings, build_accelerator, is_sharded
from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor import findings, machine, probes
from nanogpt_hf.doctor.report import Report
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.planning.estimate import run_bytes
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.machine import describe_host, versions
from nanogpt_hf.training.micro_batch import build_batches
from nanogpt_hf.training.setup import build_run

_CPU_TOKENS = 1024  # in a timed micro-batch on a CPU, or one block
PATIENCE_COMPILING = 300  # the first step compiles if the accelerate config says so


def diagnose(recipe: Config | None, run_dir: str | None, report: Report) -> int:
    """Report on this machine, without a recipe for a small model; return the exit status."""
    mesh = Mesh.from_environment()
    config = recipe or probes.small_config(mesh.world_size)
    folder = RunFolder(run_dir or (Path("runs") / config.name if recipe else "runs"))

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
    requested, actual, gpus = requested_settings(), actual_settings(accelerator), torch.cuda.device_count()
    report.add(*findings.judge_launch(requested, actual, mesh.world_size, mesh.local_world_size, gpus))
    with report.together("processes"):
        processes = gather(machine.this_process(accelerator, places))
    report.add(*findings.judge_processes(processes))
    for host, process in {p.host: p for p in reversed(processes)}.items():
        if host != processes[0].host:
            report.add(*findings.judge_places(process.places, None, host=f"{host}: "))
    _Examination(config, accelerator, gather, processes, report).run(use_prepared=recipe is not None)
    status = report.end()
    accelerator.end_training()
    return status


@dataclass(frozen=True)
class _Examination:
    """Build what a run of `config` builds, and report whether all processes agree on it and how fast they are."""

    config: Config
    accelerator: Accelerator
    gather: probes.Gather
    processes: list[machine.Process]
    report: Report

    def run(self, *, use_prepared: bool) -> None:
        data, source = self._agree_on_data(use_prepared)
        self._check_initial_weights(data.vocab_size)
        self._check_batches(data, source)
        self._measure_all_reduce()
        self._measure_steps(data)
        if source == self.config.data.dir and self.report.prints:
            # last: it may take minutes, in which the others need not wait
            self.report.add(findings.judge_checksums(source, *probes.verify_data(self.config)))

    def _agree_on_data(self, use_prepared: bool) -> tuple[PreparedData, str]:
        """The prepared data if all processes have the same, else synthetic tokens; and a name for it."""
        data, source, problem = prepared_if_any(self.config, use_prepared)
        with self.report.together("data"):
            all_sources = self.gather((source, problem, vocab_size_of(self.config)))
        for rank, (_, problem, _) in enumerate(all_sources):
            if problem:
                self.report.add(findings.Finding("fault", "data", f"rank {rank}: {problem}" if rank else problem))
        if data is None or len({source for source, _, _ in all_sources}) > 1:
            source = f"synthetic tokens ({source})"
            tokens = synthetic_data(self.config, vocab_size=max(size for _, _, size in all_sources))
            data = cast(PreparedData, tokens)  # has all that a run needs without evaluations
        return data, source

    def _check_initial_weights(self, vocab_size: int) -> None:
        config = self.config
        model = build_model(build_config(config.model, vocab_size), config.train.seed, config.model.init)
        with self.report.together("parameters"):
            digests = self.gather(probes.parameter_digests(model))
        self.report.add(findings.judge_parameters(digests, f"{model.num_parameters():,} as built"))

    def _check_batches(self, data: PreparedData, source: str) -> None:
        size = self.config.train.min_micro_batch_size
        batches = build_batches(self.config, self.accelerator, Mesh.from_environment(), data.train, size)
        with self.report.together("data"):
            read = probes.by_data_rank(self.gather(probes.windows_read(batches, 0)))
        self.report.add(findings.judge_data(read, probes.windows_of_step(batches, 0), source))

    def _measure_all_reduce(self) -> None:
        if len(self.processes) == 1:
            self.report.add(findings.Finding("ok", "all-reduce", "n/a with one process"))
            return
        with self.report.together("all-reduce"):
            rows = probes.all_reduce_times(self.accelerator.device, self.gather)
        link = probes.find_link(self.processes, self.report.backend)
        self.report.add(findings.judge_all_reduce(rows, link, self.report.backend))

    def _measure_steps(self, data: PreparedData) -> None:
        config, accelerator, report = self.config, self.accelerator, self.report
        # A whole step may take minutes and would show nothing more. On a CPU so may one micro-batch.
        timed, accumulation = config.train.min_micro_batch_size, accelerator.gradient_accumulation_steps
        of_step = accumulation * timed
        if accelerator.device.type == "cpu":
            timed = max(1, min(timed, _CPU_TOKENS // config.data.block_size))
        train = dataclasses.replace(config.train, micro_batch_size=timed)
        with report.together("step", PATIENCE_COMPILING):
            run = build_run(dataclasses.replace(config, train=train), accelerator, data)
            # only now: DeepSpeed's engine has set its own. A pipeline needs a micro-batch for each stage.
            accelerator.gradient_accumulation_steps = run.mesh.pp_size
            run.batches = build_batches(run.config, accelerator, run.mesh, data.train, timed)
            seconds = max(self.gather(probes.warm_up(run)))
            # Shards differ by design. Whole copies have to be equal after steps, too: their gradients were averaged.
            sharded = is_sharded(accelerator)
            copies = run.mesh.world_size > 1 and not sharded
            digests = self.gather(probes.parameter_digests(run.model)) if copies else []
        if copies:
            report.add(findings.judge_parameters(digests, f"after {probes.WARM_STEPS} steps"))
        with report.together("step", PATIENCE_COMPILING):
            times = self.gather(probes.time_steps(run, count=max(1, min(5, int(20 / seconds)))))
        size = f"{timed} × {config.data.block_size} tokens"
        inseparable = ""
        if not probes.is_separable(run):
            splitter = "DeepSpeed's engine" if is_zero(accelerator) else "a model that is split"
            inseparable = f"{splitter} communicates as it computes"
        if run.mesh.pp_size > 1:
            size = f"{run.mesh.pp_size} × {size}"
        micro_batches = of_step / timed / run.mesh.pp_size
        report.add(*findings.judge_step(times, size, micro_batches, report.backend, sharded, inseparable))
