#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
# grpo_fast.py on two nodes of 8 GPUs under SLURM: sbatch scripts/debug/multi_node_grpo.sh
#
# Each node has 4 learners and 4 engine ranks, two for each engine; a node that dies is waited for, and the run goes on
# from the newest checkpoint (output_dir must be on a disk both nodes see). Never run on GPUs by us: two torchrun agents
# on one CPU machine stand for the nodes in tests/test_fast.py. sbatch copies this file, so start it at the repository.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start me with sbatch from the root of the repository}"
source scripts/setup.sh
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc_per_node 8 \
    --max-restarts 3 \
    --rdzv_backend c10d \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 20000))" \
    grpo_fast.py \
    --exp_name multi_node_grpo \
    --output_dir runs \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_mixer_list openai/gsm8k:main 1.0 \
    --dataset_mixer_eval_list openai/gsm8k:main 256 \
    --num_learners_per_node 4 4 \
    --vllm_num_engines 4 \
    --vllm_tensor_parallel_size 2 \
    --async_steps 4 \
    --inflight_updates \
    --num_unique_prompts_rollout 64 \
    --num_samples_per_prompt_rollout 8 \
    --max_prompt_token_length 512 \
    --response_length 1024 \
    --pack_length 8192 \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.001 \
    --total_episodes 102400 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --checkpoint_state_freq 20 \
    --local_eval_every 20 \
    --vllm_enable_prefix_caching \
    "$@"
