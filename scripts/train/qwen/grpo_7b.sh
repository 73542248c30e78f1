#!/usr/bin/env bash
#SBATCH --job-name=qwen_grpo_7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=4-00:00:00
# Qwen2.5-7B zero with the older trainer's settings: GRPO from the base model on MATH, in the R1 format. 13020 steps.
#
# Hardware: 2 nodes of 8 GPUs of 80 GB: 12 learners and 4 engines.
#   sbatch scripts/train/qwen/grpo_7b.sh
# Expected: the source gives no figures. Its curves of ifeval, gsm8k and MATH rise. We have never run this.
# Source: open-instruct's docs/algorithms/grpo.md, "Qwen 2.5 7B Zero-style", and its scripts/train/qwen/grpo_7b.sh at
# commit 745bf58d321c. That script starts grpo_vllm_thread_ray_gtrl.py. Both files have been deleted since.
# scripts/train/qwen/grpo_fast_7b.sh is the page's run with grpo_fast.py.
#
# Where this differs from the source:
# - The source counts its batch for each rank. 4 prompts on each of 12 learners are the 48 prompts here. 32 responses on
#   each of 12 learners are one of the two mini-batches here.
# - The source's loss is the mean over responses of their token means (--loss_denominator sequence). It trains on all
#   groups, takes the standard deviation with n - 1, and has AdamW's own weight decay of 0.01. All of that is kept.
# - In the source the old policy of a mini-batch is the policy before that mini-batch, so that the clip never acts. Here
#   the old policy is the one before the step.
# - In the source the responses to one prompt may be in both mini-batches. Here they stay together.
# - --max_token_length is left out, because --max_prompt_token_length and --response_length bound the same.
# - --num_evals 200 of 13020 steps is an evaluation every 65 steps (--local_eval_every).
# - The source trains on ai2-adapt-dev/math_ground_truth_zs, which may not stay public. Here the data are the 7500
#   training questions of DigitalLearningGmbH/MATH-lighteval, without examples before them
#   (scripts/data/competition_math.py).
# - beta is 0, so the loss has no KL. The reference policy is loaded all the same, as in the source, to measure the KL.
#   --no_load_ref_policy saves its memory.
# - --with_tracking is left to you. The evaluation jobs of AI2's own cluster have no counterpart here.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
data=data/math_zs
[[ -f $data/train.jsonl ]] || python scripts/data/competition_math.py --out $data

srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc_per_node 8 \
    --max-restarts 3 \
    --rdzv_backend c10d \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 20000))" \
    grpo_fast.py \
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
