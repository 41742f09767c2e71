"""Fine-tuning on a mixture of conversations of several row shapes, with the chat template of the
model.
"""

import json
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.data.conversations import conversation_of
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.finetuning import finetune_config

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = [
    ("system", "Be brief."),
    ("human", "Why?"),
    ("gpt", "Because."),
    ("human", "How?"),
    ("gpt", "So."),
]
ROWS = {
    "talk": [
        {
            "messages": [
                {"role": "user", "content": f"Hi {n}"},
                {"role": "assistant", "content": "Hello!"},
            ]
            * (n % 2 + 1)
        }
        for n in range(20)
    ],
    "sharegpt": [
        {"conversations": [{"from": f, "value": v * (n % 3 + 1)} for f, v in TURNS]}
        for n in range(20)
    ],
    "sums": [
        {"question": f"{n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in range(20)
    ],
    "exam": [
        {
            "question": f"Which is {n % 4}?",
            "subject": "",
            "choices": ["0", "1", "2", "3"],
            "answer": n % 4,
        }
        for n in range(20)
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, byte_tokenizer) -> Path:
    """A tiny GPT-2 with a chat template of its own."""
    folder = tmp_path_factory.mktemp("assistant") / "base"
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    GPTForCausalLM(
        GPTConfig(
            vocab_size=len(tokenizer),
            n_positions=128,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def arguments(base):
    """A function that gives the arguments of `finetune` on the four sources with the data in
    `folder`.
    """
    sources = []
    for weight, (name, rows) in enumerate(ROWS.items(), 1):
        path = base.parent / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"source": str(path), "weight": weight})
    fixed = "--from {} --data.format chat --data.block_size 128 --train.tokens_per_step 1280 "
    fixed += "--train.micro_batch_size 1 --train.max_steps 4 --eval.every 2 --eval.tokens 512 "
    fixed += "--data.source {} --data.dir {}"

    def arguments(sources=sources, folder=base.parent / "data") -> list[str]:
        return argv(fixed, base, json.dumps(sources), folder)

    return arguments


@pytest.fixture(scope="module")
def alone(arguments, base, forget_accelerate) -> RunFolder:
    """The run of one process, without interruption."""
    forget_accelerate()
    run = RunFolder(base.parent / "alone")
    assert main(["finetune", *arguments(), "--run-dir", str(run.path)]) == 0
    return run


@pytest.mark.long
def test_rows_of_every_source_become_the_tokens_of_the_template(alone, base):
    plain = AutoTokenizer.from_pretrained(alone.final)
    assert plain.chat_template == CHATML
    for name, rows in ROWS.items():
        conversations = [conversation_of(row) for row in rows]
        answers = {
            tuple(plain.apply_chat_template(messages, return_dict=False)): "".join(
                f"{message['content']}<|im_end|>"
                for message in messages
                if message["role"] == "assistant"
            )
            for messages in conversations
        }
        splits = [
            datasets.load_from_disk(f"{base.parent}/data/{name}/{part}")
            for part in ("train", "validation")
        ]
        prepared = [row for split in splits for row in split]
        assert len(prepared) == len(rows)
        assert {tuple(row["input_ids"]) for row in prepared} == answers.keys()
        for row in prepared:
            answered = [
                i
                for i, counts in zip(row["input_ids"], row["assistant_mask"], strict=True)
                if counts
            ]
            assert plain.decode(answered) == answers[tuple(row["input_ids"])]


def test_run_is_named_after_the_sources_of_the_command_line(arguments):
    words = arguments()[2:]
    knobs = [
        (key.removeprefix("--"), value) for key, value in zip(words[::2], words[1::2], strict=True)
    ]
    config, _ = finetune_config(None, [("finetune.model", arguments()[1]), *knobs])
    assert config.name == "base-talk-sharegpt-sums-exam"


def test_bad_row_of_a_source_names_its_file_and_line(arguments, base, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        json.dumps(ROWS["exam"][0]) + "\n" + json.dumps(ROWS["exam"][0] | {"answer": 4}) + "\n"
    )
    sources = [
        {"source": f"{base.parent}/talk.jsonl", "weight": 1},
        {"source": str(bad), "weight": 1},
    ]
    words = arguments(sources, tmp_path / "data")
    assert main(["finetune", *words, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{bad}: row 2: expected choices, a list of texts, and answer")
    assert error.endswith(" and 4\n")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "data" / "bad").exists()
