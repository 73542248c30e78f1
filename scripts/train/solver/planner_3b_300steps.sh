#!/usr/bin/env bash
# A planner learns to write guidelines. A frozen solver reads them and solves problems of NuminaMath. Both are
# Qwen2.5-3B-Instruct. 300 steps of 30 prompts x 4.
#
# Hardware: 1 node of 4 GPUs of 80 GB: 2 learners, 1 engine, 1 solver.
# Expected: the document has no result. It has about 4 steps in 3 hours, because it made the 120 calls of the solver in
# a step one by one. Here a call is made as soon as its response ends, and many run at a time. We have never run this.
# Source: "Training config reference (full 300-step run)" of the planner/solver project, its run_train.sh on veRL.
#
# Where this differs from the source:
# - The source tells veRL of 3 GPUs and of mini-batches of 24 of the 30 prompts. veRL cuts these unequally: 32 and 8
#   responses a rank, and it scales the second by 1/4. Here all 30 prompts make one update.
# - The source has the KL both in the reward and in the loss, so that it counts twice. In the reward, where groups are
#   divided by their standard deviation, it makes advantages out of nothing. Here the KL is in the loss only. For both,
#   git apply scripts/forks/kl_twice.diff and append --kl_in_reward --kl_in_reward_coef 0.001 --force_kl_in_reward.
# - The document has rollouts on GPU 0 and the actor on GPUs 1 and 2. veRL puts both on all three. This script does what
#   the document says.
# - The document gives 3072 tokens to "planner + solver". In veRL that number bounds the planner alone. Here each has
#   3072.
# - The reference policy is not offloaded, and prefill stays chunked. The solver runs on vLLM's current engine; the
#   source sets VLLM_USE_V1=0.
# - NuminaMath 30k is not published as such. scripts/data/competition_math.py draws 30,000 rows with a boxed answer from
#   AI-MO/NuminaMath-CoT and holds out 300 of them.
# - The source's cap of 10 epochs has no meaning for 9000 prompts of 29,700.
# - With data.truncation error veRL stops at a prompt that is still too long after its filter. Here longer prompts are
#   always dropped, and their number is printed.
# - save_freq 25 is --checkpoint_state_freq 25. A run can go on from these states. python scripts/to_hf.py RUN --step N
#   makes a model of one.
#
# As in the source, VERL_GUIDELINES_SOLVER_MODEL can name another solver. The source's figures are of the model above.
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
data=data/numinamath30k
[[ -f $data/eval.jsonl ]] || python scripts/data/competition_math.py \
    --dataset AI-MO/NuminaMath-CoT \
    --rows 30000 \
    --eval_rows 300 \
    --verifier solver \
    --prompt_file scripts/train/solver/planner_prompt.txt \
    --out $data

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
