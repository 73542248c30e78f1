"""Flags: names, defaults and forms; open-instruct's command lines; refusals with their fix; arithmetic by hand."""

import json
import os
import re
import socket
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import grpo
import grpo_fast
import rewards
import utils
from scripts.parts import checks, launch, plan

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("measured_once")

# The Key Flags table of open-instruct's GRPO page, which both of its scripts share
KEY_FLAGS = """learning_rate=2e-05 lr_scheduler_type=linear per_device_train_batch_size=1 total_episodes=100000
    num_epochs=1 num_mini_batches=1 seed=1 beta=0.05 clip_lower=0.2 clip_higher=0.2 loss_fn=dapo load_ref_policy=True
    num_unique_prompts_rollout=16 num_samples_per_prompt_rollout=4 temperature=0.7 max_prompt_token_length=256
    response_length=256 pack_length=512 async_steps=1 active_sampling=False apply_verifiable_reward=True
    verification_reward=10.0 apply_r1_style_format_reward=False deepspeed_stage=0 sequence_parallel_size=1
    num_learners_per_node=[1] single_gpu_mode=False vllm_num_engines=1 vllm_tensor_parallel_size=1
    vllm_gpu_memory_utilization=0.9 gradient_checkpointing=False chat_template_name=None output_dir=output save_freq=200
    with_tracking=False""".split()
ROOM = ["--vllm_gpu_memory_utilization", "0.5"]  # with a GPU the default 0.9 is refused: the learner is there too


def rows_of(text):
    """The cells of a table of text, a row for each line."""
    return [line.split(" | ") for line in text.strip().splitlines()]


def parse(*argv):
    return utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *argv])


def check(*argv, world_size=1):
    """What a run's flags are asked at its start, but for servers."""
    args = parse(*ROOM, *argv)
    args.check(world_size)
    rewards.configure(args, connect=False)


# --- Names, defaults, help --------------------------------------------------------------------------------------------


@pytest.mark.house
def test_key_flags_have_the_documented_defaults():
    args = parse()
    assert [f"{pair.partition('=')[0]}={getattr(args, pair.partition('=')[0])}" for pair in KEY_FLAGS] == KEY_FLAGS
    assert args.model_name_or_path == "x"


def test_the_model_is_the_only_required_flag():
    check()
    with pytest.raises(utils.UserError, match="--model_name_or_path is required: a hub name or a directory"):
        utils.parse_args(grpo.Args, ROOM).check()


def help_text(capsys, *argv):
    with pytest.raises(SystemExit) as exit_info:
        utils.parse_args(grpo.Args, [*argv])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_help_with_a_word_shows_the_flags_that_have_it(capsys):
    """In their name or in their text, in any case, on however many lines."""
    shown = help_text(capsys, "--exp_name", "x", "--help", "CLIP")
    names = set(re.findall(r"^--(\w+)", shown, re.MULTILINE))
    assert names >= {"clip_lower", "clip_higher", "clip_dual", "loss_fn", "max_grad_norm"}
    assert not names & {"seed", "beta"}
    whole = help_text(capsys, "--help")
    assert all(f"--{flag.name}" in whole for flag in fields(grpo.Args))
    assert "'clop'" in help_text(capsys, "-h", "clop")


# --- Forms ------------------------------------------------------------------------------------------------------------


FORMS = """
--active_sampling | active_sampling | True
--active_sampling=true | active_sampling | True
--active-sampling | active_sampling | True
--active_sampling --no_active_sampling | active_sampling | False
--no-load-ref-policy | load_ref_policy | False
--load_ref_policy false --beta 0 | load_ref_policy | False
--total_episodes 10_000 | total_episodes | 10000
--learning_rate=1e-6 | learning_rate | 1e-06
--loss_denominator 4096 | loss_denominator | '4096'
--exp_name -x | exp_name | '-x'
--num_learners_per_node 4 4 | num_learners_per_node | [4, 4]
--stop_strings true False | stop_strings | ['true', 'False']
--dataset_mixer_list a 1.0 b 20 | dataset_mixer_list | ['a', '1.0', 'b', '20']
"""


@pytest.mark.parametrize("line, name, want", rows_of(FORMS))
def test_forms_of_flags(line, name, want):
    assert repr(getattr(parse(*line.split()), name)) == want


UNKNOWN = "--resume=maybe|--no_resume=true|--loss_fn ppo|--seed x|--betta 1|--no_tols|--learning_rat 1".split("|")


@pytest.mark.parametrize("line", UNKNOWN)
def test_unknown_flags_and_values_are_refused(line, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(*line.split())
    assert exit_info.value.code not in (0, None)
    said = str(exit_info.value.code) + capsys.readouterr().err.replace("-", "_")
    assert any(part in said for part in re.split("[= ]", line.removeprefix("--")))


# --- open-instruct's command lines ------------------------------------------------------------------------------------

LAUNCHES = json.loads((ROOT / "tests/open_instruct.json").read_text())  # its script -> program and flags
ROWS = [line.split("\t") for line in checks.TABLE.read_text().splitlines()[1:]]
FLAGS = {f.name: f for f in fields(grpo.Args)}


@pytest.fixture
def nothing_told(monkeypatch):
    """No judge at hand, and nothing printed yet."""
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "HOSTED_VLLM_API_BASE"):
        monkeypatch.setenv(name, "")
    yield
    rewards.configure(rewards.RewardFlags(), connect=False)


def value_of(text, default):
    """What a flag's text means, by the type of its default; a number where that is None and the text is one."""
    if isinstance(default, bool):
        return {"true": True, "false": False}[text.lower()]
    if isinstance(default, (int, float)) or (default is None and re.fullmatch(r"[\d.]+", text)):
        return float(text.replace("_", ""))
    return text


@pytest.mark.parametrize("script", LAUNCHES)
def test_a_launch_line_of_open_instruct_passes_a_dry_run(script, nothing_told, monkeypatch, capsys):
    """Each flag of ours has the line's value, each other one is told, and nothing asks the network."""
    program, *argv = LAUNCHES[script]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a dry run asks the network"))
    args = utils.parse_args(grpo.Args, [*argv, "--dry_run"])
    {"grpo.py": grpo.main, "grpo_fast.py": grpo_fast.main}[program](args)
    told, _, rest = capsys.readouterr().out.partition("\nstep ")
    assert "\nrun " in rest and f"\nmodel    {args.model_name_or_path}" in rest
    given: dict[str, list[str]] = {}
    for token in argv:
        if token.startswith("--"):
            given[token[2:]] = texts = []
        else:
            texts.append(token)
    assert len(given) >= 25
    for name, texts in given.items():
        if name not in FLAGS or [f"{name}={' '.join(texts)}"] in [row[:1] for row in ROWS]:
            assert re.search(rf" --{name}\b", told), name
            continue
        found = getattr(args, name)
        if isinstance(found, list):
            assert list(map(str, found)) == texts, name
        else:
            assert found == value_of(*texts or ["true"], FLAGS[name].default), name


@pytest.mark.house
def test_the_table_of_other_flags():
    """Every row once, every alias a flag of ours, no flag of ours but with a value."""
    assert len({flag for flag, _, _ in ROWS}) == len(ROWS) > 200
    for flag, kind, _ in ROWS:
        name, _, value = flag.partition("=")
        assert value or name not in FLAGS, f"{name} is a flag of ours: only a value of it can be another's"
        done = checks.translate([f"--{flag}" if value else f"--{flag}=other"], checks.names_of(grpo.Args))
        assert done.others[0][0] == kind and bool(done.line) == (kind == "alias"), flag
        ours = {token.partition("=")[0].removeprefix("--") for token in done.line if token.startswith("--")}
        assert ours <= checks.names_of(grpo.Args), flag


OTHERS = """
--truncated_importance_sampling_ratio_cap 5.0 | rho_clamp_upper_bound | 5.0
--truncated_importance_sampling_ratio_cap=0.0 | use_rho_correction | False
--masked_mean_axis 1 | loss_denominator | 'sequence'
--no_async_mode | async_steps | 0
--add_r1_style_format_reward False | apply_r1_style_format_reward | False
--no_add_r1_style_format_reward | apply_r1_style_format_reward | False
--compile_model | compile_layers | True
--actor_num_gpus_per_node 4 8 | num_learners_per_node | [4, 8]
--activation-memory-budget 0.5 | gradient_checkpointing | True
--fsdp_shard_degree 8 | deepspeed_stage | 3
--attn_implementation flash_2 | attn_implementation | 'flash_attention_2'
--no_try_launch_beaker_eval_jobs --use_peft false --tool_configs {} {} --seed 5 | seed | 5
"""


@pytest.mark.parametrize("line, name, want", rows_of(OTHERS))
def test_other_names_of_our_flags(line, name, want, nothing_told, capsys):
    assert repr(getattr(parse(*line.split()), name)) == want
    first = line.split()[0].partition("=")[0].lstrip("-").replace("-", "_")
    assert (f" --{first}" in capsys.readouterr().out) == (first not in FLAGS or "flash_2" in line)


# What is constant here, in open-instruct's flags: this value of it changes nothing, another one is refused
CONSTANTS = """--llm_judge_temperature 1.0|--code_apply_perf_penalty False|--max_length_verifier_max_length 32768
--pass_tools_to_chat_template True|--only_reward_good_outputs False|--hf_repo_revision main""".replace("\n", "|")


@pytest.mark.parametrize("line", CONSTANTS.split("|"))
def test_a_flag_that_is_a_constant_here(line, nothing_told, capsys):
    name, value = line.split()
    assert parse(name, value) == parse()
    assert re.search(rf"^  (same|ignored) .*{line}", capsys.readouterr().out, re.MULTILINE)
    other = {"True": "false", "False": "true"}.get(value, "7")
    with pytest.raises(utils.UserError, match=f"^{name} {other}: "):
        parse(name, other)


def test_what_became_of_other_flags_is_printed_by_one_rank(nothing_told, monkeypatch, capsys):
    flags = ("--verbose", "--oe_eval_tasks", "a", "b", "--eval_freq", "7")
    parse(*flags)
    told = capsys.readouterr().out
    assert all(text in told for text in ("--eval_freq 7", "--local_eval_every 7", "--oe_eval_tasks a b", "--verbose"))
    monkeypatch.setenv("RANK", "1")
    parse(*flags)
    assert capsys.readouterr().out == ""


def test_the_ranks_of_grpo_fast_print_nothing_again(nothing_told, monkeypatch, capsys):
    """Their command line is the translated one."""
    monkeypatch.setattr(sys, "argv", ["grpo_fast.py", "--model_name_or_path", "x", "--cliprange=0.1", "--verbose"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []
    monkeypatch.setattr(launch, "launch", lambda names, command: started.append((names, command)))
    args = utils.parse_args(grpo.Args)
    assert "--cliprange" in capsys.readouterr().out
    grpo_fast.launch(args)
    ((names, (script, *flags)),) = started
    assert names == ["learner 0", "engine 0"] and Path(script).name == "grpo_fast.py"
    assert utils.parse_args(grpo.Args, flags) == args
    assert capsys.readouterr().out == ""


MISSING = r"""
--use_search_actor --use_peft | --use_search_actor: .*--tools .*; --use_peft: .*--lora_rank
--warm_up_steps 10 | --warm_up_steps 10: .*--warmup_ratio
--mask_tool_use False | ^--mask_tool_use False: answers never have a loss
"""


@pytest.mark.parametrize("line, message", rows_of(MISSING))
def test_a_flag_without_which_a_run_is_another_is_refused(line, message, nothing_told, capsys):
    with pytest.raises(utils.UserError, match=message):
        parse(*line.split())
    assert parse(*line.split(), "--dry_run").dry_run
    assert "\n  missing  " in capsys.readouterr().out


# --- Refusals ---------------------------------------------------------------------------------------------------------

POSITIVE = """num_unique_prompts_rollout num_samples_per_prompt_rollout response_length max_prompt_token_length
    temperature num_mini_batches num_epochs per_device_train_batch_size total_episodes eval_pass_at_k
    ref_policy_update_freq sequence_parallel_size solver_num_samples solver_num_engines
    code_max_execution_time""".split()
NOT_NEGATIVE = """beta clip_higher entropy_coef learning_rate weight_decay max_grad_norm max_logprob_gap async_steps
    rho_clamp_upper_bound rho_mask_lower_bound rho_mask_upper_bound eval_temperature verification_reward
    overlong_buffer_length""".split()
BOUNDS = [(flag, "0", "must be positive") for flag in POSITIVE]
BOUNDS += [(flag, "-1", "must not be negative") for flag in NOT_NEGATIVE]
BOUNDS += [(flag, value, r"must be in \(0, 1\]") for flag in ("alpha", "vllm_top_p") for value in ("0", "1.1")]
BOUNDS += [("clip_lower", value, r"must be in \[0, 1\]") for value in ("-0.1", "1.1")]
BOUNDS += [("seed", value, r"must be in \[0, 2\*\*32\)") for value in ("-1", "4294967296")]
BOUNDS += [("warmup_ratio", value, r"must be in \[0, 1\)") for value in ("-0.1", "1")]
BOUNDS += [("vllm_gpu_memory_utilization", value, r"must be in \(0, 1\)") for value in ("0", "1.0")]
BOUNDS += [("code_max_execution_time", "inf", ".*finite"), ("no_resampling_pass_rate", "1.5", r"must be in \(0, 1\]")]
BOUNDS += [("beta", "nan", "must be a number"), ("code_pass_rate_reward_threshold", "2", r"must be in \[0, 1\]")]


@pytest.mark.parametrize("flag, value, must", BOUNDS)
def test_a_number_beyond_its_bound_is_refused(flag, value, must):
    with pytest.raises(utils.UserError, match=rf"--{flag} {re.escape(value)}(\.0)?: {must}"):
        check(f"--{flag}={value}")


CREDIT = "--turn_credit --tools calculator --advantage_normalization_type centered --no_filter_zero_std_samples"
CENTERED = "--advantage_normalization_type centered"
TEACHER = "--ref_model_name_or_path t"
# flags | what the message holds, in this order: the flags that clash, with their values, and the fix
REFUSALS = rf"""
--pack_length 300 | --pack_length 300 .*--max_prompt_token_length 256 .*--response_length 256.*raise .* 512
--num_samples_per_prompt_rollout 1 --no_filter_zero_std_samples | _rollout 1 .*raise it, .*_type none
--num_samples_per_prompt_rollout 1 --advantage_normalization_type none | _rollout 1 .*--no_filter_zero_std_samples
--num_mini_batches 3 | --num_unique_prompts_rollout 16 on 1 ranks is 16 .*--num_mini_batches 3
--total_episodes 63 | --total_episodes 63 .*--num_unique_prompts_rollout 16 x .*_rollout 4 = 64
--overlong_buffer_length 256 | --overlong_buffer_length 256 must be less than --response_length 256
--beta 0.1 --no_load_ref_policy | --beta 0\.1 .*drop --no_load_ref_policy or set --beta 0
--lora_rank 8 --ref_policy_update_freq 5 | --ref_policy_update_freq 5 .*--lora_rank 8 .*: drop one
--offload reference --ref_policy_update_freq 2 | --ref_policy_update_freq 2 .*--offload reference: drop one
{TEACHER} --beta 0 --no_load_ref_policy | --ref_model_name_or_path t .*: drop --no_load_ref
{TEACHER} --beta 1 | --ref_model_name_or_path t .*: add --no_filter_zero_std_samples
{TEACHER} --no_filter_zero_std_samples --kl_estimator kl1 | kl1 with --ref_model_name_or_path t .*zero.*: take kl2
--clip_dual 1 | --clip_dual 1\.0: must be above 1
--clip_dual 3 --loss_fn gspo | --clip_dual 3\.0: .*--loss_fn dapo; 0 is off
--loss_denominator tokens | --loss_denominator tokens: token, sequence or a positive number
--lr_scheduler_type constant --warmup_ratio 0.1 | --warmup_ratio 0\.1 .* constant warms .*: take constant_with_warmup
--vllm_top_p 0.9 | --vllm_top_p 0\.9 .*--use_rho_correction: set --vllm_top_p 1\.0 or --no_use_rho_correction
--rho_clamp_upper_bound 0.5 | --rho_clamp_upper_bound 0\.5 at least 1, or 0 for off
--rho_clamp_lower_bound 1.5 | --rho_clamp_lower_bound 1\.5 .*at most 1
--rho_clamp_lower_bound 0.5 --no_use_rho_correction | --rho_clamp_lower_bound 0\.5 act through
--rho_mask_tv_divergence --no_use_rho_correction | --rho_mask_\* bounds .*act through
--rho_mask_tv_divergence | --rho_mask_tv_divergence .*--rho_mask_upper_bound 0.0 alone
--rho_mask_tv_divergence --rho_mask_upper_bound 2 --rho_mask_lower_bound 0.1 | --rho_mask_tv_divergence .*alone
--rho_mask_lower_bound 1 | --rho_mask_lower_bound 1\.0 must be below 1
--rho_mask_upper_bound 1 | --rho_mask_upper_bound 1\.0 .*above 1
--turn_credit | --turn_credit needs turns with rewards: add --env_file or --tools
{CREDIT} --advantage_normalization_type standard | --turn_credit .*standard: .*take {CENTERED}
{CREDIT} --filter_zero_std_samples | --turn_credit .*: .*--no_filter_zero_std_samples
{CREDIT} --active_sampling | without --active_sampling|--active_sampling refills
{CREDIT} --kl_in_reward --beta 0.1 | --turn_credit --kl_in_reward: .* KL of turns before it, drop one
--no_apply_verifiable_reward | --no_apply_verifiable_reward without --apply_r1_style_format_reward
--additive_format_reward | --additive_format_reward needs --apply_r1_style_format_reward
--kl_in_reward --beta 0 | --kl_in_reward subtracts beta \* KL: it needs --beta above 0
--kl_in_reward | --kl_in_reward with --advantage_normalization_type standard divides .*force_kl_in_reward
--kl_in_reward --force_kl_in_reward --mask_truncated_completions | --mask_truncated_completions cuts: drop one
--active_sampling --no_filter_zero_std_samples | --active_sampling .*--filter_zero_std_samples.*needs
--sequence_parallel_size 3 | --sequence_parallel_size 3 does not divide the 1 learners: start a multiple of it
--fsdp_shard_size 3 | --fsdp_shard_size 3 does not divide the 1 learners: take a number that does
--num_learners_per_node 2 | --num_learners_per_node 2 but 1 ranks .*: start grpo\.py .* --nproc_per_node=2, or grpo_fast
--llm_judge_model x --llm_judge_base_url http://y --llm_judge_max_tokens 9000 | --llm_judge_max_tokens 9000 .*lower it
--resume --overwrite | --resume .*--overwrite .*give one
--resume --output_dir no_such_directory | --resume: no checkpoint of a run in no_such_directory/grpo
--dump_steps every | --dump_steps every: all, or N for every N-th step
--load_states tests | --load_states tests: no state of step 1, which would be .*global_step_1/actor
--load_batches tests --active_sampling | --load_batches tests: drop .*--active_sampling
--env_file tests/conftest.py --tools calculator | --env_file tests/conftest\.py --tools calculator: .*drop one
--dataset_mixer_list | --dataset_mixer_list is empty
--dataset_mixer_list a 1.0 b 1.0 c 1.0 --dataset_mixer_list_splits train test | _splits: give .* \(3\), got 2
"""


@pytest.mark.parametrize("line, message", rows_of(REFUSALS))
def test_refusals_name_the_flags_and_the_fix(line, message):
    with pytest.raises(utils.UserError) as error:
        check(*line.split())
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


# flags | what a run is refused for, and a plan, perhaps for another machine, tells in the same words
TOLD = r"""
--dataset_mixer_list no_such.jsonl 1.0 | --dataset_mixer_list no_such\.jsonl: no such file
--model_name_or_path tests/nothere | --model_name_or_path tests/nothere: no such directory
--system_prompt_override_file no_such.txt | --system_prompt_override_file no_such\.txt: no such file
--chat_template_name tulo | --chat_template_name tulo: .*take one of .*simple_chat \| tulu
--max_steps 100 | --max_steps 100 .*--tools or --env_file.*--total_episodes
--vllm_tensor_parallel_size 2 | --vllm_tensor_parallel_size 2: .*start grpo_fast\.py
--llm_judge_model m | --llm_judge_model m: needs \$OPENAI_API_KEY, or --llm_judge_base_url
"""


@pytest.mark.parametrize("line, message", rows_of(TOLD))
def test_a_dry_run_tells_what_a_run_is_refused_for(line, message, nothing_told, capsys):
    grpo.main(parse(*ROOM, "--dry_run"))
    assert "refused  " not in capsys.readouterr().out
    with pytest.raises(utils.UserError, match=f"^{message}") as error:
        grpo.main(parse(*ROOM, *line.split()))
    grpo.main(parse(*ROOM, *line.split(), "--dry_run"))
    assert f"refused  {error.value}" in capsys.readouterr().out.splitlines()


OF_RANKS = r"""
--seed 1 | 3 | --num_unique_prompts_rollout 16 is not a multiple of the 3 ranks: take 18
--num_unique_prompts_rollout 4 | 8 | --num_unique_prompts_rollout 4 .* 8 ranks: take 8
--num_mini_batches 8 | 4 | --num_unique_prompts_rollout 16 on 4 ranks is 4 .*--num_mini_batches 8
--sequence_parallel_size 2 --attn_implementation eager | 2 | _size 2 .*eager: only our own
--solver_model_name_or_path s | 2 | --solver_model_name_or_path s: on several nodes .*--solver_base_url
"""


@pytest.mark.parametrize("line, world_size, message", rows_of(OF_RANKS))
def test_refusals_that_depend_on_the_ranks(line, world_size, message):
    with pytest.raises(utils.UserError, match=message):
        check(*line.split(), world_size=int(world_size))


OF_FAST = r"""
--num_learners_per_node 2 --vllm_num_engines 3 | 4 | 4 | _node 2 .*_engines 3 .* = 5 processes, but 4 ranks
--num_learners_per_node 3 1 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 | 8 | 4 | span two nodes
--num_learners_per_node 2 2 | None | 1 | --num_learners_per_node 2 2 is for 2 nodes, but 1 run
--num_learners_per_node 2 --vllm_num_engines 0 | None | 1 | needs? a learner and an engine
--num_learners_per_node 3 --sequence_parallel_size 2 | None | 1 | _size 2 does not divide the 3 learners
--num_learners_per_node 4 --fsdp_shard_size 3 | None | 1 | _size 3 does not divide the 4 learners
--rollout_backend transformers --vllm_tensor_parallel_size 2 | None | 1 | needs --rollout_backend vllm
--load_batches tests | None | 1 | --load_batches tests .*: grpo\.py trains
--deterministic --inflight_updates | None | 1 | --deterministic: timing would decide .*drop one
"""


@pytest.mark.parametrize("line, world, a_node, message", rows_of(OF_FAST))
def test_refusals_of_grpo_fast(line, world, a_node, message):
    with pytest.raises(utils.UserError, match=message):
        grpo_fast.check_fast_args(parse(*line.split()), eval(world), int(a_node))


ALLOWED = """
--num_samples_per_prompt_rollout 1 --advantage_normalization_type none --no_filter_zero_std_samples | 1
--ref_policy_update_freq 1 --alpha 1 | 1
--num_mini_batches 4 | 4
 | 16
--num_learners_per_node 4 4 | 8
--loss_denominator sequence | 1
--vllm_top_p 0.9 --no_use_rho_correction | 1
--rho_clamp_upper_bound 1 | 1
--rho_clamp_upper_bound 0 --rho_mask_lower_bound 0.5 --rho_mask_upper_bound 5 | 1
--no_apply_verifiable_reward --apply_r1_style_format_reward --additive_format_reward | 1
--dataset_mixer_list a 1.0 b 1.0 --dataset_mixer_list_splits train test | 1
--temperature 0.01 --learning_rate 0 --max_grad_norm 0 --max_logprob_gap 0 | 1
"""  # just inside the bounds that the refusals above are just outside of


@pytest.mark.parametrize("line, world_size", rows_of(ALLOWED))
def test_what_is_allowed(line, world_size):
    check(*line.split(), world_size=int(world_size))


def test_an_engine_on_the_learners_gpu_leaves_it_room_in_both_scripts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parse().check(1, fast=True)  # GPUs of its own
    cases = ([], False, 0.8), (["--vllm_sleep", "off"], False, 0.6), (["--single_gpu_mode"], True, 0.6)
    for flags, fast, most in cases:
        with pytest.raises(utils.UserError, match=rf"--vllm_gpu_memory_utilization 0\.9 .*0\.3 to {most}"):
            parse(*flags).check(1, fast=fast)
        parse(*flags).beside_engine(True).check(1, fast=fast)
        parse(*flags, "--vllm_gpu_memory_utilization", str(most)).check(1, fast=fast)


# --- Arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("episodes, steps", [(64, 1), (127, 1), (128, 2), (100_000, 1562)])
def test_steps_are_whole_batches(episodes, steps):  # 16 x 4 = 64 a step; 1562 x 64 = 99 968
    assert grpo.num_training_steps(grpo.Args(total_episodes=episodes)) == steps


def test_describe_by_hand():
    line = "--num_unique_prompts_rollout 24 --num_samples_per_prompt_rollout 8 --max_prompt_token_length 100 "
    line += "--response_length 400 --num_mini_batches 3 --num_epochs 2 --pack_length 700 --total_episodes 2000"
    text = plan.arithmetic(parse(*line.split()), 4)
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)]
    assert numbers == [
        *(24, 8, 192, 96_000),  # 24 x 8 rollouts; x 500 tokens
        *(4, 6, 48),  # ranks; 24 / 4 prompts; x 8 rollouts
        *(2, 3, 6, 64, 700),  # epochs x mini-batches = optimizer steps; of 192 / 3 rollouts; tokens of a pack
        *(2000, 192, 10, 60),  # 2000 // 192 steps, x 6
    ]


# --- The script -------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_the_disk_must_hold(tmp_path, monkeypatch):
    """A matrix of 100 x 50 and 50 biases: 5050 weights. 64 rollouts a step, 10 steps."""
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(100, 50), "a.bias": torch.zeros(50)}, tmp_path / "model.safetensors")
    base = f"--model_name_or_path {tmp_path} --output_dir {tmp_path / 'no'} --total_episodes 640 --save_freq -1 "

    def estimate(flags):
        args = parse(*(base + flags).split())
        return plan.disk_bytes(args, plan.weight_shapes(str(tmp_path)))

    assert estimate("") == {"model": 2 * 5050}
    assert estimate("--model_dtype float32 --save_freq 4") == {"model": 4 * 5050, "2 of steps": 2 * 4 * 5050}
    assert estimate("--checkpoint_state_freq 2")["4 checkpoints"] == 4 * 12 * 5050  # 3 and the one that is written
    assert estimate("--checkpoint_state_freq 2 --keep_last_n_checkpoints -1")["5 checkpoints"] == 5 * 12 * 5050
    assert estimate("--checkpoint_state_freq 5 --ref_policy_update_freq 1")["2 checkpoints"] == 2 * 16 * 5050
    adapters = 2 * (100 + 50)
    assert estimate("--lora_rank 2 --checkpoint_state_freq 9")["1 checkpoints"] == 12 * adapters
    assert estimate("--lora_rank 2 --lora_merge") == {"model": 4 * adapters + 2 * 5050}
    assert "the disk may get full" not in plan.disk_text(parse(*base.split()))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10_000))
    assert "the disk may get full" in plan.disk_text(parse(*base.split()))


def test_dry_run_prints_arithmetic_and_sources_and_loads_nothing(tmp_path, capsys):
    data = tmp_path / "mine.jsonl"
    data.write_text("this is not even JSON\n")
    line = f"--dry_run --model_name_or_path nobody/no-such-model --output_dir {tmp_path / 'out'} --dataset_mixer_list"
    line += f" {data} 1.0 nobody/no-such-data 10 reasoning_gym:chain_sum 5 /nowhere/rows 1.0"
    assert grpo.main(parse(*ROOM, *line.split())) is None
    told = capsys.readouterr().out
    assert plan.arithmetic(grpo.Args(model_name_or_path="x"), 1) in told
    sources = dict(re.findall(r"^(?:model   |data     --dataset_mixer_list) (\S+).*: (.*)$", told, re.MULTILINE))
    wheres = sources["nobody/no-such-model"], sources[str(data)], sources["nobody/no-such-data"]
    assert wheres == ("hub", "local", "hub")
    assert (sources["reasoning_gym:chain_sum"], sources["/nowhere/rows"]) == ("generated", "not here")
    assert not (tmp_path / "out").exists()


@pytest.mark.house
def test_flags_are_checked_without_what_only_a_run_needs():
    """What makes --help, --dry_run and every refusal slow, were it imported at the top of a file."""
    heavy = "datasets numpy.testing openai rich sympy torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp"
    heavy += " torch.distributed.tensor transformers vllm wandb"
    code = "import sys, grpo_fast, utils\nfrom grpo import Args\n"
    code += "utils.parse_args(Args, ['--model_name_or_path', 'x', *sys.argv[1:]]).check()\n"
    code += f"print(sorted(set({heavy.split()}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *ROOM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_a_refused_flag_is_one_line_without_traceback():
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "grpo.py", *ROOM, "--beta", "0.1", "--no_load_ref_policy", "--model_name_or_path", "x"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert re.fullmatch(r"grpo\.py: --beta 0\.1 needs .*--no_load_ref_policy.*\n", done.stderr)


def test_ranks_of_torchrun_are_checked(monkeypatch):
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(utils.UserError, match="--num_unique_prompts_rollout 16 is not a multiple of the 3 ranks"):
        grpo.main(parse(*ROOM))
