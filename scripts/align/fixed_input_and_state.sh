#!/usr/bin/env bash
# Experiment 1 of 4: the same batches from the same start state. Do both systems make the same update?
#
# Our side trains and dumps its batches; TRL's GRPOTrainer trains on them from the same weights. Neither is put back on
# the other's weights between steps, so that differences may add up: what holds here holds when they are.
#
# Hardware: 2 CPU cores with MODE=tiny; with MODE=full 6 GPUs of 80 GB for our side and one for TRL's.
# Source: "GSM8K Benchmark Results" of Trinity-RFT against veRL, experiment 1; there all curves lie on each other.
# Expected: MODE=tiny takes 30 s (and 2 minutes to install TRL): gradient norm of 24 steps and every parameter after
# every step within 6e-7, relative. Other metrics may also differ by 1e-7 absolute: the loss is near 0 without KL and
# entropy, and TRL computes the KL as exp(d) - d - 1, in float32 good to 6e-8. common.sh has the settings, also of the
# default, MODE=full.
#   MODE=tiny bash scripts/align/fixed_input_and_state.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
BETA="${BETA:-0}" ENTROPY_COEF="${ENTROPY_COEF:-0}" # the source's; BETA=0.001 ENTROPY_COEF=0.003 for all terms
if [[ "$MODE" == tiny ]]; then # a random model does not stop, and responses of one length have a loss of 0
    set -- --stop_strings er "$@"
fi

ours ours --dump_steps all --save_freq 1 --beta "$BETA" --entropy_coef "$ENTROPY_COEF" "$@"
trl trl batches ours --save_freq 1
python scripts/align/align.py "$OUT/ours" "$OUT/trl" --tolerance "$TOLERANCE" --atol 1e-7 --plot "$OUT/align.png"
