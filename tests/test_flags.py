"""Flags: names, defaults and forms; open-instruct's command lines; refusals; what a plan says."""

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
from scripts.parts import checks, plan

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
    check()
    with pytest.raises(utils.UserError, match="--model_name_or_path is required: a hub name or a directory"):
        utils.parse_args(grpo.Args, ROOM).check()


# --- Forms ------------------------------------------------------------------------------------------------------------


FORMS = """
--active_sampling | active_sampling | True
--active-sampling=true | active_sampling | True
--total_episodes 10_000 | total_episodes | 10000
--loss_denominator 4096 | loss_denominator | '4096'
--exp_name -x | exp_name | '-x'
--num_learners_per_node 4 4 | num_learners_per_node | [4, 4]
"""


@pytest.mark.parametrize("line, name, want", rows_of(FORMS))
def test_forms_of_flags(line, name, want):
    assert repr(getattr(parse(*line.split()), name)) == want


UNKNOWN = "--resume=maybe|--no_resume=true|--loss_fn ppo|--seed x".split("|")


@pytest.mark.parametrize("line", UNKNOWN)
def test_unknown_values_are_refused(line, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(*line.split())
    assert exit_info.value.code not in (0, None)
    said = str(exit_info.value.code) + capsys.readouterr().err.replace("-", "_")
    assert any(part in said for part in re.split("[= ]", line.removeprefix("--")))


MISTYPED = {"betta": "beta", "modle_name": "model_name_or_path", "leraning-rate": "learning_rate"}
MISTYPED |= {"no_shufle": "no_shuffle", "vllm_gpu_memory": "vllm_gpu_memory_utilization"}


@pytest.mark.parametrize("typed", MISTYPED)
def test_a_mistyped_flag_is_refused_with_the_one_that_was_meant(typed):
    with pytest.raises(utils.UserError, match=f"^--{typed.replace('-', '_')}: .* --{MISTYPED[typed]} or "):
        parse(f"--{typed}", "1")


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
    assert len({(flag, *other) for flag, _, _, *other in ROWS}) == len(ROWS) > 200
    for flag, kind, _, *others in ROWS:
        name, _, value = flag.partition("=")
        assert value or name not in FLAGS, f"{name} is a flag of ours: only a value of it can be another's"
        line = [f"--{flag}" if value else f"--{flag}=other", *(f"--{other}" for other in others)]
        done = checks.translate(line, checks.names_of(grpo.Args))
        assert done.others[0][0] == kind and bool(done.line) == (kind == "alias" or others != []), flag
        ours = {token.partition("=")[0].removeprefix("--") for token in done.line if token.startswith("--")}
        assert ours <= checks.names_of(grpo.Args), flag


OTHERS = """
--truncated_importance_sampling_ratio_cap=0.0 | use_rho_correction | False
--no_add_r1_style_format_reward | apply_r1_style_format_reward | False
--actor_num_gpus_per_node 4 8 | num_learners_per_node | [4, 8]
"""


@pytest.mark.parametrize("line, name, want", rows_of(OTHERS))
def test_other_names_of_our_flags(line, name, want, nothing_told, capsys):
    assert repr(getattr(parse(*line.split()), name)) == want
    first = line.split()[0].partition("=")[0].lstrip("-").replace("-", "_")
    assert (f" --{first}" in capsys.readouterr().out) == (first not in FLAGS)


def test_adapters_need_no_more_than_their_rank(nothing_told):
    """The line that the refusal of --use_peft asks for is taken, as --use_peft False is without one."""
    line = "--use_peft --lora_rank=8 --lora_alpha 16 --lora_target_modules all-linear --lora_dropout 0.0"
    args = parse(*line.split())
    assert (args.lora_rank, args.lora_alpha, args.lora_target_modules) == (8, 16, ["all-linear"])
    assert parse("--use_peft", "False", "--lora_r", "8").lora_rank == 0


def test_a_short_name_is_known_by_its_initials():
    assert checks.likely_flags("lr", set(FLAGS)).startswith("--learning_rate ")


MISSING = r"""
--use_search_actor --use_peft | --use_search_actor: .*--tools .*; --use_peft: .*--lora_rank
--warm_up_steps 10 | --warm_up_steps 10: .*--warmup_ratio
--mask_tool_use False | ^--mask_tool_use False: answers never have a loss
--use_peft --lora_rank 8 --lora_dropout 0.1 | ^--lora_dropout 0.1: adapters have no dropout
"""


@pytest.mark.parametrize("line, message", rows_of(MISSING))
def test_a_flag_without_which_a_run_is_another_is_refused(line, message, nothing_told, capsys):
    with pytest.raises(utils.UserError, match=message):
        parse(*line.split())
    assert parse(*line.split(), "--dry_run").dry_run
    assert "\n  missing  " in capsys.readouterr().out


# --- Refusals ---------------------------------------------------------------------------------------------------------

BOUNDS = [  # one of each kind of type
    ("num_mini_batches", "0", "must be positive"),
    ("beta", "-1", "must not be negative"),
    ("beta", "nan", "must be a number"),
    ("clip_lower", "-0.1", r"must be in \[0, 1\]"),
    ("seed", "4294967296", r"must be in \[0, 2\*\*32\)"),
    ("vllm_gpu_memory_utilization", "1.0", r"must be in \(0, 1\)"),
]


@pytest.mark.parametrize("flag, value, must", BOUNDS)
def test_a_number_beyond_its_bound_is_refused(flag, value, must):
    with pytest.raises(utils.UserError, match=rf"--{flag} {re.escape(value)}(\.0)?: {must}"):
        check(f"--{flag}={value}")


TEACHER = "--ref_model_name_or_path t"
# What is refused in a line that names these flags
REFUSALS = f"""
--pack_length 300 | pack_length max_prompt_token_length response_length
--num_samples_per_prompt_rollout 1 | num_samples_per_prompt_rollout
--num_mini_batches 3 | num_unique_prompts_rollout num_mini_batches
--total_episodes 63 | total_episodes num_unique_prompts_rollout
--beta 0.1 --no_load_ref_policy | beta no_load_ref_policy
--lora_rank 8 --ref_policy_update_freq 5 | ref_policy_update_freq lora_rank
{TEACHER} --beta 1 | ref_model_name_or_path no_filter_zero_std_samples
{TEACHER} --beta 0 --no_load_ref_policy | ref_model_name_or_path no_load_ref_policy
--clip_dual 3 --loss_fn gspo | clip_dual loss_fn
--lr_scheduler_type constant --warmup_ratio 0.1 | warmup_ratio
--rho_clamp_upper_bound 0.5 | rho_clamp_upper_bound
--rho_clamp_lower_bound 1.5 | rho_clamp_lower_bound
--rho_mask_upper_bound 2 --no_use_rho_correction | rho_mask_upper_bound no_use_rho_correction
--kl_in_reward --beta 0 --advantage_normalization_type centered | kl_in_reward beta
{TEACHER} --no_filter_zero_std_samples --kl_estimator kl1 | kl_estimator ref_model_name_or_path
--loss_denominator tokens | loss_denominator
--vllm_top_p 0.9 | vllm_top_p use_rho_correction
--rho_mask_tv_divergence | rho_mask_tv_divergence rho_mask_upper_bound
--rho_mask_upper_bound 1 | rho_mask_upper_bound
--no_apply_verifiable_reward | no_apply_verifiable_reward apply_r1_style_format_reward
--kl_in_reward | kl_in_reward advantage_normalization_type
--kl_in_reward --force_kl_in_reward --mask_truncated_completions | mask_truncated_completions
--active_sampling --no_filter_zero_std_samples | active_sampling filter_zero_std_samples
--sequence_parallel_size 3 | sequence_parallel_size
--num_learners_per_node 2 | num_learners_per_node nproc_per_node
--resume --overwrite | resume overwrite
--vllm_kwargs [1] | vllm_kwargs
--vllm_kwargs {{"seed":3}} | vllm_kwargs seed
--dump_steps every | dump_steps
--load_batches tests --active_sampling | load_batches active_sampling
--env_file tests/conftest.py --tools calculator | env_file tools
--dataset_mixer_list | dataset_mixer_list
"""


@pytest.mark.parametrize("line, flags", rows_of(REFUSALS))
def test_refusals_name_the_flags(line, flags):
    with pytest.raises(utils.UserError) as error:
        check(*line.split())
    said = str(error.value)
    assert all(f"--{flag}" in said for flag in flags.split()) and "\n" not in said, said


# flags | what a run is refused for, and a plan, perhaps for another machine, tells in the same words
TOLD = r"""
--dataset_mixer_list no_such.jsonl 1.0 | --dataset_mixer_list no_such\.jsonl
--model_name_or_path ./tests/nothere | --model_name_or_path ./tests/nothere
--system_prompt_override_file no.txt | --system_prompt_override_file no.txt
--env_file no.py | --env_file no.py: no such file
--env_file tests/ruler.py | --env_file tests/ruler.py
--tools calculater | --tools calculater
--load_batches no_such | --load_batches no_such
--load_states tests | --load_states tests
--chat_template_kwargs {"a": | --chat_template_kwargs
--vllm_tensor_parallel_size 2 | --vllm_tensor_parallel_size 2
--llm_judge_model m | --llm_judge_model m
"""


@pytest.mark.parametrize("line, message", rows_of(TOLD))
def test_a_dry_run_tells_what_a_run_is_refused_for(line, message, nothing_told, capsys):
    grpo.main(parse(*ROOM, "--dry_run"))
    assert "refused  " not in capsys.readouterr().out
    with pytest.raises(utils.UserError, match=f"^{message}") as error:
        grpo.main(parse(*ROOM, *line.split()))
    grpo.main(parse(*ROOM, *line.split(), "--dry_run"))
    assert f"refused  {error.value}" in capsys.readouterr().out.splitlines()


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(checks, "TRACKERS", {"with_tracking": "no_such_package"})
    check()
    with pytest.raises(utils.UserError, match="^--with_tracking: .*pip install no_such_package"):
        check("--with_tracking")
    grpo.main(parse(*ROOM, "--with_tracking", "--dry_run"))
    assert "refused  --with_tracking" in capsys.readouterr().out


OF_RANKS = r"""
--seed 1 | 3 | --num_unique_prompts_rollout 16
--num_mini_batches 8 | 4 | --num_mini_batches 8
--sequence_parallel_size 2 --attn_implementation eager | 2 | --sequence_parallel_size 2
--solver_model_name_or_path s | 2 | --solver_base_url
"""


@pytest.mark.parametrize("line, world_size, message", rows_of(OF_RANKS))
def test_refusals_that_depend_on_the_ranks(line, world_size, message):
    with pytest.raises(utils.UserError, match=message):
        check(*line.split(), world_size=int(world_size))


OF_FAST = r"""
--num_learners_per_node 2 --vllm_num_engines 3 | 4 | 4 | 5 processes
--num_learners_per_node 3 1 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 | 8 | 4 | two nodes
--num_learners_per_node 0 | None | 1 | a learner
--load_batches tests | None | 1 | --load_batches tests
--deterministic --inflight_updates | None | 1 | --deterministic
"""


@pytest.mark.parametrize("line, world, a_node, message", rows_of(OF_FAST))
def test_refusals_of_grpo_fast(line, world, a_node, message):
    with pytest.raises(utils.UserError, match=message):
        checks.check_fast(parse(*line.split()), eval(world), int(a_node))


ALLOWED = """
--num_samples_per_prompt_rollout 1 --advantage_normalization_type none --no_filter_zero_std_samples | 1
--vllm_top_p 0.9 --no_use_rho_correction | 1
--rho_clamp_upper_bound 0 --rho_mask_lower_bound 0.5 --rho_mask_upper_bound 5 | 1
--temperature 0.01 --learning_rate 0 --max_grad_norm 0 --max_logprob_gap 0 | 1
"""  # just inside the bounds that the refusals above are just outside of


@pytest.mark.parametrize("line, world_size", rows_of(ALLOWED))
def test_what_is_allowed(line, world_size):
    check(*line.split(), world_size=int(world_size))


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
    adapters = 2 * (100 + 50)
    assert estimate("--lora_rank 2 --checkpoint_state_freq 9")["1 checkpoints"] == 12 * adapters
    assert estimate("--lora_rank 2 --lora_merge") == {"model": 4 * adapters + 2 * 5050}
    assert "the disk may get full" not in plan.disk_text(parse(*base.split()))
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10_000))
    assert "the disk may get full" in plan.disk_text(parse(*base.split()))


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


def test_a_gpu_without_memory_names_flags_that_help():
    said = utils.words_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. " + 50 * "x "))
    flags = re.findall(r"--(\w+)", said)
    assert "2.00 GiB" in said and len(flags) >= 3 and set(flags) <= {field.name for field in fields(grpo.Args)}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_alone_says_it(monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    utils.say("once")
    assert capsys.readouterr().out == ("once\n" if rank == "0" else "")


def test_one_row_in_place_of_all_rows_is_told(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2", "dataset": "gsm8k"}\n')
    for amount in ("1", "1.0"):
        grpo.main(parse(*"--model_name_or_path x --dry_run --dataset_mixer_list".split(), str(rows), amount))
        assert ("WARNING: --dataset_mixer_list" in capsys.readouterr().out) == (amount == "1")
