#!/usr/bin/env bash
# Measure on one GPU what docs/performance.md has of one, in two parts of at most six minutes each: speed and
# memory, then losses and exactness, most valuable first. FOLDER/table.md is the result; FOLDER/*.log and
# *.json are what each command wrote.
#
#   launch/measure_gpu.sh [FOLDER]               # both parts; default: runs/measure_gpu
#   PART=exact launch/measure_gpu.sh             # one part: speed or exact
#   NANOGPT=~/nanoGPT launch/measure_gpu.sh      # also times the clone of karpathy/nanoGPT there
#   DEVICE=cpu launch/measure_gpu.sh             # small models on a CPU: tries this script, measures nothing
#
# A measurement that fails or takes longer than its limit is a row that says so; the others go on. What a part
# has no time for is a row, too. The exit status is 1 if a row failed.
# shellcheck disable=SC2329 # functions are called by name
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
out=$(realpath -m "${1:-runs/measure_gpu}")
python=${PYTHON:-python}
machine=accelerate_configs/single_gpu.yaml
recipes=(gpt2_124m modern_124m nanochat_d12 gpt2_350m)
size=() micro_batch=12 step=24576 bench_step=() windows=5 limit=240 part_seconds=360
if [ "${DEVICE:-}" = cpu ]; then
    machine=accelerate_configs/cpu.yaml
    size=(--model.n_layer 2 --model.n_head 2 --model.n_kv_head null --model.n_embd 64 --model.n_inner null
        --model.n_positions 64 --data.block_size 64)
    bench_step=(--train.tokens_per_step 512 --train.micro_batch_size 8)
    micro_batch=8 step=1024 windows=2 part_seconds=3000 limit=400
fi
launch=("$python" cli.py launch --config_file "$machine")
eager=(--dynamo_backend no)
float32=(--mixed_precision no --dynamo_backend no)
deterministic=(--train.deterministic true)
# The text comes with Python, so nothing is downloaded; the model has the recipe's size.
pretrain=(pretrain recipes/gpt2_124m.yaml --data.source python-docs --data.tokenizer char
    --data.validation_fraction 0.1 --data.dir "$out/data" --model.dropout 0.1 --optim.warmup_steps 2
    --train.max_steps 20 --train.tokens_per_step "$step" --train.micro_batch_size "$micro_batch"
    --eval.every 10 --eval.tokens "$step" --checkpoint.every 5 --checkpoint.keep 9
    --tracking.every 1 --tracking.trackers '[]' "${size[@]}")

# measure NAME SUMMARY COMMAND...: run a command, or a function, into NAME.log; SUMMARY prints the result.
failed=0
measure() {
    local name=$1 summary=$2 start=$SECONDS log="$out/$1.log" result status left
    left=$((part_began + part_seconds - SECONDS))
    if [ "$left" -lt 15 ]; then
        printf '| %s | not run: the part has no time left | 0 |\n' "$name" | tee -a "$table"
        return
    fi
    local limited=(timeout --kill-after 30 "$((left < limit ? left : limit))")
    shift 2
    declare -F "$1" >/dev/null && limited=()
    "${limited[@]}" "$@" >"$log" 2>&1 </dev/null
    status=$?
    if [ "$status" = 0 ]; then
        result=$($summary "$log")
    else
        result="**failed, status $status:** $(tail -n 2 "$log" | tr '\n' ' ')" failed=1
    fi
    printf '| %s | %s | %d |\n' "$name" "${result//|/;}" $((SECONDS - start)) | tee -a "$table"
}

last_line() { grep -v '^ *$' "$1" | tail -n 1; }

trained() { echo "$(grep '^done: ' "$1")$(grep -o '^  best validation loss [0-9.]*' "$1")"; }

batch() { grep -o '= [0-9]* sequences .* accumulated' "$1"; }

memory() { grep -E '^(step|memory) ' "$1" | tr -s ' ' | paste -sd ';'; }

# differences: of the training losses of each run from those in float32
differences() {
    "$python" - "$out"/{float32,bf16,compiled}/metrics.jsonl <<'END'
import json, sys
exact, *others = (
    [event["train/loss"] for event in map(json.loads, open(path)) if "train/loss" in event]
    for path in sys.argv[1:]
)
worst = [max(abs(a - b) for a, b in zip(exact, other, strict=True)) for other in others]
print(f"largest differences of {len(exact)} losses from float32 ({exact[0]:.3f} to {exact[-1]:.3f}): ", end="")
print("bf16 {:.1e}, compiled {:.1e}".format(*worst))
END
}

# A run that is killed after its checkpoint of step 10, and resumed, ends with the bytes of the one before.
killed() {
    local run=("${launch[@]}" "${pretrain[@]}" "${deterministic[@]}" --run-dir "$out/killed") group
    setsid "${run[@]}" --overwrite &
    group=$!
    until [ -d "$out/killed/checkpoints/step_00000010" ] || ! kill -0 "$group"; do sleep 0.05; done
    kill -KILL -- "-$group"
    wait "$group"
    "${run[@]}" --resume && cmp "$out"/{killed,deterministic}/final/model.safetensors && echo "the same bytes"
}

# kernels: the attention kernels, of flash attention or cuDNN, the most frequent first
kernels() {
    grep -oE '"name": "[^"]*(flash|fmha|cudnn[^"]*sdpa|mha_graph)[^"]*"' "$out/trace.json" |
        sort | uniq -c | sort -rn | head -n 3
}

# A step of a recipe, and its peak memory compared with the estimate
benched() {
    "$python" - "$out/$recipe.json" "$out/$recipe.estimate.json" <<'END'
import json, sys
bench, estimate = (json.load(open(path)) for path in sys.argv[1:])
mfu = f", MFU {bench['mfu']:.1%}" if bench["mfu"] else ""
against = ((name, bench.get(f"against_{name}")) for name in ("bare", "trainer"))
ratios = [f"{figures['ratio']['median']:.3f} of {name}" for name, figures in against if figures]
peak, expected = bench["peak_memory"] / 1e9, estimate["memory"]["peak"] / 1e9
print(
    f"{bench['step_seconds']['median'] * 1e3:,.1f} ms for {bench['tokens_per_step']:,} tokens, "
    f"{bench['tokens_per_second']:,.0f} tokens/s{mfu}; time: {', '.join(ratios)}; "
    f"memory {peak:.2f} GB, estimate {expected:.2f} GB"
)
END
}

mkdir -p "$out" || exit 2
table=$out/table.md
printf '| measurement | result | seconds |\n|---|---|---|\n' >"$table"

speed() {
    local recipe knobs baselines
    for recipe in "${recipes[@]}"; do
        knobs=("recipes/$recipe.yaml" "${bench_step[@]}" "${size[@]}")
        "$python" cli.py estimate "${knobs[@]}" --config_file "$machine" --json "$out/$recipe.estimate.json" \
            >"$out/$recipe.estimate.log" 2>&1
        baselines=bare,trainer
        grep -q 'name: muon' "recipes/$recipe.yaml" && baselines=bare # the Trainer has no Muon
        measure "$recipe" benched "${launch[@]}" bench "${knobs[@]}" --windows "$windows" --against "$baselines" \
            --json "$out/$recipe.json"
        if [ "$recipe" = gpt2_124m ]; then
            [ -z "${NANOGPT:-}" ] || measure nanoGPT last_line nanogpt
            measure deterministic-step memory "${launch[@]}" bench "${knobs[@]}" --windows "$windows" \
                "${deterministic[@]}"
        fi
    done
    measure attention kernels "${launch[@]}" "${eager[@]}" bench recipes/gpt2_124m.yaml --windows 1 \
        --profile "$out/trace.json" --train.tokens_per_step "$step" --train.micro_batch_size "$micro_batch" \
        "${size[@]}"
    measure 8-bit-state memory "${launch[@]}" bench recipes/gpt2_124m.yaml "${bench_step[@]}" "${size[@]}" \
        --windows "$windows" --optim.state 8bit
}

# the same number of sequences per step as one micro-batch of the recipe
nanogpt() { (cd "$NANOGPT" && "$python" bench.py --real_data=False --batch_size="$micro_batch"); }

exact() {
    measure doctor last_line "${launch[@]}" doctor
    measure deterministic trained "${launch[@]}" "${pretrain[@]}" "${deterministic[@]}" \
        --run-dir "$out/deterministic" --overwrite
    measure killed last_line killed
    measure verify-deterministic last_line "${launch[@]}" verify "$out/deterministic"
    measure float32 trained "${launch[@]}" "${float32[@]}" "${pretrain[@]}" --run-dir "$out/float32" --overwrite
    measure bf16 trained "${launch[@]}" "${eager[@]}" "${pretrain[@]}" --run-dir "$out/bf16" --overwrite
    measure compiled trained "${launch[@]}" "${pretrain[@]}" --run-dir "$out/compiled" --overwrite
    measure losses last_line differences
    measure verify-compiled last_line "${launch[@]}" verify "$out/compiled"
    measure micro-batch-auto batch "${launch[@]}" "${pretrain[@]}" --run-dir "$out/auto" --overwrite \
        --train.micro_batch_size auto --train.max_steps 5
}

for part in ${PART:-speed exact}; do
    part_began=$SECONDS
    "$part"
done
exit $failed
