"""scripts/proof/gpu_quarter.py in miniature: its checks pass here, and each fails on what it is there to find."""

import json
import textwrap

import pytest

from tests import programs

PROGRAM = "scripts/proof/gpu_quarter.py"
RUNS = "vllm_torchrun vllm_tp_2"  # dry: they need GPUs
FAULTS = {  # check -> a fault
    "packs_256": """
        import functools
        import torch
        import utils
        right = utils.Layout.masks.func
        def across(self):
            return {key: torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0]) for key, mask in right(self).items()}
        utils.Layout.masks = functools.cached_property(across)
        utils.Layout.masks.__set_name__(utils.Layout, "masks")
    """,
    "fly": """
        from scripts.parts.transformers_engine import TransformersEngine
        right = TransformersEngine.load_weights
        def stale(self, named_tensors, version):
            came = [(name, tensor.detach().clone()) for name, tensor in named_tensors]
            self.first = getattr(self, "first", came)
            right(self, self.first, version)
        TransformersEngine.load_weights = stale
    """,
    "head": """
        import grpo
        right = grpo.softmax_gradient
        grpo.softmax_gradient = lambda *arguments: 0.8 * right(*arguments)
    """,
    "replay": """
        import sys
        import torch
        right = torch.optim.AdamW.step
        def another_rate(self, *arguments):
            if "replay" in sys.argv[0]:
                for group in self.param_groups:
                    group["lr"] *= 2
            return right(self, *arguments)
        torch.optim.AdamW.step = another_rate
    """,
}


@pytest.fixture
def quarter(tmp_path):
    """Function (checks, fault, seconds) -> rows of results.jsonl, after a look at the page."""

    def run(checks, fault="", seconds=200):
        python = programs.python_that_forks(tmp_path / "python", PROGRAM)
        (tmp_path / "sitecustomize.py").write_text(fault)
        words = [PROGRAM, "--tiny", "--seconds", seconds, "--out", tmp_path / "out", "--only", *checks.split()]
        done = programs.run(words, PYTHON_OF_FORKS=python, PYTHONPATH=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
        page = (tmp_path / "out" / "README.md").read_text()
        assert page in done.stdout and all(f"| {row['check']} | {row['case']} |" in page for row in rows)
        return rows

    return run


def test_checks_pass_or_say_why_they_are_not_made(quarter, tmp_path):
    checks = f"machine fly update_05 head vllm_model {RUNS}"
    rows = quarter(checks)
    assert {row["check"] for row in rows} == set(checks.split())
    assert [row for row in rows if row["ok"] is False] == [] and not (tmp_path / "out" / "failed.txt").exists()
    assert json.loads((tmp_path / "out" / "speed.json").read_text()).keys() == {"product_flops", "copied_bytes"}
    right = {row["check"] for row in rows if row["ok"]}
    assert right == set(checks.split()) - set("machine update_05 vllm_model".split())


@pytest.mark.parametrize("check, right, wrong", [
    ("packs_256", 3, "256 x 4 / 2, float32, responses of 20, window 0"),  # the others have masks of their own
    ("fly", 0, "grpo.py"),
    ("head", 0, "7B"),
    ("replay", 2, "to step 2"),  # the first update begins with the same weights
])  # fmt: skip
def test_a_check_fails_on_its_fault(quarter, check, right, wrong):
    rows = quarter(check, textwrap.dedent(FAULTS[check]))
    assert [row["case"] for row in rows if row["ok"] is False] == [wrong]
    assert sum(row["ok"] is True for row in rows) == right


def test_what_is_cut_off_loses_nothing(quarter):
    rows = quarter("machine fly", seconds=0.5)
    assert any(row["figures"].get("status") == "cut off" for row in rows)
