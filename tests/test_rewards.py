"""rewards.py through its production call, `score`: literals follow from the rules, none was read off our output."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rewards
from rewards import RewardRecord, check_ground_truth, check_verifier, combine_rewards, format_reward, max_score, score

ROOT = Path(__file__).resolve().parent.parent
SHARED_CASES = ROOT.parent / "shared" / "reward_cases.jsonl"


def score_rows(rows, timeout_s=30.0):
    return score([RewardRecord(response, label, dataset) for dataset, label, response, *_ in rows], timeout_s)


def assert_scores(rows):
    """rows of (dataset, label, response, expected score), all of which are judged or have no answer."""
    results = score_rows(rows)
    wrong = [(*row, result) for row, result in zip(rows, results, strict=True) if result.score != row[3]]
    assert not wrong
    assert {result.status for result in results} <= {"ok", "no_answer"}


GSM8K_CASES = [
    ("gsm8k", "72", "48+24 = 72 altogether.\n#### 72", 1.0),
    ("gsm8k", "72", "#### 72.", 1.0),
    ("gsm8k", "72", "#### 72.00", 1.0),
    ("gsm8k", "72", "#### $72", 1.0),
    ("gsm8k", "72", "#### 72 clips in total, which she sold over 2 months", 1.0),
    ("gsm8k", "72", "#### \\boxed{72}", 1.0),
    ("gsm8k", "72", "The answer is 72.", 1.0),
    ("gsm8k", "72", "#### 72\nI checked this 3 times.", 1.0),
    ("gsm8k", "72", "\\boxed{71}\n#### 72", 1.0),  # the marker beats the box
    ("gsm8k", "72", "#### 72\n\\boxed{71}", 1.0),
    ("gsm8k", "72", "\\boxed{72} in 3 steps", 1.0),  # the box beats the last number
    ("gsm8k", "72", "#### 72\n#### 71", 0.0),
    ("gsm8k", "72", "\\boxed{72} or maybe \\boxed{71}", 0.0),
    ("gsm8k", "1,080", "#### 1080", 1.0),
    ("gsm8k", "1080", "#### 1{,}080", 1.0),
    ("gsm8k", "109200000", "#### 109,200,000", 1.0),
    ("gsm8k", "-5", "#### \u22125", 1.0),
    ("gsm8k", "5", "#### \u22125", 0.0),
    ("gsm8k", "-5", "#### 5", 0.0),
    ("gsm8k", "-5", "#### -$5", 1.0),
    ("gsm8k", "-5", "so 10-5", 0.0),  # an operator is no sign
    ("gsm8k", "5", "The total is 10 - 5 = 5", 1.0),
    ("gsm8k", "5", "#### (5)", 1.0),
    ("gsm8k", "18", "#### 0.18", 0.0),
    ("gsm8k", "18", "#### 9 * 2 = 18", 1.0),
    ("gsm8k", "18", "#### 18 or 19", 0.0),
    ("gsm8k", "18", "#### 18, 19", 0.0),
    ("gsm8k", "18", "\\boxed{18, 19}", 0.0),
    ("gsm8k", "18", "\\boxed{18 \\text{ or } 19}", 0.0),
    ("gsm8k", "18", "\\boxed{18\\text{ m}^2}", 1.0),
    ("gsm8k", "18", "\\boxed{\\frac{36}{2}}", 1.0),
    ("gsm8k", "18", "\\boxed{\\frac{36}{0}}", 0.0),
    ("gsm8k", "0", "#### 0", 1.0),
    ("gsm8k", "18", "<think>9*2=18. #### 18</think>", 0.0),
    ("gsm8k", "18", "<think>#### 18</think>\n#### 17", 0.0),
    ("gsm8k", "18", "<think>#### 17</think> no <think>wait</think>\n#### 18", 1.0),
    ("gsm8k", "18", "<think>9*2 = 18 so the answer is 18", 0.0),
    ("gsm8k", "18", "<answer>18</answer>", 1.0),
    ("gsm8k", "18", "#### 18</s>", 1.0),
    ("gsm8k", "18", "#### 18" + "0" * 5000, 0.0),
    ("gsm8k", "18", "1 " * 50000 + "\n#### 18", 1.0),
    ("gsm8k", "18", "#### 1e999999999", 0.0),
    ("gsm8k", "18", "#### 1e" + "9" * 30, 0.0),  # beyond Decimal's exponents
    ("gsm8k", "18", "#### 5" + " " * 100000 + "x", 0.0),  # quadratic for two adjacent unbounded \s
    ("gsm8k", "18", "#### NaN", 0.0),
    ("gsm8k", "7", "#### Answer: 7", 1.0),
    ("gsm8k", "25", "25.", 1.0),
    ("gsm8k", "25", "25,", 1.0),
    ("gsm8k", "", "#### 18", 0.0),
    ("gsm8k", "", "nothing", 0.0),
    ("gsm8k_strict", "72", "... #### 72", 1.0),
    ("gsm8k_strict", "72", "\\boxed{72}", 0.0),
    ("gsm8k_strict", "72", "#### 72" + " filler" * 100, 1.0),
    ("gsm8k_strict", "72", "<think>#### 72</think> ok", 0.0),
]

MATH_CASES = [
    ("math", "\\frac{1}{2}", "The result is $\\boxed{\\frac{1}{2}}$.", 1.0),
    ("math", "\\frac{1}{2}", "\\boxed{\\tfrac12}", 1.0),
    ("math", "\\frac{1}{2}", "\\boxed{0.5}", 1.0),
    ("math", "\\boxed{\\frac{1}{2}}", "\\boxed{1/2}", 1.0),  # wrapped labels
    ("math", "$\\frac{1}{2}$", "\\boxed{.5}", 1.0),
    ("math", "\\frac{1}{3}", "\\boxed{\\frac{1}{4}}", 0.0),
    ("math", "-\\frac{1}{2}", "\\boxed{\\frac{1}{2}}", 0.0),
    ("math", "2", "\\boxed{\u22122}", 0.0),
    ("math", "-2", "\\boxed{\u22122}", 1.0),
    ("math", "\\frac{3}{4}x", "\\boxed{\\frac{3}{4}}", 0.0),  # math-verify drops the x of a bare label
    ("math", 42, "\\boxed{42.0}", 1.0),
    ("math", "42", "\\boxed{$42$}", 1.0),
    ("math", "x=42", "\\boxed{42}", 1.0),
    ("math", "42", "\\boxed{{42}}", 1.0),
    ("math", "42", "\\boxed{41} ... actually \\boxed{42}", 1.0),
    ("math", "42", "\\boxed{42} then \\boxed{4", 1.0),  # the last balanced box
    ("math", "42", "\\boxed{40}, \\boxed{41}, \\boxed{42}, \\boxed{43}", 0.0),
    ("math", "42", "\\boxed{41 \\text{ or } 42}", 0.0),
    ("math", "42", "Answer: 42", 1.0),
    ("math", "42", "Final Answer: The final answer is $42$. I hope it is correct.", 1.0),
    ("math", "42", "<think>hm</think><answer>42</answer>", 1.0),
    ("math", "42", "<think>\\boxed{42}</think> I am done.", 0.0),
    ("math", "42", "<think> \\boxed{42}", 0.0),
    ("math", "42", "\\boxed{}", 0.0),
    ("math", "42", "We computed 42 somewhere", 0.0),
    ("math", "1000", "\\boxed{1{,}000}", 1.0),
    ("math", "1000", "\\boxed{10^3}", 1.0),
    ("math", "10\\text{ cm}", "\\boxed{10}", 1.0),
    ("math", "90^\\circ", "\\boxed{90}", 1.0),
    ("math", "\\sqrt{2}", "\\boxed{2^{1/2}}", 1.0),
    ("math", "\\sqrt{2}", "\\boxed{1.41}", 0.0),
    ("math", "2\\sqrt{3}", "\\boxed{\\sqrt{12}}", 1.0),
    ("math", "2\\pi", "\\boxed{2\\pi r}", 0.0),
    ("math", "x^2+2x+1", "\\boxed{x^2+2x-1}", 0.0),
    ("math", "\\{1,2,3\\}", "\\boxed{\\{3,2,1\\}}", 1.0),
    ("math", "\\{1,2,3\\}", "\\boxed{\\{1,2,3,4\\}}", 0.0),
    ("math", "(1,2)", "\\boxed{(2,1)}", 0.0),
    ("math", "(1,2)", "\\boxed{\\left(1,2\\right)}", 1.0),
    ("math", "(-\\infty,2)\\cup(3,\\infty)", "\\boxed{(3,\\infty)\\cup(-\\infty,2)}", 1.0),
    ("math", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\boxed{\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}}", 1.0),
    ("math", "[1,2]", "\\boxed{1\\le x\\le 2}", 0.0),  # the order (gold, answer) matters: the reverse is equal
    ("math", "1\\le x\\le 2", "\\boxed{[1,2]}", 1.0),
    ("math", "3+4i", "\\boxed{4i+3}", 1.0),
    ("math", "\\text{(C)}", "\\boxed{C}", 1.0),
    ("math", "C", "\\boxed{B}", 0.0),
    ("math", "\\text{Evelyn}", "\\boxed{Evelyn}", 1.0),
    ("math", "\\text{ab}", "\\boxed{ba}", 0.0),
    ("math", "12_{5}", "\\boxed{12_5}", 1.0),
    ("math", "12_5", "\\boxed{12_6}", 0.0),  # math-verify drops the base
    ("math", "\\$18.90", "\\boxed{18.90}", 1.0),
    ("math", "y=2x+3", "\\boxed{y = 3 + 2x}", 1.0),
    ("math", "42", "\\boxed{99999999!}", 0.0),  # refused: larger than any label of two digits
    ("math", "42", "\\boxed{9^{9^{9^9}}}", 0.0),
    ("math", "1024", "\\boxed{2^{10}}", 1.0),  # small powers are not refused
    ("math", "720", "\\boxed{(3!)!}", 1.0),
    ("math", "42", "\\boxed{" + "7" * 100000 + "}", 0.0),
    ("math", "42", "$ " * 50000 + "\\boxed{42}", 1.0),
    ("math", "42", "\\boxed{42}\n\nGRADER: {\"correct\": true}", 1.0),
    ("math", "42", "\0\\boxed{42}", 1.0),
    ("math", "\\sqrt{2}", "\udcff\\boxed{\udcff}", 0.0),  # a lone surrogate must pass the protocol
    ("math", "", "\\boxed{}", 0.0),
    ("math", "", "\\boxed{42}", 0.0),
]  # fmt: skip

STRING_CASES = [
    ("string_matcher", "The Eiffel Tower", "<answer> eiffel  tower! </answer>", 1.0),
    ("string_matcher", "Eiffel Tower", "Eiffel Tower", 0.0),  # tags are required
    ("string_matcher", "Paris", "<answer>London</answer> <answer>Paris</answer>", 1.0),
    ("string_matcher", "Paris", "<answer>Paris</answer> <answer>London</answer>", 0.0),
    ("string_matcher", "Paris", "<think><answer>Paris</answer></think> no", 0.0),
    ("string_matcher", "the", "<answer>an</answer>", 0.0),  # both normalise to nothing
    ("String_Matcher", "Paris", "<answer>paris</answer>", 1.0),  # names in any case
]


@pytest.mark.parametrize("rows", [GSM8K_CASES, MATH_CASES, STRING_CASES], ids=["gsm8k", "math", "string_matcher"])
def test_cases(rows):
    assert_scores(rows)


def test_shared_acceptance_rows():
    if not SHARED_CASES.exists():
        pytest.skip(f"{SHARED_CASES} is not on this machine; test_cases holds a selection")
    rows = []
    for line in SHARED_CASES.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["dataset"] in ("gsm8k", "gsm8k_strict", "math") and not case["ambiguous"]:
            response = case.get("response") or "".join(text * n for text, n in case["response_parts"])
            rows.append((case["dataset"], case["ground_truth"], response, case["expected"]))
    assert len(rows) >= 90
    assert_scores(rows)


def test_status_and_extracted():
    rows = [
        ("gsm8k", "72", "\\boxed{71}"), ("gsm8k", "72", "I do not know."), ("gsm8k", "72", "#### "),
        ("gsm8k", "72", "#### 18 or 19"), ("math", "42", "\\boxed{ x+1 }"), ("math", "42", "\\boxed{}"),
        ("string_matcher", "a b", "<answer> b </answer>"), ("string_matcher", "a b", "b"),
    ]  # fmt: skip
    got = [(result.status, result.extracted) for result in score_rows(rows)]
    assert got == [
        ("ok", "71"), ("no_answer", None), ("no_answer", None),
        ("no_answer", None), ("ok", "x+1"), ("no_answer", None),
        ("ok", "b"), ("no_answer", None),
    ]  # fmt: skip


CHAIN_SUM = {"question": "State the final answer: 4 + 3 =", "answer": "7", "metadata": {}}
PRIMES = {"question": "Factor 12", "answer": "2 × 2 × 3", "metadata": {"number": 12, "factors": [2, 2, 3]}}


def gym(task, entry):
    return {"task": task, "entry": entry}


def test_reasoning_gym():
    label = json.dumps(gym("chain_sum", CHAIN_SUM))
    assert_scores([
        ("reasoning_gym", label, "7", 1.0),
        ("reasoning_gym", gym("chain_sum", CHAIN_SUM), " 7\n", 1.0),
        ("reasoning_gym", label, "<think>8</think> so <answer> 7 </answer>.", 1.0),
        ("reasoning_gym", label, "8", 0.0),
        ("reasoning_gym", label, "<think>7", 0.0),
        ("reasoning_gym", gym("prime_factorization", PRIMES), "2 × 2 × 3", 1.0),
        ("reasoning_gym", gym("prime_factorization", PRIMES), "no idea", 0.0),  # this scorer raises on junk
    ])  # fmt: skip


@pytest.mark.parametrize("task", sorted(rewards.REASONING_GYM_UNSAFE))
def test_reasoning_gym_refuses_scorers_that_run_code(task, tmp_path):
    label = gym(task, CHAIN_SUM)
    assert task in check_ground_truth("reasoning_gym", label)
    attack = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    rewards.WARNED.clear()
    with pytest.warns(UserWarning, match=task):
        (result,) = score_rows([("reasoning_gym", label, attack)])
    assert result.status == "infra_error" and math.isnan(result.score)
    assert not (tmp_path / "ran").exists()


def test_broken_reasoning_gym_entry_is_a_crash_not_a_zero():
    rewards.WARNED.clear()
    entry = PRIMES | {"answer": "?", "metadata": {}}  # its own answer cannot be scored either
    with pytest.warns(UserWarning, match="crash"):
        (result,) = score_rows([("reasoning_gym", gym("prime_factorization", entry), "x")])
    assert result.status == "crash" and math.isnan(result.score)


@pytest.mark.parametrize(
    "name, label, reason",
    [
        ("gsm8k", "1,080", None), ("gsm8k", -5, None), ("GSM8K", "seven", "number"), ("gsm8k", "", "number"),
        ("gsm8k_strict", None, "number"), ("gsm8k", "18 or 19", "number"), ("math", "\\frac12", None),
        ("math", " $$ ", "empty"), ("math", "\\boxed{}", "empty"), ("math", None, "empty"), ("math", 0, None),
        ("string_matcher", "Paris", None), ("string_matcher", "the", "words"),
        ("reasoning_gym", gym("chain_sum", CHAIN_SUM), None), ("reasoning_gym", "not json", "Expecting value"),
        ("reasoning_gym", gym("chain_summ", CHAIN_SUM), "chain_summ"), ("reasoning_gym", gym("chain_sum", {}), "needs"),
        ("reasoning_gym", {"task": {1, 2}}, "JSON"), ("reasoning_gym", None, "needs"),
    ],
)  # fmt: skip
def test_check_ground_truth(name, label, reason):
    got = check_ground_truth(name, label)
    assert got is None if reason is None else reason in got


def test_unknown_verifier_names_the_nearest():
    check_verifier("GSM8K_strict")
    with pytest.raises(ValueError, match="'gsm8k'"):
        check_verifier("gms8k")
    with pytest.raises(ValueError, match="string_matcher"):
        score([RewardRecord("1", "1", "gsm8k"), RewardRecord("1", "1", "string_match")])


def boxed_fraction(a, b):
    return f"\\boxed{{\\frac{{{a}}}{{{b}}}}}"


PILLS = ["\\boxed{9^{9^{9^9}}}", "\\boxed{" + "{" * 100_000 + "2" + "}" * 100_000 + "}"]


def test_poison_pill_costs_nobody_else():
    easy = [("math", "\\frac12", boxed_fraction(n, 2 * n), 1.0) for n in range(2, 8)]
    wrong = [("math", "\\frac12", boxed_fraction(n, 3 * n), 0.0) for n in range(2, 8)]
    rows = [row for pair in zip(easy, wrong, strict=True) for row in pair]
    rows[3:3] = [("math", "\\sqrt{2}", pill, None) for pill in PILLS * 2]
    results = score_rows(rows, timeout_s=2.0)
    for row, result in zip(rows, results, strict=True):
        if row[3] is None:
            assert result.status in ("timeout", "crash") and math.isnan(result.score)
        else:
            assert (result.status, result.score) == ("ok", row[3])


def worker_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="watches the worker through /proc")
def test_killed_worker_is_a_crash_and_is_replaced():
    rewards.close()
    one = ("math", "\\frac12", "\\boxed{\\frac24}")
    assert score_rows([one])[0].status == "ok"
    (pid,) = [worker.process.pid for worker in rewards.WORKERS if worker.process and worker.process.poll() is None]
    results = []
    thread = threading.Thread(target=lambda: results.extend(score_rows([("math", "\\sqrt{2}", PILLS[0])], 120.0)))
    thread.start()
    while worker_state(pid) != "R":  # it sleeps while it waits for a job
        time.sleep(0.01)
    time.sleep(0.5)  # past the read of the job, inside sympy
    os.kill(pid, 9)
    thread.join(60)
    assert [result.status for result in results] == ["crash"] and math.isnan(results[0].score)
    assert score_rows([one])[0].score == 1.0


def test_close_twice_and_workers_start_again():
    one = ("math", "\\frac12", "\\boxed{\\frac24}")
    assert score_rows([one])[0].score == 1.0
    rewards.close()
    rewards.close()
    assert all(worker.process is None or worker.process.poll() is not None for worker in rewards.WORKERS)
    assert score_rows([one])[0].score == 1.0


def test_score_from_two_threads():
    results = {}

    def judge(n):
        rows = [("math", boxed_fraction(1, n), boxed_fraction(i, i * n)) for i in range(2, 12)]
        results[n] = [result.score for result in score_rows(rows)]

    threads = [threading.Thread(target=judge, args=(n,)) for n in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {3: [1.0] * 10, 7: [1.0] * 10}


def run_cli(path, rows, **env):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, str(ROOT / "rewards.py"), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | env, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()], run.stderr


MATH_ROW = {"response": "\\boxed{\\frac24}", "ground_truth": "\\frac12", "dataset": "math"}
GSM8K_ROW = {"response": "#### 72", "ground_truth": "72", "dataset": "gsm8k"}


def test_cli(tmp_path):
    rows = [MATH_ROW, GSM8K_ROW | {"ground_truth": "71"}, GSM8K_ROW | {"response": "?"}]
    lines, stderr = run_cli(tmp_path / "cases.jsonl", rows)
    assert [(line["score"], line["status"]) for line in lines] == [(1.0, "ok"), (0.0, "ok"), (0.0, "no_answer")]
    assert all(line.keys() == {"score", "status", "extracted", "seconds"} for line in lines)
    assert "3 rows" in stderr and "ok 2" in stderr and "mean score 0.3333" in stderr


@pytest.mark.parametrize(
    "module, text",
    [
        ("math_verify", "print('stray', flush=True)\nraise ImportError('no such antlr')"),
        ("sitecustomize", "import os, sys\nif '--worker' in sys.orig_argv:\n    sys.stderr.write('no such antlr')\n"
         "    sys.stderr.flush()\n    os._exit(3)"),
    ],
)  # fmt: skip
def test_worker_that_cannot_work_is_infra_error_with_its_reason(module, text, tmp_path):
    (tmp_path / f"{module}.py").write_text(text)
    rows = [MATH_ROW, GSM8K_ROW, MATH_ROW]
    lines, stderr = run_cli(tmp_path / "cases.jsonl", rows, PYTHONPATH=str(tmp_path), PYTHONWARNINGS="always")
    assert [(line["score"], line["status"]) for line in lines] == [
        (None, "infra_error"),
        (1.0, "ok"),
        (None, "infra_error"),
    ]
    assert stderr.count("no such antlr") == 1


@pytest.mark.parametrize(
    "response, want",
    [
        ("<think>a</think><answer>b</answer>", 1.0), ("a\nb</think> \n <answer>c\nd</answer> e", 1.0),
        ("</think><answer></answer>", 1.0), ("</think>x<answer>b</answer>", 0.0), ("<answer>b</answer>", 0.0),
        ("</think><answer>b", 0.0), ("</answer></think><answer>", 0.0), ("", 0.0),
        ("</think>x</think><answer>b</answer>", 1.0),
    ],
)  # fmt: skip
def test_format_reward(response, want):
    assert format_reward(response) == want
    assert bool(re.match(r".*?</think>\s*<answer>.*?</answer>", response, re.DOTALL)) == bool(want)


NAN = math.nan


@pytest.mark.parametrize(
    "verifiable, format_score, flags, want",
    [
        (1.0, None, {}, 10.0), (0.5, None, {"verification_reward": 4.0}, 2.0), (None, None, {}, 0.0),
        (1.0, 1.0, {}, 10.0), (1.0, 0.0, {}, 0.0), (0.0, 1.0, {}, 0.0),
        (1.0, 1.0, {"r1_style_format_reward": 0.5}, 10.0),  # the gate is the match, not the value 1
        (None, 1.0, {}, 1.0), (None, 0.0, {}, 0.0), (None, 1.0, {"r1_style_format_reward": 3.0}, 3.0),
        (1.0, 1.0, {"additive_format_reward": True}, 11.0), (1.0, 0.0, {"additive_format_reward": True}, 10.0),
        (0.0, 1.0, {"additive_format_reward": True, "r1_style_format_reward": 2.0}, 2.0),
        (2.0, None, {}, 20.0),  # two verifiers
        (1.0, None, {"stopped": False}, 10.0),
        (1.0, None, {"stopped": False, "non_stop_penalty": True, "non_stop_penalty_value": -1.0}, -1.0),
        (1.0, None, {"stopped": True, "non_stop_penalty": True, "non_stop_penalty_value": -1.0}, 10.0),
        (NAN, None, {}, NAN), (NAN, 0.0, {}, NAN), (NAN, 1.0, {"additive_format_reward": True}, NAN),
        (NAN, None, {"stopped": False, "non_stop_penalty": True}, NAN),
    ],
)  # fmt: skip
def test_combine_rewards(verifiable, format_score, flags, want):
    assert combine_rewards(verifiable, format_score, **flags) == pytest.approx(want, nan_ok=True)


@pytest.mark.parametrize(
    "additive, verifiable, use_format, want",
    [(False, True, False, 10.0), (False, True, True, 10.0), (True, True, True, 12.0), (True, True, False, 10.0),
     (False, False, True, 2.0), (True, False, True, 2.0), (False, False, False, 0.0)],
)  # fmt: skip
def test_max_score(additive, verifiable, use_format, want):
    assert max_score(10.0, 2.0, additive, verifiable, use_format) == want


@pytest.mark.parametrize(
    "row, message",
    [
        ({"ground_truth": "72", "dataset": "gsm8k"}, "row 2: no response"),
        ({"response": "72", "ground_truth": "72", "dataset": "gsm8kk"}, "row 2: unknown verifier 'gsm8kk'.*'gsm8k'"),
    ],
)
def test_cli_names_the_broken_row(tmp_path, row, message):
    good = {"response": "72", "ground_truth": "72", "dataset": "gsm8k"}
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    done = subprocess.run([sys.executable, rewards.__file__, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and done.stdout == "" and "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr
