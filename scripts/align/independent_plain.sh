#!/usr/bin/env bash
# Experiment 3 of 4: each system on its own, without regularization (no KL, no entropy bonus), several seeds a side.
#
# Fewer than four seeds a side, and the test cannot reject, only the bands can (align.py --help: formulas).
# Hardware: 2 CPU cores with MODE=tiny; with MODE=full 6 GPUs of 80 GB for our side and one for TRL's.
# Source: "GSM8K Benchmark Results" of Trinity-RFT against veRL, experiment 3; there reward and gradient norm agree.
# Expected: MODE=tiny takes 2.5 minutes. scripts/align/common.sh has the settings, also those of MODE=full.
#   MODE=tiny bash scripts/align/independent_plain.sh
set -euo pipefail
if [[ "${MODE:-}" == tiny ]]; then # 24 steps: the reward rises, and is not 1 yet, as with some seeds from step 30 on
    LR="${LR:-3e-4}"
fi
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

independent 0 0 "$@"
