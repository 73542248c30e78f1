"""rewards.py through its production call, `score`: literals follow from the rules, none was read off our output."""

import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rewards
from rewards import (
    RewardFlags,
    RewardRecord,
    check_ground_truth,
    check_verifier,
    combine_rewards,
    format_reward,
    score,
)
from scripts.parts import gym as gym_part
from scripts.parts import ifeval as ifeval_part
from scripts.parts import worker
from tests.programs import is_alive, wait_until

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def one_worker():
    """All but one worker stay at home, since each imports the verifiers' libraries; see all_workers. That one starts
    again once only for the number of its jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "JOBS_PER_WORKER", 5000)
        patch.setattr(worker.OF_VERIFIERS, "most", 1)
        yield


@pytest.fixture
def all_workers(monkeypatch):
    monkeypatch.setattr(worker.OF_VERIFIERS, "most", rewards.NUM_WORKERS)


def score_rows(rows, timeout_s=30.0):
    return score([RewardRecord(response, label, dataset) for dataset, label, response, *_ in rows], timeout_s)


def assert_scores(rows, timeout_s=30.0):
    """rows of (dataset, label, response, expected score), all of which are judged or have no answer."""
    results = score_rows(rows, timeout_s)
    wrong = [(*row, result) for row, result in zip(rows, results, strict=True) if result.score != row[3]]
    assert not wrong
    assert {result.status for result in results} <= {"ok", "no_answer"}


GSM8K_CASES = [
    ("gsm8k", "72", "#### \\boxed{72}", 1.0),
    ("gsm8k", "72", "#### 72\nI checked this 3 times.", 1.0),
    ("gsm8k", "72", "\\boxed{71}\n#### 72", 1.0),  # the marker beats the box
    ("gsm8k", "72", "\\boxed{72} in 3 steps", 1.0),  # the box beats the last number
    ("gsm8k", "72", "#### 72\n#### 71", 0.0),
    ("gsm8k", "1080", "#### 1{,}080", 1.0),
    ("gsm8k", "-5", "#### \u22125", 1.0),
    ("gsm8k", "-5", "so 10-5", 0.0),  # an operator is no sign
    ("gsm8k", "18", "\\boxed{18, 19}", 0.0),
    ("gsm8k", "18", "\\boxed{\\frac{36}{0}}", 0.0),
    ("gsm8k", "18", "<think>#### 18</think>\n#### 17", 0.0),
    ("gsm8k", "18", "<think>9*2 = 18 so the answer is 18", 0.0),
    ("gsm8k", "18", "#### 1e" + "9" * 30, 0.0),  # beyond Decimal's exponents
    ("gsm8k", "18", "#### 5" + " " * 100000 + "x", 0.0),  # quadratic for two adjacent unbounded \s
    ("gsm8k", "5", "#### 5_4", 0.0),
    ("gsm8k", "5", "\\boxed{5\\text{not}}", 0.0),
    ("gsm8k", "5", "#### 5 is not right", 0.0),
    ("gsm8k", "12", "#### 1\\,2", 0.0),
    ("gsm8k", "12000", "#### 12\\,000", 1.0),
    ("gsm8k", "5", "\\boxed{5} so \\boxed{6", 0.0),
    ("gsm8k", "1/3", "#### 0." + "3" * 28, 0.0),  # equal in 28 digits
    ("gsm8k", "1/3", "#### 4/12", 1.0),
    ("gsm8k_strict", "72", "\\boxed{72}", 0.0),
    ("gsm8k_strict", "72", "<think>#### 72</think> ok", 0.0),
    ("gsm8k_verl", "72", "#### 72" + "x" * 293, 1.0),  # the marker's first # is the 300th from the end
    ("gsm8k_verl", "72", "#### 72" + "x" * 294, 0.0),
]
MATH_CASES = [
    ("math", "\\frac{1}{2}", "\\boxed{\\tfrac12}", 1.0),
    ("math", "$\\frac{1}{2}$", "\\boxed{.5}", 1.0),
    ("math", "42", "\\boxed{41} ... actually \\boxed{42}", 1.0),
    ("math", "42", "\\boxed{42} then \\boxed{4", 0.0),  # a box that is cut off is the last one
    ("math", "42", "Final Answer: The final answer is $42$. I hope it is correct.", 1.0),
    ("math", "42", "<think>hm</think><answer>42</answer>", 1.0),
    ("math", "42", "<think>\\boxed{42}</think> I am done.", 0.0),
    ("math", "42", "We computed 42 somewhere", 0.0),
    ("math", "42", "\\boxed{9^{9^{9^9}}}", 0.0),  # refused: nobody needs its digits
    ("math", "\\sqrt{2}", "\\boxed{9^{9^{9^9}}}", 0.0),
    ("math", "x", "\\boxed{x+(10^9)!}", 0.0),
    ("math", "\\pi", "\\boxed{e^{e^{e^{e^{9}}}}}", 0.0),
    ("math", "7", "\\boxed{\\binom{10^9}{10^8}}", 0.0),
    ("math", "\\frac{1}{2^{60}}", "\\boxed{\\frac{1}{2^{59}}}", 0.0),
    ("math", "12000", "\\boxed{12\\,000}", 1.0),
    ("math", "5", "\\boxed{5} and so on. \\boxed{\\frac{5", 0.0),
    ("math", "5", "\\boxed{\\boxed{5}", 1.0),  # the inner box opens last
    ("math", "1024", "\\boxed{2^{10}}", 1.0),
    ("math", "42", "\\boxed{" + "7" * 100000 + "}", 0.0),
    ("math", "\\sqrt{2}", "\udcff\\boxed{\udcff}", 0.0),  # a lone surrogate must pass the protocol
    ("math", "", "\\boxed{}", 0.0),
    ("math", "1/0", "\\boxed{2}", 0.0),
]
MINERVA = "Final Answer: The final answer is {}. I hope it is correct."
# F1 by hand, over words without a, an, the: 2 * common / (words of the answer + words of the label)
TEXT_CASES = [
    ("string_matcher", "The Eiffel Tower", "<answer> eiffel  tower! </answer>", 1.0),
    ("string_matcher", "Eiffel Tower", "Eiffel Tower", 0.0),  # tags are required
    ("string_matcher", "the", "<answer>an</answer>", 0.0),  # both normalise to nothing
    ("String_Matcher", ["seven", "7"], "<answer>7</answer>", 1.0),  # alternatives; names in any case
    ("strict_math", "42", MINERVA.format("41") + "\n" + MINERVA.format("$42$"), 1.0),  # the last one
    ("strict_math", "42", "\\boxed{42}", 0.0),
    ("string_f1", "cat sat", "cat cat cat", 0.4),  # 2 * 1 / (3 + 2): a word counts as often as it is in both
    ("string_f1", ["dog", "cat sat down"], "cat sat", 0.8),  # the better label: 2 * 2 / (2 + 3)
    ("string_f1", "cat", "<think>cat</think> dog", 0.0),
    ("puzzle", "A: red, B: blue", "<think>hm</think>\na red b blue", 1.0),
    ("puzzle", "red", "red or blue", 0.0),
    ("flan", "yes", "Well. The answer is: no. The answer is: Yes.", 1.0),
    ("flan", "yes", "The answer is: yes or no", 0.0),
    ("re_search", '"Paris"', "<finish>Paris</finish> <finish>London</finish>", 1.0),  # the first ends the search
    ("re_search", "Paris", "<finish>Paris, France</finish>", 0.0),
    ("re_search_f1", "Paris", "<finish>Paris, France</finish>", 2 / 3),
    ("re_search_f1", "Paris", "<finish>London</finish>", 0.1),
    ("passthrough", None, "anything", 0.0),
]


def test_a_late_reply_is_not_the_next_jobs():
    """A reply that was left in a worker's socket makes the next sample missing, and never its score."""
    own = worker.Worker()
    job = rewards.Job("equality.work_math", {"gold": "1", "answer": "1"})
    try:
        assert own.run(*job[:2], 20.0).status != "infra_error"
        own.buffer = b'{"number": 1, "ready": true}\n{"number": 1, "score": 0.25}\n'
        outcome = own.run(*job[:2], 20.0)
        assert outcome.status == "infra_error" and "out of step" in outcome.problem and own.process is None
        assert own.run(*job[:2], 20.0).status != "infra_error"
    finally:
        own.stop()


FORKS = """
import os, signal, time
pid = os.fork()
if pid == 0:
    time.sleep(600)
    os._exit(0)
def child(response, ground_truth):
    open(ground_truth, "w").write(str(pid))
    if response == "dies":
        os.kill(os.getpid(), signal.SIGTERM)
    if response == "hangs":
        time.sleep(600)
    return 1.0
"""


@pytest.mark.parametrize("session", [False, True])  # whether the child has a session of its own
@pytest.mark.parametrize("response, status", [("dies", "crash"), ("hangs", "timeout")])
def test_a_workers_children_end_with_it(response, status, session, tmp_path):
    """A child lived on; and as it held the socket, a worker that had died was waited for until the deadline."""
    own_session = "if pid == 0:\n    os.setsid()\n"
    (tmp_path / "reward.py").write_text(FORKS.replace("if pid == 0:\n", own_session) if session else FORKS)
    note = tmp_path / "pid"
    own = worker.Worker()
    call = json.dumps(["child", {"response": response, "ground_truth": str(note)}])
    job = rewards.Job("user_files.work_reward_file", {"path": str(tmp_path / "reward.py"), "call": call})
    try:
        outcome = own.run(*job[:2], 60.0 if response == "dies" else 1.0)
        assert outcome.status == status and outcome.seconds < 50
        child = note.read_text()
        wait_until(lambda: not is_alive(child))
    finally:
        if own.process:
            own.stop()


@pytest.mark.parametrize("rows", [GSM8K_CASES, MATH_CASES, TEXT_CASES], ids=["gsm8k", "math", "text"])
def test_cases(rows):
    assert_scores(rows)


@pytest.mark.parametrize("name, num_tokens, label, want", [
    ("max_length", 100, "100", 1.0),
    ("max_length", 17192, 9000, 0.75),
    ("max_length", 40000, 100, 0.0),  # 1 - 39900 / 32768 would be negative
    ("up_to_max_length", 3, 100, 1.0),
    ("up_to_max_length", 8292, 100, 0.75),
])  # fmt: skip
def test_length_verifiers(name, num_tokens, label, want):
    (result,) = score([RewardRecord("x", label, name, num_tokens)])
    assert (result.status, result.extracted) == ("ok", str(num_tokens)) and result.score == pytest.approx(want)


def ifeval(*constraints):
    """A label in open-instruct's form."""
    return [{"instruction_id": [name for name, _ in constraints], "kwargs": [kwargs for _, kwargs in constraints]}]


TWO_SENTENCES = ifeval(("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}))
GERMAN = ifeval(("language:response_language", {"language": "de"}))
NO_COMMA = ("punctuation:no_comma", None)
MOON = ("keywords:existence", {"keywords": ["moon"], "relation": None})
IFEVAL_CASES = [
    ("ifeval", TWO_SENTENCES, "Dr. Smith went home. He was tired.", 1.0),
    ("ifeval", TWO_SENTENCES, "Dr. Smith went home. He was tired. He slept.", 0.0),
    ("ifeval", GERMAN, "Der Mond ist heute Nacht sehr hell und rund.", 1.0),
    ("ifeval", GERMAN, "1 + 1", 0.0),  # the library lets a text without letters pass for any language
    ("ifeval", json.dumps(ifeval(MOON)), "<answer>The moon.</answer> bye, bye", 1.0),
    ("ifeval", ifeval(NO_COMMA), "<think>", 0.0),
    ("ifeval_mean", ifeval(NO_COMMA, MOON), "The moon, bright.", 0.5),
    ("ifeval", ifeval(("sentence:keyword", {"N": 2, "word": "moon"})), "It is late. The moon is up.", 1.0),  # IFBench
    ("ifeval", ifeval(("sentence:keyword", {"N": 2, "word": "moon"})), "The moon is up. It is late.", 0.0),
]


def test_ifeval():
    assert_scores(IFEVAL_CASES)


def drawn_labels():
    """(constraint id, label) of all 83, with arguments as the library draws them."""
    given = {"prompt_to_repeat": "Say hi to the cat.", "reference_text": "A text."}  # these it does not draw
    for name, constraint in ifeval_part.ifeval_constraints().items():
        made = constraint(name)
        kwargs = {key: given[key] for key in given.keys() & set(made.get_instruction_args_keys())}
        made.build_description(**kwargs)
        yield name, ifeval((name, kwargs | (made.get_instruction_args() or {})))


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "<finish>", "</finish>", "\\boxed{", "}", "{", "$", "##",
          "\n", "-", "\u2212", "1", "9", ".", ",", "e9", "/", "!", "^", "(", ")", "\\frac", "\0", "\udcff", "٣",
          " ", "####", "The answer is: ", MINERVA, "a", "the", "'", '"', "[", "]", "<<", ">>", "x="]  # fmt: skip
WORKER_ONLY = {"reasoning_gym", "ifeval", "ifeval_mean"}


def random_strings(n):
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randrange(25))) for _ in range(n)]


@pytest.mark.parametrize("name", sorted(rewards.VERIFIERS.keys() - WORKER_ONLY - {"solver"}))
def test_no_string_raises_in_the_trainer(name):
    label = {"code": ["assert f(1)"], "code_stdio": [{"input": "1", "output": "1"}]}.get(name, "1")
    for text in random_strings(1_500) + [piece * 100_000 for piece in PIECES]:
        record = rewards.RewardRecord(text, label, name, num_tokens=len(text))
        found = rewards.VERIFIERS[name].verify(record).score  # a job or a call: what takes time is not done here
        assert isinstance(found, rewards.Job) or callable(found) or 0.0 <= found <= 1.0


@pytest.mark.house
def test_no_string_is_missing_in_the_workers():
    """All constraints of ifeval among them, but those that need data which no package has."""
    labels = [label for _, label in drawn_labels() if not check_ground_truth("ifeval", label)]
    assert len(labels) >= 25 + 58 - 2
    rows = []
    for i, text in enumerate(random_strings(600)):
        rows += [("ifeval", labels[i % len(labels)], text), ("math", "x^2+1", f"\\boxed{{{text}}}")]
        rows += [("reasoning_gym", gym("chain_sum", CHAIN_SUM), text)]
    results = score_rows(rows)
    missing = [(*row, result) for row, result in zip(rows, results, strict=True) if result.status in rewards.MISSING]
    assert not missing


def test_a_call_that_raises_is_a_crash_and_all_calls_are_in_flight_together(monkeypatch, capsys):
    both = threading.Barrier(2, timeout=20)

    def verify(record):
        def call():
            both.wait()  # a second call must run meanwhile
            return rewards.Scored(1.0, "ok", {"asked": record.prompt}) if record.ground_truth else 1 / 0

        return rewards.Verdict(record.response, call)

    monkeypatch.setitem(rewards.VERIFIERS, "slow", rewards.Verifier(verify))
    good, bad = score([RewardRecord("a", 1, "slow", prompt="user: hello"), RewardRecord("b", 0, "slow")])
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (good.score, good.status, good.extracted, good.details) == (1.0, "ok", "a", {"asked": "user: hello"})
    assert math.isnan(bad.score) and bad.status == "crash"


def read_pairs(name):
    return [json.loads(line) for line in (ROOT / "tests" / name).read_text().splitlines()]


def test_pairs_of_answers():
    """Labels and answers of every kind that math-verify takes wrong, half of them equal: no error of either kind."""
    pairs = read_pairs("math_pairs.jsonl")
    assert len(pairs) >= 200 and 0.4 < sum(pair["equal"] for pair in pairs) / len(pairs) < 0.6
    assert_scores([("math", pair["label"], f"\\boxed{{{pair['answer']}}}", float(pair["equal"])) for pair in pairs])


def test_pairs_of_numbers():
    """Mixed numbers, numbers in words, percent, and answers that offer several numbers."""
    pairs = read_pairs("gsm8k_pairs.jsonl")
    assert len(pairs) >= 150 and 0.3 < sum(pair["equal"] for pair in pairs) / len(pairs) < 0.7
    assert not [pair for pair in pairs if check_ground_truth("gsm8k", pair["label"])]
    assert_scores([("gsm8k", pair["label"], f"So.\n#### {pair['answer']}", float(pair["equal"])) for pair in pairs])
    assert_scores([
        ("gsm8k", "2.5", "It takes 2 1/2 hours.", 1.0), ("gsm8k", "2", "It takes 2 1/2 hours.", 0.0),
        ("gsm8k", "0.75", "The answer is 3/4.", 1.0), ("gsm8k", "4", "The answer is 3/4.", 0.0),
        ("gsm8k", "2.5", "\\boxed{2\\frac{1}{2}}", 1.0), ("gsm8k", "21", "\\boxed{\\text{twenty-one}}", 1.0),
        ("gsm8k", "1", "One more thing.", 0.0), ("gsm8k", "7", "#### " + "9" * 5000 + " 1/2", 0.0),
    ])  # fmt: skip


CHAIN_SUM = {"question": "State the final answer: 4 + 3 =", "answer": "7", "metadata": {}}
PRIMES = {"question": "Factor 12", "answer": "2 × 2 × 3", "metadata": {"number": 12, "factors": [2, 2, 3]}}


def gym(task, entry):
    return {"task": task, "entry": entry}


def test_reasoning_gym():
    label = json.dumps(gym("chain_sum", CHAIN_SUM))
    long_sum = gym("chain_sum", CHAIN_SUM | {"answer": "9007199254740993"})
    assert_scores([
        ("reasoning_gym", gym("chain_sum", CHAIN_SUM | {"answer": "54"}), "5_4", 0.0),
        ("reasoning_gym", long_sum, "9007199254740993", 1.0),
        ("reasoning_gym", long_sum, "9007199254740992", 0.0),
        ("reasoning_gym", label, "7", 1.0),
        ("reasoning_gym", gym("chain_sum", CHAIN_SUM), " 7\n", 1.0),
        ("reasoning_gym", label, "<think>8</think> so <answer> 7 </answer>.", 1.0),
        ("reasoning_gym", label, "8", 0.0),
        ("reasoning_gym", label, "<think>7", 0.0),
        ("reasoning_gym", gym("prime_factorization", PRIMES), "2 × 2 × 3", 1.0),
        ("reasoning_gym", gym("prime_factorization", PRIMES), "no idea", 0.0),  # this scorer raises on junk
    ])  # fmt: skip
    game = {"numbers": [94, 4, 6, 61], "target": 309, "source_dataset": "countdown"}
    label = gym("composite", {"question": "", "answer": "x", "metadata": game})
    four = gym("puzzle24", {"question": "", "answer": "x", "metadata": {"numbers": [8, 5, 10, 6]}})
    right = [(label, "94*4 - 6 - 61"), (label, "94 * 4 - (61+6)"), (four, "(8 - 5)*10 - 6")]
    wrong = """309|94*4 - 61|9,4*4 - 6 - 61|94*4 - 6 - 61 = 309|309 + 0*(94+4+6+61)|9**9**9|24|1*2*3*4|²|94*4 - 6 - 6_1
        |__import__('os')|S('24')|94**4**6**61|94/(4-4)-6-61""".split("|")
    wrong += ["(" * 5000, "1" * 5000]
    assert_scores([("reasoning_gym", task, answer, 1.0) for task, answer in right])
    assert_scores([("reasoning_gym", task, answer, 0.0) for task in (label, four) for answer in wrong])


# Their entries have no answer
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def gym_entry(task):
    """An entry as a data set of JSON lines has it."""
    import reasoning_gym

    easy = {  # they search for a solution
        "rush_hour": {"max_moves": 6},
        "knight_swap": {"min_pieces": 1, "max_pieces": 1, "min_steps": 1},
        "futoshiki": {"max_board_size": 5},
        "zebra_puzzles": {"num_people": 2, "num_characteristics": 2},
    }
    made = reasoning_gym.create_dataset(task, size=1, seed=5, **easy.get(task, {}))
    return json.loads(json.dumps(made[0]))


def compiled(jobs):
    """In a process of its own, which keeps its hook: the tasks whose scorers compiled a text, and the texts."""
    run, found = [], []
    sys.addaudithook(
        lambda event, args: event == "compile" and args[1] == "<string>" and run.append(str(args[0])[:200])
    )
    for task, entry, answer in jobs:
        gym_part.reasoning_gym_dataset(task)
        run.clear()
        with contextlib.suppress(Exception):
            gym_part.work_reasoning_gym(task, entry, answer)()
        if run:
            found.append((task, list(run)))
    return found


def poisoned(value, text):
    if isinstance(value, dict):
        return {key: item if key in ("task", "task_type") else poisoned(item, text) for key, item in value.items()}
    return [poisoned(item, text) for item in value] if isinstance(value, list) else text


def test_no_scorer_compiles_a_text():
    """All tasks that run in a worker, with their own entries and with ones whose every text is code."""
    from reasoning_gym.factory import DATASETS

    evil, jobs = "__import__('os').system('true')", []
    others = gym_part.REASONING_GYM_REFUSED.keys() | {"composite", "countdown", "puzzle24"}
    for task in sorted(DATASETS.keys() - others):
        entry = gym_entry(task)
        answer = entry["answer"] or "[]"
        bad = {"answer": evil} if task in UNANSWERED else poisoned(entry, evil)
        jobs += [(task, entry, answer), (task, entry, evil), (task, entry | {"answer": evil}, answer)]
        jobs += [(task, entry | bad, answer), (task, entry | {"answer": evil}, '["1"]')]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as forked:
        assert forked.submit(compiled, json.loads(json.dumps(jobs))).result(100) == []


@pytest.mark.parametrize("name, label, fits", [
    ("gsm8k", "1,080", True),
    ("GSM8K", "a few", False),
    ("gsm8k_strict", None, False),
    ("gsm8k_verl", "1,080", False),
    ("math", "\\frac12", True),
    ("math", "\\boxed{}", False),
    ("math", ["7"], False),
    ("math", math.nan, False),
    ("string_matcher", math.nan, False),
    ("passthrough", math.nan, True),
    ("math", "NaN", False),
    ("math", "so \\boxed{5", False),
    ("code", ["assert sum([1, 2]) == 3", "x = 1\nassert math.floor(1.5) == x"], False),
    ("code", ["assert sum([1, 2]) == 3", "assert f(2) == 3"], True),
    ("code", ["def check(f):\n    assert f(1)"], False),
    ("string_matcher", "the", False),
    ("re_search", '["Paris"]', True),
    ("re_search", "[]", False),
    ("max_length", "many", False),
    ("passthrough", None, True),
    ("reasoning_gym", gym("chain_summ", CHAIN_SUM), False),
    ("reasoning_gym", {"task": {1, 2}}, False),
    ("reasoning_gym", gym("coin_flip", CHAIN_SUM), False),
    ("reasoning_gym", gym("simple_integration", CHAIN_SUM), False),
    ("ifeval", ifeval(NO_COMMA), True),
    ("ifeval", ifeval(("keywords:existance", {})), False),
    ("ifeval_mean", ifeval(NO_COMMA, ("keywords:existence", {"words": ["x"]})), False),
])  # fmt: skip
def test_check_ground_truth(name, label, fits):
    assert (check_ground_truth(name, label) is None) == fits


@pytest.fixture
def configured(monkeypatch):
    """rewards.configure of some flags, undone after the test."""
    monkeypatch.setattr(rewards, "VERIFIERS", dict(rewards.VERIFIERS))
    yield lambda **flags: rewards.configure(RewardFlags(**flags), connect=False)
    rewards.configure(RewardFlags(), connect=False)


def test_remap_verifier(configured):
    rows = [("math_dapo", "\\frac12", "\\boxed{0.5}", 1.0), ("GSM8K", "18", "\\boxed{18}", 0.0)]
    with pytest.raises(ValueError, match="math_dapo"):
        score_rows(rows)
    configured(remap_verifier="Math_DAPO=math, gsm8k=gsm8k_strict")
    assert_scores(rows)
    assert check_verifier("math_dapo") == "math" and "empty" in check_ground_truth("math_dapo", "")
    configured()
    assert check_verifier("gsm8k") == "gsm8k"


MY_REWARD = """
import mmap, os, sys, time
from sibling import FULL, imported
SPACE = mmap.mmap(-1, 3 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # like torch, more than math may have

def brevity(response: str, ground_truth) -> float:
    print("dropped")
    return max(0.0, FULL - len(response) / ground_truth["limit"])

def faults(response, ground_truth):
    if response == "raise":
        return {}["key"]
    if response == "die":
        os._exit(0)
    if response == "exit":
        sys.exit(0)
    if response == "sleep":
        time.sleep(600)
    return float("nan") if response == "nan" else None if response == "none" else -2

def helper(text):
    return 1.0
"""


def test_reward_file(tmp_path):
    (tmp_path / "sibling.py").write_text("FULL = 1.0\ndef imported(response, ground_truth):\n    return 1.0\n")
    (tmp_path / "my_reward.py").write_text(MY_REWARD)
    limits = [("four", 8, 0.5), ("four", 2, 0.0), ("<think>", 14, 0.5)]
    rows = [{"response": r, "ground_truth": {"limit": n}, "dataset": "brevity"} for r, n, _ in limits]
    faults = ["raise", "die", "exit", "sleep", "nan", "none", "fine"]
    rows += [{"response": r, "ground_truth": None, "dataset": "Faults"} for r in faults]
    args = ["--reward_file", str(tmp_path / "my_reward.py"), "--timeout_s", "1"]
    lines, stderr = run_cli(tmp_path / "cases.jsonl", rows, *args)
    assert [(line["score"], line["status"]) for line in lines] == [
        (0.5, "ok"), (0.0, "ok"), (0.5, "ok"), (None, "crash"), (None, "crash"), (None, "crash"), (None, "timeout"),
        (None, "crash"), (0.0, "no_answer"), (-2.0, "ok"),
    ]  # fmt: skip
    number = MY_REWARD.splitlines().index('        return {}["key"]') + 1
    assert f"KeyError: 'key' (my_reward.py, line {number})" in stderr
    for other in ("helper", "imported"):
        with pytest.raises(subprocess.CalledProcessError) as error:
            run_cli(tmp_path / "cases.jsonl", [rows[0] | {"dataset": other}], *args)
        assert f"unknown verifier '{other}'" in error.value.stderr and "brevity" in error.value.stderr


@pytest.mark.parametrize("text, message", [
    (None, "[Nn]o such file"),
    ("x = 1\nimport no_such_module", r"No module named 'no_such_module' \(reward.py, line 2\)"),
    ("import os\nos._exit(0)", "cannot be loaded"),
    ("def math(response, ground_truth):\n    return 1.0", "math is a verifier already"),
])  # fmt: skip
def test_reward_file_refuses(text, message, tmp_path, configured):
    path = tmp_path / "reward.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        configured(reward_file=str(path))
    assert str(path) in str(error.value)


def boxed_fraction(a, b):
    return f"\\boxed{{\\frac{{{a}}}{{{b}}}}}"


PILLS = ["\\boxed{" + "(" * 300 + "2" + ")" * 300 + "}", "\\boxed{" + "{" * 100_000 + "2" + "}" * 100_000 + "}"]


def test_poison_pills_cost_nobody_else(all_workers):
    """What the answer makes slow is wrong, what the label makes slow is missing."""
    easy = [("math", "\\frac12", boxed_fraction(n, 2 * n), 1.0) for n in range(2, 8)]
    wrong = [("math", "\\frac12", boxed_fraction(n, 3 * n), 0.0) for n in range(2, 8)]
    rows = [row for pair in zip(easy, wrong, strict=True) for row in pair]
    rows[3:3] = [("math", "\\sqrt{2}", pill, None) for pill in PILLS]
    limits = {PILLS[0]: 5.0, PILLS[1]: 5.0}  # within which the worker after that reads a harmless answer
    futures = [rewards.submit(RewardRecord(text, label, name), limits.get(text, 30.0)) for name, label, text, _ in rows]
    futures.insert(4, rewards.submit(RewardRecord("\\boxed{\\sqrt{2}}", PILLS[1], "math"), 0.3))
    results = [future.result() for future in futures]
    slow = results.pop(4)
    assert slow.status == "timeout" and math.isnan(slow.score)
    for row, result in zip(rows, results, strict=True):
        if row[3] is None:
            assert (result.score, result.status, result.details) == (0.0, "ok", {"problem": "timeout"})
        else:
            assert (result.status, result.score) == ("ok", row[3])


def worker_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="watches the worker through /proc")
def test_killed_worker_is_missing_and_is_replaced():
    one = ("math", "\\frac12", "\\boxed{\\frac24}")
    assert score_rows([one])[0].status == "ok"
    own = worker.OF_VERIFIERS.idle.queue[-1]
    pid = own.process.pid
    results = []
    thread = threading.Thread(target=lambda: results.extend(score_rows([("math", "\\sqrt{2}", PILLS[0])], 120.0)))
    thread.start()
    wait_until(lambda: worker_state(pid) == "R")  # it sleeps while it waits for a job
    time.sleep(0.5)  # past the read of the job, inside the parser
    os.kill(pid, 9)
    thread.join(60)
    assert [result.status for result in results] == ["infra_error"] and math.isnan(results[0].score)
    assert score_rows([one])[0].score == 1.0


def run_cli(path, rows, *args, **env):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "score.py"), str(path), *args]
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


def test_worker_that_cannot_work_is_infra_error_with_its_reason(tmp_path):
    (tmp_path / "math_verify.py").write_text("print('stray', flush=True)\nraise ImportError('no such antlr')")
    rows = [MATH_ROW, GSM8K_ROW, MATH_ROW]
    lines, stderr = run_cli(tmp_path / "cases.jsonl", rows, PYTHONPATH=str(tmp_path), PYTHONWARNINGS="always")
    assert [(line["score"], line["status"]) for line in lines] == [
        (None, "infra_error"),
        (1.0, "ok"),
        (None, "infra_error"),
    ]
    assert stderr.count("no such antlr") == 1


def test_of_threads_with_the_same_problem_one_tells_it(monkeypatch, capsys):
    def slow(text):
        time.sleep(0.1)
        return text

    monkeypatch.setattr(rewards, "printable", slow)
    monkeypatch.setattr(rewards, "WARNED", {})
    threads = [threading.Thread(target=rewards.warn_once, args=("math", "crash", f"{i}")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err.count("WARNING") == 1


@pytest.mark.parametrize("response, want", [
    ("<think>a</think><answer>b</answer>", 1.0),
    ("a\nb</think> \n <answer>c\nd</answer> e", 1.0),
    ("</think>x<answer>b</answer>", 0.0),
    ("</answer></think><answer>", 0.0),
    ("", 0.0),
])  # fmt: skip
def test_format_reward(response, want):
    assert format_reward(response) == want
    assert bool(re.match(r".*?</think>\s*<answer>.*?</answer>", response, re.DOTALL)) == bool(want)


NAN = math.nan


STOPPED = {"non_stop_penalty": True, "non_stop_penalty_value": -1.0}


@pytest.mark.parametrize("verifiable, format_score, flags, want", [
    (0.5, None, {"verification_reward": 4.0}, 2.0),
    (1.0, 0.0, {}, 0.0),
    (1.0, 1.0, {"r1_style_format_reward": 0.5}, 10.0),  # the gate is the match, not the value 1
    (None, 1.0, {"r1_style_format_reward": 3.0}, 3.0),
    (0.0, 1.0, {"additive_format_reward": True, "r1_style_format_reward": 2.0}, 2.0),
    (2.0, None, {}, 20.0),  # two verifiers
    (1.0, None, {"stopped": False}, 10.0),
    (1.0, None, STOPPED | {"stopped": False}, -1.0),
    (1.0, None, STOPPED, 10.0),
    (NAN, None, {}, NAN),
    (NAN, 1.0, {"additive_format_reward": True}, NAN),
    (NAN, None, STOPPED | {"stopped": False}, NAN),
])  # fmt: skip
def test_combine_rewards(verifiable, format_score, flags, want):
    """None: the flag that asks for it is off, and whatever its value it must not count."""
    flags = dict(flags)
    stopped = flags.pop("stopped", True)
    asked = {
        "apply_verifiable_reward": verifiable is not None,
        "apply_r1_style_format_reward": format_score is not None,
    }
    values = [5.0 if value is None else value for value in (verifiable, format_score)]
    got = combine_rewards(RewardFlags(**asked, **flags), *values, stopped)
    assert got == pytest.approx((want, want), nan_ok=True)


@pytest.mark.parametrize(
    "tokens, want",
    [(80, 10.0), (81, 9.95), (90, 9.5), (100, 9.0), (120, 9.0), (0, 10.0)],  # DAPO's eq. 13, by hand
)
def test_soft_overlong_penalty(tokens, want):
    flags = RewardFlags(overlong_buffer_length=20)
    outcome, shaped = combine_rewards(flags, 1.0, 0.0, tokens_left=100 - tokens)
    assert outcome == 10.0 and shaped == pytest.approx(want)
    assert combine_rewards(RewardFlags(), 1.0, 0.0, tokens_left=100 - tokens) == (10.0, 10.0)  # off
