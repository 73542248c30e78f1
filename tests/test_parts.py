"""Parts: imported where a flag asks for them, never at the top of the four, and not loaded without the flag."""

import ast
import json
import subprocess
import sys

import pytest

from tests.conftest import REPO

ORDER = ("grpo_fast", "grpo", "utils", "rewards")
# What every run has; all others belong to a flag, to a kind of row or to an engine.
OF_EVERY_RUN = {"checks", "guards", "packing", "plan", "probe", "run_files"}


def imports(tree: ast.AST) -> list[str]:
    """Dotted names that the statements of a tree import."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("name", ORDER)
def test_the_four_import_one_way_and_parts_inside_functions_only(name):
    tree = ast.parse((REPO / f"{name}.py").read_text())
    assert {i.partition(".")[0] for i in imports(tree)} & set(ORDER[: ORDER.index(name) + 1]) == set()
    at_the_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [i for i in imports(ast.Module(at_the_top, [])) if i.startswith("scripts")]


def test_no_part_imports_the_algorithm_or_a_program():
    for path in (REPO / "scripts" / "parts").glob("*.py"):
        names = imports(ast.parse(path.read_text()))
        assert not [i for i in names if i.startswith(("grpo", "scripts.reports"))], path


LOADED = """
import json, sys
import utils, grpo, grpo_fast
before = [name for name in sys.modules if name.startswith("scripts.parts.")]
grpo.main(utils.parse_args(grpo.Args, sys.argv[1:]))
after = [name for name in sys.modules if name.startswith("scripts.parts.")]
print(json.dumps([before, after]))
"""


@pytest.mark.runs
def test_a_run_without_flags_loads_the_parts_of_every_run_only(tmp_path, tiny_models):
    """A real run on GSM8K's verifier: no judge, sandbox, adapter, tool, tracker, dump or teacher is imported."""
    rows = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "ground_truth": "4", "dataset": "gsm8k"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    flags = f"--model_name_or_path {tiny_models()} --dataset_mixer_list {rows} 1.0 --rollout_backend transformers"
    flags += " --model_dtype float32"  # where bfloat16 is fast it is the default, which has a part of its own
    flags += " --response_length 8 --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 2 --total_episodes 4"
    line = [sys.executable, "-c", LOADED, *flags.split(), "--output_dir", str(tmp_path)]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True)  # forked ones have imported parts
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before == []
    assert {name.rpartition(".")[2] for name in after} <= OF_EVERY_RUN | {"transformers_engine"}
