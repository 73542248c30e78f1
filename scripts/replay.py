"""Make the updates of a run again from its dumps, and compare loss, gradient norm and weights with the run's.

    python grpo.py ... --dump_steps all            a run that keeps what a replay needs
    python scripts/replay.py RUN --step 7          step 7, from the newest checkpoint before it or from the start
    python scripts/replay.py RUN --step 7 --from_start --save model_7

Nothing is sampled: start model, rollouts.jsonl and dumps/ are enough to make any later state again. Weights are
compared with the hash in the dump, the update's metrics with the run's metrics.jsonl. A run with several learners is
replayed under torchrun with as many ranks; with fewer ranks the weights agree up to the order of sums. The run of a
copy, such as my_grpo.py, is replayed by that copy. The exit status is 0 if everything is equal to the last bit, or
within --tolerance where one is given.
"""

import argparse
import importlib
import json
import math
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

NOT_COMPARED = ("debug/", "time/")  # rounding, and the clock
SHOWN = ("loss/total_avg", "optim/grad_norm")


def replay(options: argparse.Namespace) -> bool:
    """Make the steps up to options.step again and print a line for each; returns whether they are the run's."""
    import torch

    import utils
    from scripts.parts import checkpoints, dumps, hub

    run_dir = options.run
    hub.remember(run_dir)
    grpo = maths_of(run_dir)
    args = read_args(run_dir, grpo)
    args = replace(args, trust_remote_code=options.trust_remote_code)  # of a run that may be another's
    tokenizer = utils.load_tokenizer(args)  # refuses a start model that is not there
    world = utils.init_distributed()
    if world.size % args.sequence_parallel_size:
        args = replace(args, sequence_parallel_size=1)
    torch.manual_seed(args.seed)
    utils.make_deterministic(args)
    learner = grpo.load_learner(args, world)
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]  # the last one may be cut
    logged = {row["training_step"]: row for row in map(json.loads, lines)}

    done = 0
    same = True
    checkpoint = None if options.from_start else utils.newest_checkpoint(run_dir, world, before=options.step)
    if checkpoint is not None:
        done = checkpoints.resume(checkpoint, learner, args, world)["step"]
    if done and dumps.dump_path(run_dir, done).exists():
        _, dump = dumps.read_dump(run_dir, done)
        same = compare(f"before step {done + 1}", learner.policy, world, dump, {}, {}, options.tolerance)
    for step in range(done + 1, options.step + 1):
        metrics, dump = make_step(step, learner, args, world, run_dir, grpo)
        same &= compare(f"step {step}", learner.policy, world, dump, metrics, logged.get(step, {}), options.tolerance)
    if options.save is not None:
        utils.save_model(learner.policy, tokenizer, options.save, args, world)
    if world.is_main:
        bits = "replayed weights and metrics are the run's"
        equal = f"metrics within {options.tolerance:g} of the run's" if options.tolerance else bits
        print(f"equal: {equal}" if same else "NOT equal: see the lines above")
    utils.dist.destroy_process_group()
    return same


def maths_of(run_dir: Path) -> Any:
    """grpo.py as a module, or the copy of it that made the run. Raises UserError if the copy is not here."""
    import utils

    command = json.loads((run_dir / "environment.json").read_text()).get("command", [])
    scripts = [Path(word) for word in command if word.endswith(".py")]
    script = utils.REPO / (scripts[0].name if scripts else "grpo.py")
    kept = run_dir / "code" / script.name
    utils.need(script.exists(), f"{script.name} made this run and is not here; the run has it if {kept} is a file")
    module = importlib.import_module(script.stem)
    return getattr(module, "grpo", module)  # grpo_fast.py and its copies import it under this name


def read_args(run_dir: Path, grpo: Any) -> Any:
    """The run's flags, for the directory where it is now."""
    flags = json.loads((run_dir / "args.json").read_text())
    known = {flag.name for flag in fields(grpo.Args)}  # older runs had more flags
    args = grpo.Args(**{name: value for name, value in flags.items() if name in known})
    return replace(args, output_dir=str(run_dir.parent), exp_name=run_dir.name)


def make_step(
    step: int, learner: Any, args: Any, world: Any, run_dir: Path, grpo: Any
) -> tuple[dict[str, float], dict]:
    """Make a step's updates; returns its metrics and its dump. All ranks."""
    import utils
    from scripts.parts import checkpoints, dumps

    if args.load_states and step > 1:
        checkpoints.take_state(args, step - 1, learner.policy, learner.optimizer, None, world)
    rows, dump = dumps.read_dump(run_dir, step)
    rollouts = {(r.position, r.sample): r for r in dumps.rollouts_of(rows)}
    first = world.rank // args.sequence_parallel_size
    stride = world.size // args.sequence_parallel_size
    batches = []
    for mini_batch in dump["packs"]:
        packs = []
        for learner_packs in mini_batch[first::stride]:  # this rank takes the part of these learners
            packs += [[[rollouts[tuple(name)] for name in piece] for piece in pack] for pack in learner_packs]
        batches.append(grpo.micro_batches(packs, dump["how"], args, world.device))
    metrics = utils.Metrics()
    gap, _ = grpo.update(learner, batches, args, world, metrics)
    if learner.ref_policy is not None and grpo.due(args.ref_policy_update_freq or 0, step):
        grpo.refresh_reference(learner.ref_policy, learner.policy, args.alpha)
    return utils.finish_metrics(metrics.reduce(world), args) | gap.metrics, dump


def compare(when: str, policy: Any, world: Any, dump: dict, ours: dict, theirs: dict, tolerance: float) -> bool:
    """Print how weights and metrics compare with the run's; returns whether they are equal, on rank 0. All ranks."""
    from scripts.parts import dumps

    weights = dumps.weights_hash(policy, world)
    if not world.is_main:
        return True
    differences = {}
    for name in sorted(ours.keys() & theirs.keys()):
        if not name.startswith(NOT_COMPARED):
            differences[name] = relative_difference(ours[name], theirs[name])
    same_weights = weights == dump["weights"]
    hashes = "equal" if same_weights else f"differ from {dump['weights'][:12]}"
    columns = [f"{when}: weights {weights[:12]} {hashes}"]
    columns += [f"{name} {ours[name]:.9g}" for name in SHOWN if name in ours]
    if differences:
        worst = max(differences, key=differences.__getitem__)
        largest = f"{differences[worst]:.2g} ({worst})"
        columns.append(f"{len(differences)} metrics, largest relative difference {largest}")
    print(" | ".join(columns), flush=True)
    return (same_weights or tolerance > 0) and all(each <= tolerance for each in differences.values())


def relative_difference(ours: float, theirs: float | None) -> float:
    """|ours - theirs| / max(|theirs|, 0.01); 0 where both are NaN, which is null in metrics.jsonl."""
    if theirs is None:
        return 0.0 if math.isnan(ours) else math.nan
    return abs(ours - theirs) / max(abs(theirs), 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, required=True, help="the step to end with")
    parser.add_argument("--from_start", action="store_true", help="use no checkpoint: the start model and all dumps")
    parser.add_argument("--save", type=Path, help="write the model after the step there, in Hugging Face format")
    help_text = "largest relative difference of a metric (of those below 0.01: 100 times the difference); 0: bits"
    parser.add_argument("--tolerance", type=float, default=0.0, help=help_text)
    parser.add_argument("--trust_remote_code", action="store_true", help="as in the run: its flag is not taken over")
    options = parser.parse_args()
    if options.step < 1:
        parser.error(f"--step {options.step}: steps begin with 1")
    if not (options.run / "environment.json").exists():
        raise SystemExit(f"replay.py: {options.run} is no run: it has no environment.json")
    environment = json.loads((options.run / "environment.json").read_text())
    os.environ["OMP_NUM_THREADS"] = environment["omp_num_threads"]  # sums depend on how threads share them
    import utils  # reads the variable

    try:
        same = replay(options)
    except utils.UserError as error:
        raise SystemExit(f"replay.py: {error}") from None
    sys.stdout.flush()
    os._exit(0 if same else 1)


if __name__ == "__main__":
    main()
