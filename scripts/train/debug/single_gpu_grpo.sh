#!/usr/bin/env bash
# grpo.py on one device: learner and engine take turns.
# Hardware: 1 GPU, or 2 CPU cores and 9 GiB of memory.
# Expected: 6 steps of 8 prompts x 4 samples, an evaluation after each, in 3 minutes on 2 CPU cores beside other jobs.
# Source: open-instruct scripts/train/debug/single_gpu_grpo.sh.
# Differs: `smollm2`, `format`, `reference` (scripts/train/differences.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/get_smollm2.py
python scripts/data/make_addition.py

python grpo.py \
    --exp_name debug_single_gpu_grpo \
    --output_dir runs \
    --overwrite \
    --model_name_or_path models/SmolLM2-135M-Instruct \
    --dataset_mixer_list data/addition/train.jsonl 64 \
    --dataset_mixer_eval_list data/addition/eval.jsonl 16 \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 4 \
    --max_prompt_token_length 64 \
    --response_length 64 \
    --pack_length 1024 \
    --temperature 0.7 \
    --apply_r1_style_format_reward true \
    --additive_format_reward \
    --learning_rate 3e-7 \
    --beta 0.0 \
    --load_ref_policy true \
    --total_episodes 200 \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --seed 3 \
    --local_eval_every 1 \
    --save_freq -1 \
    --save_traces \
    --vllm_enforce_eager \
    --vllm_enable_prefix_caching \
    --vllm_gpu_memory_utilization 0.3 \
    "$@"
