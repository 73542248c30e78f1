"""The other side of comparisons: TRL's GRPOTrainer on the model, data and settings of a run of grpo.py.

    bash scripts/peers/setup_trl.sh && source scripts/setup.sh
    .venv-trl/bin/python scripts/peers/trl_side.py --mode stock --like runs/ours --json runs/trl.json
    .venv-trl/bin/python scripts/peers/trl_side.py --mode batches --like runs/ours --autocast none --out runs/trl

mode     generation by         what runs
stock    model.generate        TRL as it is, with float32 weights
vllm     vLLM in this process  TRL as it is, on a GPU; on a CPU TRL 1.9.2 crashes at its first update
batches  nobody                TRL's update on tokens, masks, scores and advantages of RUN's dumps (--dump_steps all)
states   model.generate        TRL on the dumps' prompts, each step from the weights that RUN saved (--save_freq 1)

--out DIR gets what scripts/align/align.py reads: metrics.jsonl with TRL's own numbers and pg_loss = loss - beta kl +
entropy_coef entropy, ppo_kl = mean(old - new); model/ and step_N/. In mode batches, rollouts that were not trained on
are masked, and TRL divides by a group's standard deviation + 1e-4: advantages are the dump's.
"""

import argparse
import functools
import importlib.util
import json
import math
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)
if importlib.util.find_spec("trl") is None:
    raise SystemExit(f"{__doc__}\nTRL is not in this environment: see the two commands above")

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

import rewards  # noqa: E402
from scripts.parts import dumps  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["stock", "vllm", "batches", "states"], required=True)
    parser.add_argument("--like", type=Path, required=True, metavar="RUN", help="of grpo.py: its args.json is followed")
    parser.add_argument("--reward_file", metavar="FILE:FUNCTION", help="(response, truth) -> number; else our gsm8k's")
    parser.add_argument("--autocast", choices=["none", "bfloat16"], default="bfloat16", help="of the learner")
    parser.add_argument("--micro_batch", type=int, default=32, help="rows of a forward and backward")
    parser.add_argument("--seed", type=int, help="of order and sampling, if not RUN's; TRL seeds vLLM with 0 always")
    parser.add_argument("--out", type=Path, help="directory for metrics.jsonl and model/")
    parser.add_argument("--save_freq", type=int, default=0, help="steps between OUT/step_N/; 0 is never")
    parser.add_argument("--json", type=Path, help="file for seconds, generation and tokens of each step")
    args = parser.parse_args()
    ours = json.loads((args.like / "args.json").read_text())
    args.model = ours["model_name_or_path"]
    args.data = Path(ours["dataset_mixer_list"][0])
    args.prompts = ours["num_unique_prompts_rollout"]
    args.samples = ours["num_samples_per_prompt_rollout"]
    args.rollouts = args.prompts * args.samples
    args.steps = ours["total_episodes"] // args.rollouts
    args.seed = args.seed or ours["seed"]
    args.ours = ours
    return args


@functools.cache
def dumped_rollouts(run: Path, step: int, prompts: int, samples: int) -> list[dict[str, Any]]:
    """A dumped step, the rollouts of a prompt adjacent, masked if they were not trained on. Raises utils.UserError if
    they are not `samples` of each of `prompts`, as TRL has them."""
    rows, dump = dumps.read_dump(run, step)
    rows = [row for row in rows if row["position"] in dump["positions"]]
    sizes = [sum(row["position"] == position for row in rows) for position in dump["positions"]]
    regular = sizes == [samples] * prompts
    utils.need(regular, f"{run}: step {step} has groups of {sizes} rollouts, and not {prompts} of {samples}")
    for row in rows:
        if "old_logprobs" not in row:
            row["mask"] = [False] * len(row["mask"])
    return rows


class Trainer(GRPOTrainer):
    """Notes what a step generated and how long that took, and trains on dumped advantages."""

    options: argparse.Namespace
    generated = {"generation": 0.0, "tokens": 0}

    def dumped(self) -> list[dict[str, Any]]:
        """The rollouts of this step in --dumps."""
        options = self.options
        return dumped_rollouts(options.like, self.state.global_step + 1, options.prompts, options.samples)

    def _generate_single_turn(self, prompt_ids, *others):
        start = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *others)
        self.generated = {"generation": time.perf_counter() - start, "tokens": sum(map(len, completion_ids))}
        return completion_ids, logprobs

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.options.mode == "batches":
            output["advantages"] = output["advantages"].new_tensor([row["advantage"] for row in self.dumped()])
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


def replay(_: Any, trainer: Trainer) -> dict[str, list]:
    """Mode batches: what TRL's rollout_func returns. TRL cannot have an empty completion: a masked token stands for
    it. Where we have NaN, a missing score, TRL has None."""
    rows = trainer.dumped()
    return {
        "prompt_ids": [row["prompt_ids"] for row in rows],
        "completion_ids": [row["token_ids"] or [0] for row in rows],
        "logprobs": [row["logprobs"] or [0.0] for row in rows],
        "env_mask": [list(map(int, row["mask"])) or [0] for row in rows],
        "score": [math.nan if row["score"] is None else row["score"] for row in rows],
    }


class Recorder(TrainerCallback):
    """Puts a policy on RUN's states, and writes --out and --json. A step lasts from the last one's end to its own."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.steps: list[dict[str, float]] = []
        self.trainer: Any = None

    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()
        if self.args.out:
            self.args.out.mkdir(parents=True, exist_ok=True)
            (self.args.out / "metrics.jsonl").write_text("")

    def on_step_begin(self, _, state, __, model=None, **___):
        """Adam's moments stay this side's: they act on weights that the next step replaces."""
        if self.args.mode == "states" and state.global_step > 0:
            from scripts.align.align import load_hf_state

            model.load_state_dict(load_hf_state(self.args.like / f"step_{state.global_step}"))

    def on_step_end(self, _, state, __, model=None, **___):
        step = {"seconds": time.perf_counter() - self.start} | self.trainer.generated
        self.start += step["seconds"]
        self.steps.append(step)
        print(f"step {state.global_step}", step, flush=True)
        if self.args.out and self.args.save_freq and state.global_step % self.args.save_freq == 0:
            model.save_pretrained(self.args.out / f"step_{state.global_step}")

    def on_log(self, _, state, __, logs=None, **___):
        if not self.args.out or "loss" not in logs:  # the last call sums up the run
            return
        if self.args.mode == "batches":  # given, and TRL would not count the rollouts that were not trained on
            logs = {name: value for name, value in logs.items() if not name.startswith("completions/")}
        ours = self.args.ours
        pg_loss = logs["loss"] - ours["beta"] * logs["kl"] + ours["entropy_coef"] * logs["entropy"]
        with (self.args.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": state.global_step} | logs | {"pg_loss": pg_loss}) + "\n")

    def on_train_end(self, *_, model=None, **__):
        if self.args.out:
            model.save_pretrained(self.args.out / "model")
            self.trainer.processing_class.save_pretrained(self.args.out / "model")
        if self.args.json:
            self.args.json.write_text(json.dumps(self.steps))


def score_number(response: str, truth: str) -> Any:
    """Our reward of GSM8K: 1 if the final number of the response is the ground truth."""
    return rewards.verify_gsm8k(rewards.RewardRecord(response, truth, "gsm8k")).score


def load_rows(args: argparse.Namespace, tokenizer: Any) -> tuple[list[dict], int | None]:
    """The rows of the data set, or those of the dumps, and the tokens of the longest prompt and completion."""
    if args.mode == "batches":
        return [{"prompt": ""}] * (args.steps * args.prompts), None  # rollout_func has the real ones
    rows = []
    by_tokens = {}
    for line in args.data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
        rows.append({"prompt": row["messages"], "ground_truth": str(row["ground_truth"])})
        by_tokens[tuple(ids)] = rows[-1]
    if args.mode == "states":
        steps = [dumped_rollouts(args.like, i + 1, args.prompts, args.samples) for i in range(args.steps)]
        rows = [by_tokens[tuple(row["prompt_ids"])] for step in steps for row in step[:: args.samples]]
    return rows, max(map(len, by_tokens)) + args.ours["response_length"]


def make_config(args: argparse.Namespace, scratch: str, max_tokens: int | None) -> GRPOConfig:
    """The settings that are equal on both sides, and those of vLLM, which other modes do not read. TRL's defaults are
    equal too: dapo loss, advantages scaled per group, fused AdamW without weight decay, gradients clipped at 1."""
    ours = args.ours
    micro_batch = min(args.micro_batch, args.rollouts)
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=not torch.cuda.is_available(),
        bf16=args.autocast == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=ours["gradient_checkpointing"],
        max_steps=args.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=args.rollouts // micro_batch,
        num_generations=args.samples,
        max_completion_length=ours["response_length"],
        temperature=ours["temperature"],
        # For 0 TRL has no reference policy and logs no KL, which align.py compares: 1e-30 changes no gradient
        beta=ours["beta"] or (1e-30 if args.out else 0.0),
        entropy_coef=ours["entropy_coef"],
        epsilon=ours["clip_lower"],
        epsilon_high=ours["clip_higher"],
        learning_rate=ours["learning_rate"],
        lr_scheduler_type=ours["lr_scheduler_type"],  # without warm-up
        seed=args.seed,
        shuffle_dataset=ours["shuffle"] and args.mode not in ("batches", "states"),
        save_strategy="no",
        logging_strategy="steps" if args.out else "no",
        logging_steps=1,
        disable_tqdm=True,
        use_vllm=args.mode == "vllm",
        vllm_max_model_length=max_tokens,
        # the correction computes one more forward per step: off, the faster setting for TRL with vLLM
        vllm_importance_sampling_correction=args.mode != "vllm",
    )


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows, max_tokens = load_rows(args, tokenizer)
    path, _, function = (args.reward_file or "").rpartition(":")
    score = runpy.run_path(path)[function] if path else score_number

    def reward(completions: list, ground_truth: Sequence[str] = (), **columns: Any) -> list:
        if args.mode == "batches":
            return [None if math.isnan(dumped) else dumped for dumped in columns["score"]]
        texts = [messages[-1]["content"] for messages in completions]
        return [float(score(text, truth)) for text, truth in zip(texts, ground_truth, strict=True)]

    recorder = Recorder(args)
    with tempfile.TemporaryDirectory() as scratch:
        recorder.trainer = Trainer(
            model=args.model,
            reward_funcs=reward,
            args=make_config(args, scratch, max_tokens),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[recorder],
            rollout_func=replay if args.mode == "batches" else None,
        )
        recorder.trainer.options = args
        recorder.trainer.train()


if __name__ == "__main__":
    main()
