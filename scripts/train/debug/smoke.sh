#!/usr/bin/env bash
# Any recipe, shrunk to two steps on a CPU: a tiny random model, made-up rows with the recipe's verifiers, 1 learner and
# 1 engine. Everything else is the recipe's own: its flags come first, those that shrink it after them.
#
# Hardware: 2 CPU cores and 4 GiB of memory, no network. About 20 seconds; with a judge or a solver, which is the tiny
# model behind a vLLM server, about a minute. Metrics in runs/smoke_NAME. More flags can follow, and win:
#   bash scripts/train/debug/smoke.sh scripts/train/qwen/grpo_fast_7b.sh --rollout_backend vllm --vllm_enforce_eager
set -euo pipefail
recipe="$(realpath "${1:?usage: smoke.sh RECIPE [FLAGS of grpo_fast.py]}")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/setup.sh
python -m scripts.train.debug.smoke "$recipe" "${@:2}"
