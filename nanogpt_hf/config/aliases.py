"""The nearest name for one that does not exist: what other programs call a knob, an option or a
command, and names that are written almost the same.

docs/coming_from.md describes the options of nanoGPT, nanochat, the Trainer and Megatron-LM;
tests/test_docs.py compares the page with this table.
"""

from collections.abc import Iterable

from nanogpt_hf.errors import did_you_mean, last_part

# A name here -> names elsewhere. A name with a dot holds in that section only.
_OTHER_NAMES = {
    "model.n_layer": "num_layers num_hidden_layers n_layers layers",
    "model.n_head": "num_heads num_attention_heads n_heads heads",
    "model.n_embd": "hidden_size d_model dim embed_dim width",
    "model.n_positions": "max_position_embeddings",
    "model.n_kv_head": "num_key_value_heads n_kv_heads num_query_groups",
    "model.n_inner": "intermediate_size d_ff ffn_dim ffn_hidden_size",
    "model.pad_vocab_to_multiple_of": "make_vocab_size_divisible_by",
    "data.source": "data path data_path file files text dataset dataset_name train_dataset "
    "train_file",
    # Of a Hub data set, and Megatron-LM's shares.
    "data.split": "split",
    "data.validation_fraction": "split",
    "data.text_column": "dataset_text_field text_field",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_type tokenizer_model",
    "data.dir": "data_cache_path",
    "data.mask": "reset_attention_mask reset_position_ids",
    "data.block_size": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length "
    "context context_length ctx_len",
    "data.packing": "group_by_length",
    "optim.name": "optimizer",
    "optim.learning_rate": "lr peak_lr max_lr",
    "optim.muon_learning_rate": "matrix_lr",
    "optim.rates": "embedding_lr unembedding_lr scalar_lr decoupled_lr",
    "optim.min_learning_rate": "min_lr lr_min final_lr_frac",
    "optim.schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "optim.warmup_steps": "warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup_iters "
    "lr_warmup_fraction",
    "optim.decay_steps": "lr_decay_iters",
    "optim.decay_fraction": "warmdown_ratio lr_wsd_decay_iters",
    "optim.balance_loss": "moe_aux_loss_coeff",
    "optim.weight_decay": "wd",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.max_grad_norm": "grad_clip clip_grad gradient_clip_val max_norm optim.clip",
    "train.max_steps": "steps max_iters iters num_steps iterations num_iterations train_iters",
    "train.tokens_per_parameter": "target_param_data_ratio",
    "train.epochs": "epoch num_epochs num_train_epochs train.max_epochs",
    "train.tokens_per_step": "gradient_accumulation_steps grad_accum total_batch_size train.tokens "
    "global_batch_size",
    "train.stages": "rampup_batch_size",
    "train.max_time": "exit_duration_in_mins",
    "train.micro_batch_size": "batch_size device_batch_size train_batch_size "
    "per_device_train_batch_size auto_find_batch_size",
    "train.seed": "data_seed",
    "eval.every": "eval_every eval_interval eval_steps eval.interval eval.steps",
    "eval.tokens": "eval_tokens eval_iters",
    "eval.samples": "sample_every",
    "eval.patience": "early_stopping_patience early_stopping",
    "checkpoint.every": "save_steps save_every save_interval always_save_checkpoint "
    "checkpoint.interval checkpoint.steps",
    "checkpoint.keep": "save_total_limit",
    "tracking.every": "log_interval logging_steps log_every tracking.interval tracking.steps",
    "tracking.trackers": "report_to logger wandb wandb_log tensorboard tensorboard_dir",
    "tracking.project": "wandb_project",
    "lora.rank": "lora_r lora.r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "finetune.model": "model_name_or_path base_model",
    "rl.samples": "num_generations grpo_group_size",
    "rl.updates": "grpo_iterations",
    "rl.clip": "grpo_clamp_eps_lower clip_ratio_low",
    "rl.clip_high": "grpo_clamp_eps_upper epsilon_high clip_ratio_high",
    "rl.kl": "grpo_kl_beta",
    "rl.reward": "reward_funcs reward_function",
    "rl.max_new_tokens": "max_completion_length",
    "hub.push": "push_to_hub",
    "hub.repo": "hub_model_id",
    "hub.private": "hub_private_repo",
    "--run-dir": "out_dir output_dir run_name wandb_run_name run save model_tag wandb_exp_name",
    "--resume": "resume_from_checkpoint resume_from_step load",
    "--prompt": "start",
    "--max-new-tokens": "max_tokens num_tokens max_length length",
    # Sections of a recipe.
    "data": "dataset datasets",
    "optim": "optimizer optimizers",
    "train": "training trainer",
    "eval": "evaluation",
    "tracking": "logging log logger wandb",
    # Commands.
    "prepare": "tokenize preprocess",
    "pretrain": "train fit",
    "finetune": "sft tune fine-tune",
    "rl": "grpo ppo",
    "align": "dpo",
    "resume": "continue",
    "sample": "generate infer predict",
    "evaluate": "eval test",
    "report": "plot",
    "push": "upload publish",
    "export": "convert",
    "bench": "benchmark profile",
}
# What the accelerate config describes -> names elsewhere.
_OF_THE_MACHINE = {
    "use_cpu": "device cpu no_cuda device_type",
    "mixed_precision": "dtype precision bf16 fp16 amp fp8 fp8_format",
    "dynamo_config": "compile torch_compile",
    "num_processes": "num_gpus n_gpu gpus nproc_per_node devices",
    "fsdp_config": "fsdp use_distributed_optimizer use_torch_fsdp2",
    "deepspeed_config": "deepspeed",
    "fsdp_activation_checkpointing": "gradient_checkpointing recompute_granularity "
    "recompute_activations",
    "parallelism_config_tp_size": "tensor_model_parallel_size tp_size tp",
    "parallelism_config_pp_size": "pipeline_model_parallel_size pp_size pp",
    "parallelism_config_cp_size": "context_parallel_size cp_size cp",
    "parallelism_config_ep_size": "expert_model_parallel_size ep_size ep",
}


def _inverted(table: dict[str, str]) -> dict[str, list[str]]:
    """Name elsewhere -> names here."""
    found: dict[str, list[str]] = {}
    for name, others in table.items():
        for other in others.split():
            found.setdefault(other, []).append(name)
    return found


ALIASES = _inverted(_OTHER_NAMES)
MACHINE_SETTINGS = _inverted(_OF_THE_MACHINE)


def suggestion(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for what `word` is called here, or else for what is written almost like
    it; '' without one.

    Candidates are knobs, sections, options or commands. An option of other programs that describes
    the machine has no candidate here, and the accelerate config is named instead.
    """
    candidates = list(candidates)
    knobs = {name for name in candidates if "." in name}
    plain = word.lstrip("-").replace("-", "_").lower()
    # The whole name comes first: `eval.steps` is not `train.steps`.
    for name in (word, plain, last_part(plain)):
        named = [n for alias in ALIASES.get(name, []) for n in (alias, f"--{alias}")]
        if found := [candidate for candidate in named if candidate in candidates]:
            return f"; did you mean {' or '.join(found)}?"
        if knobs and name in MACHINE_SETTINGS:
            setting = MACHINE_SETTINGS[name][0]
            return f"; {setting} of an accelerate config sets it: `launch --config_file FILE ...`"
    return did_you_mean(word, candidates)
