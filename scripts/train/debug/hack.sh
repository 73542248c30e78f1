#!/usr/bin/env bash
# A policy finds a hole in its reward, and a second verifier sees it: --audit_verifier is logged and never trained on.
#
# The question is for the last digit of a number, and the reward is content if that digit stands anywhere in the
# response. So a small model stops answering and lists digits. The same without the hole, or with another one:
#
#   bash scripts/train/debug/hack.sh --remap_verifier learned=gsm8k --exp_name clean
#   python scripts/audit.py data/tasks/last/eval.jsonl --reward scripts/train/debug/hack.py:anywhere   # before a run: J
#   python scripts/reports/report.py runs/hack                                                         # after it
#
# Hardware: 1 CPU core and 1 GiB of memory, no network. 17 s on an AMD EPYC (Zen 3), beside other jobs.
# Expected: with seed 1 objective/verifiable_reward goes from 2.8 to 7.0 in 30 steps and objective/audit_reward from 2.8
#   to 0, the share of right answers to held-out questions from 0.23 to 0.02, and step 15 warns that the two part.
# Source: our own.
#
# Where this differs from the source:
# - There is no published run to differ from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/make_tasks.py --tasks last

python grpo.py \
    --exp_name hack \
    --output_dir runs \
    --overwrite \
    --model_name_or_path scripts/studies/fly \
    --model_dtype float32 \
    --rollout_backend transformers \
    --dataset_mixer_list data/tasks/last/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/tasks/last/eval.jsonl 1.0 \
    --local_eval_every 10 \
    --eval_on_step_0 \
    --reward_file scripts/train/debug/hack.py \
    --remap_verifier learned=anywhere \
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
