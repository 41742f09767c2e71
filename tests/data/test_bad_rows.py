"""Rows that cannot be used: refused, or left out up to `data.max_bad_rows`, counted and named."""

import json
import re
import shutil
from types import SimpleNamespace

import datasets
import pytest

from assertions import file_contents, refusal
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import DataSection, replace_knobs
from nanogpt_hf.data import formats
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.data.source import load_documents
from nanogpt_hf.data.summary import summary_lines

GOOD = '{"text": "good"}'
TWICE = '{"text": "x", "text": "y"}'
TURNS = {"prompt": "a", "completion": "b"}


def lines(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def read(path, tmp_path, limit, **knobs):
    """The documents of a source, and how many rows were left out."""
    documents = load_documents(DataSection(str(path), max_bad_rows=limit, **knobs), tmp_path)
    texts = documents.read()
    return texts, documents.bad_rows["train"].left_out(len(texts))


BAD = [
    ("a.jsonl", f'{GOOD}\n{{"text": 5}}\n{GOOD}\n', "text"),
    ("a.jsonl", f'{GOOD}\n{{"text"\n{GOOD}\n', "text"),
    ("a.jsonl", f"{GOOD}\nplain\n{GOOD}\n", "text"),
    ("a.jsonl", f"{GOOD}\n".encode() + b'{"text": "\xff"}\n' + GOOD.encode(), "text"),
    ("a.jsonl", f'{GOOD}\n{{"text": "\\ud83d"}}\n{GOOD}\n', "text"),
    ("a.json", f'[{GOOD}, {{"body": "x"}}, {GOOD}]', "text"),
    ("a.json", f"{GOOD}\n[1]\n{GOOD}\n", "text"),
    ("a.json", f"[{GOOD}, {TWICE}, {GOOD}]", "text"),
    ("a.json", f'{{"data": [{GOOD}, {TWICE}, {GOOD}]}}', "text"),
    ("a.json", f'[{GOOD}, {{"text": "x", "of": [[{TWICE}]]}}, {GOOD}]', "text"),
    ("a.json", f"{GOOD}\n{TWICE}\n{GOOD}\n", "text"),
    ("a.jsonl", f"{GOOD}\n{TWICE}\n{GOOD}\n", "text"),
    ("a.jsonl", f'{GOOD}\n{{"of": {{"of": {TWICE}}}, "text": "x"}}\n{GOOD}\n', "text"),
    ("a.csv", "text\ngood\nx,y\ngood\n", "text"),
    ("a.tsv", b"text\ngood\n\xff\ngood\n", "text"),
    ("a.jsonl", lines(TURNS, TURNS | {"completion": " "}, TURNS), "chat"),
    ("a.jsonl", lines(TURNS, TURNS | {"completion": None}, TURNS), "chat"),
    ("a.jsonl", lines(TURNS, {"messages": [{"role": "user", "content": "a"}]}, TURNS), "chat"),
    ("a.jsonl", lines(TURNS, {"messages": 5}, TURNS), "chat"),
    ("a.jsonl", f"{GOOD}\nnull\n{GOOD}\n", "text"),
    ("a.jsonl", lines(TURNS, None, TURNS), "chat"),
    ("a.jsonl", lines(TURNS, TURNS | {"weight": 0}, TURNS), "chat"),
    ("a.jsonl", lines(TURNS, [[[]]], TURNS), "chat"),
]


@pytest.mark.parametrize(("name", "data", "format"), BAD)
def test_bad_row_is_refused_or_left_out_and_named(write, tmp_path, caplog, name, data, format):
    path = write(name, data)
    message = refusal(read, path, tmp_path, 0, format=format)
    assert message.startswith(f"{path}: row 2: ")
    assert message.endswith("; data.max_bad_rows N leaves out up to N such rows")
    for limit in (1, 0.34):
        texts, left_out = read(path, tmp_path, limit, format=format)
        assert (len(texts), left_out) == (2, 1)
        assert texts[0] == texts[1]
        assert f"1 of 3 rows cannot be used, left out: {path}: row 2: " in caplog.text
    assert "1 of 3 rows" in refusal(read, path, tmp_path, 0.3, format=format)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("bad", [TWICE.encode(), b'{"text": "\xff"}', b"[1]"])
def test_a_bad_first_line_is_a_row(write, tmp_path, name, bad):
    path = write(name, bad + f"\n{GOOD}\n{GOOD}\n".encode())
    assert read(path, tmp_path, 1) == (["good", "good"], 1)


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize(
    ("name", "data", "count"),
    [
        ("a.jsonl", f'{{"text": ""}}\n{GOOD}\n{{"text": null}}\n', "2 rows"),
        ("a.jsonl", f'""\n{GOOD}\n', "1 row"),
        ("a.csv", "id,text\n1,good\n2,\n", "1 row"),
        ("a.jsonl", f"{GOOD}\n", None),
    ],
)
def test_empty_texts_are_skipped_and_counted(write, tmp_path, caplog, name, data, count, limit):
    caplog.set_level("INFO")
    documents = load_documents(DataSection(str(write(name, data)), max_bad_rows=limit), tmp_path)
    assert documents.read() == ["good"]
    lines_ = [record.getMessage() for record in caplog.records]
    assert lines_ == ([f"{count} whose text is empty or null: skipped"] if count else [])


def test_files_that_are_no_text_are_left_out(write, tmp_path):
    for name, data in (("a", "good"), ("b", b"\xff"), ("c", b"x\0"), ("d", "good")):
        write(f"text/{name}.txt", data)
    assert read(tmp_path / "text", tmp_path, 2) == (["good", "good"], 2)
    message = refusal(read, tmp_path / "text", tmp_path, 1)
    assert all(f"{name}.txt: row 1: " in message for name in ("b", "c"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", '[{"text": "x"}, {"text"'),
        ("a.json", '{"data": [{"text": "x"}], "data": [{"text": "y"}]}'),
        ("a.csv", 'text\nx\n"open'),
        ("a.parquet", "no parquet"),
        ("a.zip", "no zip"),
        ("a.jsonl.gz", "no gzip"),
        ("a.pdf", "%PDF-1.4"),
    ],
)
def test_damaged_file_is_refused_whatever_may_be_left_out(write, tmp_path, name, data):
    path = write(name, data)
    message = refusal(read, path, tmp_path, 1000)
    assert message.startswith(f"{path}: ")
    assert "max_bad_rows" not in message


def test_first_rows_are_named_and_all_are_counted(write, tmp_path, caplog):
    write("rows/a.jsonl", "x\n" + f"{GOOD}\n" * 4 + "x\nx\n")
    write("rows/b.jsonl", "x\n" * 3 + f"{GOOD}\n")
    texts, left_out = read(tmp_path / "rows", tmp_path, 6)
    assert (len(texts), left_out) == (5, 6)
    assert "6 of 11 rows" in caplog.text
    named = [word for word in caplog.text.split() if word.endswith("jsonl:")]
    assert len(named) >= 3
    assert "row 1: " in caplog.text
    assert "row 6: " in caplog.text
    assert "row 7: " in caplog.text
    assert "more than 5 rows" in refusal(read, tmp_path / "rows", tmp_path, 5)


# --- prepared data
# ------------------------------------------------------------------------------


@pytest.fixture
def config(write_recipe, byte_tokenizer):
    def config(source, **knobs):
        options = {"data__source": str(source), "data__tokenizer": str(byte_tokenizer)}
        if knobs.get("format") == "chat":
            options |= {"model__n_positions": 64, "data__block_size": 64}
            options |= {"train__micro_batch_size": 2}
        return load_config(write_recipe(**options | {f"data__{k}": v for k, v in knobs.items()}))

    return config


def prepared(config, tmp_path):
    """The files of the prepared data of a recipe, and its manifest."""
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    manifest, _ = prepare(config)
    return file_contents(tmp_path / "data"), manifest


@pytest.mark.parametrize("format", ["text", "chat"])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_tokens_are_those_of_the_good_rows(write, config, tmp_path, format, tokenizer, monkeypatch):
    monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 7)
    knobs = {"format": format}
    if tokenizer == "bpe":
        knobs |= {"tokenizer": "bpe", "vocab_size": 300}
    rows = [{"text": f"text {n}" * 9} for n in range(60)]
    if format == "chat":
        rows = [{"prompt": f"{n}?", "completion": f"answer {n}" * 5} for n in range(60)]
    good = write("good.jsonl", lines(*rows))
    mixed = write("bad.jsonl", "x\n" + lines(*rows[:31]) + "{}\n[1]\n" + lines(*rows[31:]) + "x\n")
    files, manifest = prepared(config(good, **knobs, max_bad_rows=3), tmp_path)
    recipe = config(mixed, **knobs, max_bad_rows=4)
    others, with_bad = prepared(recipe, tmp_path)
    assert (manifest.left_out, with_bad.left_out) == (0, 4)
    assert with_bad.content() | {"revision": 0} == manifest.content() | {"revision": 0}
    files.pop("manifest.json")
    others.pop("manifest.json")
    assert files == others
    assert "  left out   4 rows that cannot be used" in summary_lines(recipe, load_prepared(recipe))
    shutil.rmtree(tmp_path / "data")
    assert "more than 3 rows" in refusal(prepare, config(mixed, **knobs, max_bad_rows=3))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_limit_of_tokens_counts_the_bad_rows_before_it(
    write, config, tmp_path, monkeypatch, threads
):
    monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 3)
    path = write("rows.jsonl", ("x\n" + f"{GOOD}\n" * 3) * 30)
    knobs = {"max_tokens": 100, "max_bad_rows": 30, "num_threads": threads}
    _, manifest = prepared(config(path, **knobs), tmp_path)
    documents = manifest.train.documents + manifest.validation.documents
    # Each document has 5 tokens.
    assert documents == 20
    assert manifest.left_out == 7


@pytest.mark.parametrize("threads", [1, 4])
def test_bad_row_beyond_the_limit_of_tokens_is_not_refused(
    write, config, tmp_path, monkeypatch, threads
):
    monkeypatch.setattr(formats, "_BATCH_DOCUMENTS", 3)
    path = write("rows.jsonl", f"{GOOD}\n" * 25 + "x\n")
    _, manifest = prepared(config(path, max_tokens=100, num_threads=threads), tmp_path)
    assert manifest.train.documents + manifest.validation.documents == 20


def test_rows_of_a_hub_set_are_left_out_of_each_split(monkeypatch, config, tmp_path):
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    splits = {
        "train": datasets.Dataset.from_dict({"messages": [good, good[:1], good, good[:0], good]}),
        "test": datasets.Dataset.from_dict({"messages": [good[:1], good, good]}),
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, **__: splits[split])
    knobs = {"format": "chat", "max_bad_rows": 2, "validation_split": "test"}
    knobs |= {"validation_fraction": 0}
    _, manifest = prepared(config("owner/name", **knobs), tmp_path)
    counts = manifest.train.documents, manifest.validation.documents, manifest.left_out
    assert counts == (3, 2, 3)
    shutil.rmtree(tmp_path / "data")
    knobs |= {"validation_split": None, "validation_fraction": 0.1, "max_bad_rows": 0.4}
    _, manifest = prepared(config("owner/name", **knobs), tmp_path)
    assert manifest.train.documents + manifest.validation.documents == 3


def test_conversation_that_the_template_refuses_is_left_out(write, config, tmp_path, monkeypatch):
    from nanogpt_hf.data.chat_template import ChatFormat
    from nanogpt_hf.errors import DataError

    check = ChatFormat.check_special

    def refuse(self, ids, conversation, *arguments):
        if conversation.messages[0]["content"] == "bad":
            raise DataError("no")
        check(self, ids, conversation, *arguments)

    monkeypatch.setattr(ChatFormat, "check_special", refuse)
    rows = [{"prompt": f"{n}", "completion": f"answer {n}" * 5} for n in range(20)]
    rows[11]["prompt"] = "bad"
    path = write("rows.jsonl", "x\n" + lines(*rows))
    _, manifest = prepared(config(path, format="chat", max_bad_rows=2), tmp_path)
    counts = manifest.train.documents + manifest.validation.documents, manifest.left_out
    assert counts == (19, 2)
    shutil.rmtree(tmp_path / "data")
    path.write_text(lines(*rows))
    message = refusal(prepare, config(path, format="chat"))
    assert message.startswith("row 12 of all: the conversation that starts 'bad': no; data.max_bad")


def test_all_rows_bad_is_said(write, config):
    path = write("rows.jsonl", "x\n" * 5)
    assert "empty; there is no text" in refusal(prepare, config(path, max_bad_rows=9))
    assert "5 of 5 rows" in refusal(prepare, config(path, max_bad_rows=0.9))


# --- what reads rows without prepared data
# ------------------------------------------------------------------------------


def with_bad_rows(rows):
    """JSON lines of the rows, with three that cannot be used between them."""
    return "x\n" + lines(*rows[:7]) + "{}\n" + lines(*rows[7:]) + "[5]\n"


def test_pairs_and_questions_are_those_of_the_good_rows(write, config, byte_tokenizer, caplog):
    from nanogpt_hf.methods.pairs import load_answers, load_pairs
    from nanogpt_hf.tasks.load import load_task

    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(20)]
    labels = [{"prompt": f"{n}?", "completion": f"{n}", "label": n % 2 == 0} for n in range(20)]
    questions = [{"question": f"{n}?", "answer": f"{n}"} for n in range(20)]

    def loaded(load, rows, **knobs):
        return load(config(write("rows.jsonl", rows), validation_fraction=0.2, **knobs))

    for load, rows in ((load_pairs, pairs), (load_answers, labels)):
        good = loaded(load, lines(*rows))
        mixed = loaded(load, with_bad_rows(rows), max_bad_rows=3)
        assert good.train.pairs == mixed.train.pairs
        assert good.validation.pairs == mixed.validation.pairs
        assert "3 of 23 rows" in caplog.text
        caplog.clear()
        assert "row 1: " in refusal(loaded, load, with_bad_rows(rows))
    for hold_out_all in (False, True):
        good, mixed = (
            load_task("exact", recipe.data, hold_out_all=hold_out_all)
            for recipe in (
                config(write("good.jsonl", lines(*questions))),
                config(write("bad.jsonl", with_bad_rows(questions)), max_bad_rows=0.2),
            )
        )
        assert (good.train, good.held_out) == (mixed.train, mixed.held_out)


REFUSED = {
    "a field that is not written": ({"mood": "glad"}, "mood: the model's chat template does not"),
    "a special token in text": ({"content": "5\N{CURRENCY SIGN}?"}, "changes the special tokens"),
    "what fails in the template": ({"content": "raise?"}, "chat template fails"),
    "an unknown character": ({"content": "1~?"}, "the tokenizer knows no '~'"),
    "half a character": ({"content": "\ud83d?"}, "surrogates not allowed"),
}
QUESTION = {"role": "user", "content": "1?"}


@pytest.fixture(scope="module", params=["marked", "unmarked"])
def refusing_tokenizer(request, tmp_path_factory):
    """The folder of a tokenizer without "~", whose chat template fails for "raise", and with a
    special token of one character, which no space can break.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from nanogpt_hf.data.own_template import chat_template

    letters = [chr(code) for code in range(32, 126)] + ["\n"]
    rust = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(letters)}, "\0"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    rust.decoder = decoders.Fuse()
    rust.add_special_tokens([AddedToken(token, normalized=False) for token in ("¤", "<end>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>", bos_token=None)
    template = chat_template(tokenizer)
    if request.param == "unmarked":
        template = re.sub(r"\{%- (end)?generation -%\}", "", template)
    tokenizer.chat_template = (
        "{%- for message in messages if 'raise' in message['content'] -%}"
        "{{ raise_exception('no') }}{%- endfor -%}" + template
    )
    folder = tmp_path_factory.mktemp("refusing")
    tokenizer.save_pretrained(folder)
    return folder


def of_method(method, asked, number=1):
    """A row of a method with a question, as messages."""
    answer = {"role": "assistant", "content": f"#### {number}"}
    if method in ("sft", "rl"):
        return {"messages": [asked, answer]}
    if method == "dpo":
        return {"prompt": [asked], "chosen": [answer], "rejected": [answer | {"content": "no"}]}
    return {"prompt": [asked], "completion": [answer], "label": number % 2 == 0}


def loaded_by(method, recipe):
    """What a method trains on, or is asked."""
    from nanogpt_hf.methods.pairs import load_answers, load_pairs
    from nanogpt_hf.methods.rollouts import load_questions

    if method == "sft":
        shutil.rmtree(recipe.data.dir, ignore_errors=True)
        manifest, _ = prepare(recipe)
        return manifest.train.documents + manifest.validation.documents
    if method == "rl":
        task = load_questions(recipe).train.task
        return task.train, task.held_out
    data = {"dpo": load_pairs, "kto": load_answers}[method](recipe)
    return data.train.pairs, data.validation.pairs


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "rl"])
def test_row_that_the_template_or_tokenizer_refuses_is_named_or_left_out(
    write, config, refusing_tokenizer, caplog, method, case
):
    change, words = REFUSED[case]
    rows = [of_method(method, QUESTION | {"content": f"{n}?"}, n) for n in range(20)]
    bad = of_method(method, QUESTION | change)

    def loaded(name, rows, **knobs):
        knobs |= {"tokenizer": str(refusing_tokenizer), "format": "chat"}
        path = write(name, lines(*rows))
        recipe = config(path, validation_fraction=0.2, **knobs)
        if method == "rl":
            recipe = replace_knobs(recipe, {"rl.task": "exact", "rl.max_new_tokens": 8})
        return loaded_by(method, recipe)

    message = refusal(loaded, "bad.jsonl", [*rows[:7], bad, *rows[7:]])
    assert "row 8" in message
    assert words in message
    assert message.endswith("; data.max_bad_rows N leaves out up to N such rows")
    mixed = [*rows[:7], bad, *rows[7:], bad]
    found = loaded("bad.jsonl", mixed, max_bad_rows=2)
    assert found == loaded("good.jsonl", rows)
    assert "data.max_bad_rows: 2 of 22 rows cannot be used, left out: " in caplog.text
    assert "more than 1 rows" in refusal(loaded, "bad.jsonl", mixed, max_bad_rows=1)


PAIR = {"prompt": "1?", "chosen": "yes", "rejected": "yes "}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}


@pytest.mark.parametrize(
    ("method", "row", "words"),
    [
        ("dpo", PAIR, "have the same tokens, which prefers nothing"),
        ("dpo, no template", PAIR | {"system": "x", "rejected": "no"}, "no chat template"),
        ("kto, no template", of_method("kto", QUESTION) | {"system": "x"}, "no chat template"),
        ("rl, no template", of_method("rl", QUESTION | {"mood": "glad"}), "no chat template"),
        ("rl", {"messages": [QUESTION, CALL]}, "calls a tool"),
        ("rl", {"messages": [QUESTION, ANSWER, QUESTION, ANSWER | {"weight": 0}]}, "not to be"),
        ("rl, gsm8k", of_method("rl", QUESTION, "?"), "has no number after ####"),
        ("rl, regex", {"question": "1?", "answer": "("}, "is no regular expression"),
        ("rl, regex", {"question": "1?", "answer": "a{9999999999}"}, "is no regular expression"),
    ],
)
def test_row_that_a_method_refuses_is_named_or_left_out(
    write, config, byte_tokenizer, tmp_path, method, row, words
):
    from transformers import AutoTokenizer

    from nanogpt_hf.data.own_template import chat_template

    method, _, detail = method.partition(", ")
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    if detail != "no template":
        tokenizer.chat_template = chat_template(tokenizer)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [of_method(method, QUESTION | {"content": f"{n}?"}, n) for n in range(20)]

    def loaded(rows, limit):
        path = write("rows.jsonl", lines(*rows))
        knobs = {"tokenizer": str(tmp_path / "tokenizer")}
        recipe = config(path, validation_fraction=0.2, max_bad_rows=limit, format="chat", **knobs)
        if method == "rl":
            task = detail if detail in ("gsm8k", "regex") else "exact"
            recipe = replace_knobs(recipe, {"rl.task": task, "rl.max_new_tokens": 8})
        return loaded_by(method, recipe)

    bad = [*rows[:7], row, *rows[7:]]
    message = refusal(loaded, bad, 0)
    assert f"{tmp_path / 'rows.jsonl'}: row 8: " in message
    assert words in message
    assert message.endswith("; data.max_bad_rows N leaves out up to N such rows")
    assert loaded(bad, 1) == loaded(rows, 0)


def test_questions_of_evaluate_that_the_template_refuses_are_named(
    write, refusing_tokenizer, tmp_path
):
    from argparse import Namespace

    from nanogpt_hf.data.tokenizer import build_tokenizer
    from nanogpt_hf.evaluation.question_task import load_question_task

    rows = [of_method("rl", QUESTION | {"content": f"{n}?"}, n) for n in range(5)]
    path = write("rows.jsonl", lines(*rows, of_method("rl", QUESTION | {"content": "raise"})))
    options = {"limit": None, "samples": None, "temperature": None, "max_new_tokens": 8}

    def loaded(limit):
        request = SimpleNamespace(
            arguments=Namespace(batch_size=2, **options),
            tokenizer=build_tokenizer(str(refusing_tokenizer), ()),
            knobs={"max_bad_rows": limit},
            positions=64,
        )
        return load_question_task(
            "exact", request, title="rl:exact", source=str(path), option="--questions"
        )

    assert f"{path}: row 6: the model's chat template fails" in refusal(loaded, 0)
    assert len(loaded(1).questions) == 5


def test_text_of_evaluate_is_that_of_the_good_rows(write, tmp_path, byte_tokenizer):
    from nanogpt_hf.data.tokenizer import build_tokenizer
    from nanogpt_hf.evaluation.corpus import read_corpus

    tokenizer = build_tokenizer(str(byte_tokenizer), ())
    rows = [{"text": f"text {n}"} for n in range(20)]
    good, mixed = (
        read_corpus(DataSection(str(write(name, data)), max_bad_rows=3), None, tokenizer, tmp_path)
        for name, data in (("a.jsonl", lines(*rows)), ("b.jsonl", with_bad_rows(rows)))
    )
    assert (good.stream.sha256(), good.documents) == (mixed.stream.sha256(), mixed.documents)


def test_sources_of_a_mixture_have_their_own_limit(write, config, tmp_path, write_recipe):
    rows = [{"text": f"text {n}" * 9} for n in range(20)]
    good = write("good.jsonl", lines(*rows))
    bad = write("bad.jsonl", with_bad_rows(rows))

    def mixed(limit):
        recipe = config(good)
        entries = [
            {"source": str(good), "weight": 1, "name": "good"},
            {"source": str(bad), "weight": 1, "name": "bad", "max_bad_rows": limit},
        ]
        return replace_knobs(recipe, {"data.source": entries})

    assert "more than 2 rows" in refusal(prepare, mixed(2))
    recipe = mixed(3)
    manifest, _ = prepare(recipe)
    assert [source.manifest.left_out for source in manifest.sources] == [0, 3]
    assert manifest.left_out == 3
    assert "  left out   3 rows that cannot be used" in summary_lines(recipe, load_prepared(recipe))


def test_another_limit_prepares_anew(write, config):
    path = write("rows.jsonl", with_bad_rows([{"text": f"text {n}" * 9} for n in range(20)]))
    prepare(config(path, max_bad_rows=3))
    assert prepare(config(path, max_bad_rows=3))[1] is False
    message = refusal(prepare, config(path))
    assert "prepared with data.max_bad_rows 3.0, the recipe says 0.0" in message
