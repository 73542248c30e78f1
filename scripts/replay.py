"""Make the updates of a run again from its dumps, and compare loss, gradient norm and weights with what the run had.

    python grpo.py ... --dump_steps all            a run that keeps what a replay needs
    python scripts/replay.py RUN --step 7          step 7, from the newest checkpoint before it or from the start
    python scripts/replay.py RUN --step 7 --from_start --save model_7

Nothing is sampled: from the start model, rollouts.jsonl and dumps/ any later state is made again. Weights are compared
with the hash in the dump, what the update measures with the run's metrics.jsonl. A run with several learners is
replayed under torchrun with as many ranks; with fewer the weights agree up to the order of sums. The exit status is 0
if everything is equal to the last bit, or within --tolerance where one is given.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.parts.run_dir import model_hash


def replay(run_dir: Path, last: int, from_start: bool, save: Path | None, tolerance: float) -> bool:
    """Steps up to `last` again; prints a line for each. Whether they are the run's."""
    import torch

    import grpo
    import utils

    flags = json.loads((run_dir / "args.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be half
    logged = {row["training_step"]: row for row in map(json.loads, lines)}
    here = {"output_dir": str(run_dir.parent), "exp_name": run_dir.name}
    args = replace(grpo.Args(**flags), **here, max_logprob_gap=0.0)  # the gap was the run's business
    tokenizer = utils.load_tokenizer(args)  # a start model that is not there is told
    world = utils.init_distributed()
    if world.size % args.sequence_parallel_size:
        args = replace(args, sequence_parallel_size=1)
    mine, shares = world.rank // args.sequence_parallel_size, world.size // args.sequence_parallel_size
    torch.manual_seed(args.seed)
    utils.make_deterministic(args)
    learner = grpo.load_learner(args, world)
    first = 1
    if not from_start and (path := utils.newest_checkpoint(run_dir, world, before=last)) is not None:
        first = grpo.load_state(path, learner, args, world)["step"] + 1
    same = True
    if first > 1 and (run_dir / "dumps" / f"step_{first - 1:06d}.json").exists():
        weights = utils.read_dump(run_dir, first - 1)[1]["weights"]
        same = report(world, f"before step {first}", {}, {}, weights, learner.policy, tolerance)
    elif first == 1 and world.is_main:
        then, now = json.loads((run_dir / "environment.json").read_text())["model_hash"], model_hash(flags)
        print(f"before step 1: {'the start model' if now == then else f'NOT the start model, its hash was {then}'}")
    for step in range(first, last + 1):
        utils.take_state(args, step - 1, learner.policy, learner.optimizer, None, world)
        rows, dump = utils.read_dump(run_dir, step)
        rollouts = {(r.position, r.sample): r for r in utils.rollouts_of(rows)}
        batches = []
        for learners in dump["packs"]:
            packs = [[[rollouts[tuple(name)] for name in p] for p in pack] for pack in sum(learners[mine::shares], [])]
            batches.append(grpo.micro_batches(packs, dump["how"], args, world.device))
        metrics = utils.Metrics()
        gap, _ = grpo.update(learner, batches, args, world, metrics)
        if learner.ref_policy is not None and grpo.due(args.ref_policy_update_freq or 0, step):
            grpo.refresh_reference(learner.ref_policy, learner.policy, args.alpha)
        ours = utils.finish_metrics(metrics.reduce(world), args) | gap
        same &= report(world, f"step {step}", ours, logged.get(step, {}), dump["weights"], learner.policy, tolerance)
    if save is not None:
        utils.save_model(learner.policy, tokenizer, save, args, world)
    if world.is_main:
        words = (
            f"metrics within {tolerance:g} of the run's" if tolerance else "replayed weights and metrics are the run's"
        )
        print(f"equal: {words}" if same else "NOT equal: see the lines above")
    utils.dist.destroy_process_group()
    return same


def report(world, what: str, ours: dict, theirs: dict, weights_hash: str, policy, tolerance: float) -> bool:
    """Print how metrics and weights compare; whether they are equal. All ranks."""
    import utils

    mine = utils.weights_hash(policy, world)
    if not world.is_main:
        return True
    theirs = {name: math.nan if value is None else value for name, value in theirs.items()}  # JSON has no NaN
    unlike = ("debug/", "time/")  # gaps are rounding
    shared = sorted(name for name in ours.keys() & theirs.keys() if not name.startswith(unlike))
    gaps = {name: abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 0.01) for name in shared}
    # equal also when both are NaN
    gaps = {k: 0.0 if math.isnan(ours[k]) and math.isnan(theirs[k]) else gap for k, gap in gaps.items()}
    worst = max(gaps, key=gaps.get, default=None)
    equal = mine == weights_hash or tolerance > 0
    equal = equal and all(gap <= tolerance for gap in gaps.values())
    parts = [f"{what}: weights {mine[:12]} {'equal' if mine == weights_hash else f'differ from {weights_hash[:12]}'}"]
    parts += [f"{name} {ours[name]:.9g}" for name in ("loss/total_avg", "optim/grad_norm") if name in ours]
    if worst is not None:
        parts.append(f"{len(shared)} metrics, largest relative difference {gaps[worst]:.2g} ({worst})")
    print(" | ".join(parts), flush=True)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--step", type=int, required=True, help="the step to end with")
    parser.add_argument("--from_start", action="store_true", help="use no checkpoint: the start model and all dumps")
    parser.add_argument("--save", type=Path, help="write the model after the step there, in Hugging Face format")
    help_text = "largest relative difference of a metric (of those below 0.01: 100 times the difference); 0: bits"
    parser.add_argument("--tolerance", type=float, default=0.0, help=help_text)
    options = parser.parse_args()
    if options.step < 1:
        parser.error(f"--step {options.step}: steps begin with 1")
    if not (options.run / "environment.json").exists():
        raise SystemExit(f"replay.py: {options.run} is no run: it has no environment.json")
    environment = json.loads((options.run / "environment.json").read_text())
    os.environ["OMP_NUM_THREADS"] = environment["omp_num_threads"]  # sums depend on how threads share them
    import utils

    try:
        same = replay(options.run, options.step, options.from_start, options.save, options.tolerance)
    except utils.UserError as error:
        raise SystemExit(f"replay.py: {error}") from None
    sys.stdout.flush()
    os._exit(0 if same else 1)


if __name__ == "__main__":
    main()
