"""GRPOTrainer of TRL with clocks, and with what scripts/peers/trl_side.py asks of it. Needs TRL."""

import argparse
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?\d+(?:\.\d+)?")

# --- Rewards, as TRL calls them ---------------------------------------------------------------------------------------


def texts_of(completions: list) -> list[str]:
    return [messages[-1]["content"] for messages in completions]


def correct_number(completions: list, ground_truth: list[str], **_: Any) -> list[float]:
    """1.0 where the last number of the completion equals the ground truth, else 0.0."""
    scores = []
    for text, truth in zip(texts_of(completions), ground_truth, strict=True):
        numbers = NUMBER.findall(text.replace(",", ""))
        scores.append(float(bool(numbers) and float(numbers[-1]) == float(truth)))
    return scores


def score_with(path_and_name: str) -> Callable[..., list[float]]:
    """The reward of --reward_file."""
    path, _, name = path_and_name.rpartition(":")
    spec = importlib.util.spec_from_file_location("peer_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, name)

    def scores(completions: list, ground_truth: list[str], **_: Any) -> list[float]:
        return [float(score(text, truth)) for text, truth in zip(texts_of(completions), ground_truth, strict=True)]

    return scores


def dumped_score(completions: list, score: list[float], **_: Any) -> list[float | None]:
    """Mode batches: the score that the rollout had. Where we have NaN, a missing sample, TRL has None."""
    return [None if math.isnan(x) else x for x in score]


def choose_reward(args: argparse.Namespace) -> Callable[..., Sequence[float | None]]:
    if args.mode == "batches":
        return dumped_score
    return score_with(args.reward_file) if args.reward_file else correct_number


# --- Clocks -----------------------------------------------------------------------------------------------------------


def machine_cpu_seconds() -> float:
    """CPU time of all processes of the machine."""
    with open("/proc/stat") as file:
        ticks = file.readline().split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Clock:
    """Seconds since the last `lap`, by the wall, of this process's CPU time, and of the whole machine's."""

    def __init__(self):
        self.last = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        machine = machine_cpu_seconds()
        *own, _elapsed = os.times()
        return time.perf_counter(), sum(own), machine

    def lap(self) -> tuple[float, ...]:
        before = self.last
        self.last = self.read()
        return tuple(now - then for now, then in zip(self.last, before, strict=True))


@dataclass
class StepLog:
    """What is measured of the step under way, and of all that are done."""

    now: dict[str, Any] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)

    def note_generation(self, wall: float, cpu: float, prompt_tokens: int, completion_tokens: int) -> None:
        self.now |= {"generation_s": wall, "generation_cpu_s": cpu}
        self.now |= {"completion_tokens": completion_tokens, "prompt_tokens": prompt_tokens}


# --- TRL --------------------------------------------------------------------------------------------------------------


def patch_vllm(log: StepLog, dtype: str) -> None:
    """Changes to TRL's vLLM backend on a CPU. Without the last, TRL 1.9.2 crashes on a CPU at its first update.

    The engine runs eager, for which TRL has no option: compiling takes a minute at the start.
    Its blocks have 32 tokens, as ours: in vLLM's 128 a short prompt fills none, and is computed for each sample.
    TRL names no dtype, and vLLM then takes bfloat16 for float32: slow on a CPU without its instructions.
    Weights go through `reload_weights`: vLLM's CPU backend packs a layer's weights and drops the originals, so that
    TRL's `model.load_weights` finds nothing to load into. A tied head keeps a packed copy of its own, which stays that
    of the old weights unless it is sent under its own name too.
    """
    from trl.generation import vllm_generation

    def sync_weights(self) -> None:
        start = time.perf_counter()
        weights = dict(self.model.named_parameters())
        weights.setdefault("lm_head.weight", self.model.get_output_embeddings().weight)
        weights = {self._fix_param_name_to_vllm(name): w for name, w in weights.items()}
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=((name, weight.detach()) for name, weight in weights.items()))
        self.llm.reset_prefix_cache()
        log.now["sync_s"] = time.perf_counter() - start

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True, block_size=32, dtype=dtype)
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


class TimedTrainer(GRPOTrainer):
    """Notes what a step generated and how long that took."""

    def __init__(self, options: argparse.Namespace, log: StepLog, **trl_arguments: Any):
        self.options = options
        self.step_log = log
        super().__init__(**trl_arguments)

    def _generate_single_turn(self, prompt_ids, *others):
        clock = Clock()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *others)
        wall, cpu, _ = clock.lap()
        self.step_log.note_generation(wall, cpu, sum(map(len, prompt_ids)), sum(map(len, completion_ids)))
        return completion_ids, logprobs

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.options.mode == "batches":
            batch = self.options.batches[self.state.global_step]
            dumped = output["advantages"].new_tensor(batch.advantages)
            difference = (output["advantages"] - dumped).abs().max().item()
            self._metrics["train"]["advantages_difference"].append(difference)
            if self.options.advantages == "dump":
                output["advantages"] = dumped
        return output

    def _get_per_token_logps_and_entropies(self, *arguments, **named):
        self.latest = super()._get_per_token_logps_and_entropies(*arguments, **named)
        return self.latest

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        new = self.latest[0].detach()
        old = inputs.get("old_per_token_logps")
        old = new if old is None else old
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        ppo_kl = ((old - new) * mask).sum() / mask.sum().clamp(min=1)
        self._metrics["train"]["ppo_kl"].append(ppo_kl.item())
        return loss


class StepTimer(TrainerCallback):
    """A step lasts from the end of the last one to its own end, whatever the trainer does in between."""

    def __init__(self, log: StepLog):
        self.log = log

    def on_train_begin(self, *_, **__):
        self.log.now = {}
        self.clock = Clock()

    def on_step_end(self, *_, **__):
        wall, cpu, machine = self.clock.lap()
        step = {"step": len(self.log.done) + 1} | self.log.now
        step["learner_s"] = wall - step["generation_s"]
        step["learner_cpu_s"] = cpu - step["generation_cpu_s"]
        step["total_s"] = wall
        step["other_cpus"] = max(0.0, machine - cpu) / wall
        self.log.done.append(step)
        self.log.now = {}
        line = "step {step} | generation {generation_s:.2f} s learner {learner_s:.2f} s total {total_s:.2f} s"
        line += " | reward {reward:.3f} | tokens {prompt_tokens} + {completion_tokens} | other cpus {other_cpus:.2f}"
        print(line.format_map(step), flush=True)


class StateLoader(TrainerCallback):
    """Mode states: every step starts from the weights that the other side had. Adam's moments stay this side's: they
    act after the numbers of a step are taken, on weights that the next step replaces."""

    def __init__(self, states: Path):
        self.states = states

    def on_step_begin(self, _, state, __, model=None, **___):
        from scripts.align.align import load_hf_state

        if state.global_step > 0:
            missing, unknown = model.load_state_dict(load_hf_state(self.states / f"step_{state.global_step}"))
            assert not missing and not unknown, (missing, unknown)


def parameter_checksums(model: torch.nn.Module) -> dict[str, dict]:
    """sha256 of the bytes and Euclidean norm of every parameter; a tied one is listed once."""
    checksums = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().cpu().contiguous()
        digest = hashlib.sha256(weight.flatten().view(torch.uint8).numpy()).hexdigest()
        checksums[name] = {"sha256": digest, "norm": weight.double().norm().item()}
    return checksums


class Recorder(TrainerCallback):
    """Writes --out."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any):
        self.args = args
        self.tokenizer = tokenizer

    def on_train_begin(self, *_, **__):
        self.args.out.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "weights.jsonl"):
            (self.args.out / name).write_text("")

    def write(self, name: str, row: dict) -> None:
        with (self.args.out / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_step_end(self, _, state, __, model=None, **___):
        self.write("weights.jsonl", {"step": state.global_step, "parameters": parameter_checksums(model)})
        if self.args.save_freq and state.global_step % self.args.save_freq == 0:
            model.save_pretrained(self.args.out / f"step_{state.global_step}")

    def on_log(self, _, state, __, logs=None, **___):
        if self.args.mode == "batches":  # given, and TRL would not count the rollouts that were not trained on
            logs = {name: value for name, value in logs.items() if not name.startswith("completions/")}
        if "loss" in logs:  # the last call sums up the run
            regularization = self.args.beta * logs["kl"] - self.args.entropy_coef * logs["entropy"]
            pg_loss = {"pg_loss": logs["loss"] - regularization}
            self.write("metrics.jsonl", {"step": state.global_step} | logs | pg_loss)

    def on_train_end(self, *_, model=None, **__):
        model.save_pretrained(self.args.out / "model")
        self.tokenizer.save_pretrained(self.args.out / "model")


def dumped_prompts(batches: list[Any], rows: list[dict], prompts: list[list[int]]) -> list[dict]:
    """The rows whose prompts the dumps have, in their order."""
    by_tokens = {tuple(ids): row for ids, row in zip(prompts, rows, strict=True)}
    found = []
    for batch in batches:
        first = {position: tuple(ids) for position, ids in zip(batch.positions, batch.prompt_ids, strict=True)}
        missing = [ids for ids in first.values() if ids not in by_tokens]
        if missing:
            raise SystemExit(f"step {batch.step}: {len(missing)} prompts are not in --data, the run's data set?")
        found += [by_tokens[ids] for ids in first.values()]
    return found


def load_rows(args: argparse.Namespace, tokenizer: Any) -> tuple[list[dict], int | None]:
    """The rows of the data set, and the tokens of the longest prompt with the longest completion."""
    if args.mode == "batches":
        return [{"prompt": ""}] * (args.steps * args.prompts), None  # rollout_func has the real ones
    rows = []
    prompts = []
    for line in args.data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.append({"prompt": row["messages"], "ground_truth": str(row["ground_truth"])})
        prompts.append(tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False))
    max_tokens = max(map(len, prompts)) + args.max_new_tokens
    return dumped_prompts(args.batches, rows, prompts) if args.mode == "states" else rows, max_tokens


def make_config(args: argparse.Namespace, scratch: str, max_tokens: int | None) -> GRPOConfig:
    """The settings that are equal on both sides, and those of vLLM, which other modes do not read."""
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=not torch.cuda.is_available(),
        bf16=args.autocast == "bfloat16",
        model_init_kwargs={"dtype": args.dtype},
        torch_compile=args.torch_compile,
        gradient_checkpointing=args.gradient_checkpointing,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.samples // args.micro_batch,
        num_generations=args.samples,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        loss_type="dapo",
        # For 0 TRL has no reference policy and logs no KL, which align.py compares: 1e-30 changes no gradient
        beta=args.beta or (1e-30 if args.out else 0.0),
        entropy_coef=args.entropy_coef,
        epsilon=args.clip_lower,
        epsilon_high=args.clip_higher,
        num_iterations=1,
        scale_rewards="group",
        learning_rate=args.lr,
        lr_scheduler_type=args.lr_scheduler,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        seed=args.seed,
        shuffle_dataset=not (args.batches or args.no_shuffle),
        save_strategy="no",
        logging_strategy="steps" if args.out else "no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_vllm=args.mode == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=max_tokens,
        vllm_gpu_memory_utilization=0.35,
        # the correction computes one more forward per step: off, the faster setting for TRL with vLLM
        vllm_importance_sampling_correction=args.mode != "vllm",
    )


def replay(_: Any, trainer: TimedTrainer) -> dict[str, list]:
    """Mode batches: TRL's rollout_func gives the dumped step."""
    batch = trainer.options.batches[trainer.state.global_step].for_trl
    prompt_tokens = sum(map(len, batch["prompt_ids"]))
    trainer.step_log.note_generation(0.0, 0.0, prompt_tokens, sum(map(sum, batch["env_mask"])))
    return batch


def make_trainer(args: argparse.Namespace, scratch: str, log: StepLog) -> TimedTrainer:
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows, max_tokens = load_rows(args, tokenizer)
    if args.mode == "vllm" and not torch.cuda.is_available():
        in_float32 = args.dtype == "float32" and args.autocast == "none"
        patch_vllm(log, "float32" if in_float32 else "auto")
    callbacks: list[TrainerCallback] = [StepTimer(log)]
    if args.mode == "states":
        callbacks.append(StateLoader(args.states))
    if args.out:
        callbacks.append(Recorder(args, tokenizer))
    score = choose_reward(args)

    def reward(**kwargs: Any) -> Sequence[float | None]:
        scores = score(**kwargs)
        log.now["reward"] = statistics.mean(x for x in scores if x is not None)
        return scores

    trainer = TimedTrainer(
        args,
        log,
        model=args.model,
        reward_funcs=reward,
        args=make_config(args, scratch, max_tokens),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
        rollout_func=replay if args.mode == "batches" else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
