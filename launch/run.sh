#!/usr/bin/env bash
# Start `accelerate launch` where something else may stop it: SLURM, Kubernetes, Docker, or kill(1).
#
#   launch/run.sh [options of accelerate launch] cli.py pretrain RECIPE --auto-resume
#
# SIGTERM, SIGINT or SIGUSR1, sent to this script or to everything it started, makes the run end its step and save.
# Exit status: 0 done, 2 a mistake of yours, 75 stopped after saving (start it again and it goes on), 1 anything else.
#
# Why not accelerate launch alone: it makes 1 of every status, it kills its workers 30 seconds after a SIGTERM, which
# is too soon for a large checkpoint, and it dies of SIGUSR1.
set -uo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export NANOGPT_HF_STATUS_FILE="$folder/status" # our program writes there how it ended

asked="" launcher=""
tell() { pkill -USR1 -P "$launcher"; } # the launcher's children are the training processes
trap 'asked=yes; [ -z "$launcher" ] || tell' TERM INT USR1

# The launcher ignores these signals (so many set-ups send them to every process) and must not install handlers of its
# own: SIGQUIT stays its way out. The training processes install theirs.
(
    trap '' TERM INT USR1
    PET_SIGNALS_TO_HANDLE=SIGQUIT exec accelerate launch --quiet "$@"
) &
launcher=$!

alive() { kill -0 "$launcher" 2>/dev/null; }
while alive; do
    [ -n "$asked" ] || wait "$launcher" # until it ends, or a signal comes
    for _ in {1..20}; do
        [ -n "$asked" ] && alive && sleep 0.5
    done
    [ -n "$asked" ] && alive && tell # again: a process that had only begun to start would have missed it
done
wait "$launcher"
status=$?

if [ "$status" -eq 0 ]; then
    exit 0
elif [ -s "$NANOGPT_HF_STATUS_FILE" ]; then
    exit "$(cat "$NANOGPT_HF_STATUS_FILE")"
elif [ -n "$asked" ]; then
    exit 75 # before the first step, or killed before it could save: the newest checkpoint is what there is
fi
exit "$status"
