#!/usr/bin/env python3
"""Tokenize a corpus on many processes or machines: datatrove makes .ds files of JSON or Parquet.

    pip install 'nanogpt_hf[datatrove]'
    python launch/tokenize_corpus.py corpus/ tokens/ --tokenizer my/tokenizer.json --tasks 64
    python launch/tokenize_corpus.py hf://datasets/user/set tokens/ --tokenizer gpt2 \\
        --format parquet --tasks 1000 --executor slurm --partition cpu
    nanogpt-hf pretrain my.yaml --data.format datatrove --data.source tokens/

Each task takes every N-th file and writes one shuffled .ds file. The same command again runs only
the tasks that have not completed; `tokens/.logs` records them.
"""

import argparse

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

READERS = {"jsonl": JsonlReader, "parquet": ParquetReader}
EXECUTORS = {
    "local": LocalPipelineExecutor,
    "slurm": SlurmPipelineExecutor,
    "ray": RayPipelineExecutor,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of the files, here or at any URL that fsspec reads")
    parser.add_argument("output", help="folder for the .ds files")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, or a Hub id")
    parser.add_argument("--format", choices=READERS, default="jsonl")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--end-of-text", default="<|endoftext|>", help="ends each document")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the documents")
    parser.add_argument("--executor", choices=EXECUTORS, default="local")
    parser.add_argument("--tasks", type=int, default=1, help="at most as many as there are files")
    parser.add_argument("--workers", type=int, default=-1, help="tasks at once (default: all)")
    parser.add_argument("--partition", help="slurm: where to run")
    parser.add_argument("--time", default="24:00:00", help="slurm: limit of a task")
    arguments = parser.parse_args()
    output = arguments.output
    end = arguments.end_of_text
    tokenizer = DocumentTokenizer(output, arguments.tokenizer, eos_token=end, seed=arguments.seed)
    reader = READERS[arguments.format](arguments.source, text_key=arguments.text_column)
    slurm = {"partition": arguments.partition, "time": arguments.time}
    EXECUTORS[arguments.executor](
        pipeline=[reader, tokenizer],
        tasks=arguments.tasks,
        workers=arguments.workers,
        logging_dir=f"{output}/.logs",
        **slurm if arguments.executor == "slurm" else {},
    ).run()


if __name__ == "__main__":
    main()
