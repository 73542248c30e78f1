#!/usr/bin/env bash
# Credit for each turn: SmolLM2-135M-Instruct guesses a number from 1 to 12. A guess that the hints allow earns 0.1 at
# once, the right guess earns 1. A rollout ends when the number is found, with a guess that contradicts a hint or is no
# number, or after 4 guesses.
# Hardware: 1 GPU, or 2 CPU cores and 9 GiB of memory.
# Expected: not known. The start model's score is 0.25, and it finds 0.15 of the numbers (env/guess/found).
# Source: our own. scripts/parts/credit.py has the estimator and says why it has no bias.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/get_smollm2.py
python scripts/data/make_guess.py

python grpo.py \
    --exp_name turn_credit \
    --output_dir runs \
    --overwrite \
    --model_name_or_path models/SmolLM2-135M-Instruct \
    --dataset_mixer_list data/guess/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/guess/eval.jsonl 1.0 \
    --env_file scripts/train/debug/guess.py \
    --turn_credit \
    --advantage_normalization_type centered \
    --no_filter_zero_std_samples \
    --verification_reward 1 \
    --beta 0 \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --max_steps 4 \
    --per_turn_max_tokens 4 \
    --max_prompt_token_length 160 \
    --response_length 128 \
    --pack_length 2048 \
    --temperature 1.0 \
    --learning_rate 1e-5 \
    --lr_scheduler_type constant \
    --total_episodes 1920 \
    --local_eval_every 15 \
    --eval_temperature 1.0 \
    --eval_on_step_0 \
    --save_freq -1 \
    --save_traces \
    --vllm_enforce_eager \
    --vllm_gpu_memory_utilization 0.4 \
    "$@"
