#!/usr/bin/env bash
# Runs two steps of any recipe on a CPU, with a tiny random model, made-up rows for the recipe's verifiers, 1 learner
# and 1 engine. All other settings are the recipe's own: its flags come first, and the flags that shrink it follow.
#
# Hardware: 2 CPU cores and 4 GiB of memory, no network. It takes about 20 seconds. A recipe with a judge or a solver
# takes about a minute: both are the tiny model behind a vLLM server. Metrics are in runs/smoke_NAME. More flags can
# follow and replace those before them:
#   bash scripts/train/debug/smoke.sh scripts/train/qwen/grpo_fast_7b.sh --rollout_backend vllm --vllm_enforce_eager
set -euo pipefail
recipe="$(realpath "${1:?usage: smoke.sh RECIPE [FLAGS of grpo_fast.py]}")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/setup.sh
python -m scripts.train.debug.smoke "$recipe" "${@:2}"
