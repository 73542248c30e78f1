#!/usr/bin/env bash
# Qwen3-4B-Base on DAPO-Math-17k, responses of at most 8192 tokens; 1000 steps of 8 prompts x 16.
#
# Hardware: 1 node of 8 GPUs of 80 GB: 4 learners and 4 engines.
# Expected: pass@1 on AIME 2025 of about 0.216 at the end. That is open-instruct's figure for its grpo_fast with 8192
# tokens, from its own comparison of grpo_fast with grpo.py. We have never run this.
# Source: open-instruct scripts/train/qwen/qwen3_4b_dapo_math.sh.
#
# Where this differs from the source:
# - --eval_top_p 0.95 has no counterpart. Here an evaluation samples from the whole distribution, which lowers pass@1 a
#   little.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"

python grpo_fast.py \
    --exp_name qwen3_4b_dapo_math \
    --output_dir output \
    --model_name_or_path Qwen/Qwen3-4B-Base \
    --no_dither_master_weights \
    --dataset_mixer_list hamishivi/DAPO-Math-17k-Processed_filtered 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list \
        allenai/aime_2025_openinstruct 1.0 \
        allenai/brumo_2025_openinstruct 1.0 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 4 \
    --vllm_num_engines 4 \
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
    --response_length 8192 \
    --pack_length 10240 \
    --chat_template_name qwen_instruct_user_boxed_math \
    --apply_verifiable_reward true \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --load_ref_policy false \
    --total_episodes 128000 \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --seed 1 \
    --local_eval_every 100 \
    --eval_pass_at_k 32 \
    --eval_temperature 1.0 \
    --save_freq 100 \
    --checkpoint_state_freq 100 \
    --keep_last_n_checkpoints -1 \
    "$@"
