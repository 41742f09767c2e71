"""Runs of `rl` in one folder, which differ by their knobs: their models and their command lines."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer

from nanogpt_hf.commands import main
from nanogpt_hf.data.chat_examples import AnswerFinder
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.messages import Conversation
from nanogpt_hf.model import GPTForCausalLM
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.tasks.tools import load_tools

# Of on-policy distillation, from the models of `save_student_and_teacher`.
TAUGHT = {
    "data.block_size": 64,
    "train.tokens_per_step": 1024,  # 16 sequences: 4 questions × 4 completions
    "train.micro_batch_size": 4,
    "train.max_steps": 6,
    "optim.learning_rate": 1e-2,
    "eval.every": 3,
    "checkpoint.every": 2,
    "rl.samples": 4,
    "rl.max_new_tokens": 6,
    "rl.eval_questions": 3,
    "rl.eval_samples": 2,
    "distill.weight": 1.0,
}
# Rewards, given answers and every part of the objective.
MIXED = {
    "distill__weight": 0.6,
    "distill__beta": 0.3,
    "distill__temperature": 1.5,
    "distill__on_policy": 0.5,
    "rl__kl": 0.1,
    "rl__updates": 2,
    "rl__clip": 0.2,
    "tracking__layers": "true",
}
# Of runs whose answers call a tool, from the model of `save_tool_caller`.
CALLING = {
    "data.block_size": 416,
    "train.tokens_per_step": 3328,  # 8 sequences: 2 questions × 4 completions
    "train.micro_batch_size": 4,
    "train.max_steps": 4,
    "optim.learning_rate": 1e-3,
    "eval.every": 2,
    "checkpoint.every": 2,
    "rl.samples": 4,
    "rl.max_new_tokens": 150,
    "rl.eval_questions": 2,
    "rl.eval_samples": 1,
    "rl.temperature": 0.7,
    "rl.max_turns": 3,
}
TOOL = '''
def f(x: str) -> str:
    """F.

    Args:
        x: X.
    """
    return str(len(x)) if x != "fail" else 1 / 0
'''
REWARD = "def score(prompt, completion, answer):\n    return len(completion) % 3 / 2\n"


def policy_words(folder: Path, start: list[str], knobs: dict) -> Callable[..., list[str]]:
    """A function to the words after `rl` for a run folder's name: those of `start`, and `knobs`,
    with other knobs (`rl__samples=4`).
    """

    def words(name: str, **others) -> list[str]:
        values = knobs | {key.replace("__", "."): value for key, value in others.items()}
        options = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
        return [*start, "--run-dir", str(folder / name), *options]

    return words


def taught_words(folder: Path) -> Callable[..., list[str]]:
    """`policy_words` of on-policy distillation, from the models of `save_student_and_teacher`."""
    start = ["--from", str(folder / "student"), "--distill.teacher", str(folder / "teacher")]
    return policy_words(folder, [*start, "--task", "arithmetic"], TAUGHT)


def tool_words(folder: Path) -> Callable[..., list[str]]:
    """`policy_words` of runs with a tool, from the model and the files of `save_tool_caller`."""
    start = ["--from", str(folder / "start"), "--task", "exact"]
    start += ["--data", str(folder / "rows.jsonl"), "--data.validation_fraction", "0.3"]
    start += ["--reward", f"{folder / 'reward.py'}:score", "--rl.tools", f"[{folder / 'mine.py'}]"]
    return policy_words(folder, start, CALLING)


def policy_trainer(
    folder: Path, words: Callable[..., list[str]], forget: Callable[[], None]
) -> Callable[..., RunFolder]:
    """A function that trains with the words of a name, flags and knobs, and returns the run."""

    def train(name: str, *flags: str, **knobs) -> RunFolder:
        forget()
        assert main(["rl", *words(name, **knobs), *flags]) == 0
        forget()
        return RunFolder(folder / name)

    return train


def save_student_and_teacher(folder: Path, save_chat_model: Callable) -> None:
    """A student of random weights, and a teacher of one block more that answers with sevens."""

    def prefers(text: str):
        def change(model, tokenizer):
            likely = tokenizer(text, add_special_tokens=False)["input_ids"]
            likely = [*likely, tokenizer.eos_token_id]
            model.transformer.ln_f.bias.copy_(torch.randn(32).sign())
            model.transformer.wte.weight[likely] += 0.2 * model.transformer.ln_f.bias

        return change

    save_chat_model(folder / "student", prefers("0123456789"), bias=True)
    save_chat_model(folder / "teacher", prefers("7"), bias=True, n_layer=3, dropout=0.1)


def _conversation(question: str, call: str) -> list[dict]:
    function = {"name": "f", "arguments": {"x": call}}
    return [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": str(len(call))},
        {"role": "assistant", "content": str(len(call))},
    ]


def save_tool_caller(folder: Path, save_chat_model: Callable) -> None:
    """A model that calls the tool in most of its answers, since it knows four conversations by
    heart; with the tool, a reward and questions.
    """
    (folder / "mine.py").write_text(TOOL)
    (folder / "reward.py").write_text(REWARD)
    tools = load_tools([str(folder / "mine.py")], 5.0)
    start = folder / "start"
    save_chat_model(start, n_positions=416, n_embd=32, dropout=0.0)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = GPTForCausalLM.from_pretrained(start).train()
    asked = {"1+1": "abc", "1+2": "fail", "1+3": "abcde", "1+4": "fail"}
    rows = [{"prompt": question, "completion": "3"} for question in [*asked] * 3]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [Conversation(_conversation(*pair), tools.schemas) for pair in asked.items()]
    examples = AnswerFinder(ChatFormat(tokenizer)).examples(talks)
    width = max(len(example.input_ids) for example in examples)
    ids = torch.zeros(4, width, dtype=torch.int64)
    labels = torch.full((4, width), -100)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        ids[row, :length] = torch.tensor(example.input_ids)
        mask = torch.tensor(example.assistant_mask).bool()
        labels[row, :length] = ids[row, :length].masked_fill(~mask, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(start)
