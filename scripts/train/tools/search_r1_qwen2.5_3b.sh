#!/usr/bin/env bash
# Qwen2.5-3B learns to ask a search engine: questions of Natural Questions, at most 2 searches; 1005 steps of 512 x 5.
#
# Hardware: 1 node of 8 GPUs of 80 GB, each with a learner and an engine that take turns. A retriever must run at
# RETRIEVER_URL: Search-R1's over Wikipedia, or any with its protocol (scripts/tools/search.py).
# Expected: the source gives no figure. The paper (arXiv:2503.09516) has tables. We have never run this.
# Source: Search-R1's train_grpo.sh, for Qwen/Qwen2.5-3B.
#
# Where this differs from the source:
# - In the source a turn has at most 500 tokens, and so has an answer. Here both share the 2500 of --response_length,
#   and an answer is cut at half of what is left.
# - In the source an answer stands in <information> tags within the policy's turn. Here it is a message of its own.
# - The source's offloading to the CPU (param_offload and others) has no counterpart here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
retriever="{\"top_k\": 3, \"url\": \"${RETRIEVER_URL:-http://127.0.0.1:8000/retrieve}\"}"
data=data/nq_search
[[ -f $data/test.jsonl ]] || python scripts/data/nq_search.py --out $data

torchrun --standalone --nproc_per_node 8 grpo.py \
    --exp_name search_r1_qwen2.5_3b \
    --output_dir output \
    --model_name_or_path Qwen/Qwen2.5-3B \
    --no_dither_master_weights \
    --dataset_mixer_list data/nq_search/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/nq_search/test.jsonl 256 \
    --tools search \
    --tool_configs "$retriever" \
    --tool_parser_type legacy \
    --max_steps 2 \
    --per_turn_max_tokens 500 \
    --num_unique_prompts_rollout 512 \
    --num_samples_per_prompt_rollout 5 \
    --num_mini_batches 2 \
    --num_epochs 1 \
    --max_prompt_token_length 2048 \
    --response_length 2500 \
    --pack_length 16384 \
    --temperature 1.0 \
    --vllm_top_p 1.0 \
    --verification_reward 1.0 \
    --advantage_normalization_type standard_unbiased \
    --no_filter_zero_std_samples \
    --no_use_rho_correction \
    --loss_denominator token \
    --clip_lower 0.2 \
    --clip_higher 0.2 \
    --beta 0.001 \
    --kl_estimator 2 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant_with_warmup \
    --warmup_ratio 0.285 \
    --total_episodes 2572800 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --vllm_gpu_memory_utilization 0.4 \
    --seed 1 \
    --local_eval_every 50 \
    --eval_on_step_0 \
    --save_freq 100 \
    "$@"
