#!/usr/bin/env bash
# veRL's GRPO example on GSM8K with Qwen2.5-7B: 105 steps of 1024 prompts x 5, four optimizer steps each, an evaluation
# of the whole test set every 5 steps.
#
# Hardware: 1 node of 8 GPUs of 80 GB, or more, each with a learner and an engine that take turns.
# Expected: 2 h 25 min on 8 H100; accuracy on the test set 0.927 (1223 of 1319), mean reward 0.979, entropy 0.070, KL
# 0.0128, 232 tokens a response. These figures are veRL's (the report "GRPO + Qwen2.5-7B on GSM8K"). We have never run
# this.
# Source: that report, and verl's examples/grpo_trainer/run_qwen2-7b.sh. The report's numbers fit the values of that
# script: 7473 // 1024 = 7 steps x 15 epochs.
#
# Where this differs from the source:
# - veRL drops the last 305 rows of each epoch. Here no row is dropped: the 107,520 prompts are 14.4 passes over all
#   7473 rows.
# - veRL's engines have 2 GPUs each (rollout.tensor_model_parallel_size 2); grpo.py has one per GPU.
# - veRL's micro-batches of 40 sequences a GPU become packs of 16384 tokens. No update depends on the micro-batch.
# - The reference policy is not offloaded to the CPU (ref.fsdp_config.param_offload). Sharded over 8 GPUs it takes at
#   most 4 GB of each.
# - A run can go on from its checkpoints. python scripts/to_hf.py RUN --step N makes a model of one.
# - The report's actor/lr 0.0 is 1e-6, rounded. The learning rate is constant.
# - The report does not say which Qwen2.5-7B it is. The low first score and the jump after it fit the base model. The
#   other reading is --model_name_or_path Qwen/Qwen2.5-7B-Instruct.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
data=data/gsm8k_verl
[[ -f $data/test.jsonl ]] || python scripts/data/gsm8k.py --prompt verl --out $data

torchrun --standalone --nproc_per_node 8 grpo.py \
    --exp_name qwen2.5_7b_gsm8k_verl \
    --output_dir output \
    --model_name_or_path Qwen/Qwen2.5-7B \
    --no_dither_master_weights \
    --dataset_mixer_list data/gsm8k_verl/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/gsm8k_verl/test.jsonl 1.0 \
    --num_unique_prompts_rollout 1024 \
    --num_samples_per_prompt_rollout 5 \
    --num_mini_batches 4 \
    --num_epochs 1 \
    --max_prompt_token_length 512 \
    --response_length 1024 \
    --pack_length 16384 \
    --temperature 1.0 \
    --vllm_top_p 1.0 \
    --remap_verifier gsm8k=gsm8k_verl \
    --verification_reward 1.0 \
    --advantage_normalization_type standard_unbiased \
    --no_filter_zero_std_samples \
    --no_use_rho_correction \
    --loss_denominator token \
    --clip_lower 0.2 \
    --clip_higher 0.2 \
    --clip_dual 3.0 \
    --beta 0.001 \
    --kl_estimator 2 \
    --entropy_coef 0.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --warmup_ratio 0.0 \
    --weight_decay 0.01 \
    --max_grad_norm 1.0 \
    --total_episodes 537600 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_gpu_memory_utilization 0.6 \
    --seed 1 \
    --local_eval_every 5 \
    --eval_on_step_0 \
    --eval_temperature 0.0 \
    --save_freq -1 \
    --checkpoint_state_freq 20 \
    --keep_last_n_checkpoints -1 \
    "$@"
