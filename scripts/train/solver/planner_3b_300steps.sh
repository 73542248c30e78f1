#!/usr/bin/env bash
# A planner learns to write guidelines, with which a frozen solver solves NuminaMath; 300 steps of 30 prompts x 4.
# Hardware: 1 node of 4 GPUs of 80 GB: 2 learners, 1 engine, 1 solver, as the document says; veRL mixes the first three.
# Source: "Training config reference (full 300-step run)". It has no result, and 4 steps in 3 hours with one call of the
# solver at a time. Here a call is made when its response ends, and many run at a time.
# Differs: `offload` (scripts/train/differences.md). veRL cuts mini-batches of 24 prompts unequally; here 30 make an
# update. The KL is in the loss only; the document's is in the reward too, where a group's deviation makes advantages of
# nothing (both: forks/kl_twice.diff, --kl_in_reward --kl_in_reward_coef 0.001 --force_kl_in_reward). Its 3072 tokens
# bound the planner in veRL; here the solver has as many. Prefill stays chunked. Its cap of 10 epochs is never reached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source scripts/train/start.sh "$@"
# A run whose answers math-verify grades has a directory of its own, so that it never overwrites one graded otherwise.
name=numinamath30k-3b-300steps
if [[ "${VERL_GUIDELINES_USE_MATH_VERIFY:-1}" == 1 ]]; then
    name+=-mathverify
else
    echo "the verifier solver has one grader, math-verify: VERL_GUIDELINES_USE_MATH_VERIFY must be 1 or unset" >&2
    exit 1
fi
# NuminaMath 30k is not published as such: 30,000 rows with a boxed answer, of which 300 are held out. Prompts that are
# too long are dropped and counted; with data.truncation error veRL stops at one.
data=data/numinamath30k
[[ -f $data/eval.jsonl ]] || python scripts/data/competition_math.py \
    --dataset AI-MO/NuminaMath-CoT \
    --rows 30000 \
    --eval_rows 300 \
    --verifier solver \
    --prompt_file scripts/train/solver/planner_prompt.txt \
    --out $data

# As in the source, VERL_GUIDELINES_SOLVER_MODEL names another solver.
python grpo_fast.py \
    --exp_name $name \
    --output_dir checkpoints/query-conditioned-guidelines \
    --model_name_or_path Qwen/Qwen2.5-3B-Instruct \
    --no_dither_master_weights \
    --dataset_mixer_list data/numinamath30k/train.jsonl 1.0 \
    --dataset_mixer_eval_list data/numinamath30k/eval.jsonl 1.0 \
    --num_learners_per_node 2 \
    --vllm_num_engines 1 \
    --vllm_tensor_parallel_size 1 \
    --async_steps 0 \
    --solver_model_name_or_path "${VERL_GUIDELINES_SOLVER_MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
    --solver_num_engines 1 \
    --solver_num_samples 1 \
    --solver_response_length 3072 \
    --num_unique_prompts_rollout 30 \
    --num_samples_per_prompt_rollout 4 \
    --num_mini_batches 1 \
    --num_epochs 1 \
    --max_prompt_token_length 3072 \
    --response_length 3072 \
    --pack_length 12288 \
    --temperature 1.0 \
    --verification_reward 1.0 \
    --advantage_normalization_type standard_unbiased \
    --no_filter_zero_std_samples \
    --no_use_rho_correction \
    --clip_lower 0.2 \
    --clip_higher 0.2 \
    --clip_dual 3.0 \
    --beta 0.001 \
    --kl_estimator 2 \
    --entropy_coef 0.0 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --weight_decay 0.01 \
    --max_grad_norm 1.0 \
    --total_episodes 36000 \
    --deepspeed_stage 3 \
    --gradient_checkpointing \
    --vllm_gpu_memory_utilization 0.4 \
    --seed 1 \
    --local_eval_every 50 \
    --eval_on_step_0 \
    --save_freq -1 \
    --checkpoint_state_freq 25 \
    --keep_last_n_checkpoints -1 \
    "$@"
