#!/usr/bin/env bash
# Qwen2.5-3B zero: GRPO from the base model on MATH, in the R1 format; 1302 steps.
# Hardware: 1 node of 8 GPUs of 80 GB: 4 learners and 4 engines.
# Expected: curves of ifeval, gsm8k and MATH that rise; the source gives no figures.
# Source: open-instruct scripts/train/qwen/grpo_fast_3b_single_node.sh and docs/algorithms/grpo.md.
# Differs: `defaults`, `math`, `reference` (scripts/train/differences.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
data=data/math_zs
[[ -f $data/train.jsonl ]] || python scripts/data/competition_math.py --out $data

python grpo_fast.py \
    --exp_name qwen2.5_3b_grpo_fast_zero \
    --output_dir output \
    --model_name_or_path Qwen/Qwen2.5-3B \
    --no_dither_master_weights \
    --dataset_mixer_list data/math_zs/train.jsonl 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list data/math_zs/train.jsonl 16 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 4 \
    --vllm_num_engines 4 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 1 \
    --advantage_normalization_type standard \
    --clip_higher 0.2 \
    --no_use_rho_correction \
    --num_unique_prompts_rollout 48 \
    --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 4096 \
    --pack_length 6144 \
    --chat_template_name r1_simple_chat_postpend_think \
    --stop_strings "</answer>" \
    --apply_verifiable_reward true \
    --apply_r1_style_format_reward true \
    --non_stop_penalty true \
    --non_stop_penalty_value 0.0 \
    --temperature 1.0 \
    --learning_rate 5e-7 \
    --lr_scheduler_type linear \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 1000000 \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --seed 1 \
    --local_eval_every 10 \
    --eval_temperature 1.0 \
    --save_freq 40 \
    "$@"
