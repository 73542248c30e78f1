"""The tasks of the studies and the two scales at which they are learned."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """A folder of data/ with train.jsonl and eval.jsonl, the flags that go with it, and the target of the endpoints.

    measured: metrics of a run in place of those that endpoints.METRICS names, by field of the curve."""

    data: str
    target: float = 0.8  # held-out accuracy, for steps, tokens and seconds to it
    flags: tuple[str, ...] = ()
    measured: Mapping[str, str] = field(default_factory=dict)
    maker: str = "python scripts/data/make_tasks.py"  # writes its rows

    @property
    def is_evaluated(self) -> bool:
        """Whether its curve is of evaluations, and not of the training rollouts."""
        return self.measured.get("held_out", "eval/").startswith("eval/")


@dataclass(frozen=True)
class Scale:
    """A model and what a run of it is."""

    model: str
    tasks: tuple[str, ...]
    steps: int
    evaluate_every: int
    flags: tuple[str, ...]
    gib: int = 2  # of memory that a run takes, of grpo_fast.py with its engine
    of_task: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # flags of a task at this scale


class TaskError(ValueError):
    """A task cannot be used; the message says why and what to do."""


LEARNED = ("--remap_verifier", "learned=gsm8k")
CALCULATOR = """--tools calculator --tool_call_names calc --tool_parser_type legacy --max_steps 1
    --max_prompt_token_length 160 --response_length 64 --per_turn_max_tokens 24""".split()
# Four guesses. What is paid on the way counts, so the score is what is measured. It is that of the training rollouts: a
# game has nothing to hold out, and each step samples new ones.
GUESS = """--env_file scripts/train/debug/guess.py --max_steps 4 --per_turn_max_tokens 4 --max_prompt_token_length 160
    --response_length 128 --verification_reward 1 --no_filter_zero_std_samples --pool_size 2 --deterministic""".split()
SCORE = {"held_out": "objective/scores", "sampled": "env/guess/found"}
TASKS = {
    "largest": Task("tasks/largest", target=0.5, flags=LEARNED),
    "smallest": Task("tasks/smallest", flags=LEARNED),
    "middle": Task("tasks/middle", flags=LEARNED),
    "odd": Task("tasks/odd", flags=LEARNED),
    "sums": Task("tasks/sums", flags=LEARNED),
    "differences": Task("tasks/differences", target=0.12, flags=LEARNED),
    "products": Task("tasks/products", flags=LEARNED),
    "remainders": Task("tasks/remainders", flags=LEARNED),
    "sort": Task("tasks/sort", flags=("--remap_verifier", "learned=puzzle")),
    "last": Task("tasks/last", target=0.4, flags=LEARNED),
    "largest_digit": Task("tasks/largest_digit", flags=LEARNED),
    "second": Task("tasks/second", flags=LEARNED),
    "third": Task("tasks/third", flags=LEARNED),
    "repeated": Task("tasks/repeated", target=0.75, flags=LEARNED),
    "reverse": Task("tasks/reverse", flags=LEARNED),
    "calculator": Task("tasks/calculator", flags=(*LEARNED, *CALCULATOR)),
    "guess": Task("guess", target=1.0, flags=tuple(GUESS), measured=SCORE, maker="python scripts/data/make_guess.py"),
    "guess_plain": Task(
        "guess_plain",
        target=1.0,
        flags=tuple(GUESS),
        measured=SCORE,
        maker="python scripts/data/make_guess.py --plain --out data/guess_plain",
    ),
}

BASE = """--num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --temperature 1.0 --beta 0
    --lr_scheduler_type constant --advantage_normalization_type centered --model_dtype float32 --save_freq -1
    --pack_length 2048""".split()
ENGINE = "--vllm_enforce_eager --vllm_gpu_memory_utilization 0.4 --vllm_enable_prefix_caching".split()

SCALES = {
    "fly": Scale(
        "scripts/studies/fly",
        tasks=("largest_digit", "last"),
        steps=40,
        evaluate_every=4,
        flags=(*BASE, *"--rollout_backend transformers --response_length 14 --learning_rate 1e-3".split()),
    ),
    "player": Scale(
        "scripts/studies/player",
        tasks=("guess_plain",),
        steps=24,
        evaluate_every=4,
        flags=(
            *BASE,
            *"--num_unique_prompts_rollout 4 --rollout_backend transformers --learning_rate 1e-3".split(),
        ),
    ),
    "smollm2": Scale(
        "models/SmolLM2-135M-Instruct",
        tasks=("largest", "second", "third", "repeated", "calculator"),  # fit, and learned within 4 minutes
        steps=8,
        evaluate_every=2,
        flags=(
            *BASE,
            *ENGINE,
            # a forward of the reference policy for the KL would be a sixth of a step
            *"--response_length 8 --learning_rate 2e-5 --no_load_ref_policy --pack_length 1024".split(),
        ),
        gib=8,
        of_task={"largest": ("--learning_rate", "1e-5")},  # 2e-5 soon makes its policy sure of an answer
    ),
    "smollm2_player": Scale(
        "models/SmolLM2-135M-Instruct",
        tasks=("guess",),
        steps=12,
        evaluate_every=4,
        flags=(
            *BASE,
            *ENGINE,
            *"--num_unique_prompts_rollout 4 --learning_rate 2e-5 --no_load_ref_policy --pack_length 1024".split(),
        ),
        gib=8,
    ),
}
CONTROL_FILE = "scripts/studies/controls.py"
# arms that must be worse than the base, as they are written on a command line
CONTROLS = (
    "lr0: --learning_rate 0",
    f"coin: --reward_file {CONTROL_FILE} --remap_verifier learned=coin",
    f"inverted: --reward_file {CONTROL_FILE} --remap_verifier learned=inverted",
    "majority@scripts/forks/ttrl.diff",  # no label is seen: what it wins is sharpening
)
CONTROL_NAMES = tuple(re.split("[:@]", text)[0] for text in CONTROLS)
AGAIN = "again"  # the base with other seeds: its differences are the noise floor
AGAIN_SHIFT = 1000  # added to its seeds


def task_of(name: str, data: Path) -> Task:
    """The task of that name: one of TASKS, or one's own, the folder `name` of `data`. Raises TaskError.

    The rows of its train.jsonl name the verifier `learned`, and those of its eval.jsonl the one that judges: an arm may
    put another reward in the place of the first, and changes nothing of the second."""
    if name in TASKS:
        return TASKS[name]
    folder = data / name
    if "/" in name or not folder.is_dir():
        there = ", ".join(TASKS)
        raise TaskError(f"no task {name}: there are {there}, or a folder data/{name} of your own, with its files")
    trained = verifiers_in(folder / "train.jsonl")
    judges = verifiers_in(folder / "eval.jsonl")
    if trained != {"learned"}:
        found = ", ".join(sorted(trained))
        raise TaskError(
            f"{folder}/train.jsonl: its rows have the dataset {found}. Write learned in all of them, so that an arm "
            "can change the reward without changing how the held-out rows are judged"
        )
    if len(judges) != 1:
        found = ", ".join(sorted(judges)) or "none"
        raise TaskError(f"{folder}/eval.jsonl: a task has one verifier, and its rows have the dataset {found}")
    return Task(name, flags=("--remap_verifier", f"learned={judges.pop()}"))


def verifiers_in(path: Path) -> set[str]:
    """The verifiers that the rows of a file name. Raises TaskError for a file that is not there or has other rows."""
    if not path.is_file():
        raise TaskError(f"there is no {path}: a task has train.jsonl and eval.jsonl")
    names = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise TaskError(f"{path} row {number} is no JSON") from None
        name = row.get("dataset") if isinstance(row, dict) else None
        if not isinstance(name, str):
            raise TaskError(f"{path} row {number}: its dataset must be the name of a verifier, and is {name!r}")
        names.add(name)
    return names
