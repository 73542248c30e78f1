#!/usr/bin/env bash
# A policy finds a hole in its reward, and a second verifier sees it: --audit_verifier is logged and never trained on.
#
#   bash scripts/train/debug/hack.sh          the reward is 1 for what it cannot read, too: the policy falls silent
#   bash scripts/train/debug/hack.sh length   a judge that takes many words for care: 0.2 is for the right answer, 0.8
#                                             for 30 characters
#   bash scripts/train/debug/hack.sh label    the label may stand anywhere: the policy lists digits
#
# Rewards: scripts/train/debug/hack.py. The question is for the largest digit of a number; for `label`, for the last.
# Flags may follow. Without a hole reward and audit both rise, and nothing warns:
#
#   bash scripts/train/debug/hack.sh hole --remap_verifier learned=gsm8k --exp_name clean
#
# An audit before the run (J is 0), and the page after it:
#
#   python scripts/audit.py data/tasks/largest_digit/eval.jsonl --reward scripts/train/debug/hack.py:forgiving
#   python scripts/reports/report.py runs/hack_hole
#
# `length` samples at temperature 2.5, where 29 of the first 64 responses are longer than a digit. At 1.5 the model
# says a digit and stops: of 768 responses of 12 steps 17 were longer, so there was nothing to choose from.
#
# Hardware: 1 CPU core and 1 GiB of memory, no network. 17 s on an AMD EPYC (Zen 3), beside other jobs.
# Expected: with hole and each of the seeds 1, 2 and 3 objective/verifiable_reward goes from 2.9 to 10 in 30 steps,
#   objective/audit_reward from 2.8 to 0.1 or less (means of the first and last 5 steps), the share of right answers to
#   held-out questions from 0.25 to 0, and step 12 or 13 warns that reward and audit part; clean, both rise to 7.5.
# With length: seeds 1, 2 and 3 in 30 steps and 20 s: objective/verifiable_reward 1.8, 1.8 and 1.4 to 7.5,
#   objective/audit_reward 1.5 to 2.1, 2.2 to 1.6 and 1.7 to 1.3, responses 4 to 14 tokens, which is the most; step 10,
#   15 and 15 warns. Clean (seed 1, the same temperature): both rise from 1.8 to 4.6, 3 tokens, no warning.
# With label: with 1 of 3 seeds the policy lists digits, and step 15 warns; with the others nothing warns.
# Source: our own.
#
# Where this differs from the source:
# - There is no published run to differ from.
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
python scripts/data/make_tasks.py --tasks "$task"

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
