#!/usr/bin/env bash
# On-policy distillation: Qwen3-8B-Base with adapters of rank 128 learns from Qwen3-8B, token by token, on the questions
# of DeepMath-103K, without a reward; 100 steps of 1024 prompts x 4 responses of at most 4096 tokens.
#
# Hardware: 1 node of 8 GPUs of 80 GB, each with a learner, a part of the teacher and an engine that take turns.
# Expected: in the source, a student with about 0.55 on AIME 2024 after supervised fine-tuning on OpenThoughts3 has
# about 0.65 after 100 steps. The source does not name the teacher of that run; its default is Qwen3-8B. We have never
# run this.
# Source: tinker-cookbook, recipes/distillation: on_policy_distillation.py and the first version of README.md (today's
# has Qwen3.5-9B and 512 groups); Thinking Machines, "On-Policy Distillation".
#
# Where this differs from the source:
# - The source's student starts from that fine-tuned checkpoint, which is on Tinker only. Here the base model is the
#   default. Give yours with --model_name_or_path.
# - The source names no alpha: --lora_alpha 32 is our default.
# - To train all weights, append --lora_rank 0 --lora_merge false --learning_rate 5e-5, the source's rate for that.
# - The KL is a term of the loss, estimator k2. At each token its gradient is -log(student / teacher) times the gradient
#   of the logprob, as with the source's advantage. The source weighs it by rho, learner to sampler. Here only the
#   policy term is weighed by rho.
# - The loss is a mean over tokens; in the source it is a sum. To Adam both are the same, without --max_grad_norm.
# - Prompts of more than 1024 tokens are dropped; the source cuts them. 256 questions are held out for evaluation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
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
