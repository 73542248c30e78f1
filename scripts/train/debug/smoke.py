"""Run a recipe on a CPU, shrunk: see smoke.sh, which starts this.

`captures` gives the command lines of a recipe without starting them, for this and for tests/test_recipes.py.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)

# Bash prefers these functions to the programs of their names. They skip the preparation of data and of the machine.
STUBS = {
    "source": '() { [[ "$1" == *setup.sh ]] || builtin source "$@"; }',
    "scontrol": "() { echo localhost; }",
    "srun": '() { while [[ "$1" == -* ]]; do shift; done; "$@"; }',
}
PRINT = STUBS | {
    "python": """() { [[ "$1" != grpo*.py ]] || printf '%s\\0' python "$@" $'\\n' >>"$CAPTURED"; }""",
    "torchrun": """() { printf '%s\\0' torchrun "$@" $'\\n' >>"$CAPTURED"; }""",
}
RUN = STUBS | {
    "python": '() { [[ "$1" != grpo*.py ]] || command python "$@"; }',
    "torchrun": '() { while [[ "$1" != grpo*.py ]]; do shift; done; command python "$@"; }',
}
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost"}
KINDS = {  # verifiers -> words in the names of data sets that have them
    "code": "code acecoder Code Think-RL",
    "code_stdio": "stdio",
    "ifeval": "-IF-7B IF_multi tulu3 Think-RL",
    "math gsm8k": "math Math omega tulu3 Think-RL",
    "puzzle": "nq_search",
    "string_f1": "string_f1",
}


def environment(functions: dict[str, str]) -> dict[str, str]:
    """This environment with shell functions for bash, and what SLURM would have set."""
    judge = {"OPENAI_BASE_URL": "http://localhost:9/v1"}  # recipes ask for its address, and nobody asks it
    return os.environ | SLURM | judge | {f"BASH_FUNC_{name}%%": body for name, body in functions.items()}


def captures(recipe: str | Path, *words: str) -> list[list[str]]:
    """The training commands of a recipe that gets these words, as the words of their argv (python or torchrun first),
    without running them.

    Raises subprocess.CalledProcessError where the script fails, ValueError where it starts nothing.
    """
    with tempfile.NamedTemporaryFile() as file:
        env = environment(PRINT) | {"CAPTURED": file.name}
        subprocess.run(["bash", str(recipe), *words], env=env, check=True, cwd=ROOT)
        commands = Path(file.name).read_bytes().decode().split("\0\n\0")[:-1]
    if not commands:
        raise ValueError(f"{recipe} starts neither grpo.py nor grpo_fast.py")
    return [command.split("\0") for command in commands]


def training_flags(command: list[str]) -> tuple[str, list[str]]:
    """(grpo.py or grpo_fast.py, its flags) of a captured command."""
    (script,) = {"grpo.py", "grpo_fast.py"} & set(command)
    return script, command[command.index(script) + 1 :]


def verifiers_of(names: list[str]) -> list[str]:
    """The verifiers that rows of these data sets have; math and gsm8k where no name tells."""
    all_names = "\n".join(names)
    kinds = [kind for kind, words in KINDS.items() if any(word in all_names for word in words.split())]
    return sorted(" ".join(kinds or ["math gsm8k"]).split())


def make_row(verifier: str, number: int) -> dict:
    """A row that this verifier judges, made from a number."""
    question = f"What is {number} + 1?"
    label: object = str(number + 1)
    match verifier:
        case "code":
            question = f"Write a function f(x) in Python that adds {number}."
            label = [f"assert f(1) == {number + 1}"]
        case "code_stdio":
            question = f"Read a number in Python and print it plus {number}."
            label = [{"input": "1", "output": str(number + 1)}]
        case "ifeval":
            question = f"Say {number} with a letter a."
            label = [{"instruction_id": ["keywords:letter_frequency"], "kwargs": [LETTER]}]
        case "solver":
            label = {"question": question, "answer": number + 1}
            question = f"Write a guideline: what is {number} + 1?"
    text = label if isinstance(label, str) else json.dumps(label)
    return {"messages": [{"role": "user", "content": question}], "ground_truth": text, "dataset": verifier}


LETTER = {"letter": "a", "let_frequency": 1, "let_relation": "at least"}


def make_data(out: Path, verifiers: list[str], count: int) -> Path:
    """Write `count` rows, the prompts of one step: one of each verifier, and ifeval for the rest. A random model
    follows that constraint now and then, so that there is something to learn from."""
    rows = [make_row(verifier, i) for i, verifier in enumerate(verifiers)]
    rows += [make_row("ifeval", i) for i in range(len(rows), count)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return out


def shrink(args, name: str, out: Path) -> list[str]:
    """The flags that make a run of these arguments small enough for a CPU: two steps. Writes model and data."""
    from scripts.data.make_tiny_model import make_tiny_model

    # a hybrid model, whose recurrent layers leak from one response of a pack into the next, stays one
    model = make_tiny_model(out / "model", arch="olmo_hybrid" if "Hybrid" in args.model_name_or_path else "llama")
    verifiers = ["solver"] if args.solver_model_name_or_path else verifiers_of(args.dataset_mixer_list[::2])
    samples = min(4, args.num_samples_per_prompt_rollout)
    prompts = math.ceil((len(verifiers) + 2) / args.num_mini_batches) * args.num_mini_batches
    data = make_data(out / "rows.jsonl", verifiers, prompts)
    flags = f"""--exp_name {name} --output_dir {ROOT / "runs"} --overwrite --model_name_or_path {model}
        --model_revision None --model_dtype float32 --rollout_backend transformers
        --dataset_mixer_list {data} 1.0 --dataset_mixer_list_splits train
        --num_learners_per_node 1 --sequence_parallel_size 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1
        --num_unique_prompts_rollout {prompts} --num_samples_per_prompt_rollout {samples}
        --total_episodes {2 * prompts * samples} --max_prompt_token_length 512 --response_length 16 --pack_length 1024
        --stop_strings e --local_eval_every 2 --eval_pass_at_k {min(2, args.eval_pass_at_k)}"""
    if args.dataset_mixer_eval_list:
        flags += f" --dataset_mixer_eval_list {data} 1.0 --dataset_mixer_eval_list_splits train"
    if args.apply_r1_style_format_reward:  # a random model never writes the format, and would earn nothing
        flags += " --additive_format_reward"
    if args.ref_model_name_or_path:
        flags += f" --ref_model_name_or_path {make_tiny_model(out / 'teacher', arch='qwen3', seed=5)}"
    if args.tools:  # each worker imports vLLM for the parser
        flags += " --pool_size 1"
    if args.checkpoint_state_freq > 0:
        flags += " --checkpoint_state_freq 2"
    if args.solver_model_name_or_path:
        server = make_tiny_model(out / "server")
        flags += f" --solver_model_name_or_path {server} --solver_num_engines 1 --solver_response_length 16"
    return [*flags.split(), "--llm_judge_model", ""]


def run(recipe: Path, more: list[str]) -> int:
    """Run the recipe shrunk, with more flags; its exit status."""
    import grpo
    import utils

    _, flags = training_flags(captures(recipe)[0])
    args = utils.parse_args(grpo.Args, flags)
    with tempfile.TemporaryDirectory() as directory:
        flags = shrink(args, f"smoke_{recipe.stem}", Path(directory))
        return subprocess.run(["bash", str(recipe), *flags, *more], env=environment(RUN)).returncode


if __name__ == "__main__":
    if not sys.argv[1:] or "--help" in sys.argv:
        sys.exit(f"{__doc__}\npython scripts/train/debug/smoke.py RECIPE.sh [WORD ...] runs one")
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
