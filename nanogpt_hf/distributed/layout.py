"""Parallel layouts: which recipes and models run on which."""

from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.config.compatibility import check_settings, recipe_settings
from nanogpt_hf.config.schema import Config, ModelSection
from nanogpt_hf.config.settings import Setting
from nanogpt_hf.config.step_size import accumulation_steps, divisors
from nanogpt_hf.distributed.context_parallel import RING_MACHINES, heads_of, needs_ring
from nanogpt_hf.distributed.expert_parallel import experts_problem
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.pipeline_stages import once_per_section, stages_problem, tiny_model
from nanogpt_hf.distributed.tensor_parallel import splits_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import model_of_run
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.recompute import check_level


def check_layout(config: Config, launch: Launch, model: PreTrainedModel | None = None) -> int:
    """Check that a recipe can be trained on a launch; return its gradient accumulation steps.

    Raises UserError if the recipe cannot be trained there, or if its tokens per step do not
    divide. `model`: the recipe's, on any device, if there is one already.
    """
    settings = recipe_settings(config) | launch_settings(launch)
    check_settings(settings)
    check_level(launch.checkpointing, config.model.n_layer)
    if launch.pp_size > 1:
        if problem := _micro_batches_problem(config, launch):
            raise UserError(problem)
        if problem := stages_problem(config.model):
            named = f"model.architecture {config.model.architecture} ({problem})"
            check_settings(settings | {Setting.BLOCKS_THAT_ARE_NO_STAGES: named})
    if launch.tp_size * launch.cp_size * launch.ep_size > 1:
        model = model or model_of_run(config, vocab_size=256)
        check_settings(settings | model_settings(config, model, launch))
        if problem := _sizes_problem(config, model, launch):
            raise UserError(problem)
    return accumulation_steps(config, launch.dp_size)


def launch_settings(launch: Launch) -> dict[Setting, str]:
    """Settings of the accelerate config that rules name, each with the words for it in messages."""
    is_fsdp = launch.sharding == "fsdp"
    is_unsharded = launch.sharding == "none"
    sizes = {
        Setting.TENSOR_PARALLELISM: ("tp_size", launch.tp_size),
        Setting.CONTEXT_PARALLELISM: ("cp_size", launch.cp_size),
        Setting.PIPELINE_STAGES: ("pp_size", launch.pp_size),
        Setting.EXPERT_PARALLELISM: ("ep_size", launch.ep_size),
        Setting.HSDP: ("dp_replicate_size", launch.dp_replicate_size),
    }
    switches = {
        Setting.ZERO_BUBBLE: launch.pp_size > 1 and launch.pp_schedule == "zero_bubble",
        Setting.DEEPSPEED: launch.sharding == "zero",
        Setting.FSDP2: is_fsdp,
        Setting.FSDP2_IN_BF16: is_fsdp and launch.precision in ("bf16", "fp8"),
        Setting.FSDP2_OVER_ONE_PROCESS: is_fsdp and launch.dp_cp_size == 1,
        Setting.UNSHARDED: is_unsharded,
        Setting.DDP: is_unsharded and launch.dp_size > 1 and launch.pp_size == 1,
        Setting.FP16: launch.precision == "fp16",
        Setting.FP8: launch.precision == "fp8",
        Setting.COMPILATION: launch.compiles,
        Setting.ACTIVATION_CHECKPOINTING: bool(launch.checkpointing),
        Setting.SELECTIVE_CHECKPOINTING: launch.checkpointing == "selective",
        Setting.RESHARDING: launch.reshards,
        Setting.SENT_WEIGHTS: launch.sends_weights,
        Setting.CPU: launch.on_cpu,
    }
    found = {
        setting: setting.describe(f"{name} {size}")
        for setting, (name, size) in sizes.items()
        if size > 1
    }
    found |= {setting: setting.describe() for setting, is_on in switches.items() if is_on}
    if launch.compression != "no":
        hook = Setting.GRADIENT_COMPRESSION
        found[hook] = hook.describe(launch.compression)
    return found


def model_settings(config: Config, model: Any, launch: Launch) -> dict[Setting, str]:
    """Settings of a model that matter for tensor, context and expert parallelism, each with
    the words for it in messages.
    """
    name = f"model.architecture {config.model.architecture}"
    found: dict[Setting, str] = {}
    architecture = architecture_of(model)
    fields = model.config.to_dict()
    window = fields.get("sliding_window") or fields.get("attention_chunk_size")
    if launch.tp_size > 1:
        try:
            plans = [splits_of(architecture, block) for block in architecture.blocks(model)]
            if any("heads" in plan.values() for plan in plans):
                found[Setting.SPLIT_NORMS_OF_HEADS] = f"the norms of heads of {name}"
        except ValueError as error:
            found[Setting.BLOCKS_WITHOUT_A_PLAN] = f"{name} ({error})"
        if model.config.is_heterogeneous:
            found[Setting.BLOCKS_WITHOUT_A_PLAN] = f"{name} (its blocks have sizes of their own)"
    if not experts_of(model):
        found[Setting.NO_EXPERTS] = name
    # Context parallelism gives attention the positions' own numbers. It needs plain causal
    # attention, positions that follow from their numbers (rotary, or GPT-2's learned ones), and
    # layers that leave the mask alone, which these two fields do not.
    rotary = getattr(model.config, "rope_parameters", None) is not None
    if (
        model.config._attn_implementation != "sdpa"
        or not (rotary or config.model.architecture == "gpt2")
        or not {"index_topk", "keep_window_size"}.isdisjoint(fields)
    ):
        found[Setting.OTHER_ATTENTION] = f"the attention of {name}"
    if launch.cp_size > 1 and not _mixes_by_attention(config.model):
        found[Setting.OTHER_ATTENTION] = f"what mixes tokens in {name}"
    if window is not None and window < config.data.block_size:
        found[Setting.WINDOW_OF_ATTENTION] = f"{name}'s window of {window} tokens"
    if launch.cp_size > 1 and needs_ring(model.config, launch.tp_size * launch.cp_size):
        found[Setting.RING_ATTENTION] = Setting.RING_ATTENTION.describe(f"cp_size {launch.cp_size}")
    # Every config names its dropouts otherwise: attention_dropout, resid_pdrop, drop_path_rate, ...
    for knob, value in fields.items():
        if "drop" in knob and value:
            found[Setting.DROPOUT] = f"{knob} {value}"
    return found


def _sizes_problem(config: Config, model: Any, launch: Launch) -> str | None:
    """Name a size of the model that its processes do not divide, if there is one."""
    if launch.ep_size > 1 and (problem := experts_problem(model, launch)):
        return problem
    block_size = config.data.block_size
    heads, kv_heads = heads_of(model.config)
    widths = {"model.n_head": heads, "model.n_kv_head": kv_heads}
    if launch.tp_size > 1:
        architecture = architecture_of(model)
        # All blocks have the sizes of the first; others were refused as blocks without a plan.
        block: Any = architecture.blocks(model)[0]
        divided = widths | {
            f"the width of {name}": block.get_submodule(name).out_features
            for name, split in splits_of(architecture, block).items()
            if split == "outputs"
        }
        for name, width in divided.items():
            if width % launch.tp_size:
                return f"{name} is {width}, which {launch.tp_size} processes do not divide"
    if block_size % launch.cp_size:
        return f"data.block_size is {block_size}, which {launch.cp_size} processes do not divide"
    # Tensor parallelism has cut the heads before context parallelism exchanges them.
    each = launch.tp_size * launch.cp_size
    if launch.cp_size == 1 or not needs_ring(model.config, each):
        return None
    if (launch.device, launch.precision) not in RING_MACHINES:
        name, width = next((name, width) for name, width in widths.items() if width % each)
        return (
            f"{name} is {width}, which {each} processes do not divide, and ring attention, which "
            "needs no such sizes, runs only on CUDA GPUs (Ampere or newer) with mixed_precision "
            "bf16; set other sizes, or use them"
        )
    if block_size % (2 * launch.cp_size):
        return (
            f"data.block_size is {block_size}, which does not divide into the 2 × {launch.cp_size} "
            "equal parts of ring attention; set a multiple"
        )
    return None


@once_per_section
def _mixes_by_attention(section: ModelSection) -> bool:
    """Whether tokens of a tiny model reach others by attention alone, and not by a convolution or a
    state, which do not know position ids; False if there is no model so small.
    """
    try:
        check_causal(tiny_model(section), packs=True)
    except Exception:
        return False
    return True


def _micro_batches_problem(config: Config, launch: Launch) -> str | None:
    """Why the layers or the micro-batches of a step do not fill the stages, if they do not."""
    if config.model.n_layer < launch.pp_size:
        return (
            f"model.n_layer is {config.model.n_layer}, fewer than the {launch.pp_size} stages; "
            "raise it, or lower pp_size in the accelerate config"
        )
    train = config.train
    block_size = config.data.block_size
    sequences = train.tokens_per_step // (block_size * launch.dp_size)
    micro_batches = sequences // train.min_micro_batch_size
    if launch.fills_pipeline(micro_batches):
        return None
    rule = "at least as many micro-batches as stages"
    if launch.pp_schedule == "zero_bubble":
        rule += ", in equal rounds of at least as many"
    fitting = [size for size in divisors(sequences) if launch.fills_pipeline(sequences // size)]
    smaller = f"set train.micro_batch_size to {max(fitting)} or " if fitting else ""
    return (
        f"a step has {plural(sequences, 'sequence')} per pipeline, in micro-batches of "
        f"{train.min_micro_batch_size}; pp_schedule {launch.pp_schedule} takes {rule}; {smaller}"
        "raise train.tokens_per_step"
    )
