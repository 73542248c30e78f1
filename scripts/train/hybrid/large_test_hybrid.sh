#!/usr/bin/env bash
#SBATCH --job-name=large_test_hybrid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# Olmo Hybrid 7B (gated DeltaNet and attention) on code, 19 steps of 32 prompts x 16; beside large_test_non_hybrid.sh.
# Hardware: 2 nodes of 8 GPUs of 80 GB: 8 learners and 4 engines of 2 GPUs each.
# Expected: 24 min, 56.7 s a step, 1,766 learner tokens/s overall, reward 0.66, correct 0.08 (groups kept). The report's
# third run appends --vllm_enforce_eager --exp_name large_test_hybrid_eager: 37 min, 100.3 s, 715 tokens/s, 0.69.
# Source: the report "GRPO Large Test Script"; open-instruct debug/large_test_script_hybrid.sh at 2d4875fa (11c8f303).
# Differs: `checkpoint`, `defaults`, `report`, `sandbox` (scripts/train/differences.md). Each response has
# a row of its own: where responses share a recurrent state, logprobs are 11 to 16 nats off. --sequence_parallel_size 2
# is left out, because a recurrence cannot be split.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"

on_all_nodes grpo_fast.py \
    --exp_name large_test_hybrid \
    --output_dir output \
    --model_name_or_path allenai/Olmo-Hybrid-7B \
    --no_dither_master_weights \
    --dataset_mixer_list \
        saurabh5/rlvr_acecoder_filtered 25376 \
        saurabh5/open-code-reasoning-rlvr-stdio 25376 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list \
        saurabh5/rlvr_acecoder_filtered 8 \
        saurabh5/open-code-reasoning-rlvr-stdio 8 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 \
    --vllm_num_engines 4 \
    --vllm_tensor_parallel_size 2 \
    --async_steps 4 \
    --inflight_updates \
    --advantage_normalization_type standard \
    --clip_higher 0.2 \
    --no_use_rho_correction \
    --active_sampling \
    --num_unique_prompts_rollout 32 \
    --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 4096 \
    --pack_length 20480 \
    --chat_template_name tulu_thinker \
    --add_bos \
    --stop_strings "</answer>" \
    --apply_verifiable_reward true \
    --non_stop_penalty false \
    --temperature 1.0 \
    --learning_rate 5e-7 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --load_ref_policy false \
    --kl_estimator 2 \
    --total_episodes 10000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --seed 1 \
    --local_eval_every 1 \
    --eval_temperature 1.0 \
    --save_freq -1 \
    --checkpoint_state_freq 2 \
    --save_traces \
    "$@"
