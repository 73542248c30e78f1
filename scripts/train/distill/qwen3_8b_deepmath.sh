#!/usr/bin/env bash
# On-policy distillation: Qwen3-8B-Base with adapters learns from Qwen3-8B on DeepMath-103K; 100 steps of 1024 x 4.
# Hardware: 1 node of 8 GPUs of 80 GB, each with a learner, a part of the teacher and an engine that take turns.
# Expected: in the source a student fine-tuned on OpenThoughts3 goes from about 0.55 on AIME 2024 to about 0.65.
# Source: tinker-cookbook recipes/distillation, its first README.md; Thinking Machines, "On-Policy Distillation".
# Differs: `kl` (scripts/train/differences.md). That student is on Tinker only: give yours with --model_name_or_path.
# The source names no alpha. Its rho weighs the KL, too. Its loss is a sum, here a mean: the same to Adam, unless
# gradients are clipped. To train all weights append --lora_rank 0 --lora_merge false --learning_rate 5e-5, its rate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
# 256 questions are held out. Prompts of more than 1024 tokens are dropped; the source cuts them.
data=data/deepmath
deepmath="--dataset zwhe99/DeepMath-103K --eval_rows 256"
[[ -f $data/eval.jsonl ]] || python scripts/data/competition_math.py $deepmath --out $data

torchrun --standalone --nproc_per_node 8 grpo.py \
    --exp_name distill_qwen3_8b_deepmath \
    --output_dir output \
    --model_name_or_path Qwen/Qwen3-8B-Base \
    --lora_rank 128 \
    --lora_alpha 32 \
    --lora_target_modules all-linear \
    --lora_merge true \
    --ref_model_name_or_path Qwen/Qwen3-8B \
    --beta 1.0 \
    --kl_estimator kl2 \
    --verification_reward 0 \
    --no_filter_zero_std_samples \
    --dataset_mixer_list data/deepmath/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/deepmath/eval.jsonl 1.0 \
    --num_unique_prompts_rollout 1024 \
    --num_samples_per_prompt_rollout 4 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --max_prompt_token_length 1024 \
    --response_length 4096 \
    --pack_length 16384 \
    --temperature 1.0 \
    --learning_rate 1e-4 \
    --lr_scheduler_type constant \
    --weight_decay 0.0 \
    --max_grad_norm 0 \
    --total_episodes 409600 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --vllm_gpu_memory_utilization 0.5 \
    --seed 1 \
    --local_eval_every 20 \
    --eval_on_step_0 \
    --save_freq 20 \
    --checkpoint_state_freq 20 \
    "$@"
