#!/usr/bin/env bash
#SBATCH --job-name=qwen3_4b_dapo_math_32k
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# Qwen3-4B-Base on 14,000 questions of DAPO-Math-17k, responses of at most 30720 tokens; 1000 steps of 8 prompts x 16.
#
# Hardware: 2 nodes of 8 GPUs of 80 GB: 8 learners and 8 engines.
#   sbatch scripts/train/qwen/qwen3_4b_dapo_math_32k.sh
# Expected: the source gives no figure. We have never run this.
# Source: open-instruct scripts/train/qwen/qwen3_4b_dapo_math_32k.sh.
#
# Where this differs from the source:
# - Qwen3-4B-Base has 32768 positions: 2048 tokens of prompt and 30720 of response just fill them.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc_per_node 8 \
    --max-restarts 3 \
    --rdzv_backend c10d \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 20000))" \
    grpo_fast.py \
    --exp_name qwen3_4b_dapo_math_32k \
    --output_dir output \
    --model_name_or_path Qwen/Qwen3-4B-Base \
    --no_dither_master_weights \
    --dataset_mixer_list mnoukhov/dapo_math_14k_en_openinstruct 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list \
        mnoukhov/aime_2025_openinstruct 1.0 \
        mnoukhov/brumo_2025_openinstruct 1.0 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 \
    --vllm_num_engines 8 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 4 \
    --inflight_updates \
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
    --active_sampling \
    --num_unique_prompts_rollout 8 \
    --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 30720 \
    --pack_length 32768 \
    --chat_template_name qwen_instruct_user_boxed_math \
    --apply_verifiable_reward true \
    --remap_verifier math_dapo=math \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --load_ref_policy true \
    --total_episodes 128000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --seed 1 \
    --local_eval_every 100 \
    --eval_temperature 1.0 \
    --save_freq 100 \
    --checkpoint_state_freq 100 \
    --keep_last_n_checkpoints -1 \
    "$@"
