"""Flags: names and defaults of open-instruct's table, the forms they take, and every refusal with its fix."""

import ast
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import types
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import grpo
import grpo_fast
import rewards
import utils
from scripts.parts import launch, outlook, plan, translate

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("measured_once")

KEY_FLAGS = {  # the Key Flags table of open-instruct's GRPO page, which both of its scripts share
    "learning_rate": 2e-5,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 1,
    "total_episodes": 100000,
    "num_epochs": 1,
    "num_mini_batches": 1,
    "seed": 1,
    "beta": 0.05,
    "clip_lower": 0.2,
    "clip_higher": 0.2,
    "loss_fn": "dapo",
    "load_ref_policy": True,
    "num_unique_prompts_rollout": 16,
    "num_samples_per_prompt_rollout": 4,
    "temperature": 0.7,
    "max_prompt_token_length": 256,
    "response_length": 256,
    "pack_length": 512,
    "async_steps": 1,
    "active_sampling": False,
    "apply_verifiable_reward": True,
    "verification_reward": 10.0,
    "apply_r1_style_format_reward": False,
    "deepspeed_stage": 0,
    "sequence_parallel_size": 1,
    "num_learners_per_node": [1],
    "single_gpu_mode": False,
    "vllm_num_engines": 1,
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.9,
    "gradient_checkpointing": False,
    "chat_template_name": None,
    "output_dir": "output",
    "save_freq": 200,
    "with_tracking": False,
}
ROOM = ["--vllm_gpu_memory_utilization", "0.5"]  # with a GPU the default 0.9 is refused: the learner is there too


def parse(*argv):
    return utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *argv])


def check(*argv, world_size=1):
    parse(*ROOM, *argv).check(world_size)


def run_script(*argv):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "grpo.py", *ROOM, *argv]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


# ---------------------------------------------------------------------------------------------------------------------
# Names, defaults, help
# ---------------------------------------------------------------------------------------------------------------------


def test_key_flags_have_the_documented_defaults():
    args = parse()
    assert {name: getattr(args, name) for name in KEY_FLAGS} == KEY_FLAGS
    assert args.model_name_or_path == "x"


def test_the_model_is_the_only_required_flag():
    check()
    with pytest.raises(utils.UserError, match="--model_name_or_path is required: a hub name or a directory"):
        utils.parse_args(grpo.Args, ROOM).check()


def test_every_field_has_a_help_text_of_its_own():
    texts = {}
    for cls in reversed(grpo.Args.__mro__[:-1]):  # bases first, as fields() has them
        tree = ast.parse(inspect.getsource(cls))
        (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
        for node, following in zip(body, body[1:] + [None], strict=True):
            if isinstance(node, ast.AnnAssign):
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), node.target.id
                texts[node.target.id] = following.value.value.strip()
    assert list(texts) == [f.name for f in fields(grpo.Args)]
    assert all(len(text) > 5 for text in texts.values())
    assert len(set(texts.values())) == len(texts)


def test_help_shows_every_flag_and_its_text(capsys):
    with pytest.raises(SystemExit) as exit_info:
        utils.parse_args(grpo.Args, ["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    for f in fields(grpo.Args):
        assert f"--{f.name.replace('_', '-')}" in shown or f"--{f.name}" in shown, f.name
    flat = re.sub(r"[\s│]+", " ", shown)
    for text in (
        "KL coefficient, per token",
        "Rollouts of the whole run",
        "Name of the run",
        "Most tokens of a verdict",
    ):
        assert text in flat


def help_text(capsys, *argv):
    with pytest.raises(SystemExit) as exit_info:
        utils.parse_args(grpo.Args, [*argv])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_help_begins_with_the_algorithm(capsys):
    shown = help_text(capsys, "--help")
    panels = re.findall(r" (\w+Flags) options", shown)
    assert panels[0] == "GRPOFlags" and len(panels) == 9 == len(set(panels))


def test_help_with_a_word_shows_the_flags_that_have_it(capsys):
    """In their name or in their text, in any case, on however many lines."""
    shown = help_text(capsys, "--exp_name", "x", "--help", "CLIP")
    names = set(re.findall(r"^--(\w+)", shown, re.MULTILINE))
    texts = {}
    for cls in grpo.Args.__mro__[:-1]:
        for name, text in re.findall(r'^    (\w+): .*?\n    """(.*?)"""', inspect.getsource(cls), re.M | re.S):
            texts.setdefault(name, text)
    assert names == {name for name, text in texts.items() if "clip" in (name + text).lower()}
    assert names >= {"clip_lower", "clip_higher", "clip_dual", "loss_fn", "max_grad_norm"}
    assert re.findall(r"^(\w+)$", shown, re.MULTILINE) == ["GRPOFlags"]
    assert "2507.18071). (default: dapo)" in re.sub(r"\s+", " ", shown), "a flag without its whole text"
    assert help_text(capsys, "-h", "clip") == shown


def test_help_with_a_word_that_no_flag_has_says_so(capsys):
    assert help_text(capsys, "--help", "clop").startswith("No flag has 'clop' in its name or text")


def test_fields_are_immutable_and_defaults_not_shared():
    assert all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(grpo.Args))
    assert grpo.Args().dataset_mixer_list is not grpo.Args().dataset_mixer_list
    with pytest.raises(AttributeError):
        grpo.Args().beta = 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Forms
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, want",
    [
        (["--active_sampling"], True),
        (["--active_sampling", "true"], True),
        (["--active_sampling", "True"], True),
        (["--active_sampling=true"], True),
        (["--active-sampling"], True),
        (["--active_sampling", "--no_active_sampling"], False),
        (["--active_sampling", "false"], False),
        (["--active_sampling=False"], False),
        ([], False),
    ],
)
def test_forms_of_a_flag_that_is_off(argv, want):
    assert parse(*argv).active_sampling is want


@pytest.mark.parametrize(
    "argv, want",
    [
        (["--no_load_ref_policy"], False),
        (["--no-load-ref-policy"], False),
        (["--load_ref_policy", "False"], False),
        (["--load_ref_policy", "false", "--beta", "0"], False),
        (["--load_ref_policy=false"], False),
        (["--load_ref_policy"], True),
        ([], True),
    ],
)
def test_forms_of_a_flag_that_is_on(argv, want):
    assert parse(*argv).load_ref_policy is want


def test_a_yes_no_flag_does_not_swallow_what_follows():
    args = parse("--active_sampling", "--exp_name", "true", "--resume", "false", "--stop_strings", "true", "False")
    assert (args.active_sampling, args.exp_name, args.resume) == (True, "true", False)
    assert args.stop_strings == ["true", "False"]


@pytest.mark.parametrize("argv", [["--resume=maybe"], ["--resume=1"], ["--resume", "maybe"], ["--no_resume=true"]])
def test_other_values_of_a_yes_no_flag_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    assert exit_info.value.code not in (0, None)
    assert re.search("resume|maybe|true", str(exit_info.value.code) + capsys.readouterr().err)


@pytest.mark.parametrize(
    "argv, name, want",
    [
        (["--total_episodes", "10_000"], "total_episodes", 10000),
        (["--learning_rate", "1e-6"], "learning_rate", 1e-6),
        (["--learning_rate=1e-6"], "learning_rate", 1e-6),
        (["--save_freq", "-1"], "save_freq", -1),
        (["--ref_policy_update_freq", "5"], "ref_policy_update_freq", 5),
        (["--loss_denominator", "4096"], "loss_denominator", "4096"),
        (["--kl_estimator", "kl3"], "kl_estimator", "kl3"),
        (["--deepspeed_stage", "3"], "deepspeed_stage", 3),
        (["--num_learners_per_node", "4", "4"], "num_learners_per_node", [4, 4]),
        (["--stop_strings", "</answer>", "\n\n"], "stop_strings", ["</answer>", "\n\n"]),
        (["--dataset_mixer_list", "a", "1.0", "b", "20"], "dataset_mixer_list", ["a", "1.0", "b", "20"]),
    ],
)
def test_values_and_lists(argv, name, want):
    assert getattr(parse(*argv), name) == want


@pytest.mark.parametrize("argv", [["--loss_fn", "ppo"], ["--deepspeed_stage", "1"], ["--seed", "x"], ["--betta", "1"]])
def test_unknown_flags_and_choices_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)
    assert exit_info.value.code == 2
    assert argv[0].removeprefix("--")[:4] in capsys.readouterr().err.replace("-", "_")


# ---------------------------------------------------------------------------------------------------------------------
# open-instruct's command lines
# ---------------------------------------------------------------------------------------------------------------------

LAUNCHES = json.loads((ROOT / "tests/open_instruct.json").read_text())  # its script -> program and flags
ROWS = [line.split("\t") for line in translate.TABLE.read_text().splitlines()[1:]]
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


def test_the_table_of_other_flags():
    """In order, every row once, every alias a flag of ours, every flag that nobody honours with its reason."""
    kinds = ["alias", "same", "ignored", "missing"]
    assert ROWS == sorted(ROWS, key=lambda row: (kinds.index(row[1]), row[0]))
    assert len({flag for flag, _, _ in ROWS}) == len(ROWS) > 200
    for flag, kind, words in ROWS:
        name, _, value = flag.partition("=")
        assert value or name not in FLAGS, f"{name} is a flag of ours: only a value of it can be another's"
        assert value == value.lower() and len(words) > 5
        for target in re.findall(r"--(?:no_)?(\w+)", words) if kind == "alias" else ():
            assert target.removeprefix("no_") in FLAGS or f"no_{target}" in FLAGS, flag


@pytest.mark.parametrize(
    "argv, name, want",
    [
        ("--truncated_importance_sampling_ratio_cap 5.0", "rho_clamp_upper_bound", 5.0),
        ("--truncated_importance_sampling_ratio_cap=0.0", "use_rho_correction", False),
        ("--masked_mean_axis 1", "loss_denominator", "sequence"),
        ("--masked_mean_denominator 100", "loss_denominator", "100"),
        ("--cliprange 0.1", "clip_higher", 0.1),
        ("--no_async_mode --async_steps 2", "async_steps", 2),
        ("--no_async_mode", "async_steps", 0),
        ("--add_r1_style_format_reward", "apply_r1_style_format_reward", True),
        ("--add_r1_style_format_reward False", "apply_r1_style_format_reward", False),
        ("--no_add_r1_style_format_reward", "apply_r1_style_format_reward", False),
        ("--compile_model", "compile_layers", True),
        ("--no_compile_model", "compile_layers", False),
        ("--actor_num_gpus_per_node 4 8", "num_learners_per_node", [4, 8]),
        ("--activation-memory-budget 0.5", "gradient_checkpointing", True),
        ("--fsdp_shard_degree 8", "deepspeed_stage", 3),
        ("--attn_implementation flash_2", "attn_implementation", "flash_attention_2"),
        ("--attn_implementation eager", "attn_implementation", "eager"),
        ("--no_try_launch_beaker_eval_jobs --use_peft false --tool_configs {} {} --seed 5", "seed", 5),
    ],
)
def test_other_names_of_our_flags(argv, name, want, nothing_told, capsys):
    assert getattr(parse(*argv.split()), name) == want
    first = argv.split()[0].partition("=")[0].lstrip("-").replace("-", "_")
    assert (f" --{first}" in capsys.readouterr().out) == (first not in FLAGS or "flash_2" in argv)


# What is constant here, in open-instruct's flags, and other values of them
CONSTANTS = """--llm_judge_temperature 1.0 --code_apply_perf_penalty False --max_length_verifier_max_length 32768
    --pass_tools_to_chat_template True --only_reward_good_outputs False --hf_repo_revision main"""
OTHER_THAN_CONSTANTS = (
    "--llm_judge_temperature",
    "--code_apply_perf_penalty",
    "--max_length_verifier_max_length",
    "--no_pass_tools_to_chat_template",
    "--only_reward_good_outputs",
    "--hf_repo_revision",
)


def test_a_line_with_flags_that_are_constants_here_is_the_same_run(nothing_told, capsys):
    assert parse(*CONSTANTS.split()) == parse()
    shown = capsys.readouterr().out
    for flag in re.findall(r"--\w+", CONSTANTS):
        assert re.search(rf"^  (same|ignored) .*{flag}\b", shown, re.MULTILINE), flag


@pytest.mark.parametrize(
    "flags",
    [
        "--llm_judge_max_concurrency 64",
        "--ref_model_revision main",
        "--ref_model_dtype float32",
        "--share_prompts",
        "--no_share_prompts",
        "--solver_baseline",
        "--no_solver_baseline",
        "--solver_prompt_file x",
        "--overlong_penalty_factor 1.0",
    ],
)
def test_a_flag_of_ours_that_became_a_constant_is_named(flags, capsys):
    with pytest.raises(SystemExit):
        parse(*flags.split())
    assert f"{flags.split()[0]}: no such flag" in capsys.readouterr().err


def test_what_became_of_other_flags_is_printed_once_and_by_one_rank(nothing_told, monkeypatch, capsys):
    flags = ("--verbose", "--oe_eval_tasks", "a", "b", "--oe_eval_max_length", "9", "--eval_freq", "7")
    parse(*flags)
    assert capsys.readouterr().out == (
        "open-instruct's flags:\n"
        "  alias    --eval_freq 7: --local_eval_every 7\n"
        "  ignored  --oe_eval_tasks --oe_eval_max_length: Ai2's evaluation jobs; --dataset_mixer_eval_list evaluates"
        " here\n"
        "  ignored  --verbose: more or less is printed by no flag\n"
    )
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


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--use_search_actor --use_peft",
            r"--use_search_actor: --tools .*; --use_peft: give --lora_rank",
        ),
        ("--warm_up_steps 10", r"--warm_up_steps: give --warmup_ratio"),
        ("--ground_truths_key label", r"--ground_truths_key: .*name the columns"),
        ("--max_steps 0", r"--max_steps 0: leave it out"),
        ("--no_mask_tool_use", r"^--no_mask_tool_use: answers never have a loss"),
        ("--mask_tool_use False", r"^--mask_tool_use False: answers never have a loss"),
        *((flags, f"^{re.escape(flags)}: ") for flags in OTHER_THAN_CONSTANTS),
    ],
)
def test_a_flag_without_which_a_run_is_another_is_refused(flags, message, nothing_told):
    with pytest.raises(utils.UserError, match=message):
        parse(*flags.split())
    assert parse(*flags.split(), "--dry_run").dry_run


def test_a_judge_that_a_remapped_verifier_lacks_is_told_in_a_dry_run(nothing_told, capsys):
    """open-instruct names the judge of rubrics in a variable of the environment, not in the line."""
    flags = ("--remap_verifier", "general_rubric=rubric", "--apply_evolving_rubric_reward", "true")
    grpo.main(parse(*ROOM, *flags, "--dry_run"))
    told = "judge    --remap_verifier general_rubric=rubric: rubric needs --llm_judge_model, a run is refused"
    assert told in capsys.readouterr().out.splitlines()
    with pytest.raises(utils.UserError, match=r"rubric needs a model: set --llm_judge_model"):
        check(*flags[:2])


def test_a_flag_that_nobody_knows_is_refused_with_the_nearest_name(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("--betta", "1", "--oe_eval_task", "x", "--no_tols", "--seed", "3")
    assert exit_info.value.code == 2
    near = re.findall(r"--(\w+): no such flag; the nearest is --(\w+)\n", capsys.readouterr().err)
    assert near == [("betta", "beta"), ("oe_eval_task", "oe_eval_tasks"), ("no_tols", "tools")]


OTHER_NAMES = translate.read_other_names()


@pytest.mark.parametrize(
    "flag, nearest",
    [("num_gpus", "num_epochs"), ("learnig_rate", "learning_rate"), ("reponse_length", "response_length")],
)
def test_the_nearest_name_is_one_of_our_own(flag, nearest, capsys):
    with pytest.raises(SystemExit):
        parse(f"--{flag}", "1")
    assert capsys.readouterr().err == f"--{flag}: no such flag; the nearest is --{nearest}\n"


@pytest.mark.parametrize("flag", OTHER_NAMES)
def test_a_name_of_trl_or_verl_is_refused_with_ours(flag, capsys):
    project, ours = OTHER_NAMES[flag]
    with pytest.raises(SystemExit) as exit_info:
        parse(f"--{flag}", "1")
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"--{flag}: a name of {project}; here it is {ours}\n"
    assert flag not in FLAGS and flag not in {row[0].partition("=")[0] for row in ROWS}, "it would never be asked for"
    named = re.findall(r"--(\w+)", ours)
    assert all(name in FLAGS for name in named) and (named or "grpo" in ours or "functions" in ours)


def test_a_line_of_verl_is_refused_with_our_flags(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("--beta", "0", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=64", "+trainer.unheard_of=1")
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "actor_rollout_ref.rollout.n=8: this is verl's form; here it is --num_samples_per_prompt_rollout",
        "data.train_batch_size=64: this is verl's form; here it is --num_unique_prompts_rollout",
        "+trainer.unheard_of=1: this is verl's form; here it is a flag of the form --name value: see --help WORD",
    ]


@pytest.mark.parametrize(
    "flags, warning",
    [
        ("--local_eval_every 5", "--local_eval_every 5: nothing is evaluated without --dataset_mixer_eval_list"),
        (
            "--dataset_mixer_eval_list a/b 1",
            "--dataset_mixer_eval_list a/b 1: that is one row; 1.0 is all of a data set",
        ),
        ("--max_steps 100", "--max_steps 100: .*--tools.*; a run is refused"),
        ("--dataset_mixer_list a/b 1.0 c/d 1", "--dataset_mixer_list c/d 1: that is one row; 1.0 is all of a data set"),
    ],
)
def test_what_is_hardly_meant_is_warned_of(flags, warning, capsys):
    grpo.main(parse(*ROOM, "--dry_run"))
    assert "WARNING" not in capsys.readouterr().out
    grpo.main(parse(*ROOM, *flags.split(), "--dry_run"))
    assert [line for line in capsys.readouterr().out.splitlines() if re.match(f"WARNING: {warning}", line)]


def test_grpo_says_which_flags_only_grpo_fast_acts_on(capsys):
    flags = (*ROOM, "--vllm_num_engines", "8", "--async_steps", "4", "--inflight_updates", "--dry_run")
    grpo.main(parse(*flags))
    shown = capsys.readouterr().out
    assert "WARNING: --vllm_num_engines 8 --async_steps 4 --inflight_updates True: grpo.py samples" in shown
    grpo.main(parse(*ROOM, "--num_learners_per_node", "4", "4", "--dry_run"))  # no torchrun yet
    shown = capsys.readouterr().out
    assert "\nranks    8, each 2 prompts" in shown and "WARNING" not in shown


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------

POSITIVE = (
    "num_unique_prompts_rollout num_samples_per_prompt_rollout response_length max_prompt_token_length temperature "
    "num_mini_batches num_epochs per_device_train_batch_size total_episodes eval_pass_at_k"
).split()
NOT_NEGATIVE = (
    "beta clip_higher entropy_coef learning_rate weight_decay max_grad_norm max_logprob_gap async_steps "
    "rho_clamp_upper_bound rho_mask_lower_bound rho_mask_upper_bound eval_temperature verification_reward"
).split()


@pytest.mark.parametrize("flag", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_less_are_refused(flag, value):
    with pytest.raises(utils.UserError, match=rf"--{flag} {value}(\.0)?: must be positive"):
        check(f"--{flag}", str(value))


@pytest.mark.parametrize("flag", NOT_NEGATIVE)
def test_negative_values_are_refused(flag):
    with pytest.raises(utils.UserError, match=rf"--{flag} -1(\.0)?: must not be negative"):
        check(f"--{flag}", "-1")


CREDIT = "--turn_credit --tools calculator --advantage_normalization_type centered --no_filter_zero_std_samples"
REFUSALS = [  # flags, what the message must hold in this order: the flags that clash, and the fix
    ("--pack_length 300", r"--pack_length 300 .*--max_prompt_token_length 256 .*--response_length 256.*raise .* 512"),
    (
        "--num_samples_per_prompt_rollout 1 --no_filter_zero_std_samples",
        r"--num_samples_per_prompt_rollout 1 .*standard.*raise it, or .*--advantage_normalization_type none",
    ),
    (
        "--num_samples_per_prompt_rollout 1 --advantage_normalization_type centered --no_filter_zero_std_samples",
        r"--num_samples_per_prompt_rollout 1 .*centered",
    ),
    (
        "--num_samples_per_prompt_rollout 1 --advantage_normalization_type none",
        r"--num_samples_per_prompt_rollout 1 .*--filter_zero_std_samples.*add --no_filter_zero_std_samples",
    ),
    ("--beta 0.1 --no_load_ref_policy", r"--beta 0\.1 .*drop --no_load_ref_policy or set --beta 0"),
    (
        "--beta 0 --no_load_ref_policy --ref_policy_update_freq 5",
        r"--ref_policy_update_freq 5 needs .*drop --no_load_ref_policy",
    ),
    ("--ref_policy_update_freq 0", r"--ref_policy_update_freq 0: must be positive"),
    ("--ref_policy_update_freq -3", r"--ref_policy_update_freq -3: must be positive"),
    (
        "--lora_rank 8 --ref_policy_update_freq 5",
        r"_freq 5 with --lora_rank 8 has no second .*: drop",
    ),
    ("--lora_merge", r"--lora_merge without --lora_rank 0: drop it"),
    ("--lora_rank 8 --lora_alpha 0", r"--lora_rank 8 with --lora_alpha 0 .* trains nothing: leave these two out"),
    (
        "--ref_model_name_or_path t --ref_policy_update_freq 5",
        r"--ref_policy_update_freq 5 would mix the policy into --ref_model_name_or_path t: drop one",
    ),
    (
        "--ref_model_name_or_path t --beta 0 --no_load_ref_policy",
        r"_path t is the reference .*: drop --no_load_ref",
    ),
    (
        "--ref_model_name_or_path t --beta 1",
        r"--filter_zero_std_samples with --ref_model_name_or_path t drops .*: add --no_filter_zero_std_samples",
    ),
    (
        "--ref_model_name_or_path t --no_filter_zero_std_samples --kl_estimator kl1",
        r"--kl_estimator kl1 with --ref_model_name_or_path t has a gradient of zero on average.*: take kl2",
    ),
    ("--alpha 0", r"--alpha 0\.0: must be in \(0, 1\]"),
    ("--alpha 1.5", r"--alpha 1\.5: must be in"),
    ("--num_mini_batches 3", r"--num_unique_prompts_rollout 16 on 1 ranks.*--num_mini_batches 3"),
    ("--total_episodes 63", r"--total_episodes 63 .*--num_unique_prompts_rollout 16 x .*_rollout 4 = 64"),
    ("--clip_lower -0.1", r"--clip_lower -0\.1: must be in \[0, 1\]"),
    ("--clip_lower 1.1", r"--clip_lower 1\.1: must be in \[0, 1\]"),
    ("--clip_dual 1", r"--clip_dual 1\.0: must be above 1"),
    ("--clip_dual -2", r"--clip_dual -2\.0: must be above 1"),
    ("--clip_dual 3 --loss_fn gspo", r"--clip_dual 3\.0: .*--loss_fn dapo; 0 is off"),
    ("--clip_dual 3 --loss_fn cispo", r"--clip_dual 3\.0: .*--loss_fn dapo"),
    ("--loss_denominator tokens", r"--loss_denominator tokens: token, sequence or a positive number"),
    ("--loss_denominator 0", r"--loss_denominator 0: token, sequence or a positive number"),
    ("--loss_denominator -5", r"--loss_denominator -5: "),
    ("--loss_denominator inf", r"--loss_denominator inf: "),
    ("--loss_denominator nan", r"--loss_denominator nan: "),
    ("--vllm_top_p 0 --no_use_rho_correction", r"--vllm_top_p 0\.0: must be in \(0, 1\]"),
    ("--vllm_top_p 1.1", r"--vllm_top_p 1\.1: must be in \(0, 1\]"),
    ("--vllm_top_p 0.9", r"--vllm_top_p 0\.9 .*--use_rho_correction: set --vllm_top_p 1\.0 or --no_use_rho_correction"),
    ("--rho_clamp_upper_bound 0.5", r"--rho_clamp_upper_bound 0\.5 .*at least 1, or 0 for off"),
    ("--rho_clamp_lower_bound 1.5", r"--rho_clamp_lower_bound 1\.5 .*at most 1, or 0 for off"),
    ("--rho_clamp_lower_bound 0.5 --no_use_rho_correction", r"--rho_clamp_lower_bound 0\.5 acts through"),
    ("--rho_mask_tv_divergence", r"--rho_mask_tv_divergence drops nothing without --rho_mask_upper_bound"),
    ("--rho_mask_tv_divergence --rho_mask_upper_bound 2 --rho_mask_lower_bound 0.1", r"drops exact agreement"),
    ("--rho_mask_tv_divergence --rho_mask_upper_bound 2 --rho_mask_sequence_level", r"one of the two, drop one"),
    ("--rho_mask_tv_divergence --no_use_rho_correction", r"--rho_mask_\* bounds act through"),
    ("--turn_credit", r"--turn_credit needs turns with rewards: add --env_file or --tools"),
    (
        f"{CREDIT} --advantage_normalization_type standard",
        r"--turn_credit .*take --advantage_normalization_type centered",
    ),
    (f"{CREDIT} --filter_zero_std_samples", r"--turn_credit: .*add --no_filter_zero_std_samples"),
    (f"{CREDIT} --active_sampling", r"drop --active_sampling"),
    (f"{CREDIT} --kl_in_reward --beta 0.1", r"--turn_credit --kl_in_reward: .* KL of turns before it, drop one"),
    ("--rho_mask_lower_bound 1", r"--rho_mask_lower_bound 1\.0 must be below 1 .*--rho_mask_upper_bound .*0 is off"),
    ("--rho_mask_upper_bound 1", r"--rho_mask_lower_bound .*--rho_mask_upper_bound 1\.0 above 1"),
    ("--no_apply_verifiable_reward", r"--no_apply_verifiable_reward without --apply_r1_style_format_reward"),
    ("--additive_format_reward", r"--additive_format_reward needs --apply_r1_style_format_reward"),
    ("--overlong_buffer_length 256", r"--overlong_buffer_length 256 must be less than --response_length 256"),
    ("--kl_in_reward --beta 0", r"--kl_in_reward subtracts beta \* KL: it needs --beta above 0"),
    ("--kl_in_reward", r"--kl_in_reward with --advantage_normalization_type standard divides .*force_kl_in_reward"),
    (
        "--kl_in_reward --advantage_normalization_type standard_unbiased",
        r"--kl_in_reward with --advantage_normalization_type standard_unbiased",
    ),
    (
        "--kl_in_reward --force_kl_in_reward --mask_truncated_completions",
        r"--kl_in_reward needs the KL of whole groups, which --mask_truncated_completions cuts: drop one",
    ),
    ("--active_sampling --no_filter_zero_std_samples", r"--active_sampling .*--filter_zero_std_samples.*needs"),
    ("--eval_on_step_0", r"--eval_on_step_0 needs --dataset_mixer_eval_list"),
    ("--seed -1", r"--seed -1: must be in \[0, 2\*\*32\)"),
    ("--seed 4294967296", r"--seed 4294967296: must be in"),
    ("--resume --overwrite", r"--resume .*--overwrite .*give one"),
    ("--warmup_ratio 1", r"--warmup_ratio 1\.0: must be in \[0, 1\)"),
    (
        "--lr_scheduler_type constant --warmup_ratio 0.1",
        r"--warmup_ratio 0\.1 with --lr_scheduler_type constant warms nothing up: take constant_with_warmup",
    ),
    ("--warmup_ratio -0.1", r"--warmup_ratio -0\.1: must be in"),
    ("--vllm_gpu_memory_utilization 0", r"--vllm_gpu_memory_utilization.*must be in \(0, 1\)"),
    ("--vllm_gpu_memory_utilization 1.0", r"--vllm_gpu_memory_utilization.*must be in \(0, 1\)"),
    ("--gradient_checkpointing_part mlp", r"--gradient_checkpointing_part mlp.*add that flag"),
    ("--sequence_parallel_size 0", r"--sequence_parallel_size 0: must be positive"),
    ("--sequence_parallel_size 3", r"--sequence_parallel_size 3 does not divide the 1 ranks: start a multiple of it"),
    ("--fsdp_shard_size 3", r"--fsdp_shard_size 3 does not divide the 1 learners: take a number that does"),
    ("--fsdp_shard_size 1", r"--fsdp_shard_size 1 --deepspeed_stage 0 shards nothing: add --deepspeed_stage 2 or 3"),
    ("--offload reference --beta 0 --no_load_ref_policy", r"--offload reference: there is no second model"),
    ("--offload reference --lora_rank 4", r"--offload reference: there is no second model"),
    ("--offload reference --ref_policy_update_freq 2", r"--offload .*with --ref_policy_update_freq 2, which moves it"),
    ("--sequence_parallel_size 2 --attn_implementation eager", r"--sequence_parallel_size 2 .*eager: only our own"),
    ("--reward_file no_such.py", r"--reward_file no_such\.py: no such file"),
    ("--code_max_execution_time 0", r"--code_max_execution_time 0\.0: must be positive"),
    ("--code_max_execution_time inf", r"--code_max_execution_time inf: must be positive and finite"),
    ("--code_pass_rate_reward_threshold 2", r"--code_pass_rate_reward_threshold 2\.0: must be in \[0, 1\]"),
    ("--solver_num_samples 0", r"--solver_num_samples 0: must be positive"),
    ("--solver_num_engines 0", r"--solver_num_engines 0: must be positive"),
    ("--overlong_buffer_length -1", r"--overlong_buffer_length -1: must not be negative"),
    ("--remap_verifier math", r"--remap_verifier math: 'math' is not OLD=NEW"),
    ("--remap_verifier a=mth", r"--remap_verifier a=mth: unknown verifier .*did you mean 'math'"),
    (
        "--llm_judge_model x --llm_judge_base_url http://y --llm_judge_max_tokens 9000",
        r"--llm_judge_max_tokens 9000 .*lower it",
    ),
    ("--remap_verifier a=solver", r"verifier solver needs a model: set --solver_model_name_or_path"),
    ("--resume_anyway", r"--resume_anyway continues a run whose flags differ: it needs --resume"),
    ("--dump_steps every", r"--dump_steps every: all, or N for every N-th step"),
    ("--dump_steps 0", r"--dump_steps 0: all, or N"),
    ("--load_batches no_such_directory", r"--load_batches no_such_directory: no directory"),
    ("--load_states tests", r"--load_states tests: no state of step 1, which would be .*global_step_1/actor"),
    (
        "--load_batches tests --active_sampling",
        r"--load_batches tests: drop .*--active_sampling",
    ),
    ("--resume --output_dir no_such_directory", r"--resume: no run in no_such_directory/grpo"),
    ("--no_resampling_pass_rate 1.5", r"--no_resampling_pass_rate 1\.5: must be in \(0, 1\]"),
    ("--vllm_tensor_parallel_size 2", r"--vllm_tensor_parallel_size 2: .*start grpo_fast\.py"),
    ("--num_learners_per_node 2", r"--num_learners_per_node 2 but 1 ranks .*: start grpo\.py .* --nproc_per_node=2"),
    (
        "--num_learners_per_node 6 --vllm_num_engines 2 --async_steps 4 --inflight_updates",
        r"--num_learners_per_node 6 but 1 ranks run: start grpo_fast\.py, which has --vllm_num_engines 2 "
        r"--async_steps 4 --inflight_updates True, or grpo\.py with torchrun --nproc_per_node=6",
    ),
    ("--chat_template_name tulo", r"--chat_template_name tulo: .*take one of .*simple_chat \| tulu"),
    ("--dataset_mixer_list a 1.0 b", r"--dataset_mixer_list takes NAME AMOUNT pairs, got 3 values: a 1\.0 b"),
    ("--dataset_mixer_eval_list a many", r"--dataset_mixer_eval_list a many: .*fraction \(1\.0\) or a count \(500\)"),
    ("--dataset_mixer_list a 0", r"--dataset_mixer_list a 0: the amount must be positive"),
    ("--dataset_mixer_list no_such.jsonl 1.0", r"--dataset_mixer_list no_such\.jsonl: no such file"),
    ("--dataset_mixer_eval_list no_such.parquet 9", r"--dataset_mixer_eval_list no_such\.parquet: no such file"),
    (
        "--dataset_mixer_list a 1.0 b 1.0 c 1.0 --dataset_mixer_list_splits train test",
        r"--dataset_mixer_list_splits: give one split or one per dataset \(3\), got 2",
    ),
    ("--system_prompt_override_file no_such.txt", r"--system_prompt_override_file no_such\.txt: no such file"),
    ("--model_name_or_path tests/nothere", r"--model_name_or_path tests/nothere: no such directory"),
    ("--dataset_mixer_list ~/no/rows 1.0", r"--dataset_mixer_list ~/no/rows: no such directory"),
    ("--max_steps 100", r"^--max_steps 100: .*neither --tools nor --env_file.*--total_episodes"),
    ("--tools calculater", r"^--tools calculater: no such tool\. There are calculator, .*python, search"),
]


@pytest.mark.parametrize("flags, message", REFUSALS, ids=[flags for flags, _ in REFUSALS])
def test_refusals_name_the_flags_and_the_fix(flags, message):
    with pytest.raises(utils.UserError) as error:
        check(*flags.split())
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, world_size, message",
    [
        ("", 3, r"--num_unique_prompts_rollout 16 is not a multiple of the 3 ranks: take 18"),
        ("--num_unique_prompts_rollout 4", 8, r"--num_unique_prompts_rollout 4 .* 8 ranks: take 8"),
        ("--num_mini_batches 8", 4, r"--num_unique_prompts_rollout 16 on 4 ranks is 4 .*--num_mini_batches 8"),
        ("--num_learners_per_node 4", 8, r"--num_learners_per_node 4 but 8 ranks run: .*--nproc_per_node=4"),
    ],
)
def test_refusals_that_depend_on_the_ranks(flags, world_size, message):
    with pytest.raises(utils.UserError, match=message):
        check(*flags.split(), world_size=world_size)


@pytest.mark.parametrize(
    "flags, world_size",
    [  # just inside the bounds that the refusals above are just outside of
        ("--pack_length 512", 1),
        ("--num_samples_per_prompt_rollout 1 --advantage_normalization_type none --no_filter_zero_std_samples", 1),
        ("--beta 0 --no_load_ref_policy", 1),
        ("--ref_policy_update_freq 1 --alpha 1", 1),
        ("--num_mini_batches 4", 4),
        ("", 16),
        ("--num_learners_per_node 4 4", 8),
        ("--total_episodes 64", 1),
        ("--clip_lower 0", 1),
        ("--clip_lower 1", 1),
        ("--clip_dual 3", 1),
        ("--loss_denominator sequence", 1),
        ("--loss_denominator 1e3", 1),
        ("--vllm_top_p 0.9 --no_use_rho_correction", 1),
        ("--rho_clamp_upper_bound 1", 1),
        ("--rho_clamp_upper_bound 0 --rho_mask_lower_bound 0.5 --rho_mask_upper_bound 5", 1),
        ("--no_apply_verifiable_reward --apply_r1_style_format_reward --additive_format_reward", 1),
        ("--active_sampling", 1),
        ("--eval_pass_at_k 4", 1),
        ("--eval_on_step_0 --dataset_mixer_eval_list some/set 1.0", 1),
        ("--chat_template_name tulu", 1),
        ("--lr_scheduler_type cosine", 1),
        ("--dataset_mixer_list a 1.0 b 1.0 --dataset_mixer_list_splits train test", 1),
        ("--temperature 0.01 --learning_rate 0 --max_grad_norm 0 --max_logprob_gap 0", 1),
    ],
)
def test_what_is_allowed(flags, world_size):
    check(*flags.split(), world_size=world_size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the learner shares the engine's device only on a GPU")
def test_an_engine_that_leaves_the_learner_no_room_is_refused():
    with pytest.raises(utils.UserError, match=r"--vllm_gpu_memory_utilization 0\.9 .*0\.3 to 0\.8"):
        check("--vllm_gpu_memory_utilization", "0.9")
    check("--vllm_gpu_memory_utilization", "0.9", "--rollout_backend", "transformers")


def test_an_engine_on_the_learners_gpu_leaves_it_room_in_both_scripts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parse().check(1, fast=True)  # GPUs of its own
    for flags, fast in (((), False), (("--single_gpu_mode",), True)):
        with pytest.raises(utils.UserError, match=r"--vllm_gpu_memory_utilization 0\.9 .*0\.3 to 0\.[68]"):
            parse(*flags).check(1, fast=fast)
        parse(*flags).beside_engine(not fast or parse(*flags).single_gpu_mode).check(1, fast=fast)
        parse(*ROOM, *flags).check(1, fast=fast)
    share = "vllm_gpu_memory_utilization"
    for script, flags, want in (("grpo", "", 0.4), ("grpo_fast", "", 0.9), ("grpo_fast", "--single_gpu_mode", 0.4)):
        seen = []
        monkeypatch.setattr(
            grpo.Args, "check", lambda self, *_, seen=seen, **__: seen.append(getattr(self, share)) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            {"grpo": grpo, "grpo_fast": grpo_fast}[script].main(parse(*flags.split()))
        with pytest.raises(ZeroDivisionError):
            {"grpo": grpo, "grpo_fast": grpo_fast}[script].main(parse(*ROOM, *flags.split()))
        assert seen == [want, 0.5]


@pytest.mark.parametrize("flags", ["--num_learners_per_node", "--dataset_mixer_list"])
def test_empty_lists_are_refused(flags):  # no ranks; nothing to train on
    with pytest.raises(utils.UserError, match=flags):
        check(flags)


@pytest.mark.parametrize("flags", ["--sequence_parallel_size 0", "--num_mini_batches 0"])
def test_grpo_fast_divides_by_no_zero(flags):
    with pytest.raises(utils.UserError, match=f"{flags}: must be positive"):
        grpo_fast.main(utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *flags.split()]))


def test_a_refusal_is_a_value_error():
    assert issubclass(utils.UserError, ValueError)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("episodes, steps", [(64, 1), (127, 1), (128, 2), (100_000, 1562)])
def test_steps_are_whole_batches(episodes, steps):  # 16 x 4 = 64 a step; 1562 x 64 = 99 968
    assert grpo.num_training_steps(grpo.Args(total_episodes=episodes)) == steps


def test_describe_by_hand():
    args = replace(
        parse(),
        num_unique_prompts_rollout=24,
        num_samples_per_prompt_rollout=8,
        max_prompt_token_length=100,
        response_length=400,
        num_mini_batches=3,
        num_epochs=2,
        pack_length=700,
        total_episodes=2000,
    )
    text = plan.arithmetic(args, 4)
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)]
    assert numbers == [
        *(24, 8, 192, 96_000),  # 24 x 8 rollouts; x 500 tokens
        *(4, 6, 48),  # ranks; 24 / 4 prompts; x 8 rollouts
        *(2, 3, 6, 64, 700),  # epochs x mini-batches = optimizer steps; of 192 / 3 rollouts; tokens of a pack
        *(2000, 192, 10, 60),  # 2000 // 192 steps, x 6
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The script
# ---------------------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_the_disk_must_hold(tmp_path, monkeypatch, capsys):
    """A matrix of 100 x 50 and 50 biases: 5050 weights. 64 rollouts a step, 10 steps."""
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(100, 50), "a.bias": torch.zeros(50)}, tmp_path / "model.safetensors")
    base = (
        f"--model_name_or_path {tmp_path} --output_dir {tmp_path / 'no' / 'such'} --total_episodes 640 --save_freq -1 "
    )

    def estimate(flags):
        args = parse(*(base + flags).split())
        return outlook.disk_bytes(args, outlook.weight_shapes(str(tmp_path)))

    assert estimate("") == {"model": 2 * 5050}
    assert estimate("--model_dtype float32 --save_freq 4") == {"model": 4 * 5050, "2 of steps": 2 * 4 * 5050}
    assert estimate("--checkpoint_state_freq 2")["4 checkpoints"] == 4 * 12 * 5050  # 3 and the one that is written
    assert estimate("--checkpoint_state_freq 2 --keep_last_n_checkpoints -1")["5 checkpoints"] == 5 * 12 * 5050
    assert estimate("--checkpoint_state_freq 5 --ref_policy_update_freq 1")["2 checkpoints"] == 2 * 16 * 5050
    adapters = 2 * (100 + 50)
    assert estimate("--lora_rank 2 --checkpoint_state_freq 9") == {
        "model": 4 * adapters,
        "1 checkpoints": 12 * adapters,
    }
    assert estimate("--lora_rank 2 --lora_merge") == {"model": 4 * adapters + 2 * 5050}
    row = outlook.ROLLOUT_BYTES + 256 * (outlook.PROMPT_BYTES + outlook.TOKEN_BYTES)
    assert estimate("--save_traces")["rollouts"] == 640 * row
    assert estimate("--dump_steps 5")["rollouts"] == 2 * 64 * (row + 256 * outlook.DUMP_BYTES)

    grpo.main(parse(*(base + "--dry_run").split()))
    shown = capsys.readouterr().out
    assert re.search(rf"^disk     GB: model 0\.0: at most 0\.0; [\d.]+ are free in {tmp_path}$", shown, re.MULTILINE)
    assert "the disk may get full" not in shown
    monkeypatch.setattr(outlook.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10_000))
    assert "WARNING: the disk may get full. What helps: another --output_dir" in outlook.disk_text(parse(*base.split()))
    assert "not estimated: no .safetensors of a/b" in outlook.disk_text(parse("--model_name_or_path", "a/b"))


def test_dry_run_prints_arithmetic_and_sources_and_loads_nothing(tmp_path, capsys):
    data = tmp_path / "mine.jsonl"
    data.write_text("this is not even JSON\n")
    flags = parse(
        *(*ROOM, "--dry_run", "--model_name_or_path", "nobody/no-such-model", "--output_dir", str(tmp_path / "out")),
        *("--dataset_mixer_list", str(data), "1.0", "nobody/no-such-data", "10", "reasoning_gym:chain_sum", "5"),
        *("/nowhere/rows", "1.0", "--tools", "calculater"),
        *("--dataset_mixer_eval_list", str(data), "3"),
    )
    assert grpo.main(flags) is None
    told = capsys.readouterr().out
    assert plan.arithmetic(grpo.Args(model_name_or_path="x"), 1) in told
    for source in (
        r"nobody/no-such-model: hub",
        rf"--dataset_mixer_list {data} 1\.0: local",
        r"--dataset_mixer_list nobody/no-such-data 10: hub",
        r"--dataset_mixer_list /nowhere/rows 1\.0: not here",
        r"missing  --dataset_mixer_list /nowhere/rows: no such directory, a run is refused",
        r"missing  --tools calculater: no such tool. There are calculator, .*, a run is refused",
        r"--dataset_mixer_list reasoning_gym:chain_sum 5: generated",
        rf"--dataset_mixer_eval_list {data} 3: local",
    ):
        assert re.search(source, told), source
    assert not (tmp_path / "out").exists()


def test_flags_are_checked_without_what_only_a_run_needs():
    """What makes --help, --dry_run and every refusal slow, were it imported at the top of a file."""
    heavy = "datasets numpy.testing openai rich sympy torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp"
    heavy += " torch.distributed.tensor transformers vllm wandb"
    code = "import sys, grpo_fast, utils\nfrom grpo import Args\n"
    code += "utils.parse_args(Args, ['--model_name_or_path', 'x', *sys.argv[1:]]).check()\n"
    code += f"print(sorted(set({heavy.split()}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code, *ROOM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_schedules_are_those_of_transformers_that_no_other_flag_is_needed_for(capsys):
    from transformers import SchedulerType, get_scheduler

    def ticks(name):
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        try:
            scheduler = get_scheduler(name, optimizer, 2, 9)
            scheduler.step()
            return hasattr(scheduler, "lr_lambdas")  # from which a resumed run goes on
        except (TypeError, ValueError):  # a loss to watch, a least rate, steps of decay
            return False

    known = get_args(grpo.Args.__dataclass_fields__["lr_scheduler_type"].type)
    assert list(known) == [s.value for s in SchedulerType if ticks(s)]
    with pytest.raises(SystemExit):
        utils.parse_args(grpo.Args, ["--lr_scheduler_type", "greedy"])
    assert "greedy" in (said := capsys.readouterr().err) and "inverse_sqrt" in said


@pytest.mark.parametrize("script", ["grpo", "grpo_fast"])
def test_a_shell_without_the_environment_is_told_to_source_it(script):
    code = f"import sys; sys.modules['torch'] = None; import {script}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.endswith(": source scripts/setup.sh, once a shell\n")


def test_a_refused_flag_is_one_line_without_traceback():
    done = run_script("--beta", "0.1", "--no_load_ref_policy", "--model_name_or_path", "x")
    assert done.returncode != 0
    assert done.stdout == ""
    assert re.fullmatch(r"grpo\.py: --beta 0\.1 needs .*--no_load_ref_policy.*\n", done.stderr)


def test_ranks_of_torchrun_are_checked(monkeypatch):
    for name, value in (("WORLD_SIZE", "3"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(utils.UserError, match="--num_unique_prompts_rollout 16 is not a multiple of the 3 ranks"):
        grpo.main(parse(*ROOM))
