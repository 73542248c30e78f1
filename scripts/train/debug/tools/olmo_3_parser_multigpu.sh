#!/usr/bin/env bash
#SBATCH --job-name=olmo3_7b_tool_use_test
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
# Olmo-3-7B-Instruct-SFT with tools, calls in the way of Olmo 3; two nodes under SLURM, 5 steps of 32 prompts x 8.
# Hardware: 2 nodes of 8 GPUs of 80 GB: 8 learners, 8 engines; a retriever (scripts/tools/search.py), by default on the
# first node: RETRIEVER_URL=http://HOST:8000/retrieve.
# Source: open-instruct scripts/train/debug/tools/olmo_3_parser_multigpu.sh: no figure, an hour at most.
# Differs: `sandbox`, `reference`, `fresh`, `defaults` (scripts/train/differences.md). Its search asks Google through serper.dev, ours a
# retriever of your own. Its browse (jina.ai) has no counterpart: that takes a file like scripts/tools/search.py.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../../..}"
source scripts/train/start.sh "$@"
retriever="{\"url\": \"${RETRIEVER_URL:-http://$head_node:8000/retrieve}\"}"

on_all_nodes grpo_fast.py \
    --exp_name olmo3_7b_tool_use_test \
    --output_dir output \
    --model_name_or_path allenai/Olmo-3-7B-Instruct-SFT \
    --dataset_mixer_list hamishivi/tulu_3_rewritten_100k 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list hamishivi/tulu_3_rewritten_100k 32 \
    --dataset_mixer_eval_list_splits train \
    --tools python search \
    --tool_call_names code search \
    --tool_configs "{\"timeout\": 3}" "$retriever" \
    --tool_parser_type vllm_olmo3 \
    --max_steps 5 \
    --num_learners_per_node 8 \
    --vllm_num_engines 8 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 1 \
    --inflight_updates \
    --num_unique_prompts_rollout 32 \
    --num_samples_per_prompt_rollout 8 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 8192 \
    --pack_length 16384 \
    --apply_verifiable_reward true \
    --non_stop_penalty false \
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
    --temperature 1.0 \
    --eval_temperature 1.0 \
    --learning_rate 5e-7 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 1280 \
    --deepspeed_stage 3 \
    --sequence_parallel_size 2 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --seed 1 \
    --local_eval_every 10 \
    --save_freq 100 \
    "$@"
