#!/usr/bin/env bash
#SBATCH --job-name=7b_instruct_rl
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# Olmo 3 7B Instruct: code, math, instruction following and general questions; 2000 steps of 64 prompts x 8.
# Hardware: 8 nodes of 8 GPUs of 80 GB: 8 learners and 56 engines.
# Source: open-instruct scripts/train/olmo3/7b_instruct_rl.sh and docs/algorithms/grpo.md; no time and no figure.
# Differs: `checkpoint`, `judge`, `mix`, `reference`, `sandbox` (scripts/train/differences.md).
# The source sets its mix in nonreasoner_math_mix_decon and reads another variable, which is empty: as written it trains
# on nothing. Here it is the mix that was set.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
((dry_run)) || : "${OPENAI_BASE_URL:?export the address of the judge: scripts/train/differences.md}"

on_all_nodes grpo_fast.py \
    --exp_name olmo3_7b_instruct_rl \
    --output_dir output \
    --model_name_or_path allenai/Olmo-3-7B-Instruct-DPO \
    --no_dither_master_weights \
    --dataset_mixer_list \
        hamishivi/rlvr_acecoder_filtered_filtered 20000 \
        hamishivi/omega-combined-no-boxed_filtered 20000 \
        hamishivi/rlvr_orz_math_57k_collected_filtered 14000 \
        hamishivi/polaris_53k 14000 \
        hamishivi/MathSub-30K_filtered 9000 \
        hamishivi/DAPO-Math-17k-Processed_filtered 7000 \
        allenai/IF_multi_constraints_upto5_filtered_dpo_0625_filter-keyword-filtered-topic-char-topic-filtered 38000 \
        allenai/rlvr_general_mix-keyword-filtered-topic-chars-char-filt-topic-filtered 50000 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list \
        hamishivi/omega-combined 4 \
        allenai/IF_multi_constraints_upto5 4 \
        saurabh5/rlvr_acecoder_filtered 4 \
        hamishivi/tulu_3_rewritten_400k_string_f1_only_v2_nocode_all_filtered_qwen2_5_openthoughts2 4 \
        hamishivi/virtuoussy_multi_subject_rlvr 4 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 \
    --vllm_num_engines 56 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 8 \
    --inflight_updates \
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
    --active_sampling \
    --no_resampling_pass_rate 0.875 \
    --num_unique_prompts_rollout 64 \
    --num_samples_per_prompt_rollout 8 \
    --num_mini_batches 4 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 8192 \
    --pack_length 11264 \
    --stop_strings "</answer>" \
    --apply_verifiable_reward true \
    --code_pass_rate_reward_threshold 0.99 \
    --llm_judge_model Qwen/Qwen3-32B \
    --llm_judge_timeout 600 \
    --llm_judge_max_tokens 2048 \
    --llm_judge_max_context_length 32768 \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 1024000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --seed 1 \
    --vllm_enable_prefix_caching \
    --local_eval_every 50 \
    --eval_temperature 1.0 \
    --save_freq 50 \
    --checkpoint_state_freq 50 \
    "$@"
