"""The site of the documentation: mkdocs builds it without a warning; its links lead somewhere."""

import importlib.util
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[1]
pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'nanogpt_hf[site]'")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")


@pytest.mark.slow
def test_site_builds_with_all_pages_and_names(tmp_path):
    site = tmp_path / "site"
    completed = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", site],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    assert 'id="nanogpt_hf.GPTForCausalLM"' in (site / "api.html").read_text()
    assert "def train_step" not in (site / "search" / "search_index.json").read_text()
    loop = (site / "nanogpt_hf" / "training" / "loop.py.html").read_text()
    assert "nanogpt_hf/training/loop.py" in loop


class _IgnoreTags(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a Python name has a tag."""


_IgnoreTags.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def test_navigation_has_every_page_of_docs():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _IgnoreTags)

    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry if isinstance(entry, list) else list(entry.values())
        return [page for child in children for page in pages(child)]

    navigation = pages(settings["nav"])
    assert len(navigation) == len(set(navigation))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(navigation)


def test_every_file_that_a_page_links_is_on_the_site():
    from mkdocs.config import load_config
    from mkdocs.structure.files import Files

    config = load_config(str(ROOT / "mkdocs.yml"))
    files = config.plugins.on_files(Files([]), config=config)
    pages = load_pages()
    names = {file.src_uri for file in files}
    links = 0
    for file in files:
        if file.src_uri.endswith(".md"):
            page = SimpleNamespace(file=file)
            text = pages.on_page_markdown(file.content_string, page, config, files)
            # What looks like a link in code is none.
            text = re.sub(r"(`+).*?\1", "", text, flags=re.DOTALL)
            for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", text):
                target = posixpath.normpath(posixpath.join(posixpath.dirname(file.src_uri), link))
                assert target in names, f"{file.src_uri}: docs/site/pages.py has no {link}"
                links += 1
    assert links > 200


def load_pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    return pages


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("b.html", False),
        ("b.html#part", False),
        ("#here", False),
        ("folder", False),
        ("https://example.org/nothing", False),
        ("c.html", True),
        ("b.html#other", True),
        ("#there", True),
        ("folder/c.html", True),
    ],
)
def test_broken_links_end_the_build(tmp_path, link, is_broken):
    from mkdocs.exceptions import PluginError

    pages = load_pages()
    (tmp_path / "a.html").write_text(f'<p id="here"><a href="{link}">x</a>')
    (tmp_path / "b.html").write_text('<p id="part">')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text("<p>")
    settings = SimpleNamespace(site_dir=str(tmp_path))
    if not is_broken:
        pages.on_post_build(settings)
        return
    with pytest.raises(PluginError, match=r"a\.html: " + link):
        pages.on_post_build(settings)
