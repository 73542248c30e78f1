#!/usr/bin/env bash
# grpo_fast.py on one device: one learner and one engine share a GPU, or the cores of a machine without one.
# Hardware: 1 GPU, or 2 CPU cores and 9 GiB of memory.
# Expected: 4 steps of 8 prompts x 4 samples and an evaluation in 2.5 minutes, on 2 CPU cores beside other jobs.
# Source: open-instruct scripts/train/debug/grpo_fast.sh.
# Differs: `smollm2`, `fresh` (scripts/train/differences.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/get_smollm2.py
python scripts/data/make_addition.py

python grpo_fast.py \
    --exp_name debug_grpo_fast \
    --output_dir runs \
    --overwrite \
    --model_name_or_path models/SmolLM2-135M-Instruct \
    --dataset_mixer_list data/addition/train.jsonl 64 \
    --dataset_mixer_eval_list data/addition/eval.jsonl 16 \
    --num_learners_per_node 1 \
    --vllm_num_engines 1 \
    --single_gpu_mode \
    --async_steps 1 \
    --inflight_updates \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 4 \
    --max_prompt_token_length 64 \
    --response_length 64 \
    --pack_length 1024 \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --beta 0.01 \
    --total_episodes 128 \
    --deepspeed_stage 2 \
    --seed 3 \
    --local_eval_every 4 \
    --save_freq -1 \
    --vllm_enforce_eager \
    --vllm_enable_prefix_caching \
    --vllm_gpu_memory_utilization 0.4 \
    "$@"
