"""Conversations: accepted rows, mistakes in one line, and the chat template gives the tokens of
training.
"""

import json
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

from assertions import refusal
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.chat_examples import answer_finder
from nanogpt_hf.data.conversations import conversation_of, labeled_of, pair_of
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.tokenizer import char_tokenizer

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


@pytest.fixture
def prepare_rows(tmp_path, write_recipe, byte_tokenizer):
    """Prepare rows as a file of conversations; return the recipe's Config."""

    def make(rows, **overrides):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
        {"prompt": "Why?", "completion": "Because."},
        {"instruction": "Why?", "input": None, "output": "Because.", "messages": None},
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Because."},
            ]
        },
        {"conversations": EXCHANGE, "id": 5},
    ],
)
def test_row_shapes_are_conversations(row):
    assert conversation_of(row).messages == EXCHANGE


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
    assert [message["content"] for message in conversation_of(row).messages] == [question, answer]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('"text"', "instruction + output"),
        ('{"messages": []}', "last message"),
        ('{"messages": [{"from": "human", "content": "a"}]}', "list of messages"),
        ('{"conversations": [{"from": "bing", "value": "a"}]}', "message 1: role: "),
        ('{"question": "a", "answer": 5}', "message 2: content: expected text, got 5"),
        ('{"question": "a", "choices": "b", "answer": 0}', "'b'"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "answer: expected the index"),
        ('{"question": "a", "choices": ["b", "c"], "answer": -1}', "2 choices"),
        ('{"question": "a", "choices": ["b", "c"], "answer": true}', "and True"),
        ('{"question": "a", "choices": [], "answer": 0}', "0 choices"),
        ('{"question": 5, "choices": ["a", "b"], "answer": 0}', "question: expected text"),
        ('{"question": "a", "choices": ["b", ""], "answer": 0}', "choices: expected text"),
        ('{"instruction": 5, "output": "a"}', "instruction: expected text, got 5"),
        ('{"instruction": "a", "input": ["b"], "output": "a"}', "input: expected text"),
        ('{"messages": [USER, USER, ASSISTANT]}', "message 2: role: "),
        ('{"messages": [USER, ASSISTANT, {"role": "system", "content": "a"}]}', "message 3: "),
        (
            '{"messages": [USER, {"role": "assistant", "content": " \\n"}]}',
            "message 2: content: expected",
        ),
        ('{"prompt": "a\\ud83d", "completion": "b"}', "\\ud83d"),
    ],
)
def test_invalid_conversation_is_one_line(row, message):
    for name, exchange in zip(("USER", "ASSISTANT"), EXCHANGE, strict=True):
        row = row.replace(name, json.dumps(exchange))
    assert message in refusal(conversation_of, json.loads(row), error=ValueError)


@pytest.mark.parametrize("answer", [0, 25, 26])
def test_choices_have_a_letter_or_are_refused(answer):
    row = {"question": "Which?", "choices": [f"c{n}" for n in range(27)], "answer": answer}
    message = refusal(conversation_of, row, error=ValueError)
    assert message.startswith("choices: 27 are more than the 26 letters")
    row["choices"].pop()
    if answer < 26:
        asked, answered = conversation_of(row).messages
        assert "Z. c25\n" in asked["content"]
        assert answered["content"] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[answer]


MARKED_ROWS = [
    {"messages": EXCHANGE},
    {"conversations": EXCHANGE},
    {"prompt": "Why?", "completion": "Because."},
    {"instruction": "Why?", "output": "Because."},
    {"question": "Why?", "choices": ["a", "b"], "answer": 1},
    {"question": "Why?", "answer": "Because."},
    {"prompt": "Why?", "chosen": "Because.", "rejected": "So."},
    {"prompt": "Why?", "completion": "Because.", "label": True},
]


@pytest.mark.parametrize("row", MARKED_ROWS)
@pytest.mark.parametrize(
    ("mark", "value"),
    [("weight", 0), ("weight", 0.5), ("train", False), ("loss", False), ("loss", "no")],
)
def test_mark_beside_the_messages_is_refused(row, mark, value):
    read = pair_of if "chosen" in row else labeled_of if "label" in row else conversation_of
    read(row)
    for without_effect in (None, True, 1):
        assert read(row | {mark: without_effect}) == read(row)
    message = refusal(read, row | {mark: value}, error=ValueError)
    assert f"{mark}: {value!r} beside the messages" in message


def test_invalid_conversation_names_file_and_row(prepare_rows, tmp_path):
    message = refusal(prepare_rows, [{"messages": EXCHANGE}, {"messages": EXCHANGE[:1]}])
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}: row 2: ")
    assert not (tmp_path / "data").exists()


def test_plain_text_single_conversation_and_tokenizer_without_eos_are_refused(
    prepare_rows, text_file
):
    assert str(text_file) in refusal(prepare_rows, [], data__source=str(text_file))
    assert "1 conversation" in refusal(prepare_rows, [{"messages": EXCHANGE}])
    hf = char_tokenizer(list("abc")).hf
    assert "no token that ends a text" in refusal(answer_finder, hf, "abc")


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


def test_manifest_and_report_count_assistant_tokens(prepare_rows, chat_file, capsys):
    config = prepare_rows([], data__source=str(chat_file))
    folder = Path(config.data.dir)
    manifest = read_manifest(folder)
    for name in ("train", "validation"):
        rows = trained_rows(config, name)
        facts = getattr(manifest, name)
        assert facts.documents == len(rows)
        assert facts.tokens == sum(len(ids) for ids, _ in rows)
        assert facts.assistant_tokens == sum(sum(answered) for _, answered in rows)
        ends = sum(ids.count(256) for ids, _ in rows)
        assert facts.bytes == facts.assistant_tokens - ends  # one token per byte
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


def test_only_files_of_rows_in_a_folder_are_read(prepare_rows, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("What this is.")
    (folder / "a.csv").write_text("prompt,completion\nWhy?,Because.\nHow?,So.\n")
    assert len(trained_rows(prepare_rows([], data__source=str(folder)))) == 1
