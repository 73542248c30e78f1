"""scripts/proof/bench.py through its command line: what its sides compute, never how fast anything is."""

import json
import math

import pytest

from scripts.proof import bench
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


def test_ratio_by_hand():
    """Medians 2 and 3; the rounds' ratios are 3/1, 2/2, 6/3."""
    assert bench.ratio([1.0, 2.0, 3.0], [3.0, 2.0, 6.0]) == {"value": 1.5, "min": 1.0, "max": 3.0}


def test_next_fit_by_hand():
    """[60] [50 40] [70 30]: two learners get one pack each, the third is dropped."""
    assert bench.next_fit([60, 50, 40, 70, 30], 100, 2) == [[[0]], [[1, 2]]]
    # fewer packs than learners (the limit is 10300 // 4): everything is dropped
    assert bench.next_fit([100, 100, 100, 10000], 20480, 4) == [[], [], [], []]


def test_learner_and_bare_loop_compute_the_same_gradient(tiny_models):
    facts, _ = run("learner", tiny_models(), "--dtype float32")
    norms = facts["grad_norms"]
    assert norms["ours"] == pytest.approx(norms["bare loop"], rel=1e-4) and norms["ours"] > 0.1


def test_our_loop_makes_the_responses_of_vllm(tiny_models):
    facts, _ = run("rollout", tiny_models(), "--num_samples_per_prompt_rollout 4")
    assert facts["requests"] == 8 * 4 and facts["share_of_same_responses"] == 1.0


def test_packing_loses_no_response(tiny_models):
    facts, _ = run("packing", tiny_models(), "--sequences 512")
    assert facts["shared"]["responses_lost"] == facts["plain"]["responses_lost"] == 0
    assert all(packs["packs"] >= packs["fewest_packs"] > 0 and packs["imbalance"] >= 1 for packs in facts.values())
    assert facts["shared"]["packs"] < facts["plain"]["packs"]


@pytest.mark.parametrize("name, other", [("host", "transformers, plain"), ("sync", "3 copies + vLLM's reload")])
def test_the_others_compare_all_sides(tiny_models, name, other):
    _, rows = run(name, tiny_models(), "--dtype float32")
    assert other in rows and f"{rows[0]} over {other}" in rows


@pytest.mark.skipif(not trl_is_installed(), reason="no .venv-trl: bash scripts/peers/setup_trl.sh makes it")
def test_trl_beside_ours(tiny_models):
    facts, rows = run("trl", tiny_models(), "--dtype float32 --steps 1")
    assert rows[:4] == list(facts) == ["ours", "ours, all groups", "TRL stock", "TRL vllm"] and len(rows) == 4 + 4
    assert all(64 <= side["tokens"] <= 64 * 64 for side in facts.values())
