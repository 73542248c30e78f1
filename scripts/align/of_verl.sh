#!/usr/bin/env bash
# Trinity-RFT's part in experiments 1 and 2, for a run of veRL that somebody else made: before each step our weights and
# Adam's moments become those that veRL saved after the step before, and our update is held against its log.
#
#   VERL       veRL's directory with global_step_1, global_step_2, ...: trainer.save_freq=1
#   LOG        its log: trainer.logger=[file], or the console's (tee)
#   BATCHES    its pickled batches, step_1.pkl, step_2.pkl, ..., as the study's patch of ray_trainer.py has them: then
#              this is experiment 1, the same inputs. Without them it is experiment 2: our rollouts of the same prompts
#   BETA, ENTROPY_COEF    of that run; in the source 0 and 0 for the first, 0.001 and 0.003 for the second
#   STEPS, MODEL, LR      of that run, as in common.sh
#
# What differs: veRL's token-mean (0.8, fsdp and fsdp2) is a mean over each micro-batch of each rank, ours is one over
# the batch. Its weight decay of 0.01 acts after the numbers of a step are taken, on weights that are replaced.
#
# Hardware: 6 GPUs of 80 GB, and 3 times 12 bytes a weight of disk at a time.
# Source: "GSM8K Benchmark Results" of Trinity-RFT against veRL, experiments 1 and 2.
# Expected: in experiment 1 all curves lie on each other there. Never run by us at this size. On a CPU veRL's formats
# are read, and the same states and batches give the same bits (pytest tests/test_align.py -k "shards or played").
#   VERL=checkpoints/P/E LOG=verl_gsm8k.log BATCHES=data bash scripts/align/of_verl.sh
set -euo pipefail
TRL_PYTHON="${TRL_PYTHON:-none}" # TRL has no part in it
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${VERL:?the directory that has global_step_1}"
BETA="${BETA:-0}" ENTROPY_COEF="${ENTROPY_COEF:-0}"

TOGETHER=(--paired)
if [[ -n "${BATCHES:-}" ]]; then
    TOGETHER=(--tolerance "$TOLERANCE" --atol 1e-7)
    for step in $(seq "$STEPS"); do
        [[ -f "$OUT/batches/dumps/step_$(printf %06d "$step").json" ]] ||
            python scripts/align/align.py import "$BATCHES/step_$step.pkl" "$OUT/batches"
    done
    set -- --load_batches "$OUT/batches" "$@"
fi
ours ours --load_states "$VERL" --beta "$BETA" --entropy_coef "$ENTROPY_COEF" "$@"
# shellcheck disable=SC2086  # several names
[[ -z "${LOG:-}" ]] || python scripts/align/align.py "$OUT/ours" "$LOG" --metrics $SIX --plot "$OUT/align.png" \
    "${TOGETHER[@]}"
