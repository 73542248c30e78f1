#!/usr/bin/env bash
# Debug an idea: a tiny random model learns to write small letters. A right loss raises the score, a loss with the wrong
# sign lowers it. Both are visible within half a minute. Flags can follow, as --loss_fn gspo --exp_name gspo.
# Hardware: 2 CPU cores and 2 GiB of memory, no network.
# Source: our own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/make_tiny_model.py --out models/tiny

python grpo.py \
    --exp_name letters \
    --output_dir runs \
    --overwrite \
    --model_name_or_path models/tiny \
    --model_dtype float32 \
    --rollout_backend transformers \
    --dataset_mixer_list reasoning_gym:chain_sum 100 \
    --reward_file scripts/train/debug/letters.py \
    --remap_verifier reasoning_gym=letters \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 8 \
    --response_length 16 \
    --temperature 1.0 \
    --learning_rate 1e-3 \
    --lr_scheduler_type constant \
    --beta 0 \
    --total_episodes 1280 \
    "$@"
