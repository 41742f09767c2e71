"""Mistakes of a user: status 2, one line that names the knob and the value, and nothing written.

Add a row to the table. Its first item are the words after those of its group; the line has to
contain the others. `NAME=value` before the command sets a variable of the environment. Words in
capitals stand for paths (`PLACES`), names of `FILES` are written into the working folder first.
"""

import itertools
import json
import re
import shlex

import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.errors import ConfigError

PLACES = {
    "RECIPE": lambda fixture, folder: fixture("write_recipe")(),
    "TEXT": lambda fixture, folder: fixture("text_file"),
    "MODEL": lambda fixture, folder: fixture("letter_model"),
    "BASE": lambda fixture, folder: fixture("tiny_base"),
    "RUN": lambda fixture, folder: write_run(folder / "run", fixture("write_recipe")()),
    "MACHINES": lambda fixture, folder: fixture("root") / "accelerate_configs",
    "LONG": lambda fixture, folder: "a" * 300,
    "LOOP": lambda fixture, folder: write_loop(folder / "loop"),
}
FILES = {
    "empty.txt": b"",
    "letters.txt": b"abcabc" * 20,
    "binary.txt": bytes(range(256)) * 50,
    "rows.jsonl": b'{"text": "fine"}\n{"body": "no text here"}\n',
    "recipe_of_gpt2.yaml": b"finetune: {model: gpt2}\ndata: {source: x}\n",
    "questions.jsonl": b'{"question": "ab?", "answer": "c"}\n',
}


def write_loop(path):
    """A link to itself."""
    path.symlink_to(path)
    return path


def write_run(folder, recipe):
    """A run folder of one evaluation, without a model."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(config_to_yaml(load_config(recipe)))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 6, "val/loss": 1.0}) + "\n")
    return folder


REFUSALS = {
    # the command line
    "": [
        ("pretain", "pretain", "pretrain"),
        ("sample", "MODEL"),
        ("sample MODEL --temperature warm", "--temperature", "'warm'"),
        ("sample MODEL --train.seed 3", "--train.seed"),
        ("pretrain RECIPE --max-steps 3", "--max-steps", "--train.max_steps"),
        ("pretrain RECIPE --resum", "--resum:", "--resume"),
        ("pretrain RECIPE --train.seed", "--train.seed"),
        ("pretrain RECIPE other", "'other'"),
        ("pretrain --config_file machine.yaml RECIPE", "--config_file", "launch"),
        ("prepare RECIPE -q --log-level info", "--log-level", "-q"),
        ("prepare RECIPE --log-level loud", "--log-level", "'loud'"),
        ("report 'run\udcff'", "\\udcff", "UTF-8"),
        ("doctor --train.seed 3", "--train.seed", "RECIPE"),
        ("bench --train.seed 3", "--train.seed", "RECIPE"),
        ("doctor nowhere.yaml", "nowhere.yaml"),
        ("bench nowhere.yaml", "nowhere.yaml"),
    ],
    # commands that write alone
    "WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=1": [
        (f"{command} RUN", command)
        for command in ("compare", "report", "export", "import-nanogpt", "push", "estimate")
    ],
    # paths
    " ": [
        ("pretrain RECIPE --run-dir ''", "--run-dir"),
        ("sample ''", "MODEL"),
        ("compare ''", "RUN"),
        ("pretrain RECIPE --run-dir LONG", "File name too long"),
        ("report LONG", "File name too long"),
        ("sample LONG", "File name too long"),
        ("export LONG out", "File name too long"),
        ("import-nanogpt LONG out", "File name too long"),
        ("push LONG me/model", "File name too long"),
        *(
            (f"{command} {path}", reason)
            for command, (path, reason) in itertools.product(
                (
                    "evaluate MODEL --data TEXT --output",
                    "report RUN --output",
                    "compare RUN --output",
                    "estimate RECIPE --json",
                    "doctor --json",
                    "bench --json",
                    "bench --profile",
                ),
                (("no/x.json", "no/x.json"), (".", "is a folder")),
            )
        ),
    ],
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=3 pretrain RECIPE": [
        ("--run-dir run", "gradient_accumulation_steps 3", "train.tokens_per_step"),
    ],
    # variables of torch and accelerate
    "  ": [
        *(
            (f"{name}={value} pretrain RECIPE --run-dir run", name, repr(value))
            for name, values in {
                "WORLD_SIZE": ("x", "0", "-1", ""),
                "RANK": ("x", "1.0"),
                "LOCAL_RANK": ("-1",),
                "MASTER_PORT": ("65536",),
                "ACCELERATE_USE_CPU": ("maybe", "1"),
                "ACCELERATE_USE_FSDP": ("yes",),
                "ACCELERATE_USE_SAGEMAKER": ("true",),
                "ACCELERATE_TORCH_DEVICE": ("nosuch", "meta"),
                "ACCELERATE_MIXED_PRECISION": ("x", "BF16"),
                "ACCELERATE_DYNAMO_BACKEND": ("nosuch",),
                "ACCELERATE_DYNAMO_MODE": ("fast",),
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("4",),
                "FSDP_VERSION": ("3",),
                "FSDP_OFFLOAD_PARAMS": ("None",),
                "PARALLELISM_CONFIG_TP_SIZE": ("two", "0", "-1", "2.0"),
                "PARALLELISM_CONFIG_CP_COMM_STRATEGY": ("ring",),
                "PARALLELISM_CONFIG_PP_SCHEDULE": ("gpipe",),
            }.items()
            for value in values
        ),
        ("RANK=5 pretrain RECIPE", "RANK is 5", "WORLD_SIZE 1"),
        (
            "LOCAL_RANK=0 pretrain RECIPE",
            "LOCAL_RANK",
            "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        ),
        ("WORLD_SIZE=2 pretrain RECIPE --run-dir run", "WORLD_SIZE", "RANK"),
        # what accelerate launch sets for a config
        *(
            (f"{settings} {command}", *parts)
            for settings, *parts in (
                ("ACCELERATE_MIXED_PRECISION=fp8", "mixed_precision fp8", "bf16"),
                ("ACCELERATE_USE_CPU=True ACCELERATE_MIXED_PRECISION=fp16", "fp16", "CPU"),
                ("ACCELERATE_MIXED_PRECISION=no MASTER_PORT=29500", "MULTI_CPU", "MULTI_GPU"),
            )
            for command in ("pretrain RECIPE --run-dir run", "evaluate MODEL --data letters.txt")
        ),
        *(
            (
                f"WORLD_SIZE=3 PARALLELISM_CONFIG_{size}_SIZE=3 pretrain RECIPE --dry-run",
                words,
            )
            for size, words in (("TP", "model.n_head is 2"), ("CP", "context parallelism"))
        ),
        ("ACCELERATE_TORCH_DEVICE=xpu:99 pretrain RECIPE", "ACCELERATE_TORCH_DEVICE is xpu:99"),
        ("ACCELERATE_TORCH_DEVICE=xpu:99 sample MODEL", "ACCELERATE_TORCH_DEVICE is xpu:99"),
    ],
    # models that cannot take a step
    "pretrain RECIPE --model.architecture": [
        ("llama --model.n_head 2 --model.n_embd 6", "llama", "n_head 2", "n_embd 6"),
        ("codegen", "codegen", "n_head 2"),
        *(
            (f"llama --model.extra.{field} {value}", "llama", reason)
            for field, value, reason in (
                ("head_dim", "0", "0.0"),
                ("head_dim", "-1", "-2"),
                ("head_dim", "3", "head_dim 3"),
                ("attention_dropout", "2", "dropout"),
                ("return_dict", "false", "last_hidden_state"),
                ("dtype", "nosuch", "nosuch"),
                ("id2label", "x", "items"),
            )
        ),
    ],
    "pretrain RECIPE": [
        ("--run-dir LOOP", "LOOP"),
        ("--data.dir LOOP", "LOOP"),
        ("--data.source missing.txt", "missing.txt"),
        ("--data.dir run --run-dir run", "run"),
        ("--data.dir run/data --run-dir run", "run/data"),
        ("--data.dir . --run-dir run", "run"),
        ("--run-dir RUN", "RUN", "--resume", "--overwrite"),
        ("--run-dir run --auto-resume --resume", "--auto-resume"),
        # values
        ("--train.max_steps ten", "--train.max_steps", "'ten'"),
        ("--train.max_steps 3.5", "--train.max_steps", "'3.5'"),
        ("--train.max_steps nan", "--train.max_steps", "'nan'"),
        ("--train.max_steps 1,5", "--train.max_steps", "'1,5'"),  # not 15
        ("--train.max_steps [1]", "--train.max_steps", "[1]"),
        ("--optim.learning_rate fast", "--optim.learning_rate", "'fast'"),
        ("--optim.learning_rate nan", "--optim.learning_rate", "'nan'"),
        ("--optim.learning_rate inf", "--optim.learning_rate", "'inf'"),
        ("--optim.learning_rate 0,0006", "--optim.learning_rate", "'0,0006'"),  # not 6
        ("--model.bias maybe", "--model.bias", "'maybe'"),
        ("--model.bias yes", "--model.bias", "'yes'"),
        ("--model.activation_function relu", "--model.activation_function", "gelu_new", "'relu'"),
        ("--eval.tokens some", "--eval.tokens", "all", "'some'"),
        ("--model.extra 7", "--model.extra", "'7'"),
        ("--train.max_time soon", "--train.max_time", "'soon'"),
        ("--hub.push always", "--hub.push", "'always'"),
        ("--hub.repo no-owner", "--hub.repo", "'no-owner'"),
        ("--hub.repo a/b/c", "--hub.repo", "'a/b/c'"),
        ("--hub.repo a/b--c", "--hub.repo", "'a/b--c'"),
        ("--hub.license 'MIT License'", "--hub.license", "'MIT License'"),
        # names
        ("--optim.learnig_rate 1", "--optim.learnig_rate", "optim.learning_rate"),
        ("--zzz.qqqqqq 1", "--zzz.qqqqqq"),
        # rules over several knobs
        ("--model.n_embd 15", "--model.n_embd", "15", "model.n_head 2"),
        ("--data.block_size 32", "--data.block_size", "32", "model.n_positions 16"),
        ("--optim.warmup_steps 7", "--optim.warmup_steps", "7", "train.max_steps 6"),
        ("--optim.min_learning_rate 0.5", "--optim.min_learning_rate", "0.5", "0.01"),
        ("--data.validation_fraction 0", "--data.validation_fraction", "data.validation_split"),
        ("--train.tokens_per_step 1000", "--train.tokens_per_step", "1,000", "960 or 1,024"),
        ("--train.tokens_per_step 10", "--train.tokens_per_step", "10", "nearest: 64"),
        ("--finetune.freeze_layers 2", "--finetune.freeze_layers", "--from"),
        ("--lora.rank 4", "--lora.rank", "--from"),
        ("--lora.targets []", "--lora.targets", "q_proj"),
        ("--hub.push best", "--hub.push", "hub.repo"),
        ("--model.n_inner 64", "--model.n_inner", "model.architecture"),
        # the size dial
        ("--depth 0", "--model.depth", "0"),
        ("--depth two", "--model.depth", "'two'"),
        ("--depth 20 --model.aspect_ratio 10000", "--model.depth", "model.n_embd 200,000"),
        ("--depth 2 --train.tokens_per_parameter 0", "--train.tokens_per_parameter", "0.0"),
        ("--depth 2 --model.n_head 7", "--model.n_embd", "128", "model.n_head 7"),
        ("--depth 2 --finetune.model gpt2", "--model.depth", "gpt2"),
        ("--depth 2 --model.architecture llama", "--model.depth", "llama"),
    ],
    "pretrain": [
        ("nowhere.yaml", "nowhere.yaml"),
        ("quickstrat", "quickstrat", "quickstart"),
        ("no/where.yaml", "no/where.yaml"),
        (".", "cannot be read as a recipe"),
        ("/dev/zero", "/dev/zero", "1,000,000"),
        ("recipe_of_gpt2.yaml", "gpt2", "finetune"),
    ],
    "prepare RECIPE --data.source": [
        ("missing.txt", "missing.txt"),
        ("empty.txt", "empty.txt"),
        ("binary.txt", "binary.txt", "UTF-8"),
        ("rows.jsonl", "rows.jsonl", "line 2", "data.text_column"),
        ("[]", "data.source"),
        ("'[{source: a.txt}]'", "data.source", "entry 1", "weight"),
        ("'[{weight: 1}]'", "data.source", "entry 1", "no source"),
        ("'[{source: a.txt, weight: 0}]'", "data.source", "entry 1", "weight", "got 0"),
        ("'[{source: a.txt, weight: -1}]'", "weight", "got -1"),
        ("'[{source: a.txt, weight: nan}]'", "weight", "'nan'"),
        ("'[{source: a.txt, weight: many}]'", "weight", "'many'"),
        ("'[{source: [a], weight: 1}]'", "data.source", "entry 1", "['a']"),
        ("'[{source: a.txt, wieght: 1}]'", "wieght", "weight"),
        ("'[{source: a.txt, weight: 1, name: ../x}]'", "name", "'../x'"),
        ("'[{source: a.txt, weight: 1, validation_fraction: 2}]'", "a.txt", "0.5"),
        ("'[{source: x/a.txt, weight: 1}, {source: y/a.txt, weight: 1}]'", "named a"),
        (
            "'[{source: a.txt, weight: 1e15}, {source: b.txt, weight: 0.1}]'",
            "data.source",
            "1,000,000",
        ),
        ("'[{source: a.txt, weight: 1}, {source: b.txt, weight: 1}]'", "data.tokenizer", "char"),
    ],
    "prepare RECIPE --data.tokenizer": [
        ("./nowhere", "./nowhere"),
        ("bpe", "data.vocab_size", "bpe"),
        ("bpe --data.vocab_size 256", "data.vocab_size", "257", "256"),
        ("char --data.vocab_size 300", "data.vocab_size", "char"),
        ("char --data.format chat", "data.tokenizer", "char"),
        ("char --data.format datatrove", "data.tokenizer", "char"),
        ("gpt2 --data.format chat --data.source python-docs", "data.source", "python-docs"),
        ("gpt2 --data.format chat --data.order random", "data.order", "random"),
    ],
    "sweep RECIPE": [
        ("--train.seed 1", "several values"),
        ("--train.sed 1,2", "--train.sed", "train.seed"),
        ("--train.micro_batch_size 4,5", "train.tokens_per_step", "train.micro_batch_size 5"),
        ("--finetune.model gpt2,gpt2-medium", "gpt2"),
        ("--hub.push best --hub.repo me/a,me/b", "hub.push"),
        ("--train.seed 1,1", "seed=1"),
        ("--train.seed 1,[2", "--train.seed"),
        ("--train.seed 1,,2", "--train.seed"),
        ("--train.seed '1,{a: 2}'", "--train.seed", "mapping"),
        ("--eval.samples \"a,['b']\"", "--eval.samples", "lists"),
        (
            (
                f"--train.seed {','.join(map(str, range(40)))} --optim.beta1 "
                f"{','.join(f'0.{n}' for n in range(40))}"
            ),
            "1,600",
        ),
    ],
    "finetune": [
        ("--data TEXT", "--from"),
        ("--from BASE", "--data"),
        ("--from TEXT --data TEXT", "TEXT"),
    ],
    "finetune --from BASE --data TEXT": [
        ("--data.source none.txt", "data.source", "none.txt"),
        ("--freeze-layers 5", "finetune.freeze_layers", "5", "4"),
        ("--freeze-layers two", "finetune.freeze_layers", "'two'"),
        ("--unfreeze-every 5", "finetune.unfreeze_every", "--freeze-layers"),
        (
            "--freeze-layers 2 --unfreeze-every 5 --train.micro_batch_size auto",
            "finetune.unfreeze_every",
            "auto",
        ),
        ("--lora 2 --freeze-layers 1", "lora.rank", "finetune.freeze_layers"),
        ("--lora 2 --lora.targets c_attn", "lora.targets", "q_proj"),
        ("--lora.quantize 4bit", "lora.quantize", "--lora"),
        ("--lora 4 --lora.quantize 4bit --lora.merge true", "lora.quantize", "lora.merge"),
        ("--data.block_size 64", "data.block_size", "64", "32"),
        ("--model.n_layer 2", "model.n_layer", "4", "BASE"),
        ("--data.tokenizer char", "data.tokenizer", "char"),
        ("--data.tokenizer gpt2", "data.tokenizer", "gpt2", "BASE"),
    ],
    "sample MODEL": [
        ("--prompt abcX", "'X'"),
        ("--prompt ''", "prompt"),
        ("--prompt-file nowhere.txt", "--prompt-file", "nowhere.txt"),
        ("--num-samples 1000000000", "--num-samples", "10000", "1000000000"),
    ],
    "chat": [
        ("MODEL", "chat template"),
        ("MODEL --temperature -1", "--temperature", "-1"),
    ],
    "serve MODEL": [
        ("--port 70000", "--port", "65535", "70000"),
    ],
    "evaluate MODEL": [
        ("", "--data", "--tasks", "--core"),
        ("--data TEXT --block-size 33", "--block-size", "33", "32"),
        ("--data TEXT --stride 33", "--stride", "33", "32"),
        ("--data TEXT --stride 0", "--stride", "0"),
        ("--data nowhere.txt", "--data", "nowhere.txt"),
        ("--data TEXT --limit 3", "--limit", "--tasks", "--core"),
        ("--data TEXT --core-sha256 00", "--core-sha256", "--core"),
        ("--core nowhere", "--core", "nowhere"),
        ("--data TEXT --optim.learning_rate 1", "--optim.learning_rate"),
        ("--tasks x --stride 3", "--stride", "--data"),
        ("--tasks x --data.split test", "--data.split"),
        ("--tasks rl:aritmetic", "--tasks", "aritmetic", "arithmetic?"),
        ("--tasks rl:exact", "--questions", "exact"),
        ("--tasks rl:exact --questions nowhere.jsonl", "--questions", "nowhere.jsonl"),
        ("--tasks rl:gsm8k --questions questions.jsonl", "####", "gsm8k"),
        ("--tasks rl:arithmetic", "tokenizer"),
        ("--tasks hellaswag --samples 2", "--samples"),
        ("--data TEXT --temperature 1", "--temperature"),
        (
            "--tasks rl:exact --questions questions.jsonl --data TEXT --data.split test",
            "--data.split",
            "--questions",
        ),
        ("--tasks rl:exact --questions questions.jsonl --max-new-tokens 30", "30", "32"),
    ],
    "compare": [
        ("RUN runn", "runn", "run?"),
        ("RUN --by day", "--by", "'day'"),
        ("RUN --reference no.json", "no.json"),
        ("RUN --make-reference x.json", "three runs"),
    ],
    "report": [
        (".", "holds no run"),
        ("nowhere", "nowhere"),
    ],
    "export": [
        ("MODEL out --dtype int4", "--dtype", "'int4'"),
        ("MODEL out --max-shard-size big", "--max-shard-size", "'big'"),
        ("MODEL MODEL", "MODEL", "exists already"),
        ("./missing out", "missing"),
        (". out", "not a model folder"),
        ("RUN out", "no model yet"),
    ],
    "push": [
        ("nowhere tester/x", "nowhere"),
    ],
    "estimate": [
        ("recipes/none.yaml", "recipes/none.yaml"),
    ],
    "estimate RECIPE": [
        ("--config_file none.yaml", "--config_file", "none.yaml"),
        ("--config_file MACHINES/cpu_ddp.yaml --gpus 2", "--gpus", "--config_file"),
        ("--write-config machine.yaml", "--write-config", "--gpus"),
        ("--gpus 12", "--gpus", "12"),
        ("--gpus 8 --gpu H10", "--gpu", "H10", "B200"),
        ("--gpus none", "--gpus", "'none'"),
        ("--gpus 1024", "8 sequences", "1,024 GPUs"),
        ("--gpus 1 --memory 0.0001GB", "RTX 4090"),
        ("--memory much", "--memory", "'much'"),
        ("--memory 0GB", "--memory", "'0GB'"),
        ("--mfu 40", "--mfu", "'40'"),
        ("--finetune.model ./nowhere", "./nowhere"),
        ("--data.tokenizer ./nowhere", "data.tokenizer"),
        ("--config_file MACHINES/deepspeed_zero2.yaml --optim.state 8bit", "optim.state 8bit"),
        ("--config_file MACHINES/deepspeed_zero2.yaml --optim.name muon", "optim.name muon"),
        ("--config_file MACHINES/cpu_ddp.yaml --train.tokens_per_step 64", "2 processes", "128"),
    ],
    "bench": [
        ("--against trainr", "--against", "'trainr'", "trainer"),
        ("--windows 0", "--windows", "0"),
        ("--windows 10000000000000000000", "--windows", "10000"),
        ("--split tp", "--split", "--scaling"),
        ("--scaling strong", "--scaling", "RECIPE"),
        ("--processes two", "--processes", "two"),
        ("RECIPE --scaling weak --processes 1,100000", "--processes", "1,100000"),
    ],
}

SOURCE = "data: {source: x}\n"
# recipes that are refused: the text, and what the line has to name
RECIPES = [
    ("train: {max_steps: }", "train.max_steps", "nothing"),
    ("train: {max_steps: [1, 2]}", "train.max_steps", "['1', '2']"),
    ("train: {max_steps: {a: 1}}", "train.max_steps", "{'a': '1'}"),
    ("model: {bias: }", "model.bias", "nothing"),
    ("tracking: {project: [a]}", "tracking.project", "['a']"),
    ("tracking: {trackers: {a: b}}", "tracking.trackers", "{'a': 'b'}"),
    ("tracking: {trackers: [[a]]}", "tracking.trackers", "[['a']]"),
    ("train: 3", "train:", "'3'"),
    ("train: [3]", "train:", "['3']"),
    ("optim: {learnig_rate: 1}", "optim.learnig_rate", "optim.learning_rate"),
    ("train: {weight_decay: 1}", "train.weight_decay", "optim.weight_decay"),
    ("modle: {n_layer: 1}", "modle", "model"),
    # no rule compares it with n_embd
    ("model: {n_head: many, n_embd: 7}", "model.n_head", "'many'"),
    ("model: {n_layer: 3}\nmodel: {n_head: 3}", "line 3", "model"),
    ("model:\n  n_layer: 3\n  n_layer: 4", "line 4", "n_layer"),
    ("model:\n  n_layer: [3", "line 4"),
    ("model:\n\tn_layer: 3", "line 3"),
    ("model:\n  a: b: c", "line 3"),
    ("---\ndata: {source: y}", "line 2"),
    ("? [a]\n: b", "line 2"),
    ("a\0b", "YAML"),
    ("[" * 1500, "YAML"),
    ("model:\n  n_layer: !!python/object/apply:os.mkdir [made]", "line 3", "tag"),
    ("model:\n  n_layer: !!python/object/new:os.mkdir [made]", "line 3", "tag"),
    ("model:\n  n_layer: !!python/name:os.system", "line 3", "tag"),
    ("model:\n  n_layer: !!python/tuple [1]", "line 3", "tag"),
    ("model:\n  n_layer: !mine 3", "line 3", "tag"),
    ("model: &a {n_layer: 1}\ntrain: *a", "line 3", "aliases"),
    ('eval: {samples: [fine, "a\\0b"]}', "eval.samples"),
    ('eval: {samples: [fine, "a\\ud800b"]}', "eval.samples"),
    ('tracking: {project: "a\\0b"}', "tracking.project"),
]

# accelerate configs with one wrong line, and what the message has to name
MACHINES = [
    ("num_processes: x", "num_processes", "'x'"),
    ("num_processes: null", "num_processes", "None"),
    ("num_processes: 2.0", "num_processes", "2.0"),
    ("num_machines: null", "num_machines", "None"),
    ("gpu_ids: 99", "gpu_ids", "99", "quotes"),
    ("mixed_precision: 5", "mixed_precision", "5"),
    ("mixed_precision: no", "mixed_precision", "False", "quote"),
    ("use_cpu: maybe", "use_cpu", "'maybe'"),
    ("main_process_port: 99999", "main_process_port", "99999"),
    ("distributed_type: x", "distributed_type", "'x'"),
    ("parallelism_config: x", "parallelism_config", "'x'"),
    ("parallelism_config: {tp_size: 2}", "parallelism_config", "tp_size"),
    (
        "parallelism_config: {parallelism_config_pp_size: two}",
        "parallelism_config_pp_size",
        "'two'",
    ),
    ("fsdp_config: {fsdp_ofload_params: true}", "fsdp_ofload_params", "fsdp_offload_params?"),
    (
        "fsdp_config: {fsdp_reshard_after_forward: FULL_SHARD}",
        "fsdp_reshard_after_forward",
        "'FULL_SHARD'",
    ),
    ("dynamo_config: {dynamo_backend: NO}", "dynamo_backend", "False", "quote"),
    ("deepspeed_config: {zero_stage: x}", "zero_stage", "'x'"),
]

ROWS = [
    (f"{group} {words}".strip(), parts)
    for group, rows in REFUSALS.items()
    for words, *parts in rows
]


@pytest.mark.parametrize(("command", "parts"), ROWS, ids=[command[:90] for command, _ in ROWS])
def test_mistake_is_one_line_that_names_it(refused, command, parts, request, tmp_path, monkeypatch):
    used = PLACES.keys() & set(re.findall(r"\b[A-Z]+\b", command))
    places = {name: str(PLACES[name](request.getfixturevalue, tmp_path)) for name in used}
    for name in FILES.keys() & set(command.split()):
        (tmp_path / name).write_bytes(FILES[name])

    def put(text: str) -> str:
        return re.sub(r"\b[A-Z]+\b", lambda found: places.get(found[0], found[0]), text)

    words = [put(word) for word in shlex.split(command)]
    while re.match(r"[A-Z_]+=", words[0]):
        monkeypatch.setenv(*words.pop(0).split("="))
    line = refused(*words)
    assert [part for part in map(put, parts) if part not in line] == [], line


@pytest.mark.parametrize(
    ("text", "parts"),
    [(text, parts) for text, *parts in RECIPES],
    ids=lambda value: str(value)[:60],
)
def test_recipe_is_refused_in_one_line_that_names_the_mistake(refused, text, parts, tmp_path):
    (tmp_path / "recipe.yaml").write_text(SOURCE + text + "\n")
    line = refused("pretrain", "recipe.yaml")
    assert [part for part in ("recipe.yaml: ", *parts) if part not in line] == [], line


@pytest.mark.parametrize(("text", "parts"), [(text, parts) for text, *parts in MACHINES], ids=str)
def test_accelerate_config_is_refused_in_one_line_that_names_the_mistake(
    refused, text, parts, tmp_path
):
    (tmp_path / "machine.yaml").write_text(
        f"distributed_type: MULTI_GPU\nnum_processes: 2\n{text}\n"
    )
    line = refused("launch", "--config_file", "machine.yaml", "pretrain", "quickstart")
    assert [part for part in ("machine.yaml: ", *parts) if part not in line] == [], line


@pytest.mark.parametrize("bound", ["low", "high"])
def test_value_out_of_its_bounds_is_refused(bound):
    beyond = {
        key: value + (1 if bound == "high" else -1)
        for key, knob in KNOBS.items()
        if (value := getattr(knob, bound)) is not None
    }
    assert len(beyond) > 10
    with pytest.raises(ConfigError) as raised:
        load_config(None, {"data.source": "x"} | beyond, name="x")
    assert {
        line.partition(":")[0][2:]: float(line.rpartition(" ")[2]) for line in raised.value.problems
    } == beyond
