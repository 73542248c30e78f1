#!/usr/bin/env bash
# Credit for each turn: one advantage for a whole rollout (base), the usual baseline for each turn index, which is
# biased (index), and --turn_credit, which is not (credit). All play the guessing game of scripts/train/debug/guess.py,
# with the same seeds.
#
#   bash scripts/studies/turns.sh [--seeds 1-24] [--budget_minutes 60] [--jobs 2] [more flags of study.py run]
#   python scripts/study.py table scripts/studies/records/turns.jsonl [--base credit]
#   bash scripts/studies/turns.sh --scale smollm2_player --tasks guess --out scripts/studies/records/turns_smollm2.jsonl
#
# It can be stopped at any time and goes on with the same line: what is done is in the file, seed by seed. The published
# files are refused since turn_index.diff has changed: go on with them by the names of their arms (--arms base index credit).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
python scripts/data/make_guess.py
python scripts/data/make_guess.py --plain --out data/guess_plain

python scripts/study.py run --out scripts/studies/records/turns.jsonl --scale player --seeds 1-24 \
    --arms base "index@scripts/forks/turn_index.diff: --turn_credit" "credit: --turn_credit" "$@"
