#!/usr/bin/env bash
# Qwen2.5-7B-Instruct solves mathematics with a Python interpreter (ReTool, arXiv:2504.11536): at most 8 programs in
# 16384 tokens; 64 prompts x 16, four optimizer steps each. Programs run in the sandbox of scripts/parts/sandbox.py.
# Hardware: 1 node of 8 GPUs of 80 GB: 4 learners and 4 engines, one update ahead at most; in the source all take turns.
# Source: verl's recipe/retool/run_qwen2_7b_dapo.sh, without figures.
# Differs: the source's model is fine-tuned on calls (run_qwen2_7b_sft.sh): give yours with --model_name_or_path. Its
# tool puts a print around a last line, ours prints the value of an expression. It pays 0.1 for each call of a wrong
# answer, up to a bound: an --env_file could. Its max_turns counts both sides, --max_steps programs. The data here have
# no duplicates.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"

python grpo_fast.py \
    --exp_name retool_qwen2.5_7b \
    --output_dir output \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_mixer_list hamishivi/DAPO-Math-17k-Processed_filtered 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list allenai/aime_2025_openinstruct 1.0 \
    --dataset_mixer_eval_list_splits train \
    --tools python \
    --tool_call_names code_interpreter \
    --tool_configs "{\"timeout\": 30, \"deadline\": 40}" \
    --tool_parser_type hermes \
    --max_steps 8 \
    --num_learners_per_node 4 \
    --vllm_num_engines 4 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 1 \
    --num_unique_prompts_rollout 64 \
    --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 4 \
    --num_epochs 1 \
    --max_prompt_token_length 2048 \
    --response_length 16384 \
    --pack_length 18432 \
    --temperature 1.0 \
    --verification_reward 1.0 \
    --loss_denominator token \
    --clip_lower 0.2 \
    --clip_higher 0.28 \
    --clip_dual 10.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --total_episodes 256000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --seed 1 \
    --local_eval_every 10 \
    --eval_on_step_0 \
    --eval_pass_at_k 30 \
    --eval_temperature 1.0 \
    --save_freq 20 \
    "$@"
