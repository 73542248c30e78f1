#!/usr/bin/env bash
#SBATCH --job-name=7b_rlzero_code
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# Olmo 3 7B RL-Zero, from the base model: code; 39062 steps of 32 prompts x 8.
# Hardware: 5 nodes of 8 GPUs of 80 GB: 8 learners and 32 engines.
# Source: open-instruct scripts/train/olmo3/7b_rlzero_code.sh and docs/algorithms/grpo.md; no time and no figure.
# Differs: `reference`, `sandbox` (scripts/train/differences.md).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"

on_all_nodes grpo_fast.py \
    --exp_name olmo3_7b_rlzero_code \
    --output_dir output \
    --model_name_or_path allenai/Olmo-3-1025-7B \
    --no_dither_master_weights \
    --dataset_mixer_list allenai/Dolci-RLZero-Code-7B 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list allenai/Dolci-RLZero-Code-7B 8 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 \
    --vllm_num_engines 32 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 4 \
    --inflight_updates \
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
    --mask_truncated_completions true \
    --num_unique_prompts_rollout 32 \
    --num_samples_per_prompt_rollout 8 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 16384 \
    --pack_length 18432 \
    --chat_template_name olmo_thinker_code_rlzero \
    --apply_verifiable_reward true \
    --code_pass_rate_reward_threshold 0.0 \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 10000000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --seed 1 \
    --vllm_enable_prefix_caching \
    --local_eval_every 50 \
    --eval_temperature 1.0 \
    --eval_on_step_0 \
    --save_freq 50 \
    --checkpoint_state_freq 50 \
    --keep_last_n_checkpoints -1 \
    "$@"
