"""The other side of the speed comparison: TRL's GRPOTrainer on the model, data and settings of grpo.py, on a CPU.

Prints the seconds of every step, split into generation and the rest. TRL is no dependency of this project:

    source scripts/peers/setup_trl.sh      # .venv-trl, an environment of its own
    python scripts/peers/trl_side.py --mode stock --steps 6 --max_new_tokens 64 --json runs/trl_stock.json

mode      generation by                      weights (--dtype)  what runs
stock     model.generate                     float32 or bf16    TRL as it is, with its bf16 autocast
stock_cb  transformers' continuous batching  bfloat16 only      TRL as it is; it casts the trained model to bfloat16
vllm      vLLM in this process, eager        float32 or bf16    TRL with `patch_vllm`: as it is, it crashes on a CPU

bfloat16 weights have no float32 master copy: faster, but at usual learning rates most of an update is rounded away.
vLLM's weights have the dtype of the checkpoint, whatever --dtype says: TRL has no option for it.

Set to be equal on both sides: dapo loss, beta 0, one update per rollout, advantages scaled per group, temperature 1,
fused AdamW without weight decay, constant learning rate, gradients clipped at 1, no checkpointing, no eval, no saving.
The reward is 1 if the last number of the completion is the ground truth, as rewards.py's gsm8k has it for plain text.

generation_s  sampling and, with vLLM, loading the new weights into it (sync_s is that part)
learner_s     the rest of the step: reward, advantages, forward, backward, clipping, AdamW
other_cpus    CPUs that other processes kept busy meanwhile: above 0.15, compare the CPU-seconds (_cpu_s) instead
"""

import argparse
import functools
import json
import os
import re
import resource
import statistics
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# As utils.py sets them, before torch and vLLM are imported
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MICRO_BATCH = 32
NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?\d+(?:\.\d+)?")
PACKAGES = ("trl", "transformers", "accelerate", "torch", "vllm-cpu")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["stock", "stock_cb", "vllm"], required=True)
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "addition" / "train.jsonl")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the trained weights")
    parser.add_argument("--torch_compile", action="store_true", help="TRL's flag: compiles the learner")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1, help="of data order and sampling; TRL seeds vLLM with 0 always")
    parser.add_argument("--json", metavar="PATH", help="write everything measured there; - is stdout")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.mode == "stock_cb" else "float32")
    if args.mode == "stock_cb" and args.dtype == "float32":
        parser.error("--mode stock_cb trains bfloat16 weights whatever it loads: say --dtype bfloat16")
    if args.prompts * args.samples > MICRO_BATCH and args.prompts * args.samples % MICRO_BATCH:
        parser.error(f"--prompts x --samples above {MICRO_BATCH} has to be a multiple of it: the micro-batch")
    return args


def correct_number(completions: list, ground_truth: list[str], **_) -> list[float]:
    """1.0 where the last number of the completion equals the ground truth, else 0.0."""
    found = [NUMBER.findall(messages[-1]["content"].replace(",", "")) for messages in completions]
    return [float(bool(n) and float(n[-1]) == float(truth)) for n, truth in zip(found, ground_truth, strict=True)]


class Clock:
    """Seconds since the last `lap`, by the wall, of this process's CPU time, and of the whole machine's."""

    def __init__(self):
        self.last = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        with open("/proc/stat") as f:  # user nice system idle iowait irq softirq steal, in ticks
            ticks = [int(field) for field in f.readline().split()[1:9]]
        machine = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return time.perf_counter(), own.user + own.system + own.children_user + own.children_system, machine

    def lap(self) -> tuple[float, float, float]:
        before, self.last = self.last, self.read()
        return tuple(now - then for now, then in zip(self.last, before, strict=True))


def patch_vllm() -> None:
    """Two changes to TRL's vLLM backend. Without the second, TRL 1.9.2 crashes on a CPU at its first update.

    The engine runs eager, for which TRL has no option: compiling takes a minute at the start.
    Weights go through `reload_weights`: vLLM's CPU backend packs a layer's weights and drops the originals, so that
    TRL's `model.load_weights` finds nothing to load into. A tied head keeps a packed copy of its own, which stays that
    of the old weights unless it is sent under its own name too.
    """
    from trl.generation import vllm_generation

    def sync_weights(self) -> None:
        weights = dict(self.model.named_parameters())
        weights.setdefault("lm_head.weight", self.model.get_output_embeddings().weight)
        weights = {self._fix_param_name_to_vllm(name): w for name, w in weights.items()}
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=((name, weight.detach()) for name, weight in weights.items()))
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def make_trainer(args: argparse.Namespace, scratch: str):
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": row["messages"], "ground_truth": str(row["ground_truth"])} for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    prompts = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]
    max_tokens = max(map(len, prompts)) + args.max_new_tokens
    batch = args.prompts * args.samples
    micro_batch = min(MICRO_BATCH, batch)

    options = {}
    if args.mode == "stock_cb":
        # Sizes for this batch. Left to itself it takes half the memory and half a minute to find that out.
        pages = batch * -(-max_tokens // 32)
        sizes = {"page_size": 32, "num_blocks": pages, "max_batch_tokens": 512, "max_requests_per_batch": batch}
        options = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": sizes}
    if args.mode == "vllm":
        patch_vllm()
        # TRL's importance sampling correction computes one more forward per step: off, the faster setting for it
        options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": max_tokens}
        options |= {"vllm_importance_sampling_correction": False}
    config = GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": args.dtype},
        torch_compile=args.torch_compile,
        gradient_checkpointing=False,
        max_steps=args.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        num_generations=args.samples,
        max_completion_length=args.max_new_tokens,
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        scale_rewards="group",
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        seed=args.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )

    class TimedTrainer(GRPOTrainer):
        """Notes what a step generated and how long that took."""

        def _generate_single_turn(self, prompt_ids, *rest):
            before = Clock()
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *rest)
            wall, cpu, _ = before.lap()
            tokens = {"completion_tokens": sum(map(len, completion_ids)), "prompt_tokens": sum(map(len, prompt_ids))}
            self.now |= {"generation_s": wall, "generation_cpu_s": cpu} | tokens
            return completion_ids, logprobs

    class StepTimer(TrainerCallback):
        """A step lasts from the end of the last one to its own end, whatever the trainer does in between."""

        def on_train_begin(self, *_, **__):
            trainer.now, trainer.steps, self.clock = {}, [], Clock()

        def on_step_end(self, *_, **__):
            wall, cpu, machine = self.clock.lap()
            now, trainer.now = trainer.now, {}
            now |= {"learner_s": wall - now["generation_s"], "learner_cpu_s": cpu - now["generation_cpu_s"]}
            now |= {"total_s": wall, "other_cpus": max(0.0, machine - cpu) / wall}
            trainer.steps.append({"step": len(trainer.steps) + 1} | now)
            line = "step {step} | generation {generation_s:.2f} s learner {learner_s:.2f} s total {total_s:.2f} s"
            line += (
                " | reward {reward:.3f} | tokens {prompt_tokens} + {completion_tokens} | other cpus {other_cpus:.2f}"
            )
            print(line.format_map(trainer.steps[-1]), flush=True)

    def reward(**kwargs):
        scores = correct_number(**kwargs)
        trainer.now["reward"] = statistics.mean(scores)
        return scores

    trainer = TimedTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StepTimer()],
    )
    trainer.remove_callback(PrinterCallback)
    if args.mode == "vllm":
        sync_weights = trainer.vllm_generation.sync_weights

        def timed_sync():
            start = time.perf_counter()
            sync_weights()
            trainer.now["sync_s"] = time.perf_counter() - start

        trainer.vllm_generation.sync_weights = timed_sync
    return trainer


def main() -> None:
    args = parse_args()
    if "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        print("Intel OpenMP is not preloaded: `source scripts/peers/setup_trl.sh` first, or TRL is shown too slow")
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(args, scratch)
        trainer.train()
    timed = trainer.steps[1:] or trainer.steps  # the first step allocates and compiles
    keys = [key for key in timed[0] if key != "step"]
    result = {
        "args": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "steps": trainer.steps,
        "median": {key: statistics.median(step[key] for step in timed) for key in keys},
        "trained_dtype": str(next(trainer.model.parameters()).dtype),
        "engine_dtype": None,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": {package: version(package) for package in PACKAGES},
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
