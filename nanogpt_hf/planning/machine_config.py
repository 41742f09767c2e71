"""Write the accelerate config of a layout."""

from nanogpt_hf.planning.layout import Layout

WRITTEN = "written by `estimate`"  # in the first line, so that no other file is replaced
_SHIPPED = {
    "one process": "single_gpu",
    "DDP": "ddp",
    "FSDP2": "fsdp2",
    "HSDP": "hsdp",
    "TP": "tp",
    "TP × FSDP2": "tp_fsdp2",
    "CP × FSDP2": "cp_fsdp2",
    "PP": "pp",
    "PP × DDP": "pp",
    "PP × FSDP2": "pp_fsdp2",
}


def shipped_config(layout: Layout) -> str | None:
    """The path of the shipped config of this kind of layout, whose numbers may differ; None if there is none."""
    name = _SHIPPED.get(layout.family)
    if name == "fsdp2" and layout.place.checkpointing:
        name = "fsdp2_checkpointing"
    elif name in ("ddp", "fsdp2") and layout.place.processes > layout.place.per_machine:
        name = f"multi_node_{name}"
    return f"accelerate_configs/{name}.yaml" if name else None


def config_text(layout: Layout) -> str:
    """The accelerate config of `layout`, as YAML."""
    place = layout.place
    machines = max(1, place.processes // place.per_machine)
    kind = "FSDP" if place.kind == "FSDP2" else "MULTI_GPU" if place.processes > 1 else "'NO'"
    lines = [
        f"# {layout.name}: {WRITTEN}",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"num_machines: {machines}",
        f"num_processes: {place.processes}",
        "machine_rank: 0" + ("  # 1, 2, ... on the other machines" if machines > 1 else ""),
    ]
    if machines > 1:
        lines += ["main_process_ip: 10.0.0.1  # edit: the address of the first machine", "main_process_port: 29500"]
    lines += [f"mixed_precision: {place.precision}", "use_cpu: false"]
    if kind == "FSDP":
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true",
            "  fsdp_cpu_ram_efficient_loading: false",
            f"  fsdp_activation_checkpointing: {str(place.checkpointing).lower()}",
            "  fsdp_offload_params: false",
        ]
    if place.compiles:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR"]
    copies = place.copies if kind == "FSDP" else place.dp
    if place.tp * place.cp * place.pp > 1 or (kind == "FSDP" and copies > 1):
        sizes = {"dp_replicate": copies, "dp_shard": place.shards // place.cp, "tp": place.tp, "cp": place.cp}
        sizes |= {"pp": place.pp} if place.pp > 1 else {}
        lines.append("parallelism_config:")
        lines += [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
    return "\n".join(lines) + "\n"
