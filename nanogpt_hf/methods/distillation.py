"""Distillation: a student learns the next token, and the distribution of a teacher over it.

The loss of a row is (1 - weight) · cross-entropy + weight · T² · divergence, with both
distributions at the temperature T (Hinton et al. 2015, arXiv:1503.02531). The divergence is
KL(teacher ‖ student), or another one by `distill.beta`. Evaluations measure the cross-entropy
alone, so that they compare with other runs. methods/on_policy.py learns from the student's answers.
"""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file

from nanogpt_hf.config.names import GPT2_NAMES, folder_or_hub_id
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import packs
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.data.hf_tokenizer import check_vocabulary, load_tokenizer, vocabulary_hash
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.distributed.accelerate_config import requested_precision
from nanogpt_hf.errors import ChangedError, DataError, UserError
from nanogpt_hf.methods.term import RowValues, Term
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.model.load import load_config_alone, load_model
from nanogpt_hf.model.packed_attention import attend_apart
from nanogpt_hf.own_files import read_json
from nanogpt_hf.runs.find import find_model
from nanogpt_hf.runs.origin import config_digest

logger = logging.getLogger(__name__)
# The teacher computes in the precision of the run, without float32 weights to update.
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TaughtData(PreparedData):
    """Prepared data, and the teacher: frozen, in evaluation mode, whole until the first step."""

    teacher: Any = None


def load_with_teacher(config: Config, load: Callable[[Config], PreparedData]) -> TaughtData:
    """Load the teacher of a recipe, and the data by `load`; the manifest gets the teacher's hash.

    Raises UserError if there is no such model, or it does not fit the data.
    """
    try:
        # A wrong name should not be found out after the hours that preparing data may take.
        teacher, tokenizer = _load_teacher(config)
    except (UserError, DataError) as error:
        raise UserError(f"distill.teacher: {error}") from None
    data = load(config)
    name = config.distill.teacher
    tokens = data.manifest.vocab_size
    if vocabulary_hash(tokenizer) != data.manifest.tokenizer_hash:
        # Reinforcement learning has questions, which the student's own tokenizer encodes.
        whose = "student" if config.rl.task else "data"
        remedy = "" if config.rl.task else "prepare the data with it, or "
        raise ChangedError(
            f"distill.teacher: {name}: its tokenizer has {len(tokenizer):,} tokens, and is not "
            f"the tokenizer of the {whose}, with {tokens:,}",
            f"{remedy}name another model",
            "put back the teacher from which this run has learned",
        )
    # A resumed run has to learn from the same teacher: its identity is the hash of the weights,
    # and the digest of config.json, which decides what the weights compute.
    digest = hashlib.sha256()
    for key, tensor in sorted(teacher.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().numpy().data)
    manifest = dataclasses.replace(
        data.manifest, teacher=f"sha256:{digest.hexdigest()}", teacher_config=_config_of(str(name))
    )
    freeze_teacher(teacher, config, requested_precision())
    return TaughtData(
        data.train, data.validation, data.tokenizer, manifest, data.end_of_turn_id, teacher
    )


def freeze_teacher(teacher: Any, config: Config, precision: str) -> None:
    """Make a teacher of a model in float32, which computes in `precision`."""
    if packs(config):
        # The teacher must not see other documents of a block either.
        attend_apart(teacher)
    # Only parameters: rotary frequencies, which are buffers, need float32.
    for parameter in teacher.parameters():
        parameter.data = parameter.data.to(teacher_dtype(precision))
    teacher.eval().requires_grad_(False)


def teacher_dtype(precision: str) -> torch.dtype:
    """The type of a teacher's weights in a run of that precision."""
    return _DTYPES.get(precision, torch.float32)


def read_teacher_config(name: str) -> PreTrainedConfig:
    """Read the configuration of a teacher, without its weights. Raises UserError if there is no
    such model.
    """
    try:
        return load_config_alone(*_base_of(name))
    except (UserError, DataError) as error:
        raise UserError(f"distill.teacher: {error}") from None


def _base_of(name: str) -> tuple[str, str | None]:
    """The folder or Hub id that has a teacher's config.json, and a revision: an adapter has those
    of its base.
    """
    name = find_model(name)
    if not (adapter := Path(name) / "adapter_config.json").is_file():
        return name, None
    facts = read_json(adapter, dict[str, Any])
    return folder_or_hub_id(str(facts["base_model_name_or_path"])), facts.get("revision")


def _config_of(name: str) -> str:
    """Compute the digest of a teacher's config.json; an adapter has the one of its base."""
    name, revision = _base_of(name)
    path: Any = Path(name) / CONFIG_NAME
    if not Path(name).is_dir():
        path = cached_file(name, CONFIG_NAME, revision=revision)
    return config_digest(Path(path))


def _load_teacher(config: Config) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load the model in float32, and its tokenizer. Raises UserError or DataError without them."""
    name = find_model(str(config.distill.teacher))
    # First, since it knows what is no model folder at all.
    model: Any = load_model(name)
    is_gpt2 = name in GPT2_NAMES
    tokenizer = build_tokenizer("gpt2", ()).hf if is_gpt2 else load_tokenizer(name)
    check_vocabulary(name, len(tokenizer), model.config.vocab_size)
    positions = model.config.max_position_embeddings
    block_size = max(stage.config.data.block_size for stage in stages_of(config))
    if positions < block_size:
        raise UserError(
            f"{name}: {positions} positions are fewer than data.block_size {block_size}"
        )
    check_causal(model, packs=packs(config))
    logger.info(f"teacher: {name}, {model.num_parameters():,} parameters")
    return model, tokenizer


def teacher_of(data: Any) -> Any:
    """The teacher that was loaded with the data. Raises UserError without one."""
    teacher = getattr(data, "teacher", None)
    if teacher is None:
        raise UserError("distill.teacher: only a run loads the teacher; leave it out")
    return teacher


def teacher_divergence(
    config: Config, data: PreparedData, model: torch.nn.Module, batch: dict[str, Tensor]
) -> RowValues:
    """Divergence of teacher and student in each row, by `divergence`."""
    teacher = teacher_of(data)
    inputs = {name: tensor for name, tensor in batch.items() if name != "shift_labels"}
    # Only the hidden states of the teacher are kept. Its logits are computed for the rows that the
    # student's loss asks for, so that neither model has B · T × vocabulary logits in memory.
    with torch.no_grad():
        place_teacher(teacher, model, batch["input_ids"].device)
        logits_of = teacher.logits_of_rows(**inputs)

    def values(chunk: slice, logits: Tensor) -> Tensor:
        with torch.no_grad():
            taught = logits_of(chunk)
        return divergence(config, logits, taught)

    return values


def divergence(config: Config, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Divergence of teacher and student, (R,), at the temperature of the recipe, from their logits
    (R, V); the gradient is the student's.

    With p of the teacher, q of the student and β = `distill.beta` it is KL(p ‖ q) for β = 0,
    KL(q ‖ p) for β = 1, and between them the generalized Jensen-Shannon divergence (Agarwal et
    al. 2024, arXiv:2306.13649, equation 1):

        β · KL(p ‖ m) + (1 - β) · KL(q ‖ m),   m = β · p + (1 - β) · q

    Either vocabulary may be padded. Tokens that only the teacher has are left out. If the student
    has more, with the probability s of the tokens of both, it is the divergence of p and q / s,
    minus log s: for β = 0 that is KL(p ‖ q), and KL(q ‖ p) would be infinite.
    """
    temperature = config.distill.temperature
    with torch.no_grad():
        p = teacher_logits[:, : logits.shape[-1]].float() / temperature
        p = p.log_softmax(-1)
    size = p.shape[-1]
    q = (logits / temperature).log_softmax(-1)[:, :size]

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)

    beta = beta_of(config)
    if beta == 0:
        return kl(p, q)
    if logits.shape[-1] > size:
        share = q.logsumexp(-1)
        q = q - share[:, None]
    else:
        share = 0.0
    if beta == 1:
        return kl(q, p) - share
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture) - share


def beta_of(config: Config) -> float:
    """The β of the divergence: by default 0 on given text, and 1 on a student's own answers."""
    if config.distill.beta is not None:
        return config.distill.beta
    return 1.0 if config.rl.task else 0.0


def divergence_weight(config: Config) -> float:
    """The factor of the divergence in the loss, weight · T²: T² keeps the size of the gradients,
    which a temperature divides by T².
    """
    return config.distill.weight * config.distill.temperature**2


def place_teacher(teacher: Any, model: torch.nn.Module, device: torch.device) -> None:
    """Put the teacher on the device, with its blocks sharded as the student's, if they are.

    The first step does it, since the mesh of the student's shards is not known before.
    """
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    if mesh is None:
        teacher.to(device)
    elif not isinstance(teacher, FSDPModule):
        for block in architecture_of(teacher).blocks(teacher):
            fully_shard(block, mesh=mesh)
        register_fsdp_forward_method(fully_shard(teacher, mesh=mesh), "logits_of_rows")


# (1 - weight) · cross-entropy + weight · T² · divergence
DIVERGENCE = Term(
    "kl",
    knob="distill.teacher",
    weight=divergence_weight,
    share=lambda config: 1 - config.distill.weight,
    rows=teacher_divergence,
)
