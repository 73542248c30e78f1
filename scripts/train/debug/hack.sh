#!/usr/bin/env bash
# A policy finds a hole in its reward (hack.py beside this), and --audit_verifier, on which nothing trains, sees it.
#   bash scripts/train/debug/hack.sh [hole]   1 for what it cannot read, too: the policy falls silent
#   bash scripts/train/debug/hack.sh length   0.2 for the right answer, 0.8 for 30 characters: it writes more
#   bash scripts/train/debug/hack.sh label    the label may stand anywhere: with one seed of three it lists digits
# Hardware: 1 CPU core and 1 GiB of memory, no network; 20 s.
# Control: hack.sh hole --remap_verifier learned=gsm8k --exp_name clean; reward and audit rise together.
# Source: our own. `length` samples at temperature 2.5: at 1.5 hardly a response is longer than a digit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
hole=hole
case "${1:-}" in
hole | length | label) hole="$1" && shift ;;
esac
case "$hole" in
hole) task=largest_digit reward=forgiving temperature=1.5 ;;
length) task=largest_digit reward=long_winded temperature=2.5 ;;
label) task=last reward=anywhere temperature=1.5 ;;
esac
source scripts/train/start.sh "$@"
python scripts/data/make_tasks.py

python grpo.py \
    --exp_name "hack_$hole" \
    --output_dir runs \
    --overwrite \
    --model_name_or_path scripts/studies/fly \
    --model_dtype float32 \
    --rollout_backend transformers \
    --dataset_mixer_list "data/tasks/$task/train.jsonl" 1.0 \
    --dataset_mixer_eval_list "data/tasks/$task/eval.jsonl" 1.0 \
    --local_eval_every 10 \
    --eval_on_step_0 \
    --reward_file scripts/train/debug/hack.py \
    --remap_verifier "learned=$reward" \
    --audit_verifier gsm8k \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --response_length 14 \
    --temperature "$temperature" \
    --learning_rate 1e-3 \
    --lr_scheduler_type constant \
    --advantage_normalization_type centered \
    --beta 0 \
    --save_freq -1 \
    --save_traces \
    --total_episodes 1920 \
    "$@"
