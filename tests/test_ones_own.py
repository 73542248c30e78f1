"""One's own: reward functions in TRL's and verl's forms, files and rows as others have them, rows without a label."""

import json
import subprocess
import sys

import pytest

import grpo
import rewards
import utils
from rewards import RewardFlags, RewardRecord
from scripts.parts import rows, user_files, worker
from tests import test_data
from tests.programs import REPO

USER = {"role": "user", "content": "What is 2 + 6?"}
REWARDS = """
import numpy as np

def plain(response, ground_truth):
    return 0.25

def with_columns(response, ground_truth, difficulty, bonus=0.5):
    return difficulty + bonus

def everything(response, **columns):
    return len(columns["prompt"]) + columns["difficulty"]

def trl(completions, solution, **kwargs):
    assert kwargs["prompts"] == [[{"role": "user", "content": "What is 2 + 6?"}]] and kwargs["difficulty"] == [3]
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, solution)]

async def trl_text(prompts, completions, ground_truth):
    return [float((prompts, completions, ground_truth) == (["2+6="], ["8"], [8]))]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float((data_source, solution_str, ground_truth, extra_info) == ("me/sums", "8", "8", {"i": 1})),
            "acc": True, "n": np.int64(3), "right": np.bool_(True), "pred": solution_str}

def alone(response):
    return 1.0

def many(*args, response, **kwargs):
    return float("ground_truth" in kwargs)

def trl_alone(completions):
    return [float(len(completions))]

def verl_alone(solution_str):
    return float(solution_str)

def helper(text):
    return text

def _private(response, ground_truth):
    return 1.0
"""
ROW = {"messages": [USER], "solution": "8", "difficulty": 3, "data_source": "me/sums", "extra_info": {"i": 1}}


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Function (text of a reward file, flags): rewards.configure, undone after the test."""
    monkeypatch.setattr(rewards, "VERIFIERS", dict(rewards.VERIFIERS))
    monkeypatch.setattr(user_files, "FUNCTIONS", {})

    def configure(text, **flags):
        (tmp_path / "mine.py").write_text(text)
        rewards.configure(RewardFlags(reward_file=str(tmp_path / "mine.py"), **flags), connect=False)

    yield configure
    rewards.configure(RewardFlags(), connect=False)


def result_of(name, label="8", **columns):
    return rewards.score([RewardRecord("8", label, name, prompt="user: ?", columns=columns)], timeout_s=30.0)[0]


def test_functions_of_three_forms_get_what_they_name(configured):
    configured(REWARDS)
    assert not {"helper", "_private"} & user_files.FUNCTIONS.keys()
    row = {"prompt": [USER]} | ROW
    got = {name: result_of(name, **row) for name in ("plain", "with_columns", "everything", "trl", "compute_score")}
    scores = {name: result.score for name, result in got.items()}
    assert scores == {"plain": 0.25, "with_columns": 3.5, "everything": 4.0, "trl": 1.0, "compute_score": 1.0}
    assert got["compute_score"].details == {"acc": 1.0, "n": 3.0, "right": 1.0}  # numbers only: they become metrics
    assert result_of("trl_text", label=8, prompt="2+6=").score == 1.0
    assert result_of("compute_score").score == 0.0  # without columns: the verifier's name and {}
    less = [result_of(name, prompt="2+6=").score for name in ("alone", "many", "trl_alone", "verl_alone")]
    assert less == [1.0, 1.0, 1.0, 8.0]  # all but the first may be left out


def test_a_label_that_a_function_needs_is_asked_for_at_the_start(configured):
    configured(
        "def mine(response, ground_truth):\n    return 1.0\ndef free(response, ground_truth=None):\n    return 1.0"
    )
    assert "ground_truth" in (rewards.check_ground_truth("mine", None) or "")
    assert rewards.check_ground_truth("mine", 7) is None and rewards.check_ground_truth("free", None) is None


@pytest.mark.parametrize("text", ["x = 1", "def short(response, /):\n    return 1.0"])
def test_a_wrong_signature_is_told(configured, text):
    with pytest.raises(rewards.UserError, match="--reward_file"):
        configured(text)


# --- Prints -----------------------------------------------------------------------------------------------------------

PRINTS = """
import logging, os, sys

print("loaded")

def loud(response, ground_truth):
    print("sees", response, "\\x1b[2J")
    print("error", file=sys.stderr)
    logging.warning("logged")
    os.system("echo child")
    os.write(1, b'{"number": 1, "score": 7}')
    return 1.0

def dies(response):
    print("last words")
    os._exit(3)

def floods(response):
    while True:
        print("x" * 1000)

def shuts(response):
    os.closerange(1, 3)
    return 2.0
"""


@pytest.fixture
def prints(monkeypatch, tmp_path):
    """What user_files.PRINTS has put into its file."""
    monkeypatch.setattr(user_files, "PRINTS", user_files.Prints())
    user_files.PRINTS.path = tmp_path / "prints.txt"
    return lambda: (tmp_path / "prints.txt").read_text().splitlines()


def test_all_that_a_function_prints_is_shown_and_none_of_it_is_a_reply(configured, prints, capfd):
    configured(PRINTS)
    assert result_of("loud").score == 1.0
    shown = [line for line in prints() if line.startswith("loud | ") and "loaded" not in line]
    assert shown == [
        "loud | sees 8 \\x1b[2J",
        "loud | error",
        "loud | WARNING:root:logged",
        "loud | child",
        'loud | {"number": 1, "score": 7}',
    ]
    assert shown[0] in capfd.readouterr().err.splitlines()

    assert result_of("dies").status == "crash"
    assert prints()[-1] == "dies | last words"
    assert result_of("shuts").score == 2.0  # no output to wait for any more
    rewards.close()


def test_a_flood_of_prints_costs_its_own_call_only_and_fills_no_disk(configured, prints, capfd, monkeypatch):
    configured(PRINTS)
    job = user_files.job_of(str(user_files.PRINTS.path.parent / "mine.py"), "floods", {"response": ""})
    assert rewards.run_in_worker(job, 1.0).status == "timeout"
    assert len("\n".join(prints())) < 2 * worker.MAX_PRINTED_BYTES
    assert len(capfd.readouterr().err.splitlines()) <= user_files.CONSOLE_LINES + 1
    assert result_of("loud").score == 1.0
    size = user_files.PRINTS.path.stat().st_size
    monkeypatch.setattr(user_files, "MAX_PRINTS_BYTES", size)
    assert result_of("loud").score == 1.0
    assert user_files.PRINTS.path.stat().st_size == size


def test_a_debugger_works_where_rows_are_scored_in_process(tmp_path):
    text = "def mine(response):\n    x = len(response)\n    breakpoint()\n    return x\n"
    (tmp_path / "mine.py").write_text(text)
    write(tmp_path / "cases.jsonl", [{"response": "abc", "ground_truth": 1, "dataset": "mine"}])
    line = [REPO / "scripts/score.py", tmp_path / "cases.jsonl", "--reward_file", tmp_path / "mine.py", "--in_process"]
    done = subprocess.run([sys.executable, *line], input="x = 40 + x\nc\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"score": 43.0' in done.stdout


# --- Rows -------------------------------------------------------------------------------------------------------------

MINE = rows.Scoring(functions=("mine", "short"), aliases=("me/sums",))
ENVIRONMENT = rows.Scoring(environment=True)


@pytest.mark.parametrize(
    "row, scoring, labels, verifiers",
    [
        ({}, MINE, [None, None], ["mine", "short"]),
        ({"dataset": "mine"}, MINE, [None], ["mine"]),
        ({"dataset": "gsm8k", "answer": "#### 8"}, MINE, ["8"], ["gsm8k"]),
        ({"answer": "so #### 8"}, MINE, ["so #### 8"] * 2, ["mine", "short"]),
        ({"data_source": "me/sums"}, MINE, [None], ["me/sums"]),
        ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "8"}}, MINE, ["8", "8"], ["mine", "short"]),
        ({"data_source": "who/knows", "answer": "8"}, rows.NOTHING_OF_ONES_OWN, ["8"], ["who/knows"]),
        ({}, ENVIRONMENT, [None], ["passthrough"]),
        ({"answer": "#### 8"}, ENVIRONMENT, ["8"], ["gsm8k"]),
    ],
)
def test_who_scores_a_row_that_names_nobody(row, scoring, labels, verifiers):
    assert rows.parse_row({"prompt": [USER]} | row, scoring) == ([USER], labels, verifiers)


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return utils.load_tokenizer(grpo.Args(model_name_or_path=str(tiny_models())))


def load(tokenizer, name, **flags):
    return test_data.load(tokenizer, name, "1.0", **flags)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_without_a_label_with_the_columns_of_their_reward(configured, tokenizer, tmp_path):
    """The columns that a function takes travel with the prompt; one that it needs is asked for at the start."""
    text = "def mine(response, difficulty):\n    return difficulty\n"
    configured(text)
    file = write(tmp_path / "a.jsonl", [{"prompt": [USER], "difficulty": 3, "huge": "x" * 100}])
    flags = {"reward_file": str(tmp_path / "mine.py")}
    (prompt,) = load(tokenizer, file, **flags)
    assert (prompt.verifiers, prompt.ground_truths, prompt.reward_columns) == (("mine",), (None,), {"difficulty": 3})
    write(file, [{"prompt": [USER], "difficulty": 4}])
    assert utils.data_hash([prompt]) != utils.data_hash(load(tokenizer, file, **flags))
    write(file, [{"prompt": [USER], "difficulty": 3}, {"prompt": [USER]}])
    with pytest.raises(utils.UserError, match="a.jsonl row 2: mine: it takes difficulty, which the row does not have"):
        load(tokenizer, file, **flags)
    with pytest.raises(utils.UserError, match="row 1: no ground_truth"):
        load(tokenizer, file)


QUESTIONS = [{"question": "What is 2 + 6?", "answer": "8", "dataset": "gsm8k"}] * 2

# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text",
    [  # an empty cell is no value
        ("a.csv", '\ufeffquestion,answer,dataset,note\n"What is 2 + 6?",8,gsm8k,\n"What is 2 + 6?",8,gsm8k,"a\nb"\n'),
        ("a.csv", 'question,answer,solution,dataset\n"What is 2 + 6?",,8,gsm8k\n"What is 2 + 6?",,8,gsm8k\n'),
        ("a.json", json.dumps(QUESTIONS, indent=1)),
        ("a.json", "".join(json.dumps(row) + "\n" for row in QUESTIONS)),
    ],
)
def test_csv_and_json_are_read(tokenizer, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    prompts = load(tokenizer, tmp_path / name)
    assert [(p.conversation, p.ground_truths, p.verifiers) for p in prompts] == [
        ("user: What is 2 + 6?", ("8",), ("gsm8k",))
    ] * 2


@pytest.mark.parametrize("name, text", [("a.json", '{"question": "What?",'), ("a.csv", "question,answer\nWhat?,8,9\n")])
def test_other_files_are_refused(tokenizer, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(utils.UserError, match=f"{name} row 1: "):
        load(tokenizer, tmp_path / name)


# --- Functions that judge a group -------------------------------------------------------------------------------------

GROUPS = """
def shortest(responses, ground_truths, bonus=0.5):
    least = min(map(len, responses))
    assert ground_truths == ["8"] * len(responses)
    return [bonus * (len(response) == least) for response in responses]

def too_few(responses, ground_truths):
    return [1.0]

def unsure(responses, ground_truths):
    return [None, {"score": 0.5, "seen": len(responses)}, 1]
"""


def scored_group(names, texts, evaluation=False, bonus=0.25):
    """Rollouts of a prompt with these texts, as sample_rollouts leaves them."""
    labels = ("8",) * len(names)
    prompt = utils.Prompt(0, (1, 2), "p", labels, tuple(names), reward_columns={"bonus": bonus})
    rollouts = []
    for i, text in enumerate(texts):
        r = utils.Rollout(prompt, 3, i, finish_reason="stop", text=text, evaluation=evaluation)
        for name in names:
            r.scoring.append(rewards.submit(RewardRecord(text, "8", name, columns=prompt.reward_columns)))
        rollouts.append(r)
    return rollouts


def test_a_function_judges_a_group(configured):
    """It gets all responses of the prompt and its columns; another verifier of the row scores each alone; an evaluation
    of the same prompt is a group of its own; a second call changes nothing."""
    configured(GROUPS)
    args = grpo.Args(reward_file="x", verification_reward=1.0)
    group = scored_group(["shortest", "gsm8k"], ["8", "it is 8", "9"])
    other = scored_group(["shortest"], ["it is 8"], evaluation=True)
    grpo.score_rollouts([*group, *other], args)
    assert [r.verifiable for r in group] == [1.25, 1.0, 0.25]
    assert [r.results[0].status for r in group] == ["ok"] * 3 and other[0].verifiable == 0.25
    grpo.score_rollouts(group, args)
    assert [r.verifiable for r in group] == [1.25, 1.0, 0.25]


def test_what_a_group_s_function_may_return(configured):
    """None does not apply, a dict has metrics of its own; too few numbers leave all missing."""
    configured(GROUPS)
    args = grpo.Args(reward_file="x", verification_reward=1.0)
    group = scored_group(["unsure"], ["1", "2", "3"])
    grpo.score_rollouts(group, args)
    assert [(r.verifiable, r.results[0].status) for r in group] == [(0.0, "no_answer"), (0.5, "ok"), (1.0, "ok")]
    assert group[1].results[0].details == {"seen": 3.0}

    group = scored_group(["too_few"], ["1", "2"])
    grpo.score_rollouts(group, args)
    assert all(r.results[0].status == "crash" and r.verifiable != r.verifiable for r in group)
    assert "for each of the responses" in group[0].results[0].details["problem"]
