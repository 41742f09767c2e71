"""The digest of a user's code: of a Python file, and of the user's own modules that it imports."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from nanogpt_hf.errors import UserError, one_line

# Modules in these folders come with Python or were installed.
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]


def code_digest(knob: str, path: Path) -> str:
    """Return the sha256 of a file, and of each of its `own_modules` by its name.

    Call it after the file has run, which may have added its folder to the places of modules.
    Raises UserError if a file that `knob` states can no longer be read.
    """
    try:
        sources = {"": path} | own_modules(path)
        digests = [
            f"{module} sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}".strip()
            for module, source in sources.items()
        ]
    except OSError as error:
        raise UserError(
            f"{knob}: {error.filename or path}: was run, and then could not be read: "
            f"{error.strerror or one_line(error)}; keep the file where it is"
        ) from None
    return ", ".join(digests)


def own_modules(path: Path) -> dict[str, Path]:
    """Return the modules that a file imports, and the ones that those import, by their names: all
    but the modules of Python, of installed packages, and of this package.

    They are found in the statements of the files: nothing is imported for it, and what a file
    imports by other means is not found.
    """
    found = dict[str, Path]()
    unread = [("", path)]
    while unread:
        package, file = unread.pop()
        for name in _imported_names(file, package):
            for module, spec in _resolved(name):
                if module in found or not (source := _own_source(module, spec)):
                    continue
                found[module] = source
                is_package = spec.submodule_search_locations is not None
                unread.append((module if is_package else module.rpartition(".")[0], source))
    return dict(sorted(found.items()))


def _imported_names(file: Path, package: str) -> Iterator[str]:
    """Yield the names that a file of a package imports; they may be names in a module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # It is imported in a function only: else the import would have failed.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            # One dot is the package itself, another one the package around it.
            start = parts[: len(parts) - node.level + 1] if node.level else []
            start += [node.module] if node.module else []
            yield from (".".join([*start, alias.name]) for alias in node.names)


def _resolved(name: str) -> Iterator[tuple[str, ModuleSpec]]:
    """Yield the packages and modules on the way to a dotted name, as far as there are any."""
    module = ""
    places = None  # sys.path
    for part in name.split("."):
        module = f"{module}.{part}" if module else part
        spec = PathFinder.find_spec(module, places)
        if spec is None:
            return
        yield module, spec
        if spec.submodule_search_locations is None:
            return
        places = list(spec.submodule_search_locations)


def _own_source(module: str, spec: ModuleSpec) -> Path | None:
    """Return the file of a module of the user's; None for other modules."""
    if module.partition(".")[0] in {*sys.stdlib_module_names, "nanogpt_hf"} or not spec.origin:
        return None
    path = Path(spec.origin)
    is_standard = any(path.is_relative_to(folder) for folder in _STANDARD)
    if path.suffix != ".py" or is_standard or not {*path.parts}.isdisjoint(_INSTALLED):
        return None
    return path
