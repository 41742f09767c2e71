"""Find the recipes, reference curves and accelerate configs that ship with the package."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """`recipes` or `recipes/reference`: inside an installed package, next to it in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


def find_recipe(name: Path | str) -> Path:
    """The file of that name if it exists, otherwise the shipped recipe of that name."""
    path = Path(name)
    return path if path.is_file() else shipped_recipes().get(str(name), path)
