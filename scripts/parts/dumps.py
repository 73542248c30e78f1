"""What a step did, on disk: what it sampled and what the learner computed for it (--save_traces, --dump_steps,
--load_batches), and a profiler's trace (--profile_step).

RUN/rollouts.jsonl has a row for each sampled rollout, in the order of the prompt stream: what was sampled, its score
and its advantage. At a dumped step the rows of the rollouts that were trained on also have the LEARNER_COLUMNS. The
new logprobs are those of the last pass, before its optimizer step.

RUN/dumps/step_NNNNNN.json describes a dumped step with what else a replay needs: `how` it was packed, the hash of the
`weights` after the step, the `positions` of its groups, its `packs` by mini-batch, learner, pack and piece with the
(position, sample) of each rollout, and of its `rows` in rollouts.jsonl start, bytes and sha256.

RUN/samples.jsonl has some rollouts of every tenth step, which utils.Logger writes, and of every evaluation.

RUN/profile has a trace of one step, of each rank that trains: what ran when, for https://ui.perfetto.dev, and with a
GPU what was in its memory, for https://pytorch.org/memory_viz. Engines of grpo_fast.py are other processes, which are
not in it.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import utils
from scripts.parts import run_files
from utils import Group, Prompt, Rollout, World

SCHEMA = 2
MOST_EVENTS = 1_000_000  # allocations that a snapshot of a GPU's memory remembers
LEARNER_COLUMNS = ("old_logprobs", "ref_logprobs", "new_logprobs")  # a value per response token
Name = tuple[int, int]  # of a rollout: its position in the prompt stream, its sample
Row = dict[str, Any]


# --- Write ------------------------------------------------------------------------------------------------------------


class Trace(NamedTuple):
    """A line of rollouts.jsonl, with the two numbers by which the lines of a step are sorted."""

    position: int
    sample: int
    line: str


@dataclass
class RankPart:
    """What one rank has of a step."""

    traces: list[Trace]  # of the rollouts that it sampled
    positions: list[int]  # of the groups that it trained on
    packs: list[list[list[list[Name]]]]  # by mini-batch, pack and piece


def record_step(step: Any, packing: str, policy: Any, args: utils.Flags, world: World) -> None:
    """Append the rollouts of a grpo.Step to rollouts.jsonl and, at a step of --dump_steps, describe it in dumps/. All
    ranks."""
    dumping = args.dump_steps == "all" or (args.dump_steps != "" and step.number % int(args.dump_steps) == 0)
    if not (dumping or args.save_traces):
        return
    own_columns = learner_columns(step.batches, dumping) if utils.leads(args, world) else {}
    columns: dict[Name, Row] = {}
    for rank_columns in utils.all_gather(own_columns, world):
        columns |= rank_columns
    traces = []
    for group in step.sampled:
        for r in group:
            row = rollout_row(r, step.number) | columns.get((r.position, r.sample), {})
            line = json.dumps(row, default=str) + "\n"
            traces.append(Trace(r.position, r.sample, line))

    positions = [group[0].position for group in step.groups]
    packs = [names_of(mini_batch) for mini_batch in step.packs]
    parts = utils.all_gather(RankPart(traces, positions, packs), world)
    description: Row = {}
    if dumping:
        learners = [part.packs for part in parts[:: args.sequence_parallel_size]]
        description = {
            "training_step": step.number,
            "how": packing,
            "weights": weights_hash(policy, world),
            "positions": sorted(position for part in parts for position in part.positions),
            "packs": list(zip(*learners, strict=True)),
        }
    if world.is_main:
        ordered = sorted(trace for part in parts for trace in part.traces)
        lines = [trace.line for trace in ordered]
        append_rows(args.run_dir, lines, description)


def learner_columns(mini_batches: Sequence[Sequence[Any]], dumping: bool) -> dict[Name, Row]:
    """What the learner knows of each rollout in its grpo.Batches: the advantage, which --kl_in_reward changes, and
    with `dumping` the LEARNER_COLUMNS."""
    names = LEARNER_COLUMNS if dumping else ()
    columns: dict[Name, Row] = {}
    for mini_batch in mini_batches:
        for batch in mini_batch:
            for i, r in enumerate(batch.rollouts, start=1):
                row: Row = {"advantage": np.asarray(r.advantage).tolist()}
                for name in names:
                    values = getattr(batch, name)  # (B, T)
                    if values is not None:
                        row[name] = values[batch.seq_ids == i].tolist()
                columns[r.position, r.sample] = row
    return columns


def names_of(packs: Sequence[Sequence[Group]]) -> list[list[list[Name]]]:
    """Packs with names in place of rollouts."""
    return [[[(r.position, r.sample) for r in piece] for piece in pack] for pack in packs]


def rollout_row(r: Rollout, step: int) -> Row:
    """A rollout as a row of rollouts.jsonl. NaN is null. Every other number is read back with the same bits, since
    Python writes a float with enough digits."""
    row: Row = {"training_step": step} | vars(r)
    del row["scoring"], row["evaluation"]
    row |= {name: getattr(r, name).tolist() for name in utils.COLUMNS}
    row["advantage"] = np.asarray(r.advantage).tolist()  # a number, or one for each token
    row["prompt"] = r.prompt.text
    row["prompt_ids"] = r.prompt.token_ids
    row["ground_truths"] = r.prompt.ground_truths
    row["verifiers"] = r.prompt.verifiers
    row["results"] = [asdict(result) for result in r.results]
    for scored in (row, *row["results"]):
        for name in ("score", "outcome", "verifiable", "audit"):
            if math.isnan(scored.get(name, 0.0)):
                scored[name] = None
    return row


def append_rows(run_dir: Path, lines: Sequence[str], description: Row) -> None:
    """Append lines to rollouts.jsonl and, unless `description` is empty, write it to dumps/ with the lines' place."""
    text = "".join(lines)
    data = text.encode()
    start = run_files.append_lines(run_dir / "rollouts.jsonl", text)
    if not description:
        return
    rows = {"start": start, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path = dump_path(run_dir, description["training_step"])
    content = {"schema_version": SCHEMA} | description | {"rows": rows}
    try:
        if start is None:
            raise OSError("its rows are not on disk")
        path.parent.mkdir(exist_ok=True)
        written = json.dumps(content).encode()
        run_files.write_aside(path, written, private=False)
    except OSError as error:
        print(f"WARNING: {path} was not written: {error}. The run goes on", flush=True)


def dump_path(run_dir: Path, step: int) -> Path:
    return run_dir / "dumps" / f"step_{step:06d}.json"


def weights_hash(policy: Any, world: World) -> str:
    """sha256 of all weights in float32, in the order of utils.full_weights; "" on ranks other than 0. All ranks."""
    digest = hashlib.sha256()
    for name, tensor in utils.full_weights(policy, torch.float32):
        if world.is_main:
            copy = tensor.to("cpu", copy=True).contiguous()  # numpy() would pin the storage, which FSDP resizes
            digest.update(name.encode())
            digest.update(copy.view(torch.uint8).numpy())
    return digest.hexdigest() if world.is_main else ""


# --- Read -------------------------------------------------------------------------------------------------------------


def read_dump(run_dir: Path, step: int) -> tuple[list[Row], Row]:
    """The rows of a dumped step and its description. Raises UserError if they are missing, damaged or of another
    schema."""
    path = dump_path(run_dir, step)
    traces = run_dir / "rollouts.jsonl"
    exists = path.is_file() and traces.is_file()
    utils.need(exists, f"{run_dir} has no dump of step {step}: a run makes them with --dump_steps all")
    description = json.loads(path.read_text())
    schema = description["schema_version"]
    utils.need(schema == SCHEMA, f"{path}: schema {schema}, this version reads {SCHEMA}")
    place = description["rows"]
    with traces.open("rb") as file:
        file.seek(place["start"])
        data = file.read(place["bytes"])
    undamaged = hashlib.sha256(data).hexdigest() == place["sha256"]
    utils.need(undamaged, f"{traces} is damaged: the sha256 of the rows of step {step} is not the one in {path.name}")
    return [json.loads(line) for line in data.splitlines()], description


def rollouts_of(rows: Sequence[Row]) -> list[Rollout]:
    """The rollouts of rows of rollouts.jsonl, scored, without labels and verdicts."""
    names = set(Rollout.__dataclass_fields__) - {"prompt", "scoring", "results"}
    prompts: dict[int, Prompt] = {}
    rollouts = []
    for row in rows:
        position = row["position"]
        if position not in prompts:
            prompts[position] = Prompt(position, tuple(row["prompt_ids"]), row.get("prompt", ""), (), ())
        values: Row = {name: row[name] for name in names & row.keys()}
        values |= {name: math.nan for name, value in values.items() if value is None}
        rollouts.append(Rollout(prompts[position], **values))
    return rollouts


def read_groups(step: int, args: Any) -> list[Group]:
    """The groups of a step's batch from --load_batches, in stream order. Raises UserError unless they are as many, and
    as large, as grpo.Args say."""
    rows, description = read_dump(Path(args.load_batches), step)
    groups: dict[int, Group] = {position: [] for position in description["positions"]}
    for r in rollouts_of([row for row in rows if row["position"] in groups]):
        groups[r.position].append(r)
    sizes = {len(group) for group in groups.values()}
    if len(groups) != args.num_unique_prompts_rollout or sizes != {args.num_samples_per_prompt_rollout}:
        wanted = "--num_unique_prompts_rollout of --num_samples_per_prompt_rollout"
        args.refuse(f"--load_batches step {step} has {len(groups)} groups of {sorted(sizes)} rollouts, not {wanted}")
    return list(groups.values())


def prompts_of(args: Any, last_step: int) -> list[Prompt]:
    """The prompts of the first step of --load_batches. Raises UserError at the start if the dump of the last step is
    missing: otherwise the run would end early, without a model."""
    groups = read_groups(1, args)
    read_groups(last_step, args)
    return [group[0].prompt for group in groups]


# --- Profile ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def profiled(run_dir: Path, step: int, rank: int) -> Generator[None]:
    """Write run_dir/profile/step_N_rank_R.json.gz of what is done inside, and with a GPU step_N_rank_R.pickle."""
    out = run_dir / "profile" / f"step_{step}_rank_{rank}"
    out.parent.mkdir(exist_ok=True)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    with torch.profiler.profile(record_shapes=True) as profile:
        yield
    profile.export_chrome_trace(f"{out}.json.gz")
    if on_gpu:
        torch.cuda.memory._dump_snapshot(f"{out}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    print(f"profile  {out}.json.gz: open it in https://ui.perfetto.dev", flush=True)
