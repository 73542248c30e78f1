"""What each metric of metrics.jsonl means, and what is healthy. The page of a run shows the same under the pointer.

    python scripts/reports/metrics.py [WORD ...]

prints the metrics whose name or definition has all words, every metric without one. NAME stands for a verifier, a tool,
an environment or its file; `_min` and `_max` of a metric are its least and most. `objective_kept/...` has the rewards
and rates over the groups kept: those with a gradient, or all with --no_filter_zero_std_samples. `eval/...` has the same
metrics over the evaluation prompts, those of val/ and objective/ mostly without that word: `eval/scores`.
"""

import re
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports.common import parser

DEFINITIONS = {
    # score and reward
    "objective/scores": "mean final score of all sampled rollouts. Healthy: rises",
    "objective/scores_mean": "the same as objective/scores",
    "objective/reward_std": "standard deviation of the final score",
    "objective/NAME_correct_rate": "share with a score above 0; verifiable: of all verifiers. Healthy: rises",
    "objective/NAME_reward": "mean score x verification_reward; verifiable: of all verifiers together. Healthy: rises",
    "objective/NAME_solve_rate": "share of rollouts with the full score of the verifier. Healthy: rises",
    "objective/solve_rate": "share of rollouts with the full score of all verifiers. Healthy: rises",
    "objective/audit_refused_rate": "share of the rewarded rollouts to which --audit_verifier gives 0. "
    "Healthy: does not rise",
    "objective/overlong_penalty": "mean taken off the score by --overlong_buffer_length",
    "objective/kl_in_reward": "mean taken off the score by --kl_in_reward",
    "objective/non_score_reward": "beta x objective/kl",
    "objective/rlhf_reward": "score minus beta x objective/kl",
    "val/format_scores": "mean format reward. Healthy: rises",
    "val/advantages": "advantages of the rollouts trained on, with --kl_in_reward after the KL. Of a rollout with "
    "one a token (some forks) the mean over its tokens, an environment's included. Healthy: mean near 0",
    # verifications
    "reward/NAME_ok": "verifications that gave a score, a count",
    "reward/NAME_no_answer": "verifications that found nothing to score, a count",
    "reward/NAME_timeout": "verifications that took too long, a count. Healthy: 0",
    "reward/NAME_crash": "verifications that crashed, a count. Healthy: 0",
    "reward/NAME_infra_error": "verifications that a server or a machine failed, a count. Healthy: 0",
    "reward/code_unsupported": "tests of a response that failed because they ask for what they cannot see of the "
    "program: the class of a result, a property of an exception, a name that it shares with Python. Healthy: 0",
    "reward/NAME_tokens": "solver: tokens of a solution",
    "reward/NAME_truncated": "solver: share of the solutions that were cut at their limit",
    "reward/NAME_tries": "judge: requests per verdict",
    "time/reward_NAME_p50": "median seconds of a verification, without waiting for a free worker",
    "time/reward_NAME_p99": "99th percentile of the seconds of a verification, without waiting for a free worker",
    "objective/reward_no_answer_rate": "share of verifications that found nothing to score, which is 0. Healthy: falls",
    "objective/reward_timeout_rate": "share of verifications that took too long: no verdict. Healthy: 0",
    "objective/reward_crash_rate": "share of verifications that crashed: no verdict. Healthy: 0",
    "objective/reward_infra_error_rate": "share of verifications that a server or a machine failed. Healthy: 0",
    "batch/missing_rewards": "rollouts left out because they have no verdict. Healthy: 0",
    # KL and entropy
    "objective/kl": "KL to the reference policy per response, estimator k1, mean over responses. Healthy: grows slowly",
    "objective/kl2": "the same by estimator k2",
    "objective/kl3": "the same by estimator k3",
    "objective/kl0_avg": "KL to the reference policy per token, estimator k1",
    "objective/kl1_avg": "KL to the reference policy per token, estimator k2",
    "objective/kl2_avg": "KL to the reference policy per token, estimator k3. Healthy: < 0.1 with beta > 0",
    "objective/kl3_avg": "KL to the reference policy per token, k1 with importance weights",
    "objective/entropy": "-log probability of a response, mean over responses. Healthy: falls, not to 0",
    "policy/entropy_avg": "entropy of the next-token distribution, mean over tokens. Healthy: falls, not to 0",
    # loss and optimizer
    "loss/policy_avg": "policy part of the loss, mean over optimizer steps. Healthy: near 0",
    "loss/kl_avg": "KL part of the loss, mean over optimizer steps",
    "loss/entropy_avg": "entropy part of the loss, mean over optimizer steps",
    "loss/total_avg": "the loss, mean over optimizer steps",
    "objective/loss": "the same as loss/total_avg",
    "policy/clipfrac_avg": "share of trained tokens at which the clip acted. Healthy: < 0.1, 0 with one update a step",
    "policy/clipfrac_lower_avg": "share of trained tokens that --clip_dual bounded. Healthy: 0 with one update a step",
    "policy/approxkl_avg": "mean of (new - old logprob)^2 / 2. Healthy: 0 with one update a step",
    "policy/ppo_kl_avg": "old - new logprob, mean over the trained tokens. Healthy: 0 with one update a step",
    "val/ratio": "mean of the probability ratio new/old. Healthy: 1 with one update a step",
    "val/ratio_var": "variance of the probability ratio new/old. Healthy: 0 with one update a step",
    "lr": "learning rate",
    "optim/grad_norm": "norm of the gradient before clipping. Healthy: stable",
    "optim/nonfinite_updates": "optimizer steps skipped for NaN or infinity. Healthy: 0",
    "optim/skipped_steps": "1 when no group had a gradient, else 0. Healthy: 0",
    "optim/loss_scale": "with --model_dtype float16: scale of the loss. Healthy: 65536",
    "optim/overflowed_updates": "with --model_dtype float16: optimizer steps skipped because a gradient times the "
    "scale was beyond float16, which halves it. Healthy: 0, or 1 in 1,000",
    # learner against engine
    "debug/vllm_vs_local_logprob_diff_mean": "|learner - engine logprob| of the sampled tokens, mean. "
    "Healthy: float32 < 5e-5, bfloat16 < 0.05",
    "debug/vllm_vs_local_logprob_diff_max": "|learner - engine logprob| of the sampled tokens, largest",
    "debug/vllm_vs_local_logprob_diff_std": "|learner - engine logprob| of the sampled tokens, standard deviation",
    "debug/vllm_local_reverse_kl": "KL(engine, learner), estimator k3. Healthy: < 0.01",
    "val/rho": "mean probability ratio learner/engine. Healthy: 1 within 3 standard errors",
    "val/rho_se": "standard error of val/rho",
    "val/rho_weight": "importance weight used, mean. Healthy: 1",
    "val/rho_clipfrac": "share of the importance weights that were truncated. Healthy: 0",
    "val/rho_drop_frac": "share of the tokens that were dropped for their ratio. Healthy: 0",
    "val/num_steps_off_policy": "grpo_fast.py: age in updates of the weights that sampled. Healthy: <= async_steps",
    "val/model_step": "grpo_fast.py: version of the weights that sampled",
    # groups
    "batch/total_prompts": "groups sampled",
    "batch/filtered_prompts": "groups whose scores are all equal",
    "batch/filtered_prompts_zero": "groups whose scores are all 0",
    "batch/filtered_prompts_solved": "groups whose scores are all the maximum",
    "batch/filtered_prompts_nonzero": "groups whose scores are all equal and neither 0 nor the maximum",
    "val/total_reward_groups": "groups with a gradient",
    "batch/groups_started": "grpo_fast.py: groups since the start: the next four together, or the run stops",
    "batch/groups_trained": "grpo_fast.py: groups trained on since the start",
    "batch/groups_filtered": "grpo_fast.py: groups left out since the start",
    "batch/groups_expired": "grpo_fast.py, active_sampling: groups since the start that became too old. Healthy: few",
    "val/expired_tokens": "grpo_fast.py: tokens of the groups that became too old in this step",
    "batch/groups_in_flight": "grpo_fast.py: groups under way. Healthy: <= groups a step x (async_steps + 1)",
    "val/num_excluded_prompts": "prompts no longer sampled because of no_resampling_pass_rate",
    "other/real_batch_size_ratio": "rollouts trained on / rollouts sampled. Healthy: > 0.3",
    "other/packed_ratio": "packs / responses trained on. Healthy: low",
    # lengths and turns
    "val/sequence_lengths": "response tokens",
    "val/sequence_lengths_solved": "response tokens of the rollouts with a score above 0",
    "val/sequence_lengths_unsolved": "response tokens of the other rollouts",
    "val/prompt_lengths": "prompt tokens of the sampled rollouts",
    "val/stop_rate": "share of responses that ended by themselves. Healthy: near 1",
    "val/stop_token_rate": "the same as val/stop_rate",
    "val/num_stop_token_ids": "number of responses that ended by themselves",
    "val/turns": "turns of the policy in a rollout with an environment",
    "val/policy_tokens": "tokens of a rollout with an environment that the policy wrote",
    "val/environment_tokens": "tokens of a rollout with an environment that the environment wrote",
    "val/answers_cut": "share of the environment's answers cut for --response_length. Healthy: 0",
    "val/prefix_cached_share": "share of the tokens asked by turns that the prefix cache had. Healthy: high",
    "tools/NAME/avg_calls_per_rollout": "calls of the tool in a rollout with turns; aggregate: of all tools",
    "tools/NAME/failure_rate": "share of the tool's calls that failed; aggregate: of all tools. NAME is an "
    "environment's file for answers that took too long or crashed. Healthy: falls",
    "tools/NAME/avg_runtime": "seconds of a call of the tool; aggregate: of all tools",
    "env/NAME/reward": "the environment's rewards in a rollout",
    "env/NAME/timeout_rate": "share of the environment's answers that took too long. Healthy: 0",
    "env/NAME/crash_rate": "share of the environment's answers that crashed. Healthy: 0",
    "env/NAME/infra_error_rate": "share of the environment's answers that a server or a machine failed. Healthy: 0",
    "env/NAME/NAME": "the environment's own metric: its last value in a rollout, 0 in one without it once any had one",
    # evaluation
    "eval/pass_at_NAME": "share of the evaluation prompts with a right response among the first NAME",
    "eval/pass_at_NAME_unbiased": "unbiased estimate of the share of prompts with a right response among NAME",
    "eval/num_prompts": "number of evaluation prompts",
    # seconds
    "time/generation": "seconds of sampling; grpo_fast.py: of decoding beside the rest, mean of the engines",
    "time/reward": "seconds for which scores were waited for after the sampling",
    "time/training": "seconds of the update",
    "time/ref_logprobs": "seconds of time/training in a forward of the reference policy",
    "time/old_logprobs": "seconds of time/training in a forward for the old logprobs",
    "time/eval": "seconds of an evaluation",
    "time/saving": "seconds of saving a model",
    "time/total": "seconds of a step without evaluation and saving",
    "time/from_scratch": "seconds since the start of the program",
    "time/packing": "grpo_fast.py: seconds of packing",
    "time/gather": "grpo_fast.py: seconds for which the learner waited for its weights to be gathered",
    "time/trainer_waiting_for_data": "grpo_fast.py: seconds in which the learner had no data",
    "time/generation_waiting_for_trainer": "grpo_fast.py: seconds in which the engines had no prompts",
    "time/group_generation_mean": "grpo_fast.py: mean seconds from a group's start to its last token",
    "time/group_generation_min": "grpo_fast.py: least seconds from a group's start to its last token",
    "time/group_generation_max": "grpo_fast.py: most seconds from a group's start to its last token",
    "time/weight_sync": "seconds that new weights took into the engine; grpo_fast.py: of the last broadcast that ended",
    "time/weight_sync_wire": "seconds of time/weight_sync on the wire",
    "time/weight_sync_load": "seconds of time/weight_sync in vLLM's loading",
    "time/weight_sync_pause": "seconds in which engines paused. Healthy: near time/weight_sync_floor + _load",
    "time/weight_sync_floor": "seconds of a memory copy of the weights' bytes",
    "val/weight_sync_bytes": "grpo_fast.py: bytes of the last broadcast that ended",
    "val/weight_sync_gb_per_second": "grpo_fast.py: GB a second of the last broadcast that ended",
    "val/weight_sync_version": "grpo_fast.py: version of the weights of the last broadcast that ended",
    "val/learner_idle_share": "grpo_fast.py: share of time/total in which the learner waited for data",
    "val/engine_idle_share": "grpo_fast.py: share in which engines waited. Healthy: it or val/learner_idle_share low",
    # tokens and speed
    "val/num_step_tokens": "response tokens of the groups kept and each prompt once, as open-instruct counts",
    "val/num_total_tokens": "val/num_step_tokens of all earlier steps",
    "learner_tokens_per_second_step": "val/num_step_tokens per second of time/total",
    "learner_tokens_per_second_overall": "val/num_total_tokens per second since the loop began, evaluations in it",
    "val/actor_tokens_per_second": "val/num_step_tokens per second of the longest group; grpo.py: of generation",
    "val/num_sampled_tokens": "prompt and response tokens of all sampled rollouts",
    "val/response_tokens_per_second": "all response tokens per second of generation; grpo_fast.py: of time/total",
    "val/num_learner_tokens": "tokens in the packs, a shared prompt once",
    "val/learner_tokens": "tokens in the packs of a rank. Healthy: even over ranks in grpo_fast.py",
    "val/engine_tokens_per_second": "grpo_fast.py: response tokens per second of an engine's decoding",
    "val/engine_pause_seconds": "grpo_fast.py: seconds of loading weights of an engine in the step",
    "val/engine_bandwidth_share": "grpo_fast.py: bytes of weights that decoding read, against a memory copy",
    "learner_mfu": "operations of the update (2 per weight and token of a forward, twice that backward, attention, "
    "reference and old logprobs) / time/training / the product of matrices measured at the start. Healthy: > 0.4",
    # memory
    "memory/gpu_allocated_gib": "GiB of a GPU that torch's tensors took since the start, most of any learner",
    "memory/gpu_reserved_gib": "GiB of a GPU that torch's allocator held since the start, most of any learner",
    "memory/process_peak_gib": "GiB that a rank's process held since the start, most of any learner",
    "memory/host_used_gib": "GiB of a machine in use by anybody, most of any learner's machine",
    # progress
    "training_step": "steps so far",
    "episode": "prompts x samples of a batch, summed over steps",
    "epoch": "passes over the prompts so far. Healthy: rises at every step",
}


def known_name(metric: str) -> str | None:
    """The name in DEFINITIONS of a metric: its own, else that of its family, which has NAME in it. None without one."""
    if metric in DEFINITIONS:
        return metric
    families = [name for name in DEFINITIONS if "NAME" in name]
    families.sort(key=len, reverse=True)  # eval/pass_at_NAME_unbiased before eval/pass_at_NAME
    return next((name for name in families if re.fullmatch(name.replace("NAME", r"[\w-]+"), metric)), None)


def define(metric: str) -> str | None:
    """What a metric means, None without a definition."""
    name = known_name(metric)
    if name:
        return DEFINITIONS[name]
    if metric.startswith("eval/"):
        rest = metric.removeprefix("eval/")
        found = define(rest) or define(f"val/{rest}") or define(f"objective/{rest}")
        return f"evaluation prompts: {found}" if found else None
    if metric.startswith("objective_kept/"):
        found = define(metric.replace("objective_kept/", "objective/"))
        return f"groups kept: {found}" if found else None
    for suffix, word in (("_min", "least"), ("_max", "most")):
        found = define(metric.removesuffix(suffix)) if metric.endswith(suffix) else None
        if found:
            return f"{word} of: {found.partition('. Healthy')[0]}"
    return None


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("words", nargs="*", metavar="WORD")
    words = flags.parse_args().words
    lines = [f"{name}: {definition}" for name, definition in DEFINITIONS.items()]
    found = [line for line in lines if all(word in line for word in words)]
    if not found:
        raise SystemExit(f"metrics.py: no metric has {' and '.join(words)} in its name or definition")
    print("\n".join(found))


if __name__ == "__main__":
    main()
