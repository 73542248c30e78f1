"""scripts/proof/bench.py through its command line: what its sides compute, never how fast anything is."""

import json
import math

import pytest

from tests import programs
from tests.test_align import trl_is_installed


def run(name, model, *flags):
    """What a benchmark found, its numbers checked: facts, and the table's sides and ratios."""
    words = ["scripts/proof/bench.py", name, "--model", str(model), "--json", "--repeat", "1", *" ".join(flags).split()]
    done = programs.run(words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(math.isfinite(value) and value > 0 for row in found["table"].values() for value in row.values())
    return found["facts"], list(found["table"])


def test_learner_and_bare_loop_compute_the_same_gradient(tiny_models):
    facts, _ = run("learner", tiny_models(), "--dtype float32")
    norms = facts["grad_norms"]
    assert norms["ours"] == pytest.approx(norms["bare loop"], rel=1e-4) and norms["ours"] > 0.1


@pytest.mark.skipif(not trl_is_installed(), reason="no .venv-trl: bash scripts/peers/setup_trl.sh makes it")
def test_trl_beside_ours(tiny_models):
    facts, rows = run("trl", tiny_models(), "--dtype float32 --steps 1")
    assert rows[:3] == list(facts) == ["ours", "ours, all groups", "TRL stock"] and len(rows) == 3 + 2
    assert all(64 <= side["tokens"] <= 64 * 64 for side in facts.values())
