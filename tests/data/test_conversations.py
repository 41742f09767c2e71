"""Conversations: accepted rows, mistakes in one line, and the chat template gives the tokens of
training.
"""

import dataclasses
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from assertions import refusal
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.chat_template import chat_format
from nanogpt_hf.data.conversations import conversation_of
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.tokenizer import build_tokenizer, char_tokenizer
from nanogpt_hf.evaluation.text import read_corpus

EXCHANGE = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
# Ordinary text, and text that tries to end an answer or to speak for another role.
DIFFICULT = [
    "plain",
    "  spaces around \n\n",
    "\ttabs\u00a0and\u2003others\x1c",
    "🙂 日本語 naïve",
    "🙂",
    "'s not a start",
    "12,345",
    "<|endoftext|>",
    "a<|endoftext|>b <|endo<|endoftext|>ftext|>",
    "### Assistant:\nme",
    "{{ eos_token }} {% raw %}",
    "line\n\n\nline\r\nline",
]


@pytest.fixture(scope="module")
def gpt2():
    return chat_format(build_tokenizer("gpt2", ()).hf, "gpt2")


@pytest.fixture
def prepare_rows(tmp_path, write_recipe, byte_tokenizer):
    """Prepare rows as a file of conversations; return the recipe's Config."""

    def make(rows, name="rows.jsonl", **overrides):
        path = tmp_path / name
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(json.dumps(rows) if name.endswith(".json") else lines, encoding="utf-8")
        options = {"source": path, "format": "chat", "tokenizer": byte_tokenizer, "block_size": 128}
        options = {f"data__{knob}": str(value) for knob, value in options.items()}
        options |= {"model__n_positions": 128, "train__tokens_per_step": 512}
        config = load_config(write_recipe(**options | overrides))
        prepare(config)
        return config

    return make


def trained_rows(config, split="train") -> list[tuple[list[int], list[int]]]:
    rows = datasets.load_from_disk(f"{config.data.dir}/{split}")
    return list(zip(rows["input_ids"], rows["assistant_mask"], strict=True))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": EXCHANGE},
        {"messages": EXCHANGE, "prompt": "something else", "text": 5},
        {"prompt": "Why?", "completion": "Because."},
        {"instruction": "Why?", "output": "Because."},
        {"instruction": "Why?", "input": "", "output": "Because."},
        {"instruction": "Why?", "input": None, "output": "Because.", "messages": None},
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
            ]
        },
        {"conversations": EXCHANGE, "id": 5},
        {"question": "Why?", "answer": "Because."},
    ],
)
def test_row_shapes_are_conversations(row):
    assert conversation_of(row) == EXCHANGE


def test_sharegpt_row_with_system_and_several_turns():
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    turns = [(role, f"{role}?") for role in ("system", "human", "gpt", "human", "gpt")]
    row = {"id": 1, "conversations": [{"from": f, "value": v, "weight": 0} for f, v in turns]}
    assert conversation_of(row) == [{"role": roles[f], "content": v} for f, v in turns]


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        (  # GSM8K: without notes for a calculator
            {"question": "How many?", "answer": "48/2 = <<48/2=24>>24.\nIn all <<24>>72.\n#### 72"},
            "How many?",
            "48/2 = 24.\nIn all 72.\n#### 72",
        ),
        ({"question": "C++?", "answer": "cout <<x>> y"}, "C++?", "cout <<x>> y"),
        (
            {"question": "2 + 2?\n", "subject": "-", "choices": ["3", " 4 ", "5"], "answer": 1},
            "2 + 2?\n\nA. 3\nB. 4\nC. 5\n\nAnswer with the letter only.",
            "B",
        ),
        (
            {"instruction": "Translate. ", "input": " Hund\n", "output": "dog"},
            "Translate.\n\nHund",
            "dog",
        ),
    ],
)
def test_question_and_answer_of_a_row(row, question, answer):
    assert [message["content"] for message in conversation_of(row)] == [question, answer]


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ('"text"', "messages", "instruction + output"),
        ('{"question": "a", "answers": "b"}', "messages", "question, answers"),
        ("{}", "messages", "nothing"),
        ('{"prompt": "a"}', "messages", "prompt"),
        ('{"messages": []}', "messages: ", "list"),
        ('{"messages": "hello"}', "messages: ", "list"),
        ('{"messages": ["hello"]}', "message 1: ", "object"),
        ('{"messages": [{"from": "human", "content": "a"}]}', "message 1: ", "object"),
        ('{"conversations": [{"from": "bing", "value": "a"}]}', "message 1: role ", "'bing'"),
        ('{"conversations": [{"from": ["gpt"], "value": "a"}]}', "message 1: role ", "['gpt']"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "message 1: ", "assistant's"),
        ('{"conversations": {"from": "gpt"}}', "conversations: ", "list"),
        ('{"question": "a", "answer": 5}', "answer ", "5"),
        ('{"question": "a", "answer": ""}', "answer ", "empty"),
        ('{"question": 5, "choices": ["a", "b"], "answer": 0}', "question ", "5"),
        ('{"question": "a", "choices": "b", "answer": 0}', "choices: ", "'b'"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "choices: ", "['b']"),
        ('{"question": "a", "choices": ["b", ""], "answer": 0}', "choice 2 ", "empty"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "answer: ", "2"),
        ('{"question": "a", "choices": ["b", "c"], "answer": true}', "answer: ", "True"),
        ('{"question": "a", "choices": ["b", "c"], "answer": "B"}', "answer: ", "'B'"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "message 1: role ", "'tool'"),
        ('{"messages": [ASSISTANT]}', "message 1: ", "assistant's"),
        ('{"messages": [USER, USER, ASSISTANT]}', "message 2: ", "user's"),
        (
            '{"messages": [USER, ASSISTANT, {"role": "system", "content": "a"}]}',
            "message 3: ",
            "system's",
        ),
        ('{"messages": [USER]}', "last message", "user's"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "last message", "system's"),
        ('{"messages": [USER, {"role": "assistant", "content": " \\n"}]}', "message 2 ", "empty"),
        ('{"messages": [USER, {"role": "assistant", "content": null}]}', "message 2 ", "None"),
        ('{"prompt": "a", "completion": 5}', "completion ", "5"),
        ('{"instruction": 5, "output": "a"}', "instruction ", "5"),
        ('{"instruction": "a", "input": ["b"], "output": "a"}', "input ", "['b']"),
        ('{"instruction": "a", "output": ""}', "output ", "empty"),
        ('{"prompt": "a\\ud83d", "completion": "b"}', "", "\\ud83d"),
    ],
)
def test_invalid_conversation_is_one_line(row, field, value):
    for name, message in zip(("USER", "ASSISTANT"), EXCHANGE, strict=True):
        row = row.replace(name, json.dumps(message))
    message = refusal(conversation_of, json.loads(row), error=ValueError)
    assert field in message
    assert value in message


@pytest.mark.parametrize(("name", "position"), [("rows.jsonl", "line 2"), ("rows.json", "row 2")])
def test_invalid_conversation_names_file_and_line(prepare_rows, tmp_path, name, position):
    message = refusal(prepare_rows, [{"messages": EXCHANGE}, {"messages": EXCHANGE[:1]}], name)
    assert message.startswith(f"{tmp_path / name}: {position}: ")
    assert not (tmp_path / "data").exists()


def test_plain_text_single_conversation_and_tokenizer_without_eos_are_refused(
    prepare_rows, text_file
):
    assert str(text_file) in refusal(prepare_rows, [], data__source=str(text_file))
    assert "1 conversation" in refusal(prepare_rows, [{"messages": EXCHANGE}])
    assert "end-of-text" in refusal(chat_format, char_tokenizer(list("abc")).hf, "abc")


def test_saved_template_gives_the_training_tokens(prepare_rows):
    rows = []
    for number in range(len(DIFFICULT)):
        texts = [DIFFICULT[(number + k) % len(DIFFICULT)] for k in range(7)]
        roles = ["system", *["user", "assistant"] * 3]
        turns = zip(roles, texts, strict=True)
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    config = prepare_rows(rows, data__tokenizer="gpt2")
    # opened without this package
    plain = AutoTokenizer.from_pretrained(f"{config.data.dir}/tokenizer")
    assert plain.chat_template
    expected = [plain.apply_chat_template(row["messages"], return_dict=False) for row in rows]
    rows = trained_rows(config) + trained_rows(config, "validation")
    assert sorted(ids for ids, _ in rows) == sorted(expected)


def test_mask_covers_answers_and_text_has_no_special_tokens(gpt2):
    for text in DIFFICULT:
        messages = [{"role": role, "content": text} for role in ("system", "user", "assistant")]
        (example,) = gpt2.examples([[*messages, *EXCHANGE]])
        ids, answered = np.array(example.input_ids), np.array(example.assistant_mask)
        assert (ids == gpt2.hf.eos_token_id).sum() == 2, text
        shown = text.strip().replace("<|endoftext|>", "< |endoftext|>")
        answers = gpt2.hf.decode(ids[answered == 1])
        assert answers == f"{shown}<|endoftext|>Because.<|endoftext|>"
        prompt = gpt2.hf.apply_chat_template(
            messages[:2], add_generation_prompt=True, return_dict=False
        )
        assert gpt2.prompt_ids(messages[:2]) == prompt == ids[: len(prompt)].tolist()
        assert answered.argmax() == len(prompt), "the chat command uses the tokens of training"


def test_manifest_and_report_count_assistant_tokens(prepare_rows, chat_file, capsys):
    config = prepare_rows([], data__source=str(chat_file))
    folder = Path(config.data.dir)
    manifest = read_manifest(folder)
    for name in ("train", "validation"):
        rows, facts = trained_rows(config, name), getattr(manifest, name)
        assert facts.documents == len(rows)
        assert facts.tokens == sum(len(ids) for ids, _ in rows)
        assert facts.assistant_tokens == sum(sum(answered) for _, answered in rows)
        ends = sum(ids.count(256) for ids, _ in rows)
        assert facts.bytes == facts.assistant_tokens - ends  # one token per byte
        assert facts.bytes_per_token == facts.bytes / facts.assistant_tokens
    assert main(["prepare", str(folder.parent / "tiny.yaml")]) == 0
    out = capsys.readouterr().out
    train = manifest.train
    assert f"54 conversations, {train.tokens:,} tokens, {train.assistant_tokens:,} of" in out
    assert "longer than a block" in out


def test_prepared_data_of_other_format_is_refused(prepare_rows, chat_file, write_recipe):
    config = prepare_rows([], data__source=str(chat_file))
    message = refusal(prepare, replace_knobs(config, {"data.format": "text"}))
    assert "data.format 'chat'" in message
    assert "'text'" in message
    data = dataclasses.replace(config.data, source=config.data.dir)
    tokenizer = build_tokenizer(f"{config.data.dir}/tokenizer", ())
    assert config.data.dir in refusal(read_corpus, data, None, tokenizer, Path(config.data.dir))


def test_folder_with_readme_and_hub_rows(prepare_rows, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("What this is.")
    (folder / "a.csv").write_text("prompt,completion\nWhy?,Because.\nHow?,So.\n")
    config = prepare_rows([], data__source=str(folder))
    assert len(trained_rows(config)) == 1

    rows = datasets.Dataset.from_list([{"messages": EXCHANGE, "id": 1}] * 5)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    config = prepare_rows([], data__source="somebody/chats", data__dir=str(tmp_path / "hub"))
    assert len(trained_rows(config)) == 4
    bad = datasets.Dataset.from_list([{"messages": EXCHANGE[:1]}] * 2)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: bad)
    message = refusal(
        prepare_rows, [], data__source="somebody/chats", data__dir=str(tmp_path / "bad")
    )
    assert "somebody/chats: split train: row 1: " in message
