#!/usr/bin/env bash
# On-policy distillation on one device: SmolLM2-135M-Instruct with noise in its weights learns from the original.
# Hardware: 1 GPU, or 2 CPU cores and 9 GiB of memory, where a step takes half a minute.
# Expected: in 20 steps the KL per token falls from 0.39 to 0.06; of 320 sampled answers to 20 held-out sums 0.45 are
# right before and 0.53 after (teacher: 0.48).
# Source: GKD, arXiv:2306.13649, and Thinking Machines, "On-Policy Distillation".
# Differs: `kl` (scripts/train/differences.md). The student is the teacher with 5.5 % of noise, so no hub is needed.
# Both sample at temperature 0.5: at 1, the sources', a model of 135M answers a sum with almost anything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
python scripts/data/get_smollm2.py
python scripts/data/make_addition.py
python scripts/data/disturb.py models/SmolLM2-135M-Instruct models/disturbed --noise 0.055

python grpo.py \
    --exp_name debug_distill \
    --output_dir runs \
    --overwrite \
    --model_name_or_path models/disturbed \
    --ref_model_name_or_path models/SmolLM2-135M-Instruct \
    --beta 1 \
    --kl_estimator kl2 \
    --verification_reward 0 \
    --no_filter_zero_std_samples \
    --dataset_mixer_list data/addition/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/addition/eval.jsonl 1.0 \
    --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 4 \
    --max_prompt_token_length 64 \
    --response_length 16 \
    --pack_length 1024 \
    --temperature 0.5 \
    --learning_rate 3e-5 \
    --lr_scheduler_type linear \
    --total_episodes 5120 \
    --local_eval_every 10 \
    --eval_on_step_0 \
    --eval_pass_at_k 16 \
    --save_freq -1 \
    --vllm_enforce_eager \
    --vllm_gpu_memory_utilization 0.4 \
    "$@"
