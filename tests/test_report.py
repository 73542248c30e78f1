"""The reports of a run: the page in a real browser, the comparison and the benchmark tables against numbers by hand."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
from urllib.parse import quote

import pytest
import torch

import utils
from scripts.parts import dumps
from scripts.reports import benchmark_report, checks, common, compare_runs, metrics, report
from tests import programs
from tests.conftest import REPO

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, no google-chrome: apt-get install chromium")
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script> &lt; \u2028 @DATA@ @SCRIPT@ \x00 '\"`${1}"
)
WORLD = utils.World(0, 0, 1, torch.device("cpu"))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The browser's directory, which takes it as long to make as to show a page."""
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def learned(tiny_models, tmp_path_factory):
    """A real run of four steps, evaluated, with rollouts and dumps."""
    out = tmp_path_factory.mktemp("runs")
    for name, numbers in (("train", range(16)), ("test", range(16, 20))):
        turns = [{"role": "user", "content": f"Say {i}, then 7."} for i in numbers]
        rows = [{"messages": [t], "ground_truth": "7", "dataset": "gsm8k"} for t in turns]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = f"""--model_name_or_path {tiny_models()} --dataset_mixer_list {out / "train.jsonl"} 1.0
        --dataset_mixer_eval_list {out / "test.jsonl"} 1.0 --output_dir {out} --exp_name run --model_dtype float32
        --rollout_backend transformers --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8
        --response_length 6 --max_prompt_token_length 48 --pack_length 128 --temperature 1.0 --learning_rate 3e-3
        --lr_scheduler_type constant --beta 0.01 --total_episodes 256 --local_eval_every 2 --save_freq -1
        --num_epochs 2 --save_traces --dump_steps all"""
    done = programs.run(["grpo.py", *flags.split()], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "run"


def make_run(path, seconds, extra=None):
    """A run without rollouts, of a step for each of these seconds. extra: step -> more metrics."""
    path.mkdir(parents=True)
    rows = []
    for step, of_step in enumerate(seconds, 1):
        row = {"training_step": step, "episode": 2 * step, "time/total": of_step, "time/generation": 1.0, "lr": 1e-6}
        row |= {"time/training": of_step - 1.0, "val/num_step_tokens": 100.0, "val/sequence_lengths": 20.0}
        row |= {"learner_tokens_per_second_step": 100.0 / of_step, "val/advantages": 0.0, "val/stop_rate": 0.75}
        row |= {"time/from_scratch": 60.0 + sum(seconds[:step])}
        rows.append(row | (extra or {}).get(step, {}))
    write_rows(path / "metrics.jsonl", rows)
    args = {"verification_reward": 10.0, "vllm_enforce_eager": path.name == "a", "exp_name": path.name}
    (path / "args.json").write_text(json.dumps(args))
    (path / "environment.json").write_text(json.dumps({"device": "cpu", "world_size": 1}))
    return path


def rollout(step, position, sample, prompt, text):
    """A row of rollouts.jsonl, whose score is 0."""
    row = {"training_step": step, "position": position, "sample": sample, "token_ids": [5, 6], "text": text}
    row |= {"logprobs": [-0.5] * 2, "versions": [step - 1] * 2, "finish_reason": "stop", "score": 0.0}
    row |= {"results": [{"status": "ok", "details": {"note": text}}], "ground_truths": [text], "verifiers": ["gsm8k"]}
    return row | {"prompt": prompt, "advantage": 0.0}


def browse(page, profile, fragment=""):
    """The page's document after its script has run, as Chromium prints it."""
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=4000".split()
    flags += [f"--user-data-dir={profile}", "--window-size=1300,2600", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, f"file://{page}{fragment}"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(errors="replace")


def drawn(dom):
    """The document without the data and the script, which would contain everything anyhow."""
    assert "data-ready" in dom, "the page's script did not reach its end"
    return re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


# --- The page ---------------------------------------------------------------------------------------------------------


@needs_browser
def test_the_page_shows_the_run_and_filters_and_colours_its_rollouts(learned, tmp_path, profile):
    page = report.write_page(learned, tmp_path / "page.html")
    rows = [json.loads(line) for line in (learned / "rollouts.jsonl").read_text().splitlines()]
    wanted = [r for r in rows if r["training_step"] == 3 and r["score"] >= 5]
    shown = drawn(browse(page, profile, "#step=3&min=5"))
    assert set(re.findall(r'<h2 id="(\w+)"', shown)) == {"checks", "curves", "rollouts", "configuration", "environment"}
    curves_of = re.findall(r'data-metric="([^"]+)"', shown)
    assert {"policy/entropy_avg", f"eval/{common.CORRECT}", "time/training"} <= set(curves_of)
    assert shown.count("<path") == len(curves_of) and "NaN" not in shown.split("Rollouts")[0]
    assert f">{len(wanted)} rollouts" in shown
    of_step = [r for r in report.collect(learned)["rollouts"] if r["step"] == 3 and r["text"].isprintable()]
    trained = next(r for r in of_step if any(s[2] is not None for s in r["spans"]) and len(r["text"]) > 6)
    shown = drawn(browse(page, profile, f"#step=3&find={quote(trained['text'])}"))  # the first one found is open
    assert f"prompt {trained['position']}, sample {trained['sample']}:" in shown
    box = re.search(r'<div class="tokens" data-by="(\w+)">(.*?)</div>', shown, re.DOTALL)
    assert box[1] == "gap" and box[2].count("<span") == len(trained["spans"])
    assert html.unescape(re.sub("<.*?>", "", box[2])) == "".join(s[0] for s in trained["spans"])


@needs_browser
def test_a_hostile_response_stays_text(tmp_path, profile):
    run = make_run(tmp_path / "run", [2.0] * 4)
    hostile = rollout(1, 0, 0, HOSTILE, HOSTILE)
    (run / "rollouts.jsonl").write_text(json.dumps(hostile) + "\n")
    (run / "args.json").write_text(json.dumps({"exp_name": HOSTILE}))
    page = report.write_page(run)
    dom = browse(page, profile)
    assert "<title>run: report</title>" in dom
    shown = drawn(dom)
    assert "<img" not in shown and shown.count(html.escape("</script>", quote=False)) >= 4
    assert page.read_text().count("</script>") == 2  # the data's and the page's own
    assert "script-src 'sha256-" in dom


def test_the_answers_of_the_first_and_the_last_evaluation_are_on_the_page(tmp_path):
    run = make_run(tmp_path / "run", [2.0] * 4)
    answer = {"prompt": "2 + 2?", "ground_truths": "('4',)", "score": 10.0, "finish_reason": "stop", "text": "<b>4"}
    kinds = ((0, True), (2, True), (4, False), (4, True))
    rows = [{"training_step": step, "evaluation": kind} for step, kind in kinds]
    for row in rows:
        row["rollouts"] = [answer | {"training_step": row["training_step"]}] * 2
    write_rows(run / "samples.jsonl", rows)
    shown = [row for row in report.collect(run)["rollouts"] if str(row["step"]).startswith("eval")]
    places = [(row["step"], row["position"], row["text"]) for row in shown]
    assert places == [(f"eval {step}", position, "<b>4") for step in (0, 4) for position in (0, 1)]


def test_tokens_join_to_the_text_and_gaps_are_those_of_the_dump(learned):
    data = report.collect(learned)
    trained = [r for r in data["rollouts"] if "tokens" in r]  # the others are evaluations'
    rows = {(r["step"], r["position"], r["sample"]): r for r in trained}
    pieces = report.load_pieces(learned, {}, [])
    assert len(rows) == 256 and sum(any(s[2] is not None for s in r["spans"]) for r in rows.values()) > 0
    for row in map(json.loads, (learned / "rollouts.jsonl").read_text().splitlines()):
        shown = rows[row["training_step"], row["position"], row["sample"]]
        assert "".join(s[0] for s in shown["spans"]) == pieces.decode(row["token_ids"])
    snow = pieces.tokenizer.encode(" a ☃ é", add_special_tokens=False)
    assert "".join(p[0] for p in pieces.split(snow)) == " a ☃ é"
    assert [b for _, _, b in pieces.split(snow)][-1] == len(snow)


def test_new_logprobs_of_a_dump_are_those_of_the_last_pass(learned):
    """Of two passes over one mini-batch the first has ratio 1; val/ratio is the mean over both."""
    metrics = common.read_metrics(learned)[-1]
    rows = [r for r in dumps.read_dump(learned, 4)[0] if "new_logprobs" in r]
    columns = [zip(r["new_logprobs"], r["old_logprobs"], r["mask"], strict=True) for r in rows]
    ratios = [math.exp(new - old) for tokens in columns for new, old, kept in tokens if kept]
    assert max(abs(r - 1) for r in ratios) > 0.01
    assert (1 + sum(ratios) / len(ratios)) / 2 == pytest.approx(metrics["val/ratio"], abs=1e-6)


def test_the_page_is_bounded_and_says_so(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [2.0] * 4)
    rows = [rollout(1 + i // 400, i // 4, i % 4, "p", "x" * 8001) for i in range(1600)]
    write_rows(run / "rollouts.jsonl", rows)
    monkeypatch.setattr(report, "MAX_BYTES", 2_000_000)
    data = report.collect(run)
    assert 0 < len(data["rollouts"]) <= 400 and len(json.dumps(data["rollouts"])) <= 2_000_000
    assert {r["step"] for r in data["rollouts"]} == {1, 2, 3, 4} and all(r["cut"] for r in data["rollouts"])
    groups = [(r["step"], r["position"]) for r in data["rollouts"]]
    assert all(groups.count(g) == 4 for g in groups) and len(data["notes"]) == 2  # whole groups; no tokenizer


# --- Checks -----------------------------------------------------------------------------------------------------------

FINE = {
    "policy/entropy_avg": 1.0, "policy/clipfrac_avg": 0.01, "val/sequence_lengths": 100.0, "val/stop_rate": 1.0,
    "debug/vllm_vs_local_logprob_diff_mean": 0.01, "batch/total_prompts": 8.0, "batch/filtered_prompts_solved": 1.0,
    "batch/filtered_prompts_zero": 1.0, "val/total_reward_groups": 6.0, "batch/missing_rewards": 0.0,
    "optim/nonfinite_updates": 0.0, "objective/kl2_avg": 0.01, "optim/grad_norm": 1.0,
    "eval/objective/verifiable_correct_rate": 0.5,
}  # fmt: skip


def checks_of(change, dtype="bfloat16"):
    rows = [{"training_step": s, "episode": 64 * s} | FINE | (change if s > 8 else {}) for s in range(1, 11)]
    return checks.check_run(rows, {"model_dtype": dtype, "beta": 0.01})


def test_a_healthy_run_has_no_warning():
    found = checks_of({})
    assert len(found) == 12 and all(c["fine"] for c in found)
    assert not all(c["fine"] for c in checks_of({}, "float32")), "whose gap is narrower"


@pytest.mark.parametrize(
    "metric, value, name",
    [
        ("policy/entropy_avg", 0.2, "entropy collapse"),
        ("policy/clipfrac_avg", 0.2, "clipped tokens"),
        ("val/sequence_lengths", 300.0, "length explosion"),
        ("val/stop_rate", 0.5, "truncated responses"),
        ("debug/vllm_vs_local_logprob_diff_mean", 0.06, "logprob gap"),
        ("val/total_reward_groups", 2.0, "groups with a gradient"),
        ("batch/missing_rewards", 3.0, "missing rewards"),
        ("optim/nonfinite_updates", 1.0, "non-finite updates"),
        ("objective/kl2_avg", 0.5, "KL to the reference"),
        ("optim/grad_norm", 30.0, "gradient spikes"),
        ("eval/objective/verifiable_correct_rate", 0.4, "evaluation falls"),
        ("optim/grad_norm", None, "NaN or infinite metrics"),
    ],
)
def test_each_fault_has_one_warning(metric, value, name):
    assert [c["name"] for c in checks_of({metric: value}) if not c["fine"]] == [name]


def learning(scores, *held_out):
    """Name -> whether that is fine, of a run of these scores and shares of right held-out answers, that looks like a
    solved task from step 6 on."""
    solved = {"policy/entropy_avg": 0.2, "batch/filtered_prompts_solved": 8.0, "val/total_reward_groups": 0.0}
    accuracy = "eval/objective/verifiable_correct_rate"
    rows = []
    for step, score in enumerate(scores, 1):
        row = {"training_step": step} | FINE | {"objective/scores": score, accuracy: None}
        rows.append(row | (solved if step > 5 else {}))
    for row, share in zip((rows[0], rows[-1]), held_out, strict=True):
        row |= {accuracy: share, "eval/num_prompts": 100}
    found = checks.check_run(rows, {"verification_reward": 10.0})
    return {c["name"]: c["fine"] for c in found}


LEARNED = {"score", "held-out score"}
SOLVED = {"entropy collapse", "groups with a gradient"}


@pytest.mark.parametrize(
    ("scores", "held_out", "fine"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 7], (0.25, 0.75), LEARNED | SOLVED),  # 0.8 of the maximum
        ([9.9, 10.0] * 5, (1.0, 1.0), LEARNED | SOLVED),  # solved at the start
        ([6.7, 6.6, 6.4, 6.4, 6.3, 6.2, 6.1, 6.0, 5.9, 5.9], (0.5, 0.55), set()),  # a wrong sign
        ([5, 6, 5, 6, 5, 6, 5, 6, 5.2, 6], (0.5, 0.6), set()),  # within two standard errors
    ],
)
def test_a_page_says_whether_the_run_learned(scores, held_out, fine):
    """Of first and last fifth: a rise of more than two errors sqrt((variance + variance) / 2), or near the maximum."""
    found = learning(scores, *held_out)
    assert {name for name in LEARNED | SOLVED if found[name]} == fine


# --- The comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    sync = {2: {"time/weight_sync": 0.5}, 3: {"time/from_scratch": 35.0}, 4: {"time/from_scratch": 38.0}}  # resumed
    a = make_run(tmp_path / "a", [9.0, 2.0, 2.0, 2.0])
    b = make_run(tmp_path / "b", [9.0, 4.0, 5.0, 3.0], sync)
    where = {"command": ["/bin/python", "../grpo.py"], "device": "cpu", "git_commit": "0123456789ab", "git_dirty": True}
    (a / "environment.json").write_text(json.dumps(where | {"code": {"mine.py": "0" * 64, "changes.diff": "1" * 64}}))
    (b / "environment.json").write_text(json.dumps(where | {"code": {"mine.py": "2" * 64, "changes.diff": "1" * 64}}))
    (a / "wandb_id.txt").write_text("ab12cd\n")
    return a, b


def cells(text):
    """First cell of a table's row -> the others, without marks: the first row of this name."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        first, *others = (cell.strip(" *`") for cell in line.strip("|").split("|"))
        if line.startswith("|"):
            found.setdefault(first, others)
    return found


def test_comparison_by_hand(pair, capsys):
    """Step 1 apart: means 2 and 4 s."""
    assert compare_runs.main(list(map(str, pair))) == 0
    assert (pair[0].parent / "comparison.png").exists()
    text = capsys.readouterr().out
    rows = cells(text)
    assert rows["avg total_time"] == ["2.00", "4.00"] and rows["sum total_time (step 1 too)"] == ["15.0", "21.0"]
    assert rows["Wall clock (min)"] == ["1.25", "1.85"]
    assert rows["avg learner_tok/s_step"] == ["50", "26"] and rows["avg weight_sync"] == ["—", "0.50"]
    assert rows["a"][:5] == ["grpo.py", "? (?)", "cpu", "ab12cd", "0123456789ab and changes"]
    assert set(re.findall("^- `(.*)`", text, re.MULTILINE)) == {"vllm_enforce_eager", "mine.py"}
    written = (pair[0].parent / "comparison.md").read_text()  # steps are here only
    assert "| 2 | 25 | 100 | 20.0 | 4.00 | 3.00 | 0.50 | 1.00 |" in written and "| 2 | 25 |" not in text
    assert "| 3 | 20 | 100 | 20.0 | 5.00 | 4.00 | — | 1.00 |" in written


REPORT = """verifiable_reward 0.69 0.66 0.83|verifiable_correct_rate 0.08 0.08 0.11|code_reward 0.73 0.69 1.01
    code_correct_rate 0.08 0.08 0.12|code_stdio_reward 0.48 0.45 0.43|code_stdio_correct_rate 0.07 0.06 0.08
    learner_tok/s_step 990 4265 7307|actor_tok/s 1299 3014 4027|total_time 100.3 56.7 52.3
    training_time 69.4 47.7 38.3|weight_sync 33.0 9.8 15.3"""


def test_open_instructs_report_comes_out_of_its_own_tables(tmp_path):
    """Per-step tables in, summary out: docs/benchmarks/grpo_hybrid_vs_nonhybrid.md of open-instruct, commit 5b691b933.

    A run's clock is not in the tables: its overall rate is the report's own.
    """
    data = json.loads((REPO / "tests/large_test.json").read_text())
    printed = []
    for name, overall in (("hybrid_eager", 715), ("hybrid", 1766), ("non_hybrid", 4699)):
        steps = [dict(zip(data["columns"], row, strict=True)) for row in data[name]]
        rows = []
        for number, step in enumerate(steps, start=1):
            row = {"training_step": number, "time/total": step["total_time"], "time/weight_sync": step["weight_sync"]}
            row |= {"time/training": step["training_time"] - 5, "time/trainer_waiting_for_data": 5.0}
            row |= {"learner_tokens_per_second_step": step["learner_tok/s_step"]}
            row |= {"val/actor_tokens_per_second": step["actor_tok/s"], "learner_tokens_per_second_overall": overall}
            row |= {f"objective_kept/{key}": step[key] for key in data["columns"][5:]}
            rows.append(row | {"objective/verifiable_reward": 99.0})
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "metrics.jsonl", rows)
        printed.append(tmp_path / name)
    shown = cells(compare_runs.compare(compare_runs.load(printed, None, after=0)))
    assert shown["final learner_tok/s_overall"] == ["715", "1,766", "4,699"]
    for heading, *wanted in (entry.split() for entry in re.split(r"\||\n", REPORT)):
        got = [float(cell.replace(",", "")) for cell in shown[f"avg {heading}"]]
        digits = len(wanted[0].partition(".")[2])
        assert got == pytest.approx(list(map(float, wanted)), abs=0.6 * 10**-digits), heading
    for heading, wanted in (("total_time", (1906, 1077, 995)), ("training_time", (1319, 907, 728))):
        assert [float(cell.replace(",", "")) for cell in shown[f"sum {heading}"]] == pytest.approx(wanted, abs=0.7)
    assert shown["avg verifiable_reward, all rollouts"] == ["99.000"] * 3


def test_runs_of_other_lengths_share_their_steps_and_one_step_is_too_few(tmp_path, pair, capsys):
    long = make_run(tmp_path / "c", [2.0] * 6)
    assert [len(run.rows) for run in compare_runs.load([pair[0], long], None)] == [4, 4]
    for path in (make_run(tmp_path / "d", [2.0]), tmp_path):
        assert compare_runs.main([str(pair[0]), str(path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err


# --- The benchmark report ---------------------------------------------------------------------------------------------


def reported(run, args):
    """The rows of a benchmark report: steps, first, last and mean of a metric by veRL's name, and the remark."""
    (run / "args.json").write_text(json.dumps(args))
    assert benchmark_report.main([str(run)]) == 0
    return {name: row[1:] for name, row in cells((run / "benchmark.md").read_text()).items()}


def test_benchmark_by_hand(tmp_path):
    """Of four steps, with scores 0, 0.5, 1, 0.5 of the maximum, and an evaluation at the last."""
    more = {"val/num_sampled_tokens": 100.0, "batch/total_prompts": 1.0, "time/ref_logprobs": 0.25}
    more |= {"time/old_logprobs": 0.5, "val/learner_tokens_min": 40.0, "val/learner_tokens_max": 45.0}
    more |= {"objective/scores_max": 10.0, "memory/gpu_allocated_gib": 3.5, "time/eval": None}
    scores = [0.0, 5.0, 10.0, 5.0]
    extra: dict = {step: more | {"objective/scores": score} for step, score in enumerate(scores, 1)}
    extra[4] |= {"eval/objective/verifiable_correct_rate": 1.0, "eval/num_prompts": 1}
    args = {"num_samples_per_prompt_rollout": 2, "beta": 0.001, "verification_reward": 10.0, "eval_pass_at_k": 4}
    args |= {"dataset_mixer_eval_list": ["data/gsm8k_verl/test.jsonl", "1.0", "data/a/eval.jsonl", "8"]}
    run = make_run(tmp_path / "run", [9.0, 2.0, 2.0, 2.0], extra)
    start = {"training_step": 0, "eval/objective/verifiable_correct_rate": 0.25, "eval/num_prompts": 1}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")
    rows = reported(run, args)
    assert rows["critic/rewards/mean"][:4] == ["▁▅█▅", "0", "0.5", "0.66667"]
    for name, *wanted in (
        ("actor/lr", "1.000e-06", "1.000e-06", "1.000e-06"),
        ("actor/kl_coef", "0.001", "0.001", "0.001"),
        ("actor/entropy", "—", "—", "—"),
        ("critic/score/max", "1", "1", "1"),
        ("response_length/clip_ratio", "0.25", "0.25", "0.25"),
        ("perf/throughput", "11.111", "50", "50"),
        ("perf/max_memory_allocated_gb", "3.5", "3.5", "3.5"),
        ("timing_s/update_actor", "7.25", "0.25", "0.25"),  # 1 s less 0.25 and 0.5
        ("timing_s/testing", "—", "—", "—"),
        ("timing_per_token_ms/gen", "25", "25", "25"),  # 1 s for 2 responses of 20 tokens
        ("timing_per_token_ms/ref", "2.5", "2.5", "2.5"),
        ("timing_per_token_ms/update_actor", "72.5", "2.5", "2.5"),  # 7.25 s and 0.25 s for 100 tokens
        ("global_seqlen/minmax_diff", "5", "5", "5"),
        ("global_seqlen/balanced_max", "—", "—", "—"),
    ):
        assert rows[name][1:4] == wanted, name
    accuracy = rows["val-core/openai/gsm8k+data/a/eval/reward/mean@4"]
    assert accuracy[1:3] == ["0.25", "1"] and "of 2 evaluations" in accuracy[4]  # one before step 1
    assert "over 1 prompts 0.2065 to 1.0000" in accuracy[4]  # 1 / (1 + 1.96^2): one draw

    for step in range(1, 5):
        extra[step] |= {"objective/kl_in_reward": 1.0}
    rows = reported(make_run(tmp_path / "in_reward", [9.0, 2.0, 2.0, 2.0], extra), args | {"kl_in_reward": True})
    assert rows["critic/rewards/mean"][2:4] == ["0.4", "0.56667"]


def test_each_of_verls_62_metrics_has_a_value_or_a_reason():
    known = benchmark_report.METRICS
    assert len(known) == 62
    for name, metric in known.items():
        assert metric.meaning and (metric.ours or metric.missing), name
        for ours in re.findall(r"[a-z_-]+/[\w/]+|learner_mfu", metric.ours):
            assert ours.startswith("timing_s") or metrics.define(ours), f"{name}: {ours} has no definition"


# --- The picture ------------------------------------------------------------------------------------------------------

CURVES = [sys.executable, str(REPO / "scripts" / "reports" / "curves.py")]


def test_curves_of_a_run_under_way(tmp_path):
    """Half a last line is no step; the ending of --out is the format."""
    run_dir = make_run(tmp_path / "a", [2.0] * 4)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"training_step": 5, "epi')
    done = subprocess.run([*CURVES, run_dir, "--out", tmp_path / "a.svg"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<!-- a: 4 steps, 8 episodes -->" in (tmp_path / "a.svg").read_text()
    assert subprocess.run([*CURVES, tmp_path / "b"], capture_output=True).returncode == 2


def test_a_drawing_that_fails_costs_the_picture_only(tmp_path, capsys, monkeypatch):
    run_dir = make_run(tmp_path / "a", [2.0] * 4)
    assert str(run_dir / "report.png") in utils.draw_report(run_dir) and capsys.readouterr().out == ""
    (run_dir / "report.png").unlink()
    monkeypatch.setattr(utils, "PROGRAM_S", 0.01)
    assert "report.png" not in utils.draw_report(run_dir)
    assert "WARNING" in capsys.readouterr().out
