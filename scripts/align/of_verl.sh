#!/usr/bin/env bash
# The four alignment experiments against veRL. Somebody else has run veRL; this script runs our side and compares.
#
#   EXPERIMENT    1: the same states and the same batches. Before each step our weights and Adam's moments become those
#                 that veRL saved after the step before, and our update takes veRL's batch.
#                 2: the same states. Our own rollouts of the same prompts.
#                 3, 4: nothing is shared. Our side runs once for each of SEEDS.
#   VERL          1, 2: veRL's directory with global_step_1, global_step_2, ... (trainer.save_freq=1)
#   BATCHES       1: directory of veRL's pickled batches step_1.pkl, step_2.pkl, ..., which the study's patch of
#                 ray_trainer.py writes
#   LOG           veRL's log: trainer.logger=[file], or the console's (tee). 3, 4: one or several, with spaces between
#   BETA, ENTROPY_COEF    of veRL's run. As in the study, the defaults are 0 and 0 in 1 and 3, 0.001 and 0.003 in 2 and 4
#   STEPS, MODEL, LR      of veRL's run, as in common.sh
#
# With MODE=tiny and without VERL and LOG a run of our own stands for veRL's: a trial of this script on a CPU.
#
# What differs, and is not an error:
# - PPO KL is not compared. The study's veRL, 0.5.0, computes the old logprobs in a forward of their own, so that its PPO
#   KL is the rounding between two forwards, about 1e-4. Here a step of one optimizer step takes the update's own
#   logprobs as the old ones, also where a batch of veRL's brings some. Our PPO KL is exactly 0.
# - Trinity has two engines beside 6 trainer GPUs, at 0.9 of their memory, uncompiled, seed 42. Here each of the 6 has one
#   at 0.4, compiled with MODE=full, seeds 1 to 4. None of it is in the mathematics.
# - veRL's token-mean (0.8, fsdp and fsdp2) is a mean over each micro-batch of each rank. Ours is one over the batch.
# - veRL's weight decay of 0.01 acts after the numbers of a step are taken, in 1 and 2 on weights that are replaced. In 3
#   and 4 append --weight_decay 0.01.
#
# Hardware: 6 GPUs of 80 GB. Experiments 1 and 2 need 3 times 12 bytes a weight of disk at a time.
# Expected: in experiment 1 of the study all curves lie on each other; in 3 and 4 reward and gradient norm agree. We have
# never run this at full size. On a CPU veRL's formats are read, and the same states and batches give the same bits
# (pytest tests/test_align.py -k "shards or played").
# Source: "GSM8K Benchmark Results" of Trinity-RFT against veRL.
#   EXPERIMENT=1 VERL=checkpoints/P/E BATCHES=data LOG=verl_gsm8k.log bash scripts/align/of_verl.sh
#   EXPERIMENT=3 LOG="verl_1.log verl_2.log verl_3.log verl_4.log" bash scripts/align/of_verl.sh
#   MODE=tiny STEPS=3 EXPERIMENT=1 bash scripts/align/of_verl.sh
set -euo pipefail
TRL_PYTHON="${TRL_PYTHON:-none}" # TRL has no part in it
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
EXPERIMENT="${EXPERIMENT:?1, 2, 3 or 4: see the head of this script}"
COMPARED="${SIX/ policy\/ppo_kl_avg/}"
case "$EXPERIMENT" in
1 | 3) BETA="${BETA:-0}" ENTROPY_COEF="${ENTROPY_COEF:-0}" ;;
2 | 4) BETA="${BETA:-0.001}" ENTROPY_COEF="${ENTROPY_COEF:-0.003}" ;;
*) echo "EXPERIMENT is 1, 2, 3 or 4, not $EXPERIMENT" >&2 && exit 1 ;;
esac
REGULARIZATION=(--beta "$BETA" --entropy_coef "$ENTROPY_COEF")

# stand_in NAME SEED: a run of ours in veRL's place, with the states and batches of every step
stand_in() {
    ours "$1" --seed "$2" "${REGULARIZATION[@]}" --dump_steps all --checkpoint_state_freq 1 --keep_last_n_checkpoints -1
}

if ((EXPERIMENT >= 3)); then
    mine=''
    others="${LOG:-}"
    others="${others// /,}"
    for seed in $SEEDS; do
        ours "ours_$seed" --seed "$seed" "${REGULARIZATION[@]}" "$@"
        mine="${mine:+$mine,}$OUT/ours_$seed"
        if [[ "$MODE" == tiny && -z "${LOG:-}" ]]; then
            stand_in "other_$seed" $((100 + seed))
            others="${others:+$others,}$OUT/other_$seed"
        fi
    done
    # shellcheck disable=SC2086  # several names
    [[ -z "$others" ]] || python scripts/align/align.py "$mine" "$others" --metrics $COMPARED --plot "$OUT/align.png"
    exit
fi

if [[ "$MODE" == tiny && -z "${VERL:-}" ]]; then
    stand_in other $((EXPERIMENT == 1 ? 1 : 101)) # experiment 2 compares other rollouts of the same prompts
    VERL="$OUT/other" BATCHES="$OUT/other" LOG="$OUT/other"
fi
: "${VERL:?the directory that has global_step_1}"
HELD=(--paired)
if ((EXPERIMENT == 1)); then
    : "${BATCHES:?the directory that has step_1.pkl}"
    HELD=(--tolerance "$TOLERANCE" --atol 1e-7)
    REWARD_FLAGS=() # the batches are scored
    if [[ ! -d "$BATCHES/dumps" ]]; then
        for step in $(seq "$STEPS"); do
            [[ -f "$OUT/batches/dumps/step_$(printf %06d "$step").json" ]] ||
                python scripts/align/align.py import "$BATCHES/step_$step.pkl" "$OUT/batches"
        done
        BATCHES="$OUT/batches"
    fi
    set -- --load_batches "$BATCHES" "$@"
fi
ours ours --load_states "$VERL" "${REGULARIZATION[@]}" "$@"
# shellcheck disable=SC2086  # several names
[[ -z "${LOG:-}" ]] || python scripts/align/align.py "$OUT/ours" "$LOG" --metrics $COMPARED --plot "$OUT/align.png" \
    "${HELD[@]}"
