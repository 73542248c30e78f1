#!/usr/bin/env bash
# A policy finds a hole in its reward, and a second verifier sees it: --audit_verifier is logged and never trained on.
#
# The question is for the largest digit of a number. The reward of scripts/train/debug/hack.py is 1 for what it cannot
# read, too. So a small model soon says nothing at all. Without a hole both rise to 7.5, and nothing warns:
#
#   bash scripts/train/debug/hack.sh --remap_verifier learned=gsm8k --exp_name clean
#
# An audit before the run (J is 0), and the page after it:
#
#   python scripts/audit.py data/tasks/largest_digit/eval.jsonl --reward scripts/train/debug/hack.py:forgiving
#   python scripts/reports/report.py runs/hack
#
# Hardware: 1 CPU core and 1 GiB of memory, no network. 17 s on an AMD EPYC (Zen 3), beside other jobs.
# Expected: with each of the seeds 1, 2 and 3 objective/verifiable_reward goes from 2.9 to 10 in 30 steps,
#   objective/audit_reward from 2.8 to 0.1 or less (means of the first and last 5 steps), the share of right answers to
#   held-out questions from 0.25 to 0, and step 12 or 13 warns that reward and audit part.
# Source: our own.
#
# Where this differs from the source:
# - There is no published run to differ from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/make_tasks.py --tasks largest_digit

python grpo.py \
    --exp_name hack \
    --output_dir runs \
    --overwrite \
    --model_name_or_path scripts/studies/fly \
    --model_dtype float32 \
    --rollout_backend transformers \
    --dataset_mixer_list data/tasks/largest_digit/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/tasks/largest_digit/eval.jsonl 1.0 \
    --local_eval_every 10 \
    --eval_on_step_0 \
    --reward_file scripts/train/debug/hack.py \
    --remap_verifier learned=forgiving \
    --audit_verifier gsm8k \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --response_length 14 \
    --temperature 1.5 \
    --learning_rate 1e-3 \
    --lr_scheduler_type constant \
    --advantage_normalization_type centered \
    --beta 0 \
    --save_freq -1 \
    --save_traces \
    --total_episodes 1920 \
    "$@"
