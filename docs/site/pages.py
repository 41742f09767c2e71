"""Pages of the documentation's site that are elsewhere in the repository: a hook of mkdocs.

The site has the paths of the repository, so a link that works in a clone works there. A source file
is a page with its text, a folder a page with links to its files.
"""

import ast
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SKILL.md", "tests/README.md")
FOLDERS = ("docs", "examples", "recipes", "accelerate_configs", "launch", "nanogpt_hf", "notebooks")
# Their text is shown on a page; the language is the one of the highlighting.
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".toml": "toml",
    ".sh": "bash",
    ".sbatch": "bash",
    ".txt": "text",
    "": "text",
}
# files of the root folder that have a page with their text
SOURCES = ("LICENSE", "Makefile", "cli.py", "constraints.txt", "pyproject.toml")
COPIED = {".png", ".ipynb"}  # files that a link opens as they are
# A page of this kind is not searched, because the search is for words of the documentation, and
# has no table of contents, because lines of code need the width.
SOURCE = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {title}\n\n{text}\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages and files, and the reference of the Python names."""

    def add(name: str, content: str) -> None:
        files.append(File.generated(config, name, content=content))

    def add_folder(folder: Path) -> None:
        lines = []
        for path in sorted(folder.iterdir()):
            name = path.relative_to(ROOT).as_posix()
            if path.name.startswith((".", "__pycache__")) or path == Path(__file__).parent:
                continue
            if path.is_dir():
                add_folder(path)
                lines.append(f"- [{path.name}/]({path.name}/index.md)")
            elif path.suffix in COPIED:
                files.append(File.generated(config, name, abs_src_path=str(path)))
            elif path.suffix == ".md":
                add(name, path.read_text(encoding="utf-8"))
                lines.append(f"- [{path.name}]({path.name})")
            elif path.suffix in LANGUAGES:
                add(f"{name}.md", source_page(path))
                lines.append(f"- [{path.name}]({path.name}.md)")
        title = folder.relative_to(ROOT).as_posix()
        add(f"{title}/index.md", SOURCE.format(title=title, text="\n".join(lines)))

    for name in PAGES:
        add(name, (ROOT / name).read_text(encoding="utf-8"))
    for name in SOURCES:
        add(f"{name}.md", source_page(ROOT / name))
    for folder in FOLDERS:
        add_folder(ROOT / folder)
    add("api.md", api_page())
    return files


def source_page(path: Path) -> str:
    # A fence longer than any in the text.
    fence = "`" * 6
    text = f"{fence}{LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8')}\n{fence}"
    return SOURCE.format(title=path.relative_to(ROOT).as_posix(), text=text)


def api_page() -> str:
    """The reference of all names in `nanogpt_hf.__all__`, from their docstrings."""
    module = ast.parse((ROOT / "nanogpt_hf" / "__init__.py").read_text(encoding="utf-8"))
    names: list[str] = []
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    parts = [f"::: nanogpt_hf.{name}" for name in names]
    return "\n\n".join(["# Python names", "What `import nanogpt_hf` has.", *parts]) + "\n"


_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)")


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """Let links to source files and folders lead to their pages."""
    here = Path(page.file.src_uri).parent

    def to_page(match: re.Match) -> str:
        target = match[1]
        path = (ROOT / here / target).resolve()
        if path.is_dir():
            return f"{target.rstrip('/')}/index.md"
        return f"{target}.md" if path.suffix in LANGUAGES and path.is_file() else target

    return _LINK.sub(to_page, markdown)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def on_post_build(config: MkDocsConfig) -> None:
    """Raise PluginError if a link of the site leads to no file, or to no part of one."""
    site = Path(config.site_dir)
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            link = urlsplit(target)
            if link.scheme or link.netloc or path.name == "404.html":
                continue
            file = (path.parent / unquote(link.path)).resolve() if link.path else path
            if file.is_dir():
                file /= "index.html"
            is_known_part = file not in pages or unquote(link.fragment) in pages[file].ids
            if not file.is_file() or (link.fragment and not is_known_part):
                broken.append(f"{path.relative_to(site)}: {target}")
    if broken:
        raise PluginError("\n".join(["links that lead nowhere:", *broken]))
