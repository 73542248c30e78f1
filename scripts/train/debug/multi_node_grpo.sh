#!/usr/bin/env bash
#SBATCH --job-name=multi_node_grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
# Two nodes under SLURM: the model writes Python programs; 19 steps of 32 prompts x 16. If a node dies, the run waits
# for it to come back and continues from the newest checkpoint (output_dir must be on a disk that both nodes see).
# Hardware: 2 nodes of 8 GPUs of 80 GB: 8 learners and 4 engines of 2 GPUs each.
# Source: open-instruct scripts/train/debug/multi_node_grpo.sh, with no time and no figure.
# Differs: `sandbox` (scripts/train/differences.md). In the source grpo.py has engines of its own.
# Here only grpo_fast.py has. Checkpoints are written to the run's own directory.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
# Where a node's name means 127.0.1.1, for which a run is refused, or nodes have several networks: name the fast one's
# interface (ip -brief address).
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

on_all_nodes grpo_fast.py \
    --exp_name multi_node_grpo \
    --output_dir output \
    --model_name_or_path Qwen/Qwen3-8B \
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
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
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
    --stop_strings "</answer>" \
    --apply_verifiable_reward true \
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
    --checkpoint_state_freq 2 \
    "$@"
