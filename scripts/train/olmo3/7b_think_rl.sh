#!/usr/bin/env bash
#SBATCH --job-name=7b_think_rl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# Olmo 3 7B Think, with in-flight updates; 19531 steps of 64 prompts x 8.
# Hardware: 4 nodes of 8 GPUs of 80 GB: 16 learners and 16 engines.
# Source: open-instruct scripts/train/olmo3/7b_think_rl.sh and docs/algorithms/grpo.md; no time and no figure.
# Differs: `judge`, `reference`, `sandbox` (scripts/train/differences.md).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
((dry_run)) || : "${OPENAI_BASE_URL:?export the address of the judge: scripts/train/differences.md}"

on_all_nodes grpo_fast.py \
    --exp_name olmo3_7b_think_rl \
    --output_dir output \
    --model_name_or_path allenai/Olmo-3-7B-Think-DPO \
    --no_dither_master_weights \
    --dataset_mixer_list allenai/Dolci-Think-RL-7B 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list allenai/Dolci-Think-RL-7B 8 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 8 \
    --vllm_num_engines 16 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 8 \
    --inflight_updates \
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
    --num_unique_prompts_rollout 64 \
    --num_samples_per_prompt_rollout 8 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 32768 \
    --pack_length 35840 \
    --chat_template_name olmo_thinker \
    --apply_verifiable_reward true \
    --code_pass_rate_reward_threshold 0.99 \
    --llm_judge_model Qwen/Qwen3-32B \
    --llm_judge_timeout 600 \
    --llm_judge_max_tokens 2048 \
    --llm_judge_max_context_length 32768 \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 10000000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --seed 1 \
    --local_eval_every 50 \
    --eval_temperature 1.0 \
    --save_freq 25 \
    --checkpoint_state_freq 100 \
    "$@"
