#!/usr/bin/env bash
# Qwen2.5-7B-Instruct solves mathematics with a Python interpreter (ReTool, arXiv:2504.11536): DAPO-Math-17k, at most 8
# programs in 16384 tokens; 64 prompts x 16, four optimizer steps each.
#
# Hardware: 1 node of 8 GPUs of 80 GB: 4 learners and 4 engines. Programs run in the sandbox of parts/sandbox.py.
# Expected: the source gives no figure. We have never run this.
# Source: verl's recipe/retool/run_qwen2_7b_dapo.sh.
#
# Where this differs from the source:
# - The source starts from a checkpoint of its own, fine-tuned on conversations with calls (its run_qwen2_7b_sft.sh).
#   Give yours with --model_name_or_path.
# - The source's tool puts a print around a program's last line if that line is no print. Our tool prints the value of a
#   last line that is an expression.
# - The source adds 0.1 for each call to the reward of a wrong answer, up to a bound. Here an --env_file of your own
#   could do that.
# - max_turns 16 counts the turns of both sides. Here --max_steps counts programs.
# - In the source the same GPUs take turns, with engines of 4 GPUs and sequences split over 4 learners. Here half of the
#   GPUs are engines, which are one update ahead at most.
# - The data set is the one without duplicates that the other recipes take.
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
