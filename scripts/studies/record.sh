#!/usr/bin/env bash
# The record: GRPO's variants against the base on the fruit fly, all with the same seeds.
#
#   bash scripts/studies/record.sh [--seeds 1-24] [--budget_minutes 60] [--jobs 2] [more flags of study.py run]
#   python scripts/study.py table scripts/studies/records/fly.jsonl
#
# It can be stopped at any time and goes on with the same line: what is done is in the file, seed by seed. Arms whose fork
# has changed since are refused: name those to go on with, as in --arms base rloo.
# The base: 8 prompts x 8 samples, centered advantages, one update a step, no KL, token mean, float32.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
[[ -d data/tasks/calculator ]] || python scripts/data/make_tasks.py

arms=(
    "base"
    "standard: --advantage_normalization_type standard"
    "unbiased: --advantage_normalization_type standard_unbiased"
    "dr_grpo: --loss_denominator 896"  # 64 responses of at most 14 tokens
    "rloo@scripts/forks/rloo.diff: --advantage_normalization_type rloo"
    "maxrl@scripts/forks/maxrl.diff: --advantage_normalization_type maxrl"
    "sequence: --loss_denominator sequence"
    "beta: --beta 0.05"
    "group4: --num_unique_prompts_rollout 16 --num_samples_per_prompt_rollout 4"
    "group16: --num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 16"
    "active: --active_sampling"
    "mini4: --num_mini_batches 4"
    "cispo4: --loss_fn cispo --num_mini_batches 4"
    "gspo4: --loss_fn gspo --num_mini_batches 4"
    "sapo4@scripts/forks/sapo.diff: --loss_fn sapo --num_mini_batches 4"
    "late4: grpo_fast.py --async_steps 4"
    "dppo4@scripts/forks/dppo.diff: --loss_fn dppo --num_mini_batches 4"
    "lora: --lora_rank 8 --learning_rate 5e-3"
    "late0: grpo_fast.py --async_steps 0"
    "late1: grpo_fast.py --async_steps 1"
    "late4_inflight: grpo_fast.py --async_steps 4 --inflight_updates"
    "late8: grpo_fast.py --async_steps 8"
    "bfloat16: --model_dtype bfloat16"  # master weights float32, dithered, as by default
    "bfloat16_plain: --model_dtype bfloat16 --no_dither_master_weights"
)
python scripts/study.py run --out scripts/studies/records/fly.jsonl --scale fly --seeds 1-24 --controls \
    --arms "${arms[@]}" "$@"
