"""The command that measures models: evaluate."""

import argparse
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import add_option, add_output
from nanogpt_hf.config.values import bounded
from nanogpt_hf.console import show
from nanogpt_hf.evaluation import table
from nanogpt_hf.evaluation.base import Loaded, Request, Subject
from nanogpt_hf.formatting import shows_bars
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.find import find_model


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "model MODEL", "a run folder (its best model), a model folder, or a Hub id")
    table.add_options(parser)
    texts = "texts in one forward pass"
    add_option(parser, "--batch-size N", texts, type=bounded(int, 1), default=8)
    add_output(parser, "--json --output", "also write all figures and the protocol to FILE")


def run_evaluate(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    """Measure a model: loss on a text, lm-eval's tasks, pass@k of its answers, the CORE score.

    Under `accelerate launch` the processes share the work; the results do not depend on their
    number.
    """
    wanted, knobs = table.asked_for(arguments, overrides)

    import datasets
    from transformers.utils import logging

    from nanogpt_hf.data.files import file_digest
    from nanogpt_hf.data.tokenizer import build_tokenizer, check_vocabulary
    from nanogpt_hf.distributed.accelerator import (
        build_evaluation_accelerator,
        describe_machine,
        mesh_of,
    )
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.model.build import load_model
    from nanogpt_hf.runs.machine import versions

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = find_model(arguments.model)

    def load() -> tuple[tuple[Request, list[Loaded]], dict[str, Any]]:
        model, tokenizer = load_model(folder), build_tokenizer(folder, ())
        check_vocabulary(folder, tokenizer.vocab_size, model.config.vocab_size)
        request = Request(arguments, knobs, model, tokenizer)
        weights = sorted(Path(folder).glob("model*.safetensors"))  # a model on the Hub has none
        digest = file_digest(weights).removeprefix("sha256:") if weights else None
        facts: dict[str, Any] = {"model": {"name": folder, "sha256": digest}}
        loaded = [evaluation.load(request) for evaluation in wanted]
        for evaluation in loaded:
            facts |= evaluation.facts
        return (request, loaded), facts

    (request, loaded), facts = prepare_on_all_ranks(arguments.mesh, load)
    with one_line_for_a_lost_process():
        accelerator = build_evaluation_accelerator(arguments.mesh)
        is_main = accelerator.is_main_process
        subject = Subject(
            name=folder,
            model=request.model.to(accelerator.device),
            tokenizer=request.tokenizer.hf,
            accelerator=accelerator,
            mesh=mesh_of(accelerator),
            batch_size=arguments.batch_size,
            bars=is_main and shows_bars(),
        )
        machine = describe_machine(accelerator)
        results = {"model": facts["model"], "machine": machine, "versions": versions()}
        for evaluation in loaded:
            for found in evaluation.measure(subject):
                results |= found.figures
                if is_main and found.lines:
                    show(*found.lines, sep="\n")
    if arguments.json and is_main:
        write_json(arguments.json, results)
        show(f"written: {arguments.json}")
