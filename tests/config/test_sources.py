import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.sources import (
    read_sources,
    short_name,
    source_text,
    sources_of,
)
from nanogpt_hf.config.stages import comparable


def sources(*weights, **more):
    return read_sources(
        [{"source": f"{number}.txt", "weight": w} | more for number, w in enumerate(weights)]
    )


def load(entries, **overrides):
    return load_config(
        None, {"data.source": entries, "data.dir": "data/mix"} | overrides, name="mix"
    )


@pytest.mark.parametrize(
    ("weights", "integers"),
    [
        (["0.7", "0.2", "0.1"], [7, 2, 1]),
        ([70, 20, 10], [7, 2, 1]),
        (["0.333", "0.667"], [333, 667]),
        (["1e-3", 1], [1, 1000]),
        ([0.1 + 0.2, 0.3], None),  # 0.30000000000000004: an accident of floats, not a weight
        (["1e15", "0.1"], None),
        ([3], [1]),
    ],
)
def test_weights_become_integers_exactly(weights, integers):
    if integers is None:
        with pytest.raises(ValueError, match="more than 1,000,000 samples"):
            sources(*weights)
    else:
        assert [source.weight for source in sources_of(load(sources(*weights)).data)] == integers


def test_an_entry_overrides_the_knobs_of_its_source_alone():
    entries = [
        {"source": "web.txt", "weight": "3", "validation_fraction": "0.01"},
        {
            "source": "user/set",
            "weight": "1",
            "split": "all",
            "text_column": "content",
            "dir": "shared/set",
        },
    ]
    web, hub = sources_of(load(entries, **{"data.validation_fraction": 0.1}).data)
    assert (web.name, web.data.source, web.data.dir, web.data.validation_fraction) == (
        "web",
        "web.txt",
        "data/mix/web",
        0.01,
    )
    assert (hub.name, hub.data.split, hub.data.text_column, hub.data.dir) == (
        "set",
        "all",
        "content",
        "shared/set",
    )
    assert (web.data.split, hub.data.validation_fraction) == ("train", 0.1)


def test_a_mixture_survives_being_written_and_read(tmp_path):
    config = load(sources("0.7", "1e-3", validation_fraction="0.01"))
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "recipe.yaml").data == config.data


def test_a_mixture_on_the_command_line():
    text = "[{source: a.txt, weight: 2}, {source: 'b,c.txt', weight: 1}]"
    config = load_config(None, [("data.source", text)], name="mix")
    assert [source.data.source for source in sources_of(config.data)] == ["a.txt", "b,c.txt"]
    assert (
        load_config(None, [("data.source", "[ab].txt")], name="glob").data.source == "[ab].txt"
    ), "a glob"


def test_names_of_sources():
    names = {
        "texts/my.txt": "my",
        "user/set": "set",
        "https://x.org/a.jsonl.gz?key=1": "a.jsonl",
        "./x/*.txt": "text",
    }
    assert {source: short_name(source) for source in names} == names


def test_folders_of_texts_may_move():
    config = load(sources(2, 1))
    first, second = config.data.source
    changes = ({"dir": "a"}, {"validation_fraction": 0.2})
    moved, other = (load([first | more, second]) for more in changes)
    assert source_text(config.data) == "2 0.txt + 1 1.txt"
    before = comparable(config)["data.source"]
    assert comparable(moved)["data.source"] == before != comparable(other)["data.source"]
