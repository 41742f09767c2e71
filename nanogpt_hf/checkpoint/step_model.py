"""Write the model folder of a checkpoint: the weights of its step, in the form of the run's best or
last model.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import RunFolderError, one_line
from nanogpt_hf.export.card import card_of_step
from nanogpt_hf.export.model_folder import new_folder
from nanogpt_hf.model.architecture import architecture_of_type, architecture_on_disk
from nanogpt_hf.model.lora import merged_weights, save_adapter_weights
from nanogpt_hf.own_files import read_json
from nanogpt_hf.runs.find import find_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import read_recipe
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.runs.tensor_files import TensorFiles

_WEIGHTS = re.compile(r"\.safetensors(\.index\.json)?$")


@contextmanager
def model_of_step(run: RunFolder, checkpoint: Path) -> Iterator[Path]:
    """Yield a temporary model folder with the weights of a run's checkpoint; it is removed at the
    end.

    Tokenizer, configuration and form (whole, adapter, merged) are those of the run's best or last
    model. Raises RunFolderError if the run has no model yet, or the checkpoint is damaged.
    """
    model = Path(find_model(str(run.path)))
    saved = read_checkpoint(checkpoint)
    config = read_recipe(run)
    # A checkpoint that is read from a folder has its files.
    weights = dict(cast(TensorFiles, saved.weights))
    with tempfile.TemporaryDirectory(prefix="nanogpt_hf-") as scratch:
        folder = Path(scratch) / checkpoint.name
        with new_folder(folder) as partial:
            try:
                _write(partial, model, config, weights, saved.state)
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
                # An error of writing has a number. Others are of its config.json, which is damaged
                # or of another model.
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise RunFolderError(
                    f"{model}: does not fit the weights of {checkpoint}: {one_line(error)}"
                ) from None
        yield folder


def _write(
    folder: Path, model: Path, config: Config, weights: dict[str, Tensor], state: TrainState
) -> None:
    """Write the weights (our names) into `folder` as the run's folder `model` has its own, and copy
    all other files.
    """
    for path in model.rglob("adapter_config.json"):
        # A merged model has its adapter beside it, in a folder.
        place = folder / path.parent.relative_to(model)
        place.mkdir(exist_ok=True)
        # `save_adapter` states so whether the adapter is for the matrices of a standard model: a
        # GPT that GPT-2 cannot represent has our names on disk, too.
        is_standard = read_json(path, dict[str, Any]).get("fan_in_fan_out")
        layers_on_disk = architecture_of_type(config.model.architecture).layers_on_disk
        save_adapter_weights(place, layers_on_disk if is_standard else {}, weights)
    if (model / "config.json").is_file():
        architecture = architecture_on_disk(str(model))
        whole = weights if config.lora.rank is None else merged_weights(weights, config.lora)
        architecture.write_model(folder, architecture.read_config(str(model)), whole)
    for path in model.rglob("*"):
        if path.is_file() and not _WEIGHTS.search(path.name):
            target = folder / path.relative_to(model)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    if (card := folder / "README.md").is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        card.write_text(card_of_step(text, config, state), encoding="utf-8")
