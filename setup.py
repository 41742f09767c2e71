"""What pyproject.toml cannot state: folders of the repository's root that are part of the package
when installed.

recipes/ becomes nanogpt_hf/recipes/ in a wheel, and so on; nanogpt_hf/config/names.py finds
them in both places.
"""

from setuptools import find_packages, setup

FOLDERS = ("recipes", "recipes.reference", "accelerate_configs")

setup(
    packages=[
        *find_packages(include=["nanogpt_hf", "nanogpt_hf.*"]),
        *(f"nanogpt_hf.{name}" for name in FOLDERS),
    ],
    package_dir={f"nanogpt_hf.{name}": name.replace(".", "/") for name in FOLDERS},
)
