#!/usr/bin/env bash
# grpo_fast.py with many features at once: active sampling, solved prompts that are not sampled again, in-flight
# updates, checkpoints, dumps, traces, evaluations.
# Hardware: 1 GPU, or 2 CPU cores and 9 GiB of memory.
# Expected: 6 steps of 8 prompts x 4 samples in 4 minutes, on 2 CPU cores beside other jobs.
# Source: open-instruct scripts/train/debug/grpo_integration_test.sh.
# Differs: `smollm2`, `format` (scripts/train/differences.md). The source writes no checkpoints and no dumps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/get_smollm2.py
python scripts/data/make_addition.py

python grpo_fast.py \
    --exp_name debug_integration \
    --output_dir runs \
    --overwrite \
    --model_name_or_path models/SmolLM2-135M-Instruct \
    --dataset_mixer_list data/addition/train.jsonl 64 \
    --dataset_mixer_eval_list data/addition/eval.jsonl 16 \
    --num_learners_per_node 1 \
    --vllm_num_engines 1 \
    --single_gpu_mode \
    --async_steps 8 \
    --inflight_updates \
    --active_sampling \
    --no_resampling_pass_rate 0.6 \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 4 \
    --max_prompt_token_length 64 \
    --response_length 64 \
    --pack_length 1024 \
    --temperature 0.7 \
    --apply_r1_style_format_reward true \
    --additive_format_reward \
    --learning_rate 3e-7 \
    --beta 0.01 \
    --total_episodes 200 \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --seed 3 \
    --local_eval_every 1 \
    --save_freq 3 \
    --checkpoint_state_freq 3 \
    --dump_steps 3 \
    --save_traces \
    --vllm_enforce_eager \
    --vllm_enable_prefix_caching \
    --vllm_gpu_memory_utilization 0.3 \
    "$@"
