"""Parts: imported where a flag asks for them, never at the top of the four, and not loaded without the flag."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

FOUR = ("grpo.py", "grpo_fast.py", "rewards.py", "utils.py")
ORDER = ("grpo_fast", "grpo", "utils", "rewards")
PARTS = sorted(path.stem for path in (REPO / "scripts" / "parts").glob("*.py"))
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


def top_level(path: Path) -> list[str]:
    """What a file imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    statements = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return imports(ast.Module(statements, []))


@pytest.mark.parametrize("name", FOUR)
def test_the_four_import_parts_inside_functions_only(name):
    assert not [i for i in top_level(REPO / name) if i.startswith("scripts")]


@pytest.mark.parametrize("name", FOUR)
def test_imports_of_the_four_run_one_way(name):
    stem = name.removesuffix(".py")
    allowed = ORDER[ORDER.index(stem) + 1 :]
    tree = ast.parse((REPO / name).read_text())
    ours = {i.partition(".")[0] for i in imports(tree)} & set(ORDER)
    assert ours <= set(allowed), ours


@pytest.mark.parametrize("name", PARTS)
def test_no_part_imports_the_algorithm(name):
    tree = ast.parse((REPO / "scripts" / "parts" / f"{name}.py").read_text())
    assert not {"grpo", "grpo_fast"} & {i.partition(".")[0] for i in imports(tree)}
    assert not [i for i in imports(tree) if i.startswith("scripts.reports")], "programs stand above parts"


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
