"""Architectures: all that the rest of the package asks of a causal LM. Here for any text-only
decoder of transformers: Llama, Qwen3, OLMo 2, nanochat, ...

The models are transformers' own classes, with our loss (loss_decoders.py). Nothing here names
one of them: the parts of a model are found by its config's fields, `_no_split_modules` and the
types of its layers. Another architecture is a subclass, as our GPT-2 in gpt2.py.
"""

import copy
import math
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import one_line
from nanogpt_hf.model.config_fields import (
    SIZES,
    ConfigFields,
    active_experts,
    completed,
    padded_vocab_size,
    padding_rows,
    size_of,
)
from nanogpt_hf.model.experts import experts_of, shapes_only
from nanogpt_hf.model.layout_gpt import check_loaded
from nanogpt_hf.model.loss_decoders import model_class_of
from nanogpt_hf.model.loss_gpt import rows_of_a_chunk

# How tensor parallelism splits a layer: each process computes a part of its outputs, or of each
# output the sum over a part of its inputs. A layer of heads has one weight for all heads, and each
# process has a part of the heads.
Split = Literal["outputs", "inputs", "heads"]
_SPLITS: dict[str, Split] = {
    "colwise": "outputs",
    "rowwise": "inputs",
    "replicated_with_grad_allreduce": "heads",
}
_TOKENS_OF_A_STEP = 256  # for `check_one_step`: a shorter text may not reach all parameters
# A deeper model fails as a shallow one does, and would take minutes: it does not generate, and
# only some of its blocks take the step.
_DEEP = 100
_EXPERT_MULTIPLE = 8  # torch's grouped products need rows of 16 bytes, in bf16 too


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a model."""

    blocks: str
    final_norm: str


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model."""

    parameters: int
    looked_up: int  # in embeddings, and in no matrix product
    idle: int  # in the experts that a token does not choose


class _NoInitialValues(TorchFunctionMode):
    """Leave out the initial values of linear layers, which the meta device does not hold: torch
    takes longer for them than for the rest of a model.
    """

    def __torch_function__(self, func, types, args=(), kwargs: Any = None):
        if func is nn.init.kaiming_uniform_:
            return (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


class Architecture(ConfigFields):
    """How to build, load, save and take apart a model, and what it costs. Methods take a model
    that is not prepared.

    `model_class(config)` makes a model with initial weights, in transformers' form. Its forward
    takes input_ids, shift_labels, position_ids, use_cache, num_items_in_batch (divides the
    summed loss) and skip_logits. A model whose vocabulary is padded never predicts the added rows.
    """

    # layer of a block on disk -> ours in it; empty if they are the same
    layers_on_disk: dict[str, tuple[str, ...]] = {}  # noqa: RUF012

    def __init__(self, config_class: type[PreTrainedConfig]):
        """Raises ValueError with the reason if the models are not those of a decoder."""
        super().__init__(config_class)
        self._check_kind()
        self.model_class = model_class_of(config_class)
        # for messages and cards: `Qwen3` of Qwen3ForCausalLM
        self.title = re.sub(r"(ForCausalLM|LMHeadModel)$", "", self.model_class.__name__)
        # A start asks several times for one config.
        self._stepped: dict[str, list[str]] = {}
        self._sizes: dict[str, Sizes] = {}

    def _check_kind(self) -> None:
        kinds: Any = self.config_class.sub_configs
        # a sub-config without a type is a group of fields
        models = [getattr(kind, "model_type", kind.__name__) for kind in kinds.values()]
        if any(models):
            raise ValueError(
                f"{self.name} consists of several models ({', '.join(filter(None, models))}), and "
                "is not supported"
            )
        attends = any("cross_attention" in field.name for field in self._fields)
        is_part = attends and self._field("is_decoder")
        if getattr(self.config_class, "is_encoder_decoder", False) or is_part:
            raise ValueError(
                f"{self.name} has an encoder, is one, or attends to one, and is not supported"
            )

    # From a recipe, and from and to disk. Weights are named as in `model_class`.

    def config_from_recipe(
        self, section: ModelSection, vocab_size: int, end_of_text_id: int | None
    ) -> PreTrainedConfig:
        """The configuration that a recipe describes, for a tokenizer of `vocab_size` tokens.

        Raises ValueError if model.extra does not fit the config's fields.
        """
        config, model = self._build(section, vocab_size, end_of_text_id, is_gated=False)
        if section.n_inner is None and self._is_gated(model):
            config, model = self._build(section, vocab_size, end_of_text_id, is_gated=True)
        self.check_knobs(section, config)
        self.check_one_step(config, model)
        if padded := padded_vocab_size(section, vocab_size):
            config.padded_vocab_size = padded  # in memory only; standard_config has none
        return config

    def _build(self, *recipe: Any, is_gated: bool) -> tuple[PreTrainedConfig, PreTrainedModel]:
        """The config of a recipe, and its model on the meta device."""
        values = self.fields_from_recipe(*recipe, is_gated=is_gated)
        try:
            config = completed(self.config_class(**values))
            self.check_fields(config)
            return config, self.on_meta(config)
        except Exception as error:
            # one line of transformers' several: hidden_act expected str, got int (value: 3)
            match = re.search(r"Field '(\w+)' (expected .*)", str(error))
            reason = f"{match[1]} {match[2]}" if match else one_line(error)
            raise ValueError(f"model.extra: {self.name}'s config: {reason}") from error

    def _is_gated(self, model: PreTrainedModel) -> bool:
        """Whether its MLPs or experts have three matrices."""
        layers = (self.linear_layers(block)[1] for block in self.blocks(model))
        return bool(experts_of(model)) or any(len(of) > 2 for of in layers)

    def on_meta(self, config: Any) -> PreTrainedModel:
        """A model without values. Its sizes are noted: to build it again would take as long."""
        key = _key_of(config)
        with torch.device("meta"), _NoInitialValues():
            model = self.model_class(config)
        # Where a model lacks such parts, `sizes` gives the reason.
        with suppress(Exception):
            self._sizes[key] = self._sizes.get(key) or self._sizes_of(model)
        return model

    def _sizes_of(self, model: PreTrainedModel) -> "Sizes":
        head: Any = model.get_output_embeddings()
        looked_up = [p for module in self.embeddings(model) for p in module.parameters()]
        experts = [
            (sum(p.numel() for p in part.parameters()), part.num_experts)
            for part in experts_of(model)
        ]
        active = active_experts(model.config)
        return Sizes(
            model.num_parameters(),
            looked_up=sum(p.numel() for p in looked_up if p is not head.weight),
            idle=sum(size - size * active // count for size, count in experts),
        )

    def sizes(self, config: Any) -> "Sizes":
        """The sizes of a model, counted once for each config."""
        key = _key_of(config)
        if key not in self._sizes:
            self._sizes[key] = self._sizes_of(self.on_meta(config))
        return self._sizes[key]

    def check_one_step(self, config: Any, model: PreTrainedModel | None = None) -> list[str]:
        """The parameters that the loss gives no gradient, found by a step on the meta device, which
        computes shapes only; none if that device cannot tell. Two tokens are generated there, too.
        `model`: the config's, on that device, if there is one already.

        Raises ValueError if the model fails in a step, or in generation.
        """
        key = _key_of(config)
        if key not in self._stepped:
            model = model or self.on_meta(config)
            self._stepped[key] = self._idle_in_a_step(model, config)
        return self._stepped[key]

    def _idle_in_a_step(self, model: Any, config: Any) -> list[str]:
        self.check_fields(config)
        for name, p in model.named_parameters():
            if not p.numel() and p.dim() < 3:
                raise ValueError(f"{self.name}'s {name} has no values: it is {_by(p.shape)}")
        for p in (p for experts in experts_of(model) for p in experts.parameters()):
            if p.dim() > 2 and any(size % _EXPERT_MULTIPLE or not size for size in p.shape[1:]):
                raise ValueError(
                    f"{self.name}'s experts are matrices of {_by(p.shape[1:])}; their "
                    f"sizes must be multiples of {_EXPERT_MULTIPLE}"
                )
        if len(self.blocks(model)) != config.num_hidden_layers:
            raise ValueError(f"{self.name} has not one block per layer, and is not supported")
        try:
            idle = self._idle_in_a_shallow_step(model)
            if idle is None:
                self.output_shapes(model).loss.backward()
                idle = [name for name, p in model.named_parameters() if p.grad is None]
            if config.num_hidden_layers <= _DEEP:
                self._generate_shapes(model)
            return idle
        except Exception as error:
            # it reads values or asks for autocast: the meta device has neither
            if "meta tensor" in str(error) or "autocast" in str(error):
                return []
            others = ("head_dim", "num_local_experts", "num_experts_per_tok")
            sizes = SIZES | {name: name for name in others}
            values = {knob: size_of(config, name) for knob, name in sizes.items()}
            given = ", ".join(f"{knob} {value}" for knob, value in values.items() if value)
            raise ValueError(
                f"model.architecture {self.name} cannot take a step, or generate, with {given}: "
                f"{one_line(error)}"
            ) from error

    def _idle_in_a_shallow_step(self, model: Any) -> list[str] | None:
        """What has no gradient in a step of the lowest blocks of a deep model, twice as many as it
        takes to have each kind of block. All blocks of a kind do the same, so that a step of the
        whole model finds the same.

        None if the whole model has to take the step: it is not deep, its kinds go on to the top,
        the few blocks fail, or a parameter inside of them has no gradient.
        """
        blocks = self.blocks(model)
        if len(blocks) <= _DEEP:
            return None
        types = getattr(model.config, "layer_types", None) or [None] * len(blocks)
        kinds = [(_kind_of(block), of) for block, of in zip(blocks, types, strict=True)]
        count = 2 * (1 + max(kinds.index(kind) for kind in set(kinds)))
        above = list(blocks)[count:]
        if not above:
            return None
        del blocks[count:]
        try:
            self.output_shapes(model).loss.backward()
            idle = [name for name, p in model.named_parameters() if p.grad is None]
            is_idle_inside = any(p.grad is None for p in blocks.parameters())
            return None if is_idle_inside else idle
        except Exception:  # the step of the whole model gives the reason
            return None
        finally:
            model.zero_grad()
            blocks.extend(above)

    @torch.no_grad()
    def _generate_shapes(self, model: Any) -> None:
        """Generate two tokens with a model on the meta device, as generate.py does."""
        model, use_cache, cache = model.eval(), caches(model), None
        ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
        with shapes_only():
            for unread in (ids, ids[:, :1]):
                options = {"past_key_values": cache, "use_cache": use_cache, "logits_to_keep": 1}
                cache = getattr(model(unread, **options), "past_key_values", None)

    def output_shapes(self, model: Any) -> Any:
        """The output for a text of a model on the meta device, in training."""
        # one chunk of the loss, since chunks cannot be on the meta device
        config = model.config
        length = rows_of_a_chunk(_TOKENS_OF_A_STEP, config.vocab_size + padding_rows(config))
        length = min(length, config.max_position_embeddings)
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        with shapes_only():
            return model.train()(
                input_ids=ids, shift_labels=ids, use_cache=False, num_items_in_batch=1
            )

    def read_model(
        self,
        name: str,
        revision: str | None = None,
        quantization_config: Any = None,
        **fields: Any,
    ) -> PreTrainedModel:
        """The model in a folder or on the Hub in float32, with other `fields` of its config.

        Raises ValueError if its weights do not fit.
        """
        loaded: Any = self.model_class.from_pretrained(
            name,
            revision=revision or "main",
            config=self.read_config(name, revision, **fields),
            dtype=torch.float32,
            quantization_config=quantization_config,
            ignore_mismatched_sizes=True,  # transformers' own error does not name them
            output_loading_info=True,
            trust_remote_code=False,
        )
        model, info = loaded
        check_loaded(name, self.title, info)
        return model

    def write_model(self, folder: Path, config: Any, weights: dict[str, torch.Tensor]) -> None:
        """Write `weights` (in the dtype they have) as what they are: a model of transformers."""
        with torch.device("meta"):
            model: Any = self.model_class(self.standard_config(config))
            model = model.to(next(iter(weights.values())).dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in weights and weights[name].shape != parameter.shape:  # padded rows
                weights = weights | {name: weights[name][: len(parameter)].contiguous()}
        model.save_pretrained(folder, state_dict=weights)

    def standard_config(self, config: Any) -> PreTrainedConfig:
        """The config of the standard transformers model: without rows that pad the vocabulary."""
        config = copy.deepcopy(config)
        vars(config).pop("padded_vocab_size", None)
        return config

    def standard_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """The standard transformers model of `config`, with new weights."""
        standard = self.standard_config(config)
        return AutoModelForCausalLM.from_config(
            standard, attn_implementation="sdpa", trust_remote_code=False
        )

    # Parts of a model.

    def blocks(self, model: PreTrainedModel) -> Any:
        """Transformer blocks, lowest first."""
        return model.get_submodule(_parts_of(model).blocks)

    def embeddings(self, model: PreTrainedModel) -> list[nn.Module]:
        """Embeddings of tokens, and of positions if they are learned."""
        inside = f"{_parts_of(model).blocks}."
        return [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and not name.startswith(inside)
        ]

    def final_norm(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule(_parts_of(model).final_norm)

    def attention(self, block: nn.Module) -> Any:
        """What mixes tokens: attention, or, of a block without, its first part."""
        parts = [part for part in block.children() if any(p.dim() > 1 for p in part.parameters())]
        return next((part for part in parts if "Attention" in type(part).__name__), parts[0])

    def linear_layers(self, block: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """The linear layers of attention, and all others but experts, by name; the last of each
        writes to the residual stream.
        """
        inside = {id(module) for module in self.attention(block).modules()}
        found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear) and ".lora_" not in name:
                name = name.removesuffix(".base_layer")  # an adapter's
                found[id(module) not in inside][name] = block.get_submodule(name)
        width = next((layer.in_features for layers in found for layer in layers.values()), 0)
        for layers in found:  # the last that is as wide as the residual stream writes to it
            wide = [name for name, layer in layers.items() if layer.out_features == width]
            if wide:
                layers[wide[-1]] = layers.pop(wide[-1])
        return found

    def inner_width(self, block: nn.Module, config: Any) -> int:
        """Values per token that the last matrices of the MLP and of a token's experts multiply."""
        mlp = list(self.linear_layers(block)[1].values())
        width = sum(layer.in_features for layer in mlp[-1:])
        for experts in experts_of(block):
            matrix = experts.down_proj[0].numel()
            width += active_experts(config) * matrix // config.hidden_size
        return width

    def residual_weights(self, block: nn.Module) -> list[nn.Parameter]:
        """The weights that write to the residual stream."""
        layers = [list(part.values())[-1].weight for part in self.linear_layers(block) if part]
        return layers + [experts.down_proj for experts in experts_of(block)]

    def lora_targets(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """Names of the linear layers that can have adapters: in a model with experts those of
        attention, since peft takes MLPs beside them for experts. Beside a convolution those of its
        inputs: kernels read the weights of others without calling the layer. None that returns
        anything but its product, or whose weight the forward pass reads without calling it, or is
        that of several layers, into which their adapters could not be merged, or whose name peft
        takes for an expert's.
        """
        model: Any = self.on_meta(config)
        products: dict[nn.Module, bool] = {}
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        shared = Counter(id(layer.weight) for layer in layers)
        for layer in layers:
            layer.register_forward_hook(
                lambda layer, _, out: products.update(
                    # the layer of several groups returns another width
                    {layer: torch.is_tensor(out) and out.shape[-1:] == (layer.out_features,)}
                )
            )
        try:
            self.output_shapes(model)
        except Exception:  # the meta device cannot tell
            products = dict.fromkeys(model.modules(), True)
        parts, found = 1 if experts_of(model) else 2, {}
        names_of_experts = _NAMES_OF_EXPERTS if parts == 1 else ()
        refused: set[str] = set()
        for block in self.blocks(model):
            for name in (name for part in self.linear_layers(block)[:parts] for name in part):
                inside, _, last = name.rpartition(".")
                beside = hasattr(block.get_submodule(inside), "conv1d")
                usual = last.startswith("in_proj") or not (beside or last.isdigit())
                layer: Any = block.get_submodule(name)
                if shared[id(layer.weight)] > 1 or last in names_of_experts:
                    refused.add(last)
                elif usual and products.get(layer):
                    found[last] = True
        return tuple(name for name in found if name not in refused)

    def tensor_parallel(self, block: nn.Module) -> dict[str, Split]:
        """How tensor parallelism splits a block's layers, by name: the plan in the config class, as
        far as we can follow it.

        Raises ValueError with the reason if it has another kind of split, or none for a layer of
        attention or MLP.
        """
        tensor_plan = self.config_class.base_model_tp_plan or {}
        styles = {name.rpartition(".*.")[2]: style for name, style in tensor_plan.items()}
        plan: dict[str, Split] = {}
        for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in block.named_parameters()):
            module = block.get_submodule(name)
            if not ("." in name or isinstance(module, nn.Linear) or any(module.children())):
                continue  # a norm of the residual stream, the same on all processes
            if styles.get(name) not in _SPLITS:
                raise ValueError(
                    f"transformers has no plan that splits {self.name}'s {name} "
                    f"({styles.get(name, 'not in it')})"
                )
            plan[name] = _SPLITS[styles[name]]
        for last in (list(part)[-1] for part in self.linear_layers(block)):
            if plan[last] != "inputs":
                raise ValueError(
                    f"transformers' plan for {self.name} does not split {last} by its inputs"
                )
        return plan

    def depths(self, model: PreTrainedModel) -> dict[str, int]:
        """Parameter name -> depth: 0 for embeddings, 1, 2, ... for blocks, and one more for the
        layers above them.
        """
        blocks = self.blocks(model)
        depth = {id(p): 0 for module in self.embeddings(model) for p in module.parameters()}
        depth |= {
            id(p): index + 1 for index, block in enumerate(blocks) for p in block.parameters()
        }
        return {name: depth.get(id(p), len(blocks) + 1) for name, p in model.named_parameters()}

    def families(self, model: PreTrainedModel) -> dict[str, str]:
        """Parameter name -> its kind in optim.rates, or `other`."""
        tokens: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        of_modules = [("positions", module) for module in self.embeddings(model)]
        # the last pipeline stage has a copy of a tied head
        tied = model.config.tie_word_embeddings
        of_modules += [("tokens", tokens), ("tokens" if tied else "head", head)]
        for block in self.blocks(model):
            if not any(True for _ in block.parameters()):  # of another pipeline stage
                continue
            kinds = ("query_key_value", "attention_output"), ("mlp_in", "mlp_out")
            for (first, last), layers in zip(kinds, self.linear_layers(block), strict=True):
                families = [*[first] * (len(layers) - 1), last]
                of_modules += zip(families, layers.values(), strict=False)
        found = {id(p): family for family, module in of_modules for p in module.parameters()}
        for experts in experts_of(model):
            for name, p in experts.named_parameters():
                inner = "mlp_out" if name.startswith("down") else "mlp_in"
                found[id(p)] = inner if p.dim() > 2 else "vectors"  # biases of all experts
        return {
            name: "vectors" if p.dim() < 2 else found.get(id(p), "other")
            for name, p in model.named_parameters()
        }

    # What training, evaluation and estimates do with it.

    def freeze(self, model: PreTrainedModel, layers: int) -> None:
        """Freeze the embeddings (and a tied head) and the lowest `layers` blocks; -1 freezes
        nothing.
        """
        if layers >= 0:
            for module in [*self.embeddings(model), *self.blocks(model)[:layers]]:
                module.requires_grad_(False)

    def resize_positions(self, model: Any, length: int, theta: float | None) -> None:
        """Give a model a context of `length` tokens, and another base of its rotary wavelengths."""
        if (rope := self.resized_rope(model.config, length, theta)) is None:
            return
        model.config.rope_parameters, model.config.max_position_embeddings = rope, length
        rotary = [m for m in model.named_modules() if hasattr(m[1], "original_inv_freq")]
        for name, module in rotary:
            frequencies: Any = module.inv_freq
            with frequencies.device:
                model.set_submodule(name, type(module)(model.config))

    def lookup_parameters(self, config: Any) -> int:
        """Parameters that are in no matrix product: those of the embeddings, but for one that is
        the head too.
        """
        return self.sizes(config).looked_up

    def idle_parameters(self, config: Any) -> int:
        """Parameters of the experts that a token does not choose."""
        return self.sizes(config).idle

    def flops_per_token(self, config: PreTrainedConfig, block_size: int) -> float:
        """6·N + 12·L·H·Q·T: training, forward and backward (PaLM, arXiv:2204.02311, appendix B).

        N leaves out the parameters that are only looked up, as nanoGPT's `estimate_mfu` does, and
        the experts that a token does not choose.
        """
        parameters = self.count_parameters(config) - self.lookup_parameters(config)
        parameters -= self.idle_parameters(config)
        width = 0  # of all heads of all blocks
        for block in config.per_layer_config:
            if heads := getattr(block, "num_attention_heads", 0):
                width += heads * (getattr(block, "head_dim", None) or block.hidden_size // heads)
        return 6 * parameters + 12 * width * block_size

    def memory_bound(self, model: Any, tokens: int, block_size: int) -> float:
        """Bytes that a training step of so many tokens on a CPU never needs; infinite if no sum
        tells, as for layers whose state is larger than their inputs.
        """
        return math.inf

    def count_parameters(self, config: PreTrainedConfig) -> int:
        """Parameters of the model as it is saved: padded vocabulary rows are not counted, a tied
        head counts once.
        """
        known = self._sizes.get(_key_of(config))
        parameters = known.parameters if known else self.on_meta(config).num_parameters()
        matrices = 1 if config.tie_word_embeddings else 2
        return parameters - matrices * padding_rows(config) * config.hidden_size


def _key_of(config: PreTrainedConfig) -> str:
    return config.to_json_string(use_diff=False)


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """What tells a block from others, but for its index and values: types, sizes and settings of
    its modules. A setting that is no plain value is another one for each object.
    """
    settings = [
        (name, type(module), key, value if isinstance(value, _PLAIN) else id(value))
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key not in _NO_SETTINGS
    ]
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return *settings, *((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


_PLAIN = bool, int, float, str, type(None), torch.dtype, torch.Size
_NO_SETTINGS = {*vars(nn.Module()), "layer_idx"}  # torch's own, and the index


def _by(shape: Iterable[int]) -> str:
    return " × ".join(map(str, shape))


def caches(model: Any, *, padded: bool = False) -> bool:
    """Whether transformers' cache is used, which needs a layer with attention. Rows `padded` on
    the left cannot have blocks of tokens that are counted from the first column.
    """
    kinds = getattr(model.config, "layer_types", None) or ["attention"]
    if padded and any("compressed" in kind for kind in kinds):
        return False
    return any("attention" in kind and kind != "linear_attention" for kind in kinds)


def _parts_of(model: PreTrainedModel) -> Parts:
    """The parts of a model, found when they are asked for first: wrappers change its types."""
    if "parts" not in vars(model):
        vars(model)["parts"] = _find_parts(model, str(model.config.model_type))
    return vars(model)["parts"]


def _find_parts(model: PreTrainedModel, kind: str) -> Parts:
    names, lists = set(model._no_split_modules or ()), []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            is_block = isinstance(module[0], GradientCheckpointingLayer)
            if is_block or type(module[0]).__name__ in names:
                lists += [name] if not any(name.startswith(f"{of}.") for of in lists) else []
    if len(lists) != 1:
        raise ValueError(f"{kind} has no single list of blocks, and is not supported")
    container = lists[0].rpartition(".")[0]
    norms = [
        name
        for name, module in model.get_submodule(container).named_children()
        if "norm" in type(module).__name__.lower()
    ]
    if not norms or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError(f"{kind} has no final norm or linear head, and is not supported")
    return Parts(lists[0], f"{container}.{norms[-1]}")
