"""What is wrong with this machine or network, in one report: versions, devices, disk, launch, whether the processes
agree, how fast they talk, and where the time of a step goes. With a RECIPE, all of it for that recipe.

Each line is ok, a warning (works, but not as well as it might) or a fault (a run would fail, or not be the one that
was asked for). Exit status: 0 without a fault, 1 with one, 2 for a mistake on the command line or in the recipe.
"""

import argparse
import dataclasses
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanogpt_hf.config.load import load_config
from nanogpt_hf.errors import DataError, UserError

PATIENCE = 60  # seconds that processes wait for each other
_CPU_TOKENS = 1024  # in a timed micro-batch on a CPU, or one block
PATIENCE_COMPILING = 300  # the first step compiles where the accelerate config asks for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="default: a model of 0.8 M parameters")
    parser.add_argument("--run-dir", metavar="DIR", help="the run folder to be (default runs/<recipe name>)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the findings there too, with their figures")
    parser.epilog = "Any knob of RECIPE can be set by its name, as for `pretrain`."


class Report:
    """The findings, printed one by one as they are made, so that a hang shows where. Only the main process speaks."""

    def __init__(self, speaks: bool, backend: str, file: Path | None):
        self.speaks, self.backend, self.file = speaks, backend, file
        self.findings = []

    def add(self, *findings: Any) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self.speaks:
                first = f"{finding.level:<8} {finding.topic:<11} {finding.text}"
                print(first, *finding.lines, sep=f"\n{'':21}", flush=True)

    def end(self) -> int:
        """Print the count and write the JSON; the exit status, which for all processes is the main one's to give."""
        if not self.speaks:
            return 0
        counts = Counter(finding.level for finding in self.findings)
        warnings, faults = counts["warning"], counts["fault"]
        many = f"{warnings} warning{'s' * (warnings != 1)}, {faults} fault{'s' * (faults != 1)}"
        print(f"{counts['ok']} ok, {many}", flush=True)
        if self.file:
            try:
                text = json.dumps([dataclasses.asdict(finding) for finding in self.findings], indent=2)
                self.file.write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                raise UserError(f"--json {self.file}: cannot be written: {error.strerror}") from None
        return 1 if faults else 0

    def give_up(self, topic: str, what: str, lines: tuple[str, ...] = ()) -> None:
        """A last fault, and the end of this process here and now: taking the group of processes down could hang."""
        from nanogpt_hf.doctor.findings import Finding

        status = 1
        try:
            self.add(Finding("fault", topic, what, lines))
            status = self.end()
        finally:
            os._exit(status)

    @contextmanager
    def together(self, topic: str, seconds: float | None = None) -> Iterator[None]:
        """Around what the processes do together: a failure or a hang becomes a fault that says what to try.

        The clock is ours, because NCCL's own timeout kills the process without a word from us. It gives the others
        longer than the main process: the first process that ends takes the job, and the report, with it.
        """
        import torch

        from nanogpt_hf.doctor.findings import ADVICE

        seconds = seconds or PATIENCE
        alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
        late = f"no answer from the other processes within {seconds:g} s"
        limit = seconds if self.speaks else 2 * seconds
        clock = threading.Timer(limit, self.give_up, (topic, late, ADVICE[self.backend]))
        clock.daemon = True
        if not alone:
            clock.start()
        try:
            yield
        except torch.OutOfMemoryError:
            if not self.speaks:
                raise
            self.give_up(topic, "out of memory: halve train.micro_batch_size, or shard: accelerate_configs/fsdp2.yaml")
        except DataError as error:  # tokens that only reading them shows to be wrong
            self.give_up(topic, str(error))
        except RuntimeError as error:  # gloo's and NCCL's own kind
            if alone:
                raise
            reason = re.sub(r"^\[\S+\] |\. .*", "", " ".join(str(error).split()))  # no place in its source, no chatter
            self.give_up(topic, f"failed between the processes: {reason}", ADVICE[self.backend])
        finally:
            clock.cancel()


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    if overrides and not arguments.recipe:
        raise UserError(f"cli.py doctor: --{overrides[0][0]}: is a recipe's knob, and there is no RECIPE")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    recipe = load_config(arguments.recipe, overrides) if arguments.recipe else None
    # The imports below take seconds; mistakes above and --help should not wait for them.
    import torch
    from transformers.utils import logging

    from nanogpt_hf.distributed.accelerator import build_accelerator
    from nanogpt_hf.doctor import findings, probes
    from nanogpt_hf.model.build import build_gpt_config, count_parameters
    from nanogpt_hf.planning.estimate import run_bytes
    from nanogpt_hf.runs import machine
    from nanogpt_hf.runs.folder import RunFolder

    logging.disable_progress_bar()
    config = recipe or probes.small_config(int(os.environ.get("WORLD_SIZE") or 1))
    folder = RunFolder(arguments.run_dir or (Path("runs") / config.name if recipe else "runs"))
    report = Report(os.environ.get("RANK", "0") == "0", "nccl" if torch.cuda.is_available() else "gloo", arguments.json)

    report.add(*findings.judge_versions(machine.versions(), machine.outside_ranges()))
    report.add(findings.Finding("ok", "machine", machine.describe_host()))
    places, needed = machine.places_of_a_run(folder.path, config.data.dir), None
    if recipe:
        parameters = count_parameters(build_gpt_config(config.model, probes.vocab_size_of(config)))
        needed = run_bytes(parameters, parameters, config.checkpoint.keep)
    report.add(*findings.judge_places(places, needed))
    try:
        with report.together("launch"):
            accelerator = build_accelerator(config, folder)
            if accelerator.num_processes > 1:
                report.backend = "nccl" if "nccl" in str(accelerator.state.backend) else "gloo"
            gather = probes.build_gather(accelerator)
    except UserError as error:
        report.add(findings.Finding("fault", "launch", str(error)))
        return report.end()
    asked, obtained = machine.asked_and_obtained(accelerator)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    report.add(*findings.judge_launch(asked, obtained, accelerator.num_processes, local, torch.cuda.device_count()))
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
    from accelerate.utils import DistributedType
    from torch.distributed.tensor import DTensor

    from nanogpt_hf.data.batches import Batches
    from nanogpt_hf.distributed.accelerator import prepared_blocks
    from nanogpt_hf.doctor import findings, probes
    from nanogpt_hf.model.build import build_gpt_config, build_model
    from nanogpt_hf.training.optimizer import build_optimizer

    tokens, source, problem = probes.tokens_for(config, use_prepared)
    with report.together("data"):
        all_sources = gather((source, problem, probes.vocab_size_of(config)))
    for rank, (_, problem, _) in enumerate(all_sources):
        if problem:
            report.add(findings.Finding("fault", "data", f"rank {rank}: {problem}" if rank else problem))
    vocab_size = max(size for _, _, size in all_sources)
    if tokens is None or len({source for source, _, _ in all_sources}) > 1:
        source = f"made-up tokens ({source})"
        tokens = probes.made_up_tokens(vocab_size, 4 * max(config.train.tokens_per_step, config.data.block_size) + 1)

    model_config = build_gpt_config(config.model, vocab_size)
    model = build_model(model_config, config.train.seed)
    with report.together("parameters"):
        digests = gather(probes.parameter_digests(model))
    report.add(findings.judge_parameters(digests, f"{model.num_parameters():,} as built"))

    def build_batches(micro_batch_size: int, accumulation: int) -> Batches:
        return Batches(
            tokens,
            block_size=config.data.block_size,
            order=config.data.order,
            seed=config.train.seed,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            rank=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )

    micro_batch_size, accumulation = config.train.micro_batch_size, accelerator.gradient_accumulation_steps
    micro_batch_size = 1 if micro_batch_size == "auto" else micro_batch_size
    batches = build_batches(micro_batch_size, accumulation)
    with report.together("data"):
        read = gather(probes.windows_read(batches, 0))
    report.add(findings.judge_data(read, probes.windows_of_step(batches, 0), source))

    if accelerator.num_processes == 1:
        report.add(findings.Finding("ok", "all-reduce", "one process: nothing to talk to"))
    else:
        with report.together("all-reduce"):
            rows = probes.all_reduce_times(accelerator.device, gather)
        link = probes.find_link(processes, report.backend)
        report.add(findings.judge_all_reduce(rows, link, report.backend))

    # A whole step may take minutes and would tell nothing more. On a CPU so may one micro-batch.
    timed = micro_batch_size
    if accelerator.device.type == "cpu":
        timed = max(1, min(micro_batch_size, _CPU_TOKENS // config.data.block_size))
    batches = build_batches(timed, 1)
    with report.together("step", PATIENCE_COMPILING):
        with prepared_blocks(model, accelerator):
            model, optimizer = accelerator.prepare(model, build_optimizer(model, config.optim))
        accelerator.gradient_accumulation_steps = 1  # only now: DeepSpeed's engine has put its own there
        seconds = max(gather(probes.warm_up(accelerator, model, optimizer, batches)))
        # Shards differ by design. Whole copies have to be equal after steps, too: their gradients were averaged.
        deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        sharded = deepspeed or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        copies = accelerator.num_processes > 1 and not sharded
        digests = gather(probes.parameter_digests(model)) if copies else []
    if copies:
        report.add(findings.judge_parameters(digests, f"after {probes.WARM_STEPS} steps"))
    with report.together("step", PATIENCE_COMPILING):
        times = gather(
            probes.time_steps(accelerator, model, optimizer, batches, count=max(1, min(5, int(20 / seconds))))
        )
    size, of_step = f"{timed} × {config.data.block_size} tokens", accumulation * micro_batch_size / timed
    inseparable = "DeepSpeed's engine communicates as it computes" if deepspeed else ""
    report.add(*findings.judge_step(times, size, of_step, report.backend, sharded, inseparable))
    if source == config.data.dir and report.speaks:  # last: it may take minutes, in which the others need not wait
        report.add(findings.judge_bytes(source, *probes.verify_data(config)))
