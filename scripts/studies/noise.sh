#!/usr/bin/env bash
# What a verifier's mistakes cost: the fruit fly learns from verdicts of which a known share is turned round.
#
#   bash scripts/studies/noise.sh [--seeds 1-24] [--budget_minutes 60] [--jobs 2] [more flags of study.py run]
#   python scripts/study.py table scripts/studies/records/noise.jsonl               against true verdicts, J = 1
#   python scripts/study.py table scripts/studies/records/noise.jsonl --base lr0    against the model as it was
#
# It can be stopped at any time and goes on with the same line. The base has the true verdicts. The noise and its rates:
# scripts/studies/noise.py. lr0 learns nothing, so its accuracy is that of the start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
[[ -d data/tasks/calculator ]] || python scripts/data/make_tasks.py

noise="--reward_file scripts/studies/noise.py --remap_verifier"
arms=(
    "base"
    "j0.6: $noise learned=j_06"
    "j0.3: $noise learned=j_03"
    "j0: $noise learned=j_0"
    "j-0.3: $noise learned=j_minus_03"
    "lr0: --learning_rate 0"
)
python scripts/study.py run --out scripts/studies/records/noise.jsonl --scale fly --seeds 1-8 --arms "${arms[@]}" "$@"
