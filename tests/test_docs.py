"""The pages in docs/ and CONTRIBUTING.md: tables up to date; links, commands, flags, knobs and
files that exist.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from nanogpt_hf.commands import COMMANDS, functions_of, main
from nanogpt_hf.commands.arguments import add_help, add_logging_options
from nanogpt_hf.config.aliases import ALIASES, MACHINE_SETTINGS
from nanogpt_hf.config.load import check_knobs, load_config
from nanogpt_hf.config.names import shipped_recipes
from nanogpt_hf.config.schema import KNOBS, SECTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")
TEXTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SKILL.md"))]
}
all_pages = pytest.mark.parametrize("name", sorted(TEXTS))


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def flags_of(command: str) -> set[str]:
    if command == "launch":
        return set()
    parser = argparse.ArgumentParser(add_help=False)
    functions_of(command)[0](parser)
    add_logging_options(parser)
    add_help(parser)
    return {option for action in parser._actions for option in action.option_strings}


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What the page explains, and no name here replaces.
_EXPLAINED = {
    "init_from",
    "dataset",
    "backend",
    "eval_only",
    "load_best_model_at_end",
    "dataloader_num_workers",
}
_EXPLAINED |= {"optim", "compute_metrics", "num_samples", "max_new_tokens", "temperature", "top_k"}
_EXPLAINED |= {"head_dim", "examples_per_step", "swiglu", "rotary_base", "num_experts"}
_EXPLAINED |= {"untie_embeddings_and_output_weights", "moe_router_topk"}
_EXPLAINED |= {"num_layers_per_virtual_pipeline_stage"}


def test_names_of_other_programs_are_those_that_a_message_suggests():
    rows = re.findall(r"^\| (.*) \| (.*) \|$", TEXTS["coming_from.md"], re.MULTILINE)
    compared = 0
    for theirs, ours in rows:
        for name in re.findall(r"`([a-z][a-z_\d-]*)[`=]", theirs):
            name = name.replace("-", "_")
            targets = [*ALIASES.get(name, []), *MACHINE_SETTINGS.get(name, [])]
            if targets:
                assert all(re.search(rf"[` ]{target}\b", ours) for target in targets), name
                compared += 1
            else:
                known = any(knob.endswith(f".{name}") for knob in KNOBS)
                assert known or name in _EXPLAINED, name
    assert compared > 80


def test_tables_are_up_to_date():
    tables = script("tables")
    assert all(f"| `{key}` |" in TEXTS["recipes.md"] for key in KNOBS), "run `make docs`"
    for name in tables.PAGES:
        assert tables.updated(name) == TEXTS[name], "run `make docs`"


def test_graph_of_packages_is_up_to_date():
    assert script("structure").updated() == TEXTS["CONTRIBUTING.md"], "run `make docs`"


@pytest.mark.parametrize("name", [*sorted(TEXTS), "log.md"])
def test_links_lead_to_files_and_headings(name):
    folder = ROOT / "docs" if (ROOT / "docs" / name).is_file() else ROOT
    text = (folder / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    for path, anchor in links:
        target = (folder / path) if path else folder / name
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"
            # The site's own anchors never have two hyphens in a row, as GitHub's can.
            assert "--" not in anchor, f"{path}#{anchor}: change the heading"


def test_readme_and_site_list_the_pages_in_one_order():
    named = re.findall(r"^\d+\. \[[^]]*\]\(docs/(\w+\.md)\)", TEXTS["README.md"], re.MULTILINE)
    listed = re.findall(r"^ +- docs/(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) > 8
    assert named == [name for name in listed if name in named]
    for path in PAGES:
        assert path.name in listed, f"{path.name} is not in mkdocs.yml"
        assert f"(docs/{path.name})" in TEXTS["README.md"], f"README links no {path.name}"


@pytest.mark.parametrize("name", [path.name for path in PAGES])
def test_page_begins_with_what_it_is_for(name):
    title, purpose = TEXTS[name].split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"(Read this page|Look here|For people)", purpose), purpose


@all_pages
def test_pages_call_the_program_by_one_name(name):
    lines = [line for line in TEXTS[name].splitlines() if "cli.py" in line]
    # These introduce the script of a clone, or compare accelerate's launcher.
    introduce = ("README.md", "SKILL.md", "CONTRIBUTING.md", "machines.md")
    assert len(lines) <= (2 if name in introduce else 0)


@all_pages
def test_named_knobs_exist(name):
    sections = "|".join(SECTIONS)
    # a file such as data.md or a call such as model.save_pretrained() is not a knob
    knobs = set(re.findall(rf"(?<![\w./-])(?:--)?((?:{sections})\.[a-z]\w*+)(?![/(])", TEXTS[name]))
    knobs = {
        knob
        for knob in knobs
        if knob.partition(".")[2] not in ("md", "py", "bin", "gguf", "onnx", "safetensors")
    }
    assert knobs <= {*KNOBS, "optim.learning_rat"}  # a mistake that is shown on purpose


@all_pages
def test_named_flags_exist(name):
    # accelerate's; those of examples/chats; a mistake
    theirs = {"--config_file", "--machine_rank", "--num_processes", "--optim.learning_rat"}
    theirs |= {"--me", "--gap"}
    ours = set().union(*map(flags_of, COMMANDS)) | {f"--{key}" for key in KNOBS} | theirs
    of_others = re.compile(r"docker |sbatch |nanoGPT's train|base_train|pip |pytest")
    text = "\n".join(line for line in TEXTS[name].splitlines() if not of_others.search(line))
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text))
    assert flags <= ours


@all_pages
def test_named_commands_and_files_exist(name):
    text = TEXTS[name]
    for command in re.findall(r"nanogpt-hf (?:launch (?:--\S+ \S+ )*)?([a-z][a-z-]+)", text):
        assert command in COMMANDS, command
    files = re.findall(
        r"(?<![\w/.{-])((?:recipes|accelerate_configs|launch|docs|tests|nanogpt_hf)/[\w./-]+\w)",
        text,
    )
    for path in files:
        assert (ROOT / path).exists() or path == "recipes/reference/my.json", path
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for test in re.findall(r"(?<![\w/])(test_\w+\.py)", text):
        assert test in tests, test


@all_pages
def test_yaml_examples_are_parts_of_recipes(name, tmp_path):
    for block in re.findall(r"^```yaml\n(.*?)^```", TEXTS[name], flags=re.DOTALL | re.MULTILINE):
        tree = yaml.safe_load(block)
        # This script is lm-eval's.
        if "task" in tree:
            continue
        tree.setdefault("data", {}).setdefault("source", "my.txt")
        path = tmp_path / "example.yaml"
        path.write_text(yaml.safe_dump(tree))
        load_config(path)


def test_walks_name_functions_where_they_are():
    """CONTRIBUTING.md's hops: every `function` (`file.py`) is defined in that file."""
    hops = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", TEXTS["CONTRIBUTING.md"])
    assert len(hops) > 10
    for function, file in hops:
        tree = ast.parse((ROOT / "nanogpt_hf" / file).read_text(encoding="utf-8"))
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
                if isinstance(node, ast.ClassDef):
                    names |= {
                        f"{node.name}.{part.name}"
                        for part in node.body
                        if isinstance(part, ast.FunctionDef)
                    }
        assert function in names, f"{function} is not in {file}"


def test_skill_has_what_coding_agents_read_first():
    _, header, text = TEXTS["SKILL.md"].split("---\n", 2)
    facts = yaml.safe_load(header)
    # The bounds of the format that coding agents share (agentskills.io).
    assert re.fullmatch(r"[a-z0-9-]{1,64}", facts["name"])
    assert 0 < len(facts["description"]) <= 1024
    assert len(text.splitlines()) < 500


def commands_of(page: str) -> list[list[str]]:
    """The words of every command in a page's blocks and rows that begins with the program's name,
    without its options of `launch`.
    """
    page = page.replace("\\\n", " ")
    lines = re.findall(r"^ *(?:\$ )?(nanogpt-hf .*)$", page, re.MULTILINE)
    lines += re.findall(r"`(nanogpt-hf [^`]*)`", page)
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[:1] == ["launch"]:
            start = next((n for n, word in enumerate(words) if word in COMMANDS and n), None)
            words = words[start:] if start else []
        # A name alone, "COMMAND --help" and "evaluate ... --json FILE" are no whole commands.
        if words[1:] and words[0] in COMMANDS and not {"...", "--help"} & set(words):
            found.append(words)
    return found


@all_pages
def test_commands_have_the_options_and_values_that_pages_show(name, monkeypatch, capsys):
    """Each is parsed as it is written, and its recipe and knobs are resolved; it is not run."""

    def resolve(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
        recipe = getattr(arguments, "recipe", None)
        if recipe and recipe.strip("[]") != "RECIPE" and not recipe.endswith(".yaml"):
            assert recipe in shipped_recipes()
        shipped = shipped_recipes().get(Path(recipe or "").stem)
        # A model to start from has sizes of its own, which are not here.
        alone = shipped and not any(key == "finetune.model" for key, _ in overrides)
        (load_config if alone else check_knobs)(shipped if alone else None, overrides)

    def parts(command: str):
        add_arguments, run = functions_of(command)
        if len(inspect.signature(run).parameters) == 1:
            return add_arguments, lambda arguments: None
        # A value of a sweep is several.
        check = resolve if command != "sweep" else lambda arguments, overrides: None
        return add_arguments, lambda arguments, overrides: check(arguments, overrides)

    monkeypatch.setattr("nanogpt_hf.commands.functions_of", parts)
    for words in commands_of(TEXTS[name]):
        if "--optim.learning_rat" not in words:  # a mistake that is shown on purpose
            assert main(words) == 0, (words, capsys.readouterr().err)


def test_messages_to_look_up_are_messages_of_the_program():
    """What is between the dots is in a string of the package."""
    strings = {
        node.value
        for path in (ROOT / "nanogpt_hf").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    rows = re.findall(r"^\| (`.*?) \|", TEXTS["troubleshooting.md"], re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`(.+?)`", row)]
    parts = [part.strip(" .") for message in quoted for part in message.split("...")]
    assert len(quoted) > 9
    for part in filter(None, parts):
        assert any(part in string for string in strings), part


def test_table_of_expected_losses_has_the_references():
    table = TEXTS["watching.md"].partition("## Is my loss normal?")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+)(?: to ([\d.]+))? \|", table, re.MULTILINE)
    listed = {}
    for path in sorted((ROOT / "recipes" / "reference").glob("*.json")):
        reference = json.loads(path.read_text(encoding="utf-8"))
        low, mean, high = (reference["curve"][name][-1] for name in ("low", "mean", "high"))
        published = f"{mean:g}", ""
        listed[path.stem] = published if "published" in reference else (f"{low:.3f}", f"{high:.3f}")
    assert {name: (low, high) for name, low, high in rows} == listed
