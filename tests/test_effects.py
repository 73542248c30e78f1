"""Every flag of the engine, of turns, of evaluations and of the reward's parts, changed alone, changes what its
documentation says. Those of the algorithm and of the scores are drawn in tests/reference.py.

A row of CASES is what else is set, what the flag is changed to, and what then differs first, of the chain of causes and
effects in `observe`. Most rows run grpo.py's whole main twice, with a stub in place of the engine, 0.2 s each.
"""

import functools
import json
import random
import sys
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import grpo
import rewards
import utils
from scripts.parts import plan, run_files
from scripts.parts import rows as part_of_rows
from tests import reference

LABEL = "7"
TEXTS = ["7", "so 8", "is</think> <answer>7</answer>", "</think><answer>3</answer>", "7 then 9", "no"]


class Stub(utils.Sampler):
    """An engine that answers a request with one of TEXTS, by its seed; every third answer is cut. Engine logprobs are a
    little off. `asked` has (version, whether for an evaluation, requests) of each call."""

    def close(self):
        pass

    asked: list = []
    evaluating = False

    def __init__(self, args, tokenizer, world, num_requests):
        self.tokenizer = tokenizer
        self.eos_ids = [tokenizer.eos_token_id]
        Stub.asked = []

    def load_weights(self, named_tensors, version):
        self.version = version

    def generate(self, requests, finished=None):
        if finished is None:  # of guards.Asker: other weights, other answers
            return [utils.Generation([5], [-6.0 - self.version / 8], "length", [self.version]) for _ in requests]
        Stub.asked.append((self.version, Stub.evaluating, list(requests)))
        asked = Stub.asked[-1][2]
        for i, request in enumerate(requests):
            while request is not None:
                rng = random.Random(request.seed)
                ids = self.tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)[: request.max_tokens]
                cut = rng.random() < 0.3
                ids += [] if cut or len(ids) == request.max_tokens else self.eos_ids
                logprobs = torch.tensor([-6.2 + 0.3 * rng.gauss(0, 1) for _ in ids]).tolist()
                made = utils.Generation(ids, logprobs, "length" if cut else "stop", [0] * len(ids))
                request = (answer := finished(i, made)) and answer.result()
                asked += [request] if request else []
        return []


def claim(args, data_hash, world):
    """As utils.prepare_run_dir, without its program's start."""
    run_files.claim(args.run_dir, asdict(args), {"data_hash": data_hash})
    return args.run_dir


EVALUATE = grpo.evaluate


def evaluated(*args):
    Stub.evaluating = True
    try:
        return EVALUATE(*args)
    finally:
        Stub.evaluating = False


BASE = """--num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 3 --total_episodes 36 --response_length 30
    --max_prompt_token_length 20 --pack_length 64 --max_logprob_gap 0 --model_dtype float32 --save_freq -1 --beta 0
    --no_load_ref_policy --save_traces --overwrite --learning_rate 3e-3 --lr_scheduler_type constant"""


ROWS: dict[tuple, list] = {}
READ_ROWS = utils.read_rows


def read_once(flag, name, amount, split, args):
    """The rows that a program, whose start takes a second, has read before for the same words."""
    asked = (flag, name, amount, split, args.seed, *part_of_rows.options(args))
    if asked not in ROWS:
        ROWS[asked] = list(READ_ROWS(flag, name, amount, split, args))
    return ROWS[asked]


@pytest.fixture(scope="module")
def play(tiny_models, world, tmp_path_factory):
    """Function flags -> what grpo.py's main did with them: see `observe`."""
    out = tmp_path_factory.mktemp("effects")
    patch = pytest.MonkeyPatch()
    data = out / "train.jsonl"
    turns = [[{"role": "user", "content": f"Say {i}"}] for i in range(6)]
    rows: list[dict] = [{"messages": turn, "ground_truth": LABEL, "dataset": "gsm8k"} for turn in turns]
    rows[1] |= {"ground_truth": [LABEL, LABEL], "dataset": ["gsm8k", "string_matcher"]}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    patch.setattr(utils, "make_engine", Stub)
    patch.setattr(grpo, "evaluate", evaluated)
    patch.setattr(utils, "init_distributed", lambda: world)
    patch.setattr(utils.dist, "destroy_process_group", lambda: None)
    patch.setattr(utils, "draw_report", lambda run_dir: "")
    patch.setattr(utils, "prepare_run_dir", claim)
    patch.setattr(utils, "read_rows", read_once)
    patch.setattr(run_files, "provenance", functools.cache(run_files.provenance))
    patch.setattr(plan, "device_speed", lambda *_: dict.fromkeys(("flops_per_second", "bytes_per_second"), 1e9))

    @functools.cache
    def run(flags):
        line = f"--model_name_or_path {tiny_models()} --output_dir {out} --dataset_mixer_list {data} 1.0 {BASE} {flags}"
        line = line.replace("EVAL", f"{data} 3").replace("TEACHER", str(tiny_models("qwen3", False)))
        try:
            made = grpo.main(utils.parse_args(grpo.Args, line.split()))
        except utils.UserError as error:
            return {"refused": type(error).__name__}
        finally:
            rewards.configure(rewards.RewardFlags(), connect=False)
        return observe(made)

    yield run
    patch.undo()


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def asked(version, evaluating):
    return [requests for asked_of, kind, requests in Stub.asked if (asked_of, kind) == (version, evaluating)]


def observe(made):
    """What a run did, in the order of cause and effect: (step, what) -> value."""
    rows = read(made / "rollouts.jsonl")
    logged = {row["training_step"]: row for row in read(made / "metrics.jsonl")}
    seen: dict = {"refused": ""}
    for step in range(max(logged) + 1):
        row = logged.get(step, {})
        mine = [row for row in rows if row["training_step"] == step]
        found = {"requests": asked(step - 1, False)}
        found |= {f"{name}s": [r[name] for r in mine] for name in ("outcome", "advantage", "audit")}
        if step:
            for name in ("loss/kl_avg", "objective/kl0_avg", "debug/vllm_vs_local_logprob_diff_mean"):
                found[name] = row.get(name)
        found["evaluation"] = asked(step, True)
        seen |= {f"{step} {name}": value for name, value in found.items()}
    return seen


# --- What no run with a stub shows ------------------------------------------------------------------------------------


def flags_of(flags):
    return utils.parse_args(grpo.Args, f"--model_name_or_path x {BASE} {flags}".split())


MAKE_ENGINE = utils.make_engine
COMMUNICATORS = ".distributed.device_communicators"


def engine_options(flags, model, world, patch):
    """Which engine is made, and what vLLM, a stub, is made of and asked for."""
    seen = {}
    vllm = mock.MagicMock()
    vllm.LLM = lambda **options: seen.update(options) or mock.MagicMock()
    vllm.SamplingParams = lambda **options: seen.update({f"asked {name}": value for name, value in options.items()})
    vllm.RequestOutputKind.FINAL_ONLY = None
    for name in ("", ".sampling_params", ".distributed", COMMUNICATORS, f"{COMMUNICATORS}.cpu_communicator"):
        patch.setitem(sys.modules, f"vllm{name}", vllm)
    args = replace(flags_of(flags), model_name_or_path=str(model))
    patch.setenv("VLLM_RPC_BASE_PATH", "")  # which the engine sets for its ranks
    patch.setattr(utils.gc, "freeze", lambda: None)  # these are the tests' objects
    engine: Any = MAKE_ENGINE(args, utils.load_tokenizer(args), world, 8)
    if isinstance(engine, utils.VLLMEngine):
        engine.add("0", utils.Request((1, 2), 3, 0.7, 5))
    return {"class": type(engine).__name__} | {name: value for name, value in seen.items() if name != "model"}


def sleeps(flags, model, world, patch):
    """The same on a GPU."""
    patch.setenv("VLLM_CACHE_ROOT", "")
    gpu = utils.World(0, 0, 1, torch.device("cuda:0"))
    return engine_options(flags, model, gpu, patch)


# --- The flags --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    base: str
    changed: str
    differs: str  # the first difference of two runs
    view: str = "play"


KL = "--beta 0.5 --load_ref_policy"
TURNS = "--response_length 100 --pack_length 128 --env_file ENV"
ENV = "def step(episode):\n    return 'so' if '7' not in episode.text and episode.turn < 3 else None\n"
CASES: dict[str, Case] = {
    # the algorithm
    "force_kl_in_reward": Case(f"{KL} --kl_in_reward", "--force_kl_in_reward", "refused"),
    "ref_policy_update_freq": Case(KL, "--ref_policy_update_freq 2", "3 loss/kl_avg"),
    "alpha": Case(f"{KL} --ref_policy_update_freq 1", "--alpha 0.1", "2 loss/kl_avg"),
    "per_device_train_batch_size": Case(
        "--verification_reward 0", "--per_device_train_batch_size 4", "1 debug/vllm_vs_local_logprob_diff_mean"
    ),
    "sequence_parallel_size": Case("", "--sequence_parallel_size 2", "refused"),  # else tests/test_sequence_parallel.py
    "total_episodes": Case("", "--total_episodes 24", "3 requests"),
    "local_eval_every": Case("--dataset_mixer_eval_list EVAL", "--local_eval_every 2", "2 evaluation"),
    "eval_on_step_0": Case("--dataset_mixer_eval_list EVAL", "--eval_on_step_0", "0 evaluation"),
    "eval_pass_at_k": Case("--dataset_mixer_eval_list EVAL", "--eval_pass_at_k 2", "3 evaluation"),
    # the learner's models
    "ref_model_name_or_path": Case("--load_ref_policy", "--ref_model_name_or_path TEACHER", "1 objective/kl0_avg"),
    # the engine
    "rollout_backend": Case("", "--rollout_backend transformers", "class", "engine_options"),
    "response_length": Case("", "--response_length 3", "1 requests"),
    "vllm_top_p": Case("--no_use_rho_correction", "--vllm_top_p 0.5", "1 requests"),
    "stop_strings": Case("", "--stop_strings stop", "asked stop", "engine_options"),
    "eval_temperature": Case("--dataset_mixer_eval_list EVAL", "--eval_temperature 0.5", "3 evaluation"),
    "eval_response_length": Case("--dataset_mixer_eval_list EVAL", "--eval_response_length 3", "3 evaluation"),
    "vllm_gpu_memory_utilization": Case(
        "", "--vllm_gpu_memory_utilization 0.4", "gpu_memory_utilization", "engine_options"
    ),
    "vllm_sleep": Case("", "--vllm_sleep off", "enable_sleep_mode", "sleeps"),
    "vllm_enforce_eager": Case("", "--vllm_enforce_eager", "enforce_eager", "engine_options"),
    "vllm_enable_prefix_caching": Case("", "--vllm_enable_prefix_caching", "enable_prefix_caching", "engine_options"),
    "vllm_tensor_parallel_size": Case("", "--vllm_tensor_parallel_size 2", "tensor_parallel_size", "engine_options"),
    "vllm_kwargs": Case(
        "", '--vllm_kwargs {"kv_cache_dtype":"fp8","max_num_seqs":3}', "max_num_seqs", "engine_options"
    ),
    "max_logprob_gap": Case("", "--max_logprob_gap 0.01", "refused"),
    # turns
    "env_file": Case(TURNS.partition(" --env_file")[0], "--env_file ENV", "1 requests"),
    "max_steps": Case(TURNS, "--max_steps 1", "1 requests"),
    "per_turn_max_tokens": Case(TURNS, "--per_turn_max_tokens 2", "1 requests"),
    # the reward
    "remap_verifier": Case("", "--remap_verifier gsm8k=string_matcher", "1 outcomes"),
    "audit_verifier": Case("", "--audit_verifier string_matcher", "1 audits"),
}


# Of models, servers and programs: tests/test_lora.py, test_judge.py, test_tools.py, test_turns.py, test_rewards.py
ELSEWHERE = """tools tool_call_names tool_configs tool_parser_type env_timeout pool_size reward_file
    code_max_execution_time
    code_pass_rate_reward_threshold allow_unsafe_code llm_judge_model llm_judge_base_url llm_judge_max_tokens
    llm_judge_max_context_length llm_judge_timeout solver_model_name_or_path solver_base_url solver_num_engines
    solver_num_samples solver_response_length""".split()


@pytest.mark.house
def test_every_flag_has_a_case_or_is_drawn():
    parts = (grpo.GRPOFlags, utils.EngineFlags, utils.TurnFlags, rewards.RewardFlags)
    flags = {field.name for part in parts for field in fields(part)}
    draws = [reference.draw_args(random.Random(seed), "x") for seed in range(60)]
    drawn = {name for name in flags if len({str(getattr(args, name)) for args in draws}) > 1}
    missing = flags - drawn - set(CASES) - set(ELSEWHERE)
    assert not missing, f"draw it in reference.draw_args, or give it a row in CASES: {missing}"


@pytest.mark.parametrize("name", CASES)
def test_a_flag_does_what_it_says(name, play, tiny_models, world, tmp_path):
    case = CASES[name]
    assert name in case.changed
    environment = tmp_path / "environment.py"
    environment.write_text(ENV)
    found = []
    for flags in (case.base, f"{case.base} {case.changed}"):
        flags = flags.replace("ENV", str(environment))
        if case.view == "play":
            found.append(play(" ".join(flags.split())))
            continue
        with pytest.MonkeyPatch.context() as patch:
            found.append(globals()[case.view](flags, tiny_models(), world, patch))
        rewards.configure(rewards.RewardFlags(), connect=False)
    a, b = found
    differs = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    assert differs[0] == case.differs
