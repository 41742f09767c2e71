"""Messages as `datasets`, polars and duckdb lay them out in Parquet, and tables as JSON text."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from assertions import refusal
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.conversations import labeled_of, pair_of
from nanogpt_hf.data.messages import Conversation
from nanogpt_hf.data.source import load_documents

MESSAGES = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
OTHER = [MESSAGES[0], {"role": "assistant", "content": "c"}]
READ = Conversation(MESSAGES)
READ_OTHER = Conversation(OTHER)
SHAREGPT = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
SHORT = pyarrow.string()


def columns(messages):
    return {name: [message[name] for message in messages] for name in messages[0]}


def tuples(messages):
    return [list(message.items()) for message in messages]


def of_texts(kind):
    return pyarrow.struct({"role": kind, "content": kind})


# messages in another layout, and the type that its writer gives the column
LAYOUTS = {
    "datasets: list of struct": (list, pyarrow.list_(of_texts(SHORT))),
    "polars: large list": (list, pyarrow.large_list(of_texts(pyarrow.large_string()))),
    "struct of lists": (columns, of_texts(pyarrow.list_(SHORT))),
    "struct of large lists": (columns, of_texts(pyarrow.large_list(pyarrow.large_string()))),
    "duckdb: maps": (tuples, pyarrow.list_(pyarrow.map_(SHORT, SHORT))),
    "text": (json.dumps, SHORT),
    "polars: large text": (json.dumps, pyarrow.large_string()),
    "duckdb: json": (json.dumps, pyarrow.json_()),
    "datasets: list of json": (lambda m: [*map(json.dumps, m)], pyarrow.list_(pyarrow.json_())),
    "text of a struct of lists": (lambda m: json.dumps(columns(m)), SHORT),
}


def array_of(values, kind):
    if kind != pyarrow.list_(pyarrow.json_()):
        return pyarrow.array(values, kind)
    lists = pyarrow.array(values, pyarrow.list_(SHORT))  # pyarrow makes no such lists itself
    texts = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), lists.values)
    return pyarrow.ListArray.from_arrays(lists.offsets, texts)


def documents_of(tmp_path, read_row=None, **columns):
    path = tmp_path / "rows.parquet"
    arrays = {name: array_of(values, kind) for name, (values, kind) in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    data = DataSection(str(path), format="chat")
    return load_documents(data, tmp_path, read_row).read()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_messages_are_one_conversation(tmp_path, layout):
    write, kind = LAYOUTS[layout]
    read = documents_of(tmp_path, messages=([write(MESSAGES), write(OTHER)], kind))
    assert read == [READ, READ_OTHER]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prompt", ["text", "messages", "none"])
def test_layouts_of_pairs_and_labeled_answers(tmp_path, layout, prompt):
    write, kind = LAYOUTS[layout]
    answers = [MESSAGES[1:], OTHER[1:]] if prompt == "messages" else [MESSAGES, OTHER]
    given = {
        "text": {"prompt": (["a?"], SHORT)},
        "messages": {"prompt": ([write(MESSAGES[:1])], kind)},
    }
    chosen, rejected = (([write(answer)], kind) for answer in answers)
    more = given.get(prompt, {})
    assert documents_of(
        tmp_path, lambda row, _: pair_of(row), chosen=chosen, rejected=rejected, **more
    ) == [(READ, READ_OTHER)]
    if prompt == "messages":
        label = ([True], pyarrow.bool_())
        read = documents_of(
            tmp_path, lambda row, _: labeled_of(row), completion=chosen, label=label, **more
        )
        assert read == [(READ, True)]


def test_sharegpt_as_a_struct_of_lists(tmp_path):
    lists = pyarrow.list_(SHORT)
    kind = pyarrow.struct({"from": lists, "value": lists, "weight": lists})
    read = documents_of(tmp_path, conversations=([columns(SHAREGPT)], kind))
    assert read == [READ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a?", "completion": "[1, 2]"},
        {"prompt": '["a"]', "completion": '[{"role": "user"}]'},
        {"prompt": "a?", "completion": json.dumps(MESSAGES)},
        {"question": json.dumps(MESSAGES), "answer": json.dumps(MESSAGES)},
    ],
)
def test_json_that_is_a_text_stays_text(tmp_path, row):
    (read,) = documents_of(tmp_path, **{name: ([text], SHORT) for name, text in row.items()})
    assert [message["content"] for message in read.messages] == list(row.values())


def test_one_answer_of_json_beside_one_of_text_stays_text(tmp_path):
    texts = {"prompt": "a?", "chosen": json.dumps(MESSAGES), "rejected": "plain"}
    ((chosen, _),) = documents_of(
        tmp_path,
        lambda row, _: pair_of(row),
        **{name: ([text], SHORT) for name, text in texts.items()},
    )
    assert chosen.messages[-1]["content"] == texts["chosen"]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ({"role": ["user", "assistant"], "content": ["a"]}, "different lengths"),
        ({"role": "user", "content": "a"}, "list of messages"),
        ({}, "list of messages"),
        ("plain", "list of messages"),
        ("[1", "list of messages"),
        ('["a", "b"]', "list of messages"),
        ([["a", "b"]], "list of messages"),
        ([], "last message"),
        (5, "list of messages"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path, messages, word):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    documents = load_documents(DataSection(str(path), format="chat"), tmp_path)
    message = refusal(documents.read)
    assert message.startswith(f"{path}: row 1: ")
    assert word in message


def test_hub_set_with_a_sequence_of_objects(tmp_path, monkeypatch):
    text = datasets.List(datasets.Value("string"))
    features = datasets.Features({"messages": {"role": text, "content": text}})
    rows = datasets.Dataset.from_dict({"messages": [columns(MESSAGES)] * 3}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    documents = load_documents(DataSection("owner/name", format="chat"), tmp_path)
    assert documents.read() == [READ] * 3


def test_times_that_python_does_not_have_are_not_read(tmp_path):
    when = ([2**61], pyarrow.timestamp("us"))
    assert documents_of(
        tmp_path, messages=([MESSAGES], LAYOUTS["datasets: list of struct"][1]), when=when
    ) == [READ]


def test_messages_as_json_in_a_table(tmp_path):
    path = tmp_path / "rows.tsv"
    quoted = json.dumps(MESSAGES).replace('"', '""')
    path.write_text(f'messages\n"{quoted}"\n')
    documents = load_documents(DataSection(str(path), format="chat"), tmp_path)
    assert documents.read() == [READ]
