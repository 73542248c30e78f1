#!/usr/bin/env bash
# Runs two steps of any recipe on a CPU, with a tiny random model, made-up rows for the recipe's verifiers, 1 learner
# and 1 engine. The recipe's own flags come first, those that shrink it follow, and yours are last:
#   bash scripts/train/debug/smoke.sh scripts/train/qwen/grpo_fast_7b.sh --rollout_backend vllm --vllm_enforce_eager
# Hardware: 2 CPU cores and 4 GiB of memory, no network: 20 s. With a solver, which is the tiny model behind a vLLM
# server, a minute. A judge is left out. Metrics are in runs/smoke_NAME.
set -euo pipefail
recipe="$(realpath "${1:?usage: smoke.sh RECIPE [FLAGS of grpo_fast.py]}")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/setup.sh
python -m scripts.train.debug.smoke "$recipe" "${@:2}"
