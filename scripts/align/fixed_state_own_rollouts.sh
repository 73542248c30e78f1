#!/usr/bin/env bash
# Experiment 2 of 4: the same weights before every step, and each system samples for itself.
#
# Our side trains and saves its weights after each step; TRL's GRPOTrainer takes them before its next one, samples the
# same prompts with its own engine, scores and updates. Rollouts differ, so single numbers do; on average over steps
# they may not: --paired tests the signs of the differences. Optimizer states are not exchanged: no number is from them.
#
# Hardware: 2 CPU cores with MODE=tiny; with MODE=full 6 GPUs of 80 GB for our side and one for TRL's.
# Source: "GSM8K Benchmark Results" of Trinity-RFT against veRL, experiment 2; there reward, gradient norm,
# entropy and KL agree.
# Expected: MODE=tiny takes 45 s. scripts/align/common.sh has the settings, also those of MODE=full.
#   MODE=tiny bash scripts/align/fixed_state_own_rollouts.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ours ours --dump_steps all --save_freq 1 --beta 0.001 --entropy_coef 0.003 "$@"
trl trl states ours --seed 2
# shellcheck disable=SC2086  # several names
python scripts/align/align.py "$OUT/ours" "$OUT/trl" --paired --plot "$OUT/align.png" \
    --metrics $SIX val/sequence_lengths
