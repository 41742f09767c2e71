"""Make a run folder of nanoGPT's ckpt.pt, which `resume` continues: recipe, weights, AdamW's state
and step.

The next steps are those of nanoGPT's own `init_from='resume'`, on batches that this package draws.
"""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanogpt_hf.checkpoint.files import MODEL, OPTIMIZER, file_names, write_state
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.names import GPT2_VOCAB_SIZE
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.manifest import Manifest, read_manifest
from nanogpt_hf.data.prepared import TOKENIZER, load_prepared
from nanogpt_hf.data.tokenizer import library_tokenizer
from nanogpt_hf.errors import ConfigError, RunFolderError, UserError
from nanogpt_hf.export.card import card_without_run
from nanogpt_hf.export.model_folder import write_model_folder
from nanogpt_hf.export.nanogpt import (
    BINS,
    PADDED_GPT2,
    NanoGPT,
    load_nanogpt,
    model_with,
    plain_names,
    reading_checkpoint,
)
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import VERSION, RunFolder
from nanogpt_hf.runs.recipe import recipe_text
from nanogpt_hf.runs.state import TrainState, record_knobs, run_identity
from nanogpt_hf.runs.tensor_files import (
    Box,
    NotFiniteError,
    Part,
    layout_digest,
    layout_lines,
    write_tensors,
)

_TIED_HEAD = "lm_head.weight"
_ORIGIN = "trained by nanoGPT and imported with nanogpt_hf"
# Our knobs and nanoGPT's options of the same meaning and unit.
_OPTIONS = {
    "data.block_size": "block_size",
    "model.dropout": "dropout",
    "optim.learning_rate": "learning_rate",
    "optim.max_grad_norm": "grad_clip",
    "train.max_steps": "max_iters",
    "train.micro_batch_size": "batch_size",
    "eval.every": "eval_interval",
    "checkpoint.every": "eval_interval",
    "tracking.every": "log_interval",
}
_SCHEDULE = {
    "optim.min_learning_rate": "min_lr",
    "optim.warmup_steps": "warmup_iters",
    "optim.decay_steps": "lr_decay_iters",
}
_SIZES = {"model.n_positions": "block_size", "model.bias": "bias"}
_SIZES |= {f"model.{name}": name for name in ("n_layer", "n_head", "n_embd")}


@dataclass(frozen=True)
class NanoGPTRun:
    """A run of nanoGPT as a run of this package."""

    # The ckpt.pt.
    source: Path
    model: NanoGPT
    config: Config
    state: TrainState
    # AdamW's two averages of the gradients and its number of updates, as `<parameter>.<key>`.
    optimizer_state: dict[str, Tensor]
    # The validation loss that nanoGPT measured when it saved the checkpoint, on random windows.
    loss: float


def load_nanogpt_run(path: Path, data: Path, name: str, activation_function: str) -> NanoGPTRun:
    """Read a checkpoint of nanoGPT's train.py as a run called `name` on the prepared data in
    `data`.

    Raises UserError if the file is no checkpoint of a run, or does not fit the data.
    """
    manifest = _manifest_in(data)
    # The vocabulary of the data is that of the model: a run continues on the tokens it has learned.
    tokenizer = library_tokenizer(str(data / TOKENIZER))
    with reading_checkpoint(path) as saved:
        rows = saved["model_args"]["vocab_size"]
        is_padded = tokenizer.vocab_size == GPT2_VOCAB_SIZE and rows == PADDED_GPT2
        if rows != tokenizer.vocab_size and not is_padded:
            raise RunFolderError(
                f"{path}: has {rows:,} tokens, the data in {data} {tokenizer.vocab_size:,}; give "
                "the data that it was trained on with --data"
            )
        model = load_nanogpt(path, activation_function=activation_function, tokenizer=tokenizer)
        config = _config(path, saved, data, manifest, name, activation_function, is_padded)
        step = int(saved["iter_num"])
        if step < 0:
            raise ValueError(f"its step is {step}")
        state = TrainState(
            step=step,
            tokens=step * config.train.tokens_per_step,
            last_finite_step=step,
            reported_step=step,
        )
        # The tokens are compared again at each resume, as those of any run.
        prepared = load_prepared(config)
        state.identity = run_identity(config, prepared.manifest, {})
        record_knobs(state, config)
        optimizer_state = _optimizer_state(saved, model)
        loss = float(saved["best_val_loss"])
        return NanoGPTRun(path, model, config, state, optimizer_state, loss)


def _manifest_in(data: Path) -> Manifest:
    """Read the manifest of prepared data. Raises UserError, with the remedy, if there is none."""
    if manifest := read_manifest(data):
        return manifest
    if (data / BINS["train"]).is_file():
        words = ["import-nanogpt", str(data), f"data/{data.name}"]
        raise UserError(
            f"--data {data}: is nanoGPT's own data; import it first, with `{program()} "
            f"{shlex.join(words)}`, and give --data {shlex.quote(words[-1])}"
        )
    raise UserError(f"--data {data}: holds no prepared data; `prepare` writes it")


def _config(
    path: Path,
    saved: dict[str, Any],
    data: Path,
    manifest: Manifest,
    name: str,
    activation_function: str,
    is_padded: bool,
) -> Config:
    """Recipe of a checkpoint's run. Raises UserError with each option that no run here has."""
    options = saved["config"]
    arguments = saved["model_args"]
    # nanoGPT's own resume takes these from the optimizer's state, whatever its options are.
    matrices, vectors = saved["optimizer"]["param_groups"]
    plain = {"eps": 1e-8, "amsgrad": False, "maximize": False, "betas": matrices["betas"]}
    for group in (matrices, vectors):
        if other := [key for key, value in plain.items() if group.get(key, value) != value]:
            raise ValueError(
                f"its optimizer has {other[0]} {group[other[0]]}, not {plain[other[0]]}"
            )
    if vectors["weight_decay"] != 0:
        raise ValueError(f"its optimizer decays vectors by {vectors['weight_decay']}")
    beta1, beta2 = matrices["betas"]
    sequences = options["gradient_accumulation_steps"] * options["batch_size"]
    values = {
        **{f"data.{key}": value for key, value in manifest.recipe.items() if value is not None},
        "data.dir": str(data),
        "data.order": "random",
        **{knob: options[option] for knob, option in _OPTIONS.items()},
        **{knob: arguments[argument] for knob, argument in _SIZES.items()},
        "model.activation_function": activation_function,
        "model.pad_vocab_to_multiple_of": 64 if is_padded else 1,
        "optim.weight_decay": matrices["weight_decay"],
        "optim.beta1": beta1,
        "optim.beta2": beta2,
        "train.tokens_per_step": sequences * options["block_size"],
        "eval.tokens": options["eval_iters"] * options["batch_size"] * options["block_size"],
    }
    if options["decay_lr"]:
        values |= {knob: options[option] for knob, option in _SCHEDULE.items()}
    else:
        values |= {"optim.schedule": "constant", "optim.warmup_steps": 0}
    try:
        return load_config(None, values, name=name)
    except ConfigError as error:
        raise RunFolderError(
            f"{path}: its options make no run here: {error.problems[0].removeprefix('--')}; "
            "import it as a model, without --data"
        ) from None


def _optimizer_state(saved: dict[str, Any], model: NanoGPT) -> dict[str, Tensor]:
    """AdamW's state of a checkpoint, by our names. Raises ValueError if it is of other
    parameters.
    """
    # A head that is tied to the embedding is the same parameter.
    weights = plain_names(saved["model"])
    weights.pop(_TIED_HEAD, None)
    # nanoGPT numbers its parameters by groups: first all that decay, matrices, then vectors.
    matrices = [name for name, weight in weights.items() if weight.dim() >= 2]
    vectors = [name for name, weight in weights.items() if weight.dim() < 2]
    groups = [group["params"] for group in saved["optimizer"]["param_groups"]]
    if not model.config.tie_word_embeddings:
        raise ValueError("it has a head of its own; import it as a model, without --data")
    if [*map(len, groups)] != [len(matrices), len(vectors)]:
        raise ValueError(
            "its optimizer does not have all matrices in one group and all vectors in another: it "
            "is older than June 2023, or of another program; import it as a model, without --data"
        )
    names = [*matrices, *vectors]
    by_number = saved["optimizer"]["state"]
    numbers = [number for group in groups for number in group]
    states = {n: by_number.get(number) for n, number in zip(names, numbers, strict=True)}
    if without := [name for name, state in states.items() if not state]:
        raise ValueError(f"its optimizer has no state of {without[0]}")
    result = {}
    for key in ("exp_avg", "exp_avg_sq"):
        averages = {name: state[key] for name, state in states.items()}
        if wrong := [name for name in names if averages[name].shape != weights[name].shape]:
            raise ValueError(f"its optimizer's {key} of {wrong[0]} has another shape")
        # Converted as the weights are: a matrix of queries, keys and values becomes three.
        for name, average in model_with(averages, model.config).named_parameters():
            if name != _TIED_HEAD:
                result[f"{name}.{key}"] = average.detach()
    # All parameters have been updated equally often, and the parts of a matrix have its number.
    counts = {float(state["step"]) for state in states.values()}
    if len(counts) > 1:
        raise ValueError(f"its optimizer has updated parameters {sorted(counts)} times")
    parameters = {key.rpartition(".")[0] for key in result}
    return result | {f"{name}.step": torch.tensor(min(counts)) for name in parameters}


def write_nanogpt_run(path: Path, run: NanoGPTRun) -> None:
    """Write the run folder `path`, which is empty: recipe, a checkpoint, and the model as best/.

    Raises RunFolderError if a tensor is not finite.
    """
    folder = RunFolder(path)
    checkpoint = folder.checkpoint(run.state.step)
    checkpoint.mkdir(parents=True)
    # A tied head has the embedding's name alone.
    config = run.model.config
    weights = run.model.weights | {}
    del weights[_TIED_HEAD]
    checksums = {}
    lines = set()
    for kind, tensors in ((MODEL, weights), (OPTIMIZER, run.optimizer_state)):
        parts = {name: _whole(tensor) for name, tensor in tensors.items()}
        (file,) = file_names(kind, 1)
        try:
            checksums[file] = write_tensors(checkpoint / file, parts)
        except NotFiniteError as error:
            raise RunFolderError(f"{run.source}: {error} is not finite: it has diverged") from None
        layout = {name: (part.shape, part.values.dtype) for name, part in parts.items()}
        lines |= layout_lines(kind, layout)
    facts = {"version": VERSION, **asdict(run.state), "scaler": None}
    write_state(checkpoint, facts | {"tensors": layout_digest(lines)}, checksums)
    folder.recipe.write_text(recipe_text(run.config), encoding="utf-8")
    # Its loss is not recorded as the best: the first evaluation measures it on our batches.
    folder.best.mkdir()
    card = card_without_run(config, _ORIGIN, "transformers")
    write_model_folder(folder.best, config, run.model.weights, run.model.tokenizer.hf, card)


def _whole(tensor: Tensor) -> Part:
    """A whole tensor in float32, as a part of itself."""
    shape = tuple(tensor.shape)
    return Part(shape, Box((0,) * len(shape), shape), tensor.float().contiguous())
