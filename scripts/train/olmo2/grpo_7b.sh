#!/usr/bin/env bash
#SBATCH --job-name=grpo_7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# OLMo 2 7B Instruct, trained anew: GRPO from OLMo-2-1124-7B-DPO on GSM8K, MATH and instruction following; 2604 steps.
# Hardware: 2 nodes of 8 GPUs of 80 GB: 12 learners and one engine of 4 GPUs.
# Expected: a model better than allenai/OLMo-2-1124-7B-Instruct, which had PPO; the source gives no figures.
# Source: open-instruct scripts/train/olmo2/grpo_7b.sh (745bf58d321c), docs/algorithms/grpo.md; both deleted since.
# Differs: `older` (scripts/train/differences.md). --with_tracking is left to you.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
data=data/rlvr_tulu3
[[ -f $data/train.jsonl ]] || python scripts/data/rlvr.py \
    --dataset_mixer_list allenai/RLVR-GSM-MATH-IF-Mixed-Constraints 1.0 \
    --out $data

on_all_nodes grpo_fast.py \
    --exp_name olmo2_7b_grpo \
    --output_dir output \
    --model_name_or_path allenai/OLMo-2-1124-7B-DPO \
    --no_dither_master_weights \
    --model_revision main \
    --dataset_mixer_list data/rlvr_tulu3/train.jsonl 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list data/rlvr_tulu3/train.jsonl 16 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 4 8 \
    --vllm_num_engines 1 \
    --vllm_tensor_parallel_size 4 \
    --async_steps 1 \
    --advantage_normalization_type standard_unbiased \
    --clip_higher 0.2 \
    --no_use_rho_correction \
    --no_filter_zero_std_samples \
    --loss_denominator sequence \
    --num_unique_prompts_rollout 48 \
    --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 2 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 2048 \
    --pack_length 4096 \
    --chat_template_name tulu \
    --add_bos \
    --non_stop_penalty true \
    --non_stop_penalty_value 0.0 \
    --apply_verifiable_reward true \
    --temperature 1.0 \
    --learning_rate 5e-7 \
    --lr_scheduler_type constant \
    --weight_decay 0.01 \
    --beta 0.01 \
    --kl_estimator 2 \
    --total_episodes 2000000 \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --seed 1 \
    --local_eval_every 26 \
    --eval_temperature 0.0 \
    --save_freq 40 \
    "$@"
