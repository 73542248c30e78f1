#!/usr/bin/env bash
#SBATCH --job-name=full_integration_test
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=2-00:00:00
# Many kinds of rewards at once on two nodes: code, math, instruction following, word overlap and, in the evaluation, a
# judge; 39 steps of 32 prompts x 8.
#
# Hardware: 2 nodes of 8 GPUs of 80 GB: 8 learners and 8 engines.
#   sbatch scripts/train/debug/full_integration_test.sh
# Expected: the source gives no time and no figure. We have never run this.
# Source: open-instruct scripts/train/debug/full_integration_test.sh.
#
# Where this differs from the source:
# - The source's model is a Qwen 7B trained on Tulu data, which was not published. Qwen/Qwen2.5-7B-Instruct stands for
#   it.
# - In the source a comment in the middle of the command ends the command: bash would start it without a model. This
#   script uses the whole command.
# - The tests of generated code run on the learners' machines, in the sandbox of scripts/parts/sandbox.py. In the source
#   they run on a hosted server.
#
# Start the judge yourself, on GPUs that this run does not use: `vllm serve Qwen/Qwen3-32B --max-model-len 32768`. Then
# export OPENAI_BASE_URL=http://HOST:8000/v1.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../../..}"
source scripts/train/start.sh "$@"
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
((dry_run)) || : "${OPENAI_BASE_URL:?export the address of the judge, see above}"

srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc_per_node 8 \
    --max-restarts 3 \
    --rdzv_backend c10d \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 20000))" \
    grpo_fast.py \
    --exp_name full_integration_test \
    --output_dir output \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_mixer_list \
        hamishivi/omega-combined 63033 \
        allenai/IF_multi_constraints_upto5 63033 \
        saurabh5/rlvr_acecoder_filtered 63033 \
        hamishivi/tulu_3_rewritten_400k_string_f1_only_v2_nocode_all_filtered_qwen2_5_openthoughts2 63033 \
    --dataset_mixer_list_splits train \
    --dataset_mixer_eval_list \
        hamishivi/omega-combined 8 \
        allenai/IF_multi_constraints_upto5 8 \
        saurabh5/rlvr_acecoder_filtered 8 \
        hamishivi/tulu_3_rewritten_400k_string_f1_only_v2_nocode_all_filtered_qwen2_5_openthoughts2 4 \
        hamishivi/virtuoussy_multi_subject_rlvr 4 \
    --dataset_mixer_eval_list_splits train \
    --num_learners_per_node 8 \
    --vllm_num_engines 8 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 8 \
    --inflight_updates \
    --advantage_normalization_type centered \
    --clip_higher 0.272 \
    --num_unique_prompts_rollout 32 \
    --num_samples_per_prompt_rollout 8 \
    --num_mini_batches 4 \
    --num_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_prompt_token_length 2048 \
    --response_length 8192 \
    --pack_length 12384 \
    --chat_template_name tulu_thinker \
    --stop_strings "</answer>" \
    --apply_verifiable_reward true \
    --llm_judge_model Qwen/Qwen3-32B \
    --llm_judge_timeout 600 \
    --llm_judge_max_tokens 2048 \
    --llm_judge_max_context_length 131072 \
    --temperature 1.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --beta 0.0 \
    --kl_estimator 2 \
    --total_episodes 10000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_enable_prefix_caching \
    --seed 1 \
    --local_eval_every 100 \
    --eval_temperature 1.0 \
    --save_freq 100 \
    "$@"
