#!/usr/bin/env bash
#SBATCH --job-name=qwen_grpo_7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=4-00:00:00
# Qwen2.5-7B zero with the older trainer's settings: GRPO from the base model on MATH, in the R1 format; 13020 steps.
# Hardware: 2 nodes of 8 GPUs of 80 GB: 12 learners and 4 engines.
# Expected: rising curves of ifeval, gsm8k and MATH; the source gives no figures.
# Source: open-instruct scripts/train/qwen/grpo_7b.sh (745bf58d321c), docs/algorithms/grpo.md; both deleted since.
# Differs: `older`, `math`, `reference` (scripts/train/differences.md). --with_tracking is left to you.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
data=data/math_zs
[[ -f $data/train.jsonl ]] || python scripts/data/competition_math.py --out $data

on_all_nodes grpo_fast.py \
    --exp_name qwen2.5_7b_grpo_zero \
    --output_dir output \
    --model_name_or_path Qwen/Qwen2.5-7B \
    --no_dither_master_weights \
    --dataset_mixer_list data/math_zs/train.jsonl 1.0 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list data/math_zs/train.jsonl 16 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 4 \
    --vllm_num_engines 4 \
    --vllm_tensor_parallel_size 1 \
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
    --per_device_train_batch_size 2 \
    --max_prompt_token_length 2048 \
    --response_length 4096 \
    --pack_length 6144 \
    --chat_template_name r1_simple_chat_postpend_think \
    --stop_strings "</answer>" \
    --apply_verifiable_reward true \
    --apply_r1_style_format_reward true \
    --additive_format_reward \
    --non_stop_penalty false \
    --temperature 1.0 \
    --learning_rate 5e-7 \
    --lr_scheduler_type linear \
    --weight_decay 0.01 \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 10000000 \
    --deepspeed_stage 2 \
    --gradient_checkpointing \
    --seed 1 \
    --local_eval_every 65 \
    --eval_temperature 0.0 \
    --save_freq 40 \
    "$@"
