"""Load a model, or its configuration, from a folder or the Hub."""

import pickle
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from nanogpt_hf.config.method_sections import FinetuneSection
from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.errors import UserError, explain, one_line
from nanogpt_hf.model.architecture import Architecture, architecture_on_disk
from nanogpt_hf.model.generation_file import check_end_ids, check_generation_file
from nanogpt_hf.program import program


def load_model(name: str, revision: str | None = None, **options: Any) -> PreTrainedModel:
    """Model in a folder or on the Hub, in float32; for an adapter its base model, with the
    adapter merged in.

    `options` are arguments of Architecture.read_model. Raises UserError if no model can be read.
    """
    # Cheap checks first: a damaged file should not cost the time of loading the weights.
    name, is_adapter = _find(name)
    check_generation_file(Path(name))
    model = _read(name, is_adapter, revision, options)
    check_end_ids(name, model)
    return model


@contextmanager
def _naming_the_start_model() -> Iterator[None]:
    """Context whose UserErrors name the knob of the model that a recipe starts from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"finetune.model: {error}") from error.__cause__


@_naming_the_start_model()
def load_start_model(finetune: FinetuneSection, **options: Any) -> PreTrainedModel:
    """The model that a recipe starts from. Raises UserError if it cannot be read."""
    return load_model(str(finetune.model), finetune.revision, **options)


@_naming_the_start_model()
def load_base_config(name: str, revision: str | None) -> tuple[PreTrainedConfig, str | None]:
    """Configuration of a model to fine-tune, and its commit on the Hub (None for a folder).

    Raises UserError if there is none, or none that can be fine-tuned as it is.
    """
    name, is_adapter = _find(name)
    if is_adapter:
        raise UserError(
            f"{name}: is an adapter; merge it into a whole model first: {program()} export "
            f"{shlex.quote(name)} OUT"
        )
    try:
        architecture = architecture_on_disk(name, revision)
        config = architecture.read_config(name, revision)
        architecture.check_one_step(config)
        is_folder = Path(name).exists()
        file = None if is_folder else cached_file(name, CONFIG_NAME, revision=revision)
        commit = file and extract_commit_hash(file, None)
        architecture.recipe_knobs(config)
    except Exception as error:  # a config with nonsense in it, the network, ...
        raise _cannot_load(name, error) from error
    return config, commit


def load_config_alone(name: str, revision: str | None = None) -> PreTrainedConfig:
    """Configuration of a whole model in a folder or on the Hub, without its weights.

    Raises UserError if it cannot be read.
    """
    name, _ = _find(name)
    try:
        return architecture_on_disk(name, revision).read_config(name, revision)
    except Exception as error:  # a config with nonsense in it, the network, ...
        raise _cannot_load(name, error) from error


def _find(name: str) -> tuple[str, bool]:
    """Folder or Hub id, and whether it is an adapter.

    Raises UserError if it is a folder without a model.
    """
    name = folder_or_hub_id(name)
    is_adapter = (Path(name) / "adapter_config.json").is_file()
    if Path(name).exists() and not (is_adapter or (Path(name) / "config.json").is_file()):
        raise UserError(f"{name}: not a model folder (no config.json in it)")
    return name, is_adapter


def _read(
    name: str, is_adapter: bool, revision: str | None, options: dict[str, Any]
) -> PreTrainedModel:
    try:
        with warnings.catch_warnings():
            # torch also warns about a pickle that it is about to refuse.
            warnings.filterwarnings("ignore", module=r"torch\._weights_only_unpickler")
            if is_adapter:
                from nanogpt_hf.model.load_adapter import load_merged

                return load_merged(name)
            architecture = architecture_on_disk(name, revision)
            if Path(name).exists():
                _check_enough_weights(Path(name), architecture)
            return architecture.read_model(name, revision, **options)
    except Exception as error:  # a damaged file, a config with nonsense in it, the network, ...
        raise _cannot_load(name, error) from error


def _check_enough_weights(folder: Path, architecture: Architecture) -> None:
    """Raises ValueError if config.json describes a far larger model than the folder has weights:
    transformers allocates memory for the whole model before it compares them.
    """
    parameters = architecture.count_parameters(architecture.read_config(str(folder)))
    files = [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind)]
    size = sum(file.stat().st_size for file in files)
    # Weights of 4 bits have half a byte per parameter.
    if files and parameters > 2 * size:
        raise ValueError(
            f"its config.json describes {parameters:,} parameters, its weights have {size:,} bytes"
        )


def _cannot_load(name: str, error: Exception) -> UserError:
    hint = ""
    if not Path(name).exists():
        hint = "; there is no such folder, so it was looked up on the Hub"
    return UserError(f"{name}: cannot be loaded as a language model{hint}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Why a model cannot be loaded, without torch's advice to open a pickle that may run code."""
    if isinstance(error, pickle.UnpicklingError):
        return (
            "its weights are a damaged pickle, or one that holds more than tensors, and were "
            "not opened"
        )
    return explain(error) or one_line(error)
