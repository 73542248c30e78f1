"""The reports of a run: the page in a real browser, the comparison and the benchmark tables against numbers by hand."""

import html
import json
import math
import re
import shutil
import subprocess
import sys
import time
import types
from typing import Any
from urllib.parse import quote

import pytest
import torch

import grpo
import rewards
import utils
from scripts.parts import dumps
from scripts.reports import benchmark_report, checks, common, compare_runs, definitions, report
from tests import programs
from tests.conftest import REPO

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, no google-chrome: apt-get install chromium")
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script> &lt; \u2028 @DATA@ @SCRIPT@ \x00 '\"`${1}"
)


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


def make_run(path, seconds, scores, extra=None, steps=4):
    """A run with one prompt of two samples a step: scores[step - 1] are its samples' scores."""
    path.mkdir(parents=True)
    metrics, rollouts = [], []
    for step, pair in zip(range(1, steps + 1), scores, strict=True):
        row = {"training_step": step, "episode": 2 * step, "time/total": seconds[step - 1], "time/generation": 1.0}
        row |= {"time/training": seconds[step - 1] - 1.0, "val/num_step_tokens": 100.0, "val/sequence_lengths": 20.0}
        row |= {
            "learner_tokens_per_second_step": 100.0 / seconds[step - 1],
            "lr": 1e-6,
            "objective/scores": sum(pair) / 2,
        }
        row |= {"time/from_scratch": 60.0 + sum(seconds[:step]), "val/advantages": 0.0, "val/stop_rate": 0.75}
        metrics.append(row | (extra or {}).get(step, {}))
        for sample, score in enumerate(pair):
            rollouts.append(rollout(step, step - 1, sample, score, f"prompt {step}"))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metrics))
    (path / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    args = {"verification_reward": 10.0, "lr_scheduler_type": "constant", "vllm_enforce_eager": path.name == "a"}
    (path / "args.json").write_text(json.dumps(args | {"exp_name": path.name}))
    (path / "environment.json").write_text(json.dumps({"device": "cpu", "world_size": 1}))
    return path


def rollout(step, position, sample, score, prompt, text="a", tokens=(5, 6)):
    row = {"training_step": step, "position": position, "sample": sample, "token_ids": list(tokens), "text": text}
    row |= {"logprobs": [-0.5] * len(tokens), "mask": [True] * len(tokens), "versions": [step - 1] * len(tokens)}
    row |= {"finish_reason": "stop", "verifiable": score / 10, "outcome": score, "score": score, "advantage": 0.0}
    result = {"score": score / 10, "status": "ok", "extracted": None, "seconds": 0.0, "details": {"note": text}}
    return row | {"results": [result], "prompt": prompt, "ground_truths": [text], "verifiers": ["gsm8k"]}


def browse(page, profile, fragment="", screenshot=None):
    """The page's document after its script has run, as Chromium prints it."""
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=4000".split()
    flags += [f"--user-data-dir={profile}", "--window-size=1300,2600", "--dump-dom"]
    flags += [f"--screenshot={screenshot}"] if screenshot else []
    done = subprocess.run([BROWSER, *flags, f"file://{page}{fragment}"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout.decode(errors="replace")


def drawn(dom):
    """The document without the data and the script, which would contain everything anyhow."""
    assert "data-ready" in dom, "the page's script did not reach its end"
    return re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


# the page


def boxes(data):
    return sum(n > 0 for h in data["histograms"] for column in h["counts"] for n in column)


@pytest.mark.runs
@needs_browser
def test_a_long_run_has_smoothed_curves_and_shared_bars(tmp_path, profile):
    """Of 330 steps three share a bar; the mean is drawn over the values."""
    page = report.write_page(make_run(tmp_path / "run", [2.0, 3.0, 7.0] * 110, [(0.0, 10.0)] * 330, steps=330))
    shown, data = drawn(browse(page, profile)), report.collect(tmp_path / "run")
    assert shown.count("<rect") == boxes(data) + 110 * len(data["phases"]) and data["phases"]
    assert shown.count('opacity="0.25"') == shown.count('opacity="1"') > 5
    labels = re.findall(r'text-anchor="end">([^<]+)<', shown[shown.index("Seconds per phase") :])
    assert labels[:5] == ["0", "1", "2", "3", "4"]  # a bar is the mean of 2, 3 and 7 s
    path = re.findall(r'opacity="1" d="M([^"]+)"', shown[shown.index("Seconds per step") :])[0]
    heights = [float(point.split()[1]) for point in path.split("L")]
    assert max(heights[20:-20]) - min(heights[20:-20]) < 0.2 * (190 - 24 - 8)  # without smoothing 5 of at most 8 s


@needs_browser
def test_the_page_shows_the_run(learned, tmp_path, profile):
    page = report.write_page(learned, tmp_path / "page.html")
    shown = drawn(browse(page, profile, screenshot=tmp_path / "page.png"))
    for title in ("Checks", "Curves", "Histograms over time", "Time and throughput", "Rollouts", "Configuration"):
        assert f">{title}</h2>" in shown
    data = report.collect(learned)
    assert len(data["histograms"]) == 4 and shown.count("<rect") == boxes(data) + 4 * len(data["phases"])
    assert shown.count("stroke-dasharray") == 3  # two clip bounds, rho_clamp_upper_bound
    assert shown.count("<path") >= 20 and "1 - clip_lower = 0.8, 1 + clip_higher = 1.2" in shown
    assert "256 episodes" in shown and "learning_rate" in shown and "git_commit" in shown
    assert 'data-metric="policy/entropy_avg"' in shown
    assert (
        "http://" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
        and "https://" not in page.read_text()
    )
    assert (tmp_path / "page.png").stat().st_size > 50_000  # a blank one is a tenth of that


@needs_browser
def test_rollouts_are_filtered_and_coloured(learned, tmp_path, profile):
    page = report.write_page(learned, tmp_path / "page.html")
    rows = [json.loads(line) for line in (learned / "rollouts.jsonl").read_text().splitlines()]
    wanted = [r for r in rows if r["training_step"] == 3 and r["score"] >= 5]
    shown = drawn(browse(page, profile, "#step=3&min=5"))
    assert f">{len(wanted)} rollouts" in shown
    trained = next(r for r in report.collect(learned)["rollouts"] if any(s[2] is not None for s in r["spans"]))
    name = f"{trained['step']}:{trained['position']}:{trained['sample']}"
    shown = drawn(browse(page, profile, f"#step={trained['step']}&find={quote(trained['text'][:4])}&open={name}"))
    assert f"prompt {trained['position']}, sample {trained['sample']}:" in shown
    box = re.search(r'<div class="tokens" data-by="(\w+)">(.*?)</div>', shown, re.DOTALL)
    assert box[1] == "gap" and box[2].count("<span") == len(trained["spans"])
    assert html.unescape(re.sub("<.*?>", "", box[2])) == "".join(s[0] for s in trained["spans"])


PROBE = """<script>
const tips = document.getElementById("tip"), seen = [];
const say = () => seen.push(tips.hidden || tips.textContent);
const name = document.querySelector('[data-metric="GAP_max"]');
const svg = name.closest(".card").querySelector("svg");
const box = svg.getBoundingClientRect();
svg.dispatchEvent(new MouseEvent("mousemove", {clientX: box.right - 5, clientY: box.top + 9})); say();
svg.dispatchEvent(new MouseEvent("mouseleave")); say();
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"})); say();
name.focus(); say();
const row = document.querySelectorAll("tr[tabindex]")[3];
row.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
setTimeout(() => {
  seen.push(document.activeElement.className, document.activeElement.cells[1].textContent === row.cells[1].textContent);
  document.title = JSON.stringify(seen);
}, 200);
</script></body>"""


@needs_browser
def test_values_and_definitions_show_under_the_pointer_and_by_keyboard(learned, tmp_path, profile):
    """Events are made by a script added to the page, which its policy would not let run and is therefore taken out."""
    page, last = report.write_page(learned, tmp_path / "page.html"), common.read_metrics(learned)[-2:]
    text = page.read_text().replace('http-equiv="Content-Security-Policy"', 'name="none"')
    page.write_text(text.replace("</body>", PROBE.replace("GAP", common.GAP)))
    title = re.search("<title>(.*?)</title>", browse(page, profile))[1]
    by_mouse, left, by_key, by_focus, focused, same_row = json.loads(html.unescape(title))
    names = [f"{common.GAP}_mean", f"{common.GAP}_max"]
    explained = "{}\n{}\nhealthy: {}".format(
        names[1], *definitions.define(names[1])
    )  # the upper curve's, as both are at its top
    for tip, row in ((by_mouse, last[1]), (by_key, last[0])):
        step, *values, nothing = tip.removesuffix(explained).splitlines()
        assert step == f"step {row['training_step']}" and nothing == "" and tip.endswith(explained)
        shown = {name: float(value) for name, value in map(str.split, values)}
        assert shown == pytest.approx({n: row[n] for n in names}, rel=1e-2)
    assert left is True and by_focus == explained and focused == "open" and same_row is True


@needs_browser
def test_a_hostile_response_stays_text(tmp_path, profile):
    run = make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4)
    hostile = rollout(1, 0, 0, 10.0, HOSTILE, HOSTILE)
    (run / "rollouts.jsonl").write_text(json.dumps(hostile) + "\n")
    (run / "args.json").write_text(json.dumps({"exp_name": HOSTILE}))
    page = report.write_page(run)
    dom = browse(page, profile)
    assert "<title>run: report</title>" in dom
    shown = drawn(dom)
    assert "<img" not in shown and shown.count(html.escape("</script>", quote=False)) >= 4
    assert page.read_text().count("</script>") == 2  # the data's and the page's own
    assert "script-src 'sha256-" in dom


@needs_browser
def test_without_its_hash_the_script_does_not_run(tmp_path, profile):
    """The policy holds in this browser: a page with one more script in it does not run that one."""
    page = report.write_page(make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    assert "<title>run: report</title>" in browse(page, profile)


@needs_browser
def test_the_answers_of_the_first_and_the_last_evaluation_are_on_the_page(tmp_path, profile):
    run = make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4)
    answer = {"prompt": "2 + 2?", "ground_truths": "('4',)", "score": 10.0, "finish_reason": "stop", "text": "<b>4"}
    with (run / "samples.jsonl").open("w") as file:
        for step, evaluation in ((0, True), (2, True), (4, False), (4, True)):
            row = {"training_step": step, "evaluation": evaluation, "rollouts": [answer | {"training_step": step}] * 2}
            file.write(json.dumps(row) + "\n")
    shown = [row for row in report.collect(run)["rollouts"] if str(row["step"]).startswith("eval")]
    assert [(row["step"], row["position"], row["text"]) for row in shown] == [
        ("eval 0", 0, "<b>4"),
        ("eval 0", 1, "<b>4"),
        ("eval 4", 0, "<b>4"),
        ("eval 4", 1, "<b>4"),
    ]
    dom = browse(report.write_page(run), profile)
    assert '<option value="eval 4">' in dom and "&lt;b&gt;4</td>" in dom and "eval 2" not in dom.split("<script")[0]


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


def found(heat):
    """A value of KNOWN -> how many the first column has in the row in which it belongs."""
    values = (1.0, math.exp(-0.25), math.exp(0.2), 0.01)
    rows = {v: max(j for j, edge in enumerate([-1, *heat["edges"][1:-1]]) if edge <= v) for v in values}
    counts = {v: heat["counts"][0][j] for v, j in rows.items()}
    assert sum(counts.values()) == sum(heat["counts"][0])
    return {v: n for v, n in counts.items() if n}


@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
def test_the_policy_ratio_is_of_the_trained_tokens_with_its_bounds(tmp_path, loss_fn):
    """Two rollouts of tokens with new - old = 0, 0.2, -0.25 and log 0.01, and a masked one; one was not trained on."""
    run = make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4)
    flags = {"clip_lower": 0.2, "clip_higher": 0.28, "loss_fn": loss_fn, "use_rho_correction": True}
    (run / "args.json").write_text(json.dumps(flags | {"rho_clamp_upper_bound": 1.5, "rho_mask_lower_bound": 0.0}))
    row = {"token_ids": [5] * 5, "mask": [True] * 4 + [False], "versions": [0] * 5, "logprobs": [-1.0] * 5}
    learner = {"old_logprobs": [-1.0] * 5, "new_logprobs": [-1.0, -0.8, -1.25, -1 + math.log(0.01), -3.0]}
    rows = [rollout(1, 0, i, 10.0, "p") | row | (learner if i < 2 else {}) for i in range(3)]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = report.collect(run)
    policy, engine = (h for h in data["histograms"] if "ratio" in h["title"])
    assert found(policy) == {1.0: 2, math.exp(0.2): 2, math.exp(-0.25): 2, 0.01: 2} and found(engine) == {1.0: 8}
    upper = {"1 + clip_higher": 1.28}
    assert policy["bounds"] == (upper if loss_fn == "cispo" else {"1 - clip_lower": 0.8} | upper)
    assert engine["bounds"] == {"rho_clamp_upper_bound": 1.5}
    for heat in (policy, engine):
        assert all(v in heat["edges"] for v in heat["bounds"].values())


def test_the_page_is_bounded_and_says_so(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4)
    rows = [rollout(1 + i // 400, i // 4, i % 4, 0.0, "p", "x" * 8001, (5,)) for i in range(1600)]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(report, "MAX_ROLLOUT_BYTES", 2_000_000)
    data = report.collect(run, 400)
    assert 0 < len(data["rollouts"]) <= 400 and len(json.dumps(data["rollouts"])) <= 2_000_000
    assert {r["step"] for r in data["rollouts"]} == {1, 2, 3, 4} and all(r["cut"] for r in data["rollouts"])
    groups = [(r["step"], r["position"]) for r in data["rollouts"]]
    assert all(groups.count(g) == 4 for g in groups)  # whole groups
    assert any("of 1,600 rollouts" in note for note in data["notes"])
    assert sum(map(sum, data["histograms"][0]["counts"])) == 1600  # of all


FINE = {
    "policy/entropy_avg": 1.0, "policy/clipfrac_avg": 0.01, "val/sequence_lengths": 100.0, "val/stop_rate": 1.0,
    "debug/vllm_vs_local_logprob_diff_mean": 0.01, "batch/total_prompts": 8.0, "batch/filtered_prompts_solved": 1.0,
    "batch/filtered_prompts_zero": 1.0, "other/real_batch_size_ratio": 0.8, "batch/missing_rewards": 0.0,
    "optim/nonfinite_updates": 0.0, "optim/skipped_steps": 0.0, "objective/kl2_avg": 0.01, "optim/grad_norm": 1.0,
    "eval/objective/verifiable_correct_rate": 0.5,
}  # fmt: skip


def checks_of(change):
    rows = [{"training_step": s, "episode": 64 * s} | FINE | (change if s > 8 else {}) for s in range(1, 11)]
    return checks.check_run(
        rows, {"model_dtype": "bfloat16", "beta": 0.01, "response_length": 128, "num_samples_per_prompt_rollout": 8}
    )


def test_a_healthy_run_has_no_warning():
    found = checks_of({})
    assert len(found) == 16 and all(c["fine"] for c in found)


@pytest.mark.parametrize(
    "metric, value, name, number",
    [
        ("policy/entropy_avg", 0.2, "entropy collapse", "1 -> 0.2"),
        ("policy/clipfrac_avg", 0.2, "clipped tokens", "20.00%"),
        ("val/sequence_lengths", 300.0, "length explosion", "100.0 -> 300.0"),
        ("val/stop_rate", 0.5, "truncated responses", "50.0% (limit 128 tokens)"),
        ("debug/vllm_vs_local_logprob_diff_mean", 0.04, "gap growth", "0.01 -> 0.04"),
        ("batch/filtered_prompts_solved", 6.0, "solved groups", "75.0%"),
        ("batch/filtered_prompts_zero", 6.0, "hopeless groups", "75.0%"),
        ("other/real_batch_size_ratio", 0.1, "rollouts with a gradient", "10.0%"),
        ("batch/missing_rewards", 3.0, "missing rewards", "6 of 640"),
        ("optim/nonfinite_updates", 1.0, "non-finite updates", "2 in 10"),
        ("optim/skipped_steps", 1.0, "steps without an update", "2 of 10"),
        ("objective/kl2_avg", 0.5, "KL to the reference", "0.5"),
        ("optim/grad_norm", 30.0, "gradient spikes", "30.0 x median"),
        ("eval/objective/verifiable_correct_rate", 0.4, "evaluation falls", "best 0.500, last 0.400"),
        ("optim/grad_norm", None, "NaN or infinite metrics", "optim/grad_norm"),
    ],
)
def test_each_warning_names_its_numbers(metric, value, name, number):
    bad = [c for c in checks_of({metric: value}) if not c["fine"]]
    assert [c["name"] for c in bad] == [name] and number in bad[0]["numbers"]


def learning(scores, *held_out, number=100):
    """name -> check of a run of these scores and shares of right held-out answers, that looks like a solved task."""
    rows = []
    for step, score in enumerate(scores, 1):
        rows.append({"training_step": step} | FINE | {"objective/scores": score})
        rows[-1] |= {"eval/objective/verifiable_correct_rate": None}
    for row, share in zip((rows[0], rows[-1]), held_out, strict=False):
        row |= {"eval/objective/verifiable_correct_rate": share, "eval/num_prompts": number}
    solved = {"policy/entropy_avg": 0.2, "batch/filtered_prompts_solved": 8.0, "other/real_batch_size_ratio": 0.0}
    solved["optim/skipped_steps"] = 1.0
    for row in rows[5:]:
        row |= solved
    found = checks.check_run(rows, {"verification_reward": 10.0, "num_samples_per_prompt_rollout": 8})
    assert found[0]["name"] == "score", "what a person wants to know comes first"
    return {c["name"]: c for c in found}


def test_a_page_says_whether_the_run_learned():
    """First fifth 1, 2: mean 1.5, variance 0.5. Last fifth 9, 10: rise 8, error sqrt((0.5 + 0.5) / 2)."""
    found = learning([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.25, 0.75)
    assert (
        found["score"]["fine"] and "1.5 -> 9.5, a rise of 8 with a standard error of 0.71" in found["score"]["numbers"]
    )
    error = (2 * 0.25 * 0.75 / 100) ** 0.5  # 0.061
    assert found["held-out score"]["fine"] and f"standard error of {error:.2g}" in found["held-out score"]["numbers"]
    for last in (10, 7):  # 0.95 and 0.8 of the maximum
        found = learning([1, 2, 3, 4, 5, 6, 7, 8, 9, last], 0.25, 0.75)
        for name in ("entropy collapse", "solved groups", "rollouts with a gradient", "steps without an update"):
            assert found[name]["fine"], "healthy near the maximum"


@pytest.mark.parametrize("scores", [[6.7, 6.6, 6.4, 6.4, 6.3, 6.2, 6.1, 6.0, 5.9, 5.9], [5, 6] * 5])
def test_a_wrong_sign_or_no_learning_asks_for_a_look(scores):
    found = learning(scores, 0.5, 0.55)
    assert not found["score"]["fine"] and not found["held-out score"]["fine"]
    assert not found["entropy collapse"]["fine"] and not found["solved groups"]["fine"]
    assert not found["steps without an update"]["fine"]


@pytest.mark.parametrize(("gap", "fine"), [(2.3e-5, True), (8e-5, False)])
def test_a_gap_of_float32_is_healthy_up_to_five_hundred_thousandths(gap, fine):
    """2.3e-5 is what a model of 135M has at the start; the default would be bfloat16's bound, 0.05."""
    rows = [{"training_step": i, f"{common.GAP}_mean": gap} for i in range(1, 11)]
    found = {row["name"]: row for row in checks.check_gap(rows, {"model_dtype": "float32"})}
    assert found["logprob gap"]["fine"] == fine


def test_a_task_that_was_solved_at_the_start_needs_no_rise():
    found = learning([9.9, 10.0] * 5, 1.0, 1.0)
    assert found["score"]["fine"] and found["held-out score"]["fine"]


def test_every_metric_of_a_run_has_the_readmes_definition(learned):
    names = {k for line in (learned / "metrics.jsonl").read_text().splitlines() for k in json.loads(line)}
    assert [n for n in sorted(names) if definitions.define(n) is None] == []
    assert definitions.define("val/made_up") is None
    assert definitions.define("policy/entropy_avg")[1] == "falls, not to 0"
    assert definitions.define("val/sequence_lengths_max")[0] == "response tokens"
    assert definitions.define("objective/gsm8k_correct_rate") == definitions.define("objective/verifiable_correct_rate")
    assert definitions.define("time/generation")[0].startswith("seconds")
    assert definitions.define("optim/grad_norm") == ("gradient norm before clipping", "stable")
    assert definitions.define("val/rho_weight") == ("importance weight used", "1")
    assert "engines" in definitions.define("val/engine_idle_share")[0]  # a part with commas is not divided
    assert "clipfrac < 0.1" in definitions.define("policy/clipfrac_avg")[1]  # nor a healthy range in words
    assert (
        "truncated" in definitions.define("val/rho_clipfrac")[0]
        and "clipped" in definitions.define("policy/clipfrac_avg")[0]
    )


# the comparison

A, B = [(0.0, 0.0), (0.0, 10.0), (10.0, 10.0), (0.0, 10.0)], [(0.0, 10.0), (10.0, 10.0), (10.0, 10.0), (0.0, 10.0)]


@pytest.fixture
def pair(tmp_path):
    sync = {2: {"time/weight_sync": 0.5}, 3: {"time/from_scratch": 35.0}, 4: {"time/from_scratch": 38.0}}  # resumed
    a, b = make_run(tmp_path / "a", [9.0, 2.0, 2.0, 2.0], A), make_run(tmp_path / "b", [9.0, 4.0, 5.0, 3.0], B, sync)
    where: dict = {"begun": 1.0}
    where |= {"command": ["/bin/python", "../grpo.py", "--x"], "git_commit": "0123456789abcdef", "git_dirty": True}
    (a / "environment.json").write_text(json.dumps(where | {"device": "cpu", "world_size": 1}))
    (a / "wandb_id.txt").write_text("ab12cd\n")
    return a, b


def test_comparison_names_the_files_that_differ(pair, capsys):
    """Of runs that kept what they ran; one without tells nothing."""
    for run, reward in zip(pair, "ab", strict=True):
        facts = json.loads((run / "environment.json").read_text()) if (run / "environment.json").exists() else {}
        kept = {"changes.diff": "0" * 64, "reward_file/mine.py": reward * 64, "git_commit": reward}
        (run / "environment.json").write_text(json.dumps(facts | {"code": kept}))
    assert compare_runs.main(list(map(str, pair))) == 0
    text = capsys.readouterr().out
    assert "`code/reward_file/mine.py`: a aaaaaaaa, b bbbbbbbb" in text and "changes.diff" not in text
    (pair[1] / "environment.json").write_text("{}")
    assert compare_runs.main(list(map(str, pair))) == 0
    assert "mine.py" not in capsys.readouterr().out


def test_comparison_by_hand(pair, capsys):
    """Step 1 apart: means 2 and 4 s; prompt differences 5, 5, 0, 0: mean 2.5, s 2.887, t(3) 3.182."""
    assert compare_runs.main(list(map(str, pair))) == 0
    text = capsys.readouterr().out
    assert (
        "| avg total_time | **2.00** | 4.00 |" in text and "| sum total_time (step 1 too) | **15.0** | 21.0 |" in text
    )
    assert "| Wall clock (min) | **1.25** | 1.85 |" in text and "| total_time | 9.00 | 9.00 |" in text
    assert "| avg learner_tok/s_step | **50** | 26 |" in text and "| avg response_length | 20.0 | 20.0 |" in text
    assert [x for x in text.splitlines() if x.endswith("|  |  |")] == [
        f"| **{part}** |  |  |" for part in ("Reward, accuracy and gap", "Throughput", "Timing (s)")
    ]
    assert "| a | grpo.py | ? (?) | cpu | ab12cd | 0123456789ab + changes |" in text and "| cpu | — | ? |" in text
    assert "| seconds before it | 60.0 | 60.0 |" in text
    assert "25 tokens/s, a 50 (0.50x): 1.00x the tokens in 2.00x the seconds" in text
    assert "training +2.00 s" in text and "`vllm_enforce_eager`: a True, b False" in text
    assert "`git_commit`" in text and "`begun`" not in text
    half = 3.182 * math.sqrt(25 / 3) / 2
    low, high = f"{2.5 - half:+.4g}", f"{2.5 + half:+.4g}"
    assert (
        f"| score | 4 | 2 | 5 | 7.5 | +2.5 | {low} to {high} (few differ) | 0.5 |" in text
    )  # signs: 8 of 16 ways are as far
    assert "**Score** of a and b cannot be told apart over all rollouts of the same 4 prompts" in text
    assert text.index("**Score** of a and b") < text.index("25 tokens/s, a 50")  # what was learned comes first
    assert "Step 1** of b took 9.00 s, 2.25x" in text
    assert "| avg weight_sync | — | 0.50 |" in text and "### " not in text
    text = (pair[0].parent / "comparison.md").read_text()  # steps are here only
    assert text.count("### ") == 2
    assert "| 2 | 25 | 100 | 20.0 | 4.00 | 3.00 | 0.50 | 1.00 |" in text
    assert "| 3 | 20 | 100 | 20.0 | 5.00 | 4.00 | — | 1.00 |" in text
    assert (pair[0].parent / "comparison.png").stat().st_size > 10_000


REPORT = """verifiable_reward 0.69 0.66 0.83|verifiable_correct_rate 0.08 0.08 0.11|code_reward 0.73 0.69 1.01
    code_correct_rate 0.08 0.08 0.12|code_stdio_reward 0.48 0.45 0.43|code_stdio_correct_rate 0.07 0.06 0.08
    learner_tok/s_step 990 4265 7307|actor_tok/s 1299 3014 4027|total_time 100.3 56.7 52.3
    training_time 69.4 47.7 38.3|weight_sync 33.0 9.8 15.3"""


def test_open_instructs_report_comes_out_of_its_own_tables(tmp_path, monkeypatch, capsys):
    """Per-step tables in, summary out: docs/benchmarks/grpo_hybrid_vs_nonhybrid.md of open-instruct, commit 5b691b933.

    Tokens of a step are its rate times its seconds. A run's clock is not in the tables, only its 37, 24 and 22 minutes
    with start and end: the one here, by which the three numbers come out, ends 0.8 to 1.3 minutes before. Were the last
    step's tokens counted too, it would have to end after them.
    """
    data = json.loads((REPO / "tests/large_test.json").read_text())
    args = grpo.Args(num_unique_prompts_rollout=32, num_samples_per_prompt_rollout=16, verification_reward=1.0)
    world, now, printed = utils.World(0, 0, 1, torch.device("cpu")), [0.0], {}
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name, final, minutes in (("hybrid_eager", 715, 37), ("hybrid", 1766, 24), ("non_hybrid", 4699, 22)):
        steps = [dict(zip(data["columns"], row, strict=True)) for row in data[name]]
        tokens = [s["learner_tok/s_step"] * s["total_time"] for s in steps]
        wall = sum(tokens[:-1]) / final
        assert 0.75 < minutes - wall / 60 < 1.3 and sum(tokens) / final > 60 * minutes
        rest = (wall - sum(s["total_time"] for s in steps)) / len(steps)  # of evaluation and saving, after a step
        state, rows, now[0] = grpo.start_state() | {"clock": 0.0, "flops_per_second": 1.0}, [], rest
        learner = types.SimpleNamespace(policy=types.SimpleNamespace(flops=lambda *_: 0.0), ref_policy=None)
        run: Any = types.SimpleNamespace(
            args=args, world=world, state=state, learner=learner, train_prompts=range(100), start_time=0.0
        )
        for number, (step, n) in enumerate(zip(steps, tokens, strict=True), start=1):
            made, metrics = grpo.Step(number, start_time=now[0]), utils.Metrics()
            for count in ("trained", "sampled", "response_tokens", "val/num_sampled_tokens", "learner_flops"):
                metrics.count(count, 1e9)  # none of the report's
            metrics.count("val/num_step_tokens", n)
            for key in data["columns"][5:]:
                metrics.add(f"objective_kept/{key}", step[key])
                metrics.add(f"objective/{key}", 99.0)
            made.metrics, made.seconds = metrics, {"time/group_generation_max": n / step["actor_tok/s"]}
            made.seconds |= {"time/training": step["training_time"] - 5, "time/trainer_waiting_for_data": 5.0}
            now[0] += step["total_time"]
            row = grpo.step_metrics(run, made)
            rows.append(row | ({"time/weight_sync": step["weight_sync"]} if step["weight_sync"] else {}))
            now[0] += rest
        assert rows[-1]["episode"] == 19 * 512 and rows[0]["learner_tokens_per_second_overall"] == 0
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        printed[name] = rows[-1]["learner_tokens_per_second_overall"]
    assert compare_runs.main([str(tmp_path / n) for n in printed] + ["--with_first_step"]) == 0
    text = capsys.readouterr().out
    assert "| final learner_tok/s_overall | 715 | 1,766 | **4,699** |" in text
    assert "## Summary (means over all 19 steps)" in text and "step 1 apart" not in text
    lines = {
        parts[1].strip(): parts[2:-1] for x in text.split("### ")[0].splitlines() if len(parts := x.split("|")) == 6
    }
    for heading, *wanted in (entry.split() for entry in re.split(r"\||\n", REPORT)):
        got = [float(cell.strip(" *").replace(",", "")) for cell in lines[f"avg {heading}"]]
        digits = len(wanted[0].partition(".")[2])
        assert got == pytest.approx(list(map(float, wanted)), abs=0.6 * 10**-digits), heading
    for heading, wanted in (("total_time", (1906, 1077, 995)), ("training_time", (1319, 907, 728))):
        got = [float(cell.strip(" *").replace(",", "")) for cell in lines[f"sum {heading}"]]
        assert got == pytest.approx(wanted, abs=0.7)
    assert "| avg verifiable_reward, all rollouts | 99.000 | 99.000 | 99.000 |" in text


def test_kept_groups_and_their_prompts_are_counted_as_open_instruct_counts_them():
    """Prompts of 3 and 4 tokens, two responses each; the second group's scores are equal: it is not kept, unless
    --no_filter_zero_std_samples keeps all."""

    def group(position, prompt, responses, scores):
        p = utils.Prompt(position, tuple(range(prompt)), "p", ("7",), ("gsm8k",))
        made = [utils.Rollout(p, position, j, [1] * n, [0.0] * n, [True] * n, [0] * n) for j, n in enumerate(responses)]
        for r, score in zip(made, scores, strict=True):
            r.results, r.verifiable = [rewards.RewardResult(score, "ok", None, 0.0)], score
            r.outcome = r.score = 10 * score
        return made

    groups = [group(0, 3, (5, 6), (0.0, 1.0)), group(1, 4, (7, 8), (1.0, 1.0))]
    for filters, tokens, rate in ((True, 3 + 11, 0.5), (False, 3 + 11 + 4 + 15, 0.75)):
        metrics = utils.Metrics()
        utils.note_step(groups, groups, grpo.Args(filter_zero_std_samples=filters), metrics)
        out = metrics.reduce(utils.World(0, 0, 1, torch.device("cpu")))
        assert out["val/num_step_tokens"] == tokens and out["objective_kept/verifiable_correct_rate"] == rate
        assert (
            out["val/num_sampled_tokens"] == 2 * 3 + 11 + 2 * 4 + 15
            and out["objective/verifiable_correct_rate"] == 0.75
        )
        assert (out["objective/scores"], out["objective/scores_min"], out["objective/scores_max"]) == (7.5, 0, 10)
        assert (out["val/prompt_lengths"], out["val/prompt_lengths_min"], out["val/prompt_lengths_max"]) == (3.5, 3, 4)
    metrics = utils.Metrics()
    utils.note_step([], groups[1:], grpo.Args(), metrics)
    assert metrics.reduce(utils.World(0, 0, 1, torch.device("cpu")))["val/num_step_tokens"] == 0


@pytest.mark.parametrize(
    "name, shown",
    [
        ("data/gsm8k_verl/test.jsonl", "openai/gsm8k"),  # of the recipe of veRL's report
        ("openai/gsm8k:main", "openai/gsm8k"),
        ("./data/addition/eval.jsonl", "data/addition/eval"),
    ],
)
def test_an_evaluation_has_verls_name_of_its_data(name, shown):
    assert benchmark_report.name_of_source(name) == shown


def test_three_runs_of_two_scripts_without_rollouts(tmp_path, capsys):
    """Phases are each script's own; each two runs are compared in speed; rewards stand alone without rollouts."""
    runs = []
    for name, seconds, reward in (("a", 4.0, 1.0), ("b", 2.0, 3.0), ("c", 8.0, 2.0)):
        more = {"objective/verifiable_reward": reward, "learner_tokens_per_second_overall": 100 / seconds}
        more |= {"time/trainer_waiting_for_data": 0.25} if name == "b" else {}
        extra = {step: more for step in range(1, 5)}
        runs.append(make_run(tmp_path / name, [seconds] * 4, [(0.0, 10.0)] * 4, extra))
        (runs[-1] / "rollouts.jsonl").unlink()
    assert compare_runs.main(list(map(str, runs))) == 0
    text = capsys.readouterr().out
    assert "a step of b against a: training -2.00 s, generation -1.00 s, trainer_waiting_for_data +0.25 s; one" in text
    assert "a step of c against a: training +4.00 s.\n" in text
    assert "c processes 12 tokens/s, b 50 (0.25x)" in text and text.count("**Wall clock**: ") == 3
    assert (
        "**Reward** of a and c: 1.000 and 2.000, means over steps and over all rollouts." in text
        and "**Score**" not in text
    )
    assert (
        "**c** is the slowest by both, 12 tokens/s since the start and 1.53 min; its mean reward over all rollouts, "
        "2.000, is not" in text
    )
    assert "| avg verifiable_reward, all rollouts | 1.000 | **3.000** | 2.000 |" in text


def test_a_difference_that_is_there_is_found(tmp_path, capsys):
    a = make_run(tmp_path / "a", [2.0] * 12, [(0.0, 10.0)] * 6 + [(0.0, 0.0)] * 6, steps=12)
    b = make_run(tmp_path / "b", [2.0] * 12, [(10.0, 10.0)] * 12, steps=12)
    assert compare_runs.main([str(a), str(b)]) == 0
    assert "**Score** of a and b differs over all rollouts of the same 12 prompts" in capsys.readouterr().out


def test_other_prompts_at_the_same_place_are_not_paired(pair, capsys):
    rows = [json.loads(x) for x in (pair[1] / "rollouts.jsonl").read_text().splitlines()]
    (pair[1] / "rollouts.jsonl").write_text("".join(json.dumps(r | {"prompt": "other"}) + "\n" for r in rows))
    assert compare_runs.main(list(map(str, pair))) == 0
    assert "no prompts at the same place" in capsys.readouterr().out


def test_runs_of_other_lengths_share_their_steps_and_one_step_is_too_few(tmp_path, pair, capsys):
    long = make_run(tmp_path / "c", [2.0] * 6, [(0.0, 0.0)] * 6, steps=6)
    assert compare_runs.main([str(pair[0]), str(long)]) == 0
    assert "c has 2 steps more, left out." in capsys.readouterr().out
    short = make_run(tmp_path / "d", [2.0], [(0.0, 0.0)], steps=1)
    assert compare_runs.main([str(pair[0]), str(short)]) == 2
    assert "share 1 training steps" in capsys.readouterr().err


def test_few_prompts_that_differ_are_no_proof(tmp_path):
    """Two prompts, of which both rose by 10: the interval has no width, p is 0.5. Of 12 prompts none differs."""

    def compared(*runs):
        paths = []
        for name, scores in runs:
            paths.append(make_run(tmp_path / name, [2.0] * len(scores), scores, steps=len(scores)))
        return compare_runs.compare(compare_runs.load(paths, None))

    text = compared(("a", [(0, 0)] * 2), ("b", [(10, 10)] * 2))
    told = "cannot be told apart over all rollouts of the same 2 prompts: 0 and 10, difference +10"
    assert f"**Score** of a and b {told}" in text
    assert "(+10 to +10; 2 prompts differ, too few for this interval; p 0.5)" in text
    assert "| score | 2 | 2 | 0 | 10 | +10 | +10 to +10 (few differ) | 0.5 |" in text
    text = compared(("c", [(0, 10)] * 12), ("d", [(0, 10)] * 12))
    assert "| score | 12 | 0 | 5 | 5 | +0 | +0 to +0 (few differ) | 1 |" in text
    assert "fewer than 6 prompts differ, p is above 0.05" in text
    text = compared(("e", [(0, 0)] * 6), ("f", [(0, 10)] * 6))
    told = "differs over all rollouts of the same 6 prompts: 0 and 5, difference +5 (+5 to +5)."
    assert f"**Score** of e and f {told}" in text


# the benchmark report


def test_benchmark_by_hand(tmp_path, capsys):
    """Learning rate in full; 300 tokens in 6 s after step 1, with 4 s of validation and saving inside 10 s."""
    judged = {
        "eval/objective/verifiable_correct_rate": 1.0,
        "eval/reward/gsm8k_ok": 3,
        "eval/reward/gsm8k_no_answer": 1,
        "eval/reward/math_ok": 4,  # a second verdict on the same four
        "eval/num_stop_token_ids": 2,
        "eval/stop_rate": 0.5,
        "eval/num_prompts": 1,
    }
    more = {"val/num_sampled_tokens": 100.0, "batch/total_prompts": 1.0, "time/ref_logprobs": 0.25}
    more |= {"time/old_logprobs": 0.5, "val/learner_tokens_min": 40.0, "val/learner_tokens_max": 45.0}
    more |= {"val/num_step_tokens": 7.0, "objective/scores_max": 10.0, "memory/gpu_allocated_gib": 3.5}
    extra: dict = {step: dict(more) for step in range(1, 5)}
    extra[2] |= {"time/eval": 1.0}
    extra[4] |= {"time/eval": 1.0, "time/saving": 2.0} | judged
    run = make_run(tmp_path / "run", [9.0, 2.0, 2.0, 2.0], A, extra)
    args = json.loads((run / "args.json").read_text()) | {"num_samples_per_prompt_rollout": 2, "beta": 0.001}
    args |= {"dataset_mixer_eval_list": ["openai/gsm8k:main", "1.0", "data/a/eval.jsonl", "8"], "eval_pass_at_k": 4}
    (run / "args.json").write_text(json.dumps(args))
    (run / "wandb_id.txt").write_text("ab12cd\n")
    assert benchmark_report.main([str(run)]) == 0
    text = (run / "benchmark.md").read_text()
    assert "| `actor/lr` | `lr` | 1.000e-06 | 1.000e-06 | schedule constant: constant |" in text
    assert "per process, over all steps 50; with 4.0 s of validation and saving inside 30" in text
    assert "| `critic/rewards/mean` | `objective/scores` | 0.5 | 0.66667 |" in text
    assert "| `response_length/clip_ratio` | `1 - val/stop_rate` | 0.25 | 0.25 |" in text
    assert (
        "| `val-core/openai/gsm8k+data/a/eval/reward/mean@4` | `eval/objective/verifiable_correct_rate` | 1 |" in text
    )
    # 1 / (1 + 1.96^2): four responses to one prompt are one draw
    assert "share correct of 4 responses; 95 % interval over 1 prompts 0.2065 to 1.0000" in text
    assert "1 evaluation prompts: the standard error of an accuracy near 0.5 can be 0.500." in text
    assert "| `actor/entropy` | `policy/entropy_avg` | — | — | not recorded in this run |" in text
    assert "| `perf/max_memory_allocated_gb` | `memory/gpu_allocated_gib` | 3.5 | 3.5 |" in text
    assert "| `timing_s/update_actor` | `time/training` | 0.25 | 0.25 |" in text  # 1 s less 0.25 and 0.5
    assert "| `critic/rewards/mean` | ▁▅█▅ | 0 | 0.5 |" in text  # 0, 0.5, 1, 0.5
    assert "| `critic/score/max` | ▁▁▁▁ | 1 | 1 |" in text and "| `actor/kl_coef` | ▁▁▁▁ | 0.001 | 0.001 |" in text
    assert "| `perf/total_num_tokens` | ▁▁▁▁ | 100 | 100 |" in text
    assert "| `timing_per_token_ms/gen` | ▁▁▁▁ | 25 | 25 |" in text  # 1 s for 2 responses of 20 tokens
    assert "| `timing_per_token_ms/ref` | ▁▁▁▁ | 2.5 | 2.5 |" in text
    assert "| `timing_per_token_ms/update_actor` | █▁▁▁ | 72.5 | 2.5 |" in text  # 7.25 s and 0.25 s for 100 tokens
    assert "| `global_seqlen/minmax_diff` | ▁▁▁▁ | 5 | 5 |" in text
    assert "- `global_seqlen/balanced_max`: grpo.py balances nothing" in text
    assert "- `timing_s/stop_profile`: the loop has no profiler" in text
    assert "**`actor/lr`** (ours: `lr`): Learning rate of AdamW" in text and "| **Wandb** | ab12cd |" in text
    assert "Too few steps to speak of convergence" in text and "It ran on a CPU." in text
    assert (run / "benchmark.png").stat().st_size > 10_000 and "benchmark.md" in capsys.readouterr().out
    for step in range(1, 5):
        extra[step] |= {"time/trainer_waiting_for_data": 0.2, "objective/kl_in_reward": 1.0}
    fast = make_run(tmp_path / "fast", [9.0, 2.0, 2.0, 2.0], A, extra)
    (fast / "args.json").write_text(json.dumps(args | {"kl_in_reward": True}))
    assert benchmark_report.main([str(fast)]) == 0
    text = (fast / "benchmark.md").read_text()
    assert (
        "| `timing_s/gen` | ▁▁▁▁ | 0.2 | 0.2 |" in text and "| `timing_s/generate_sequences` | ▁▁▁▁ | 1 | 1 |" in text
    )
    assert "| `global_seqlen/balanced_max` | ▁▁▁▁ | 45 | 45 |" in text
    assert "- `global_seqlen/max`: grpo_fast.py never has packs" in text
    assert "- `critic/rewards/max`: --kl_in_reward changes it" in text
    assert "| `critic/rewards/mean` | `objective/scores` | 0.4 | 0.56667 |" in text


VERL_SUMMARY = """actor/entropy actor/grad_norm actor/kl_coef actor/kl_loss actor/lr actor/pg_clipfrac
    actor/pg_clipfrac_lower actor/pg_loss actor/ppo_kl critic/advantages/max critic/advantages/mean
    critic/advantages/min critic/returns/max critic/returns/mean critic/returns/min critic/rewards/max
    critic/rewards/mean critic/rewards/min critic/score/max critic/score/mean critic/score/min
    global_seqlen/balanced_max global_seqlen/balanced_min global_seqlen/max global_seqlen/mean
    global_seqlen/min global_seqlen/minmax_diff perf/cpu_memory_used_gb perf/max_memory_allocated_gb
    perf/max_memory_reserved_gb perf/mfu/actor perf/throughput perf/time_per_step
    perf/total_num_tokens prompt_length/clip_ratio prompt_length/max prompt_length/mean
    prompt_length/min response_length/clip_ratio response_length/max response_length/mean
    response_length/min timing_per_token_ms/adv timing_per_token_ms/gen timing_per_token_ms/ref
    timing_per_token_ms/update_actor timing_s/adv timing_s/gen timing_s/generate_sequences
    timing_s/old_log_prob timing_s/ref timing_s/reshard timing_s/reward timing_s/save_checkpoint
    timing_s/start_profile timing_s/step timing_s/stop_profile timing_s/testing timing_s/update_actor
    training/epoch training/global_step val-core/SOURCE/reward/mean@1""".split()


def test_benchmark_has_all_of_verls_summary_and_a_definition_of_its_own_for_each():
    metrics = benchmark_report.METRICS
    assert sorted(metrics) == sorted(VERL_SUMMARY) and len(metrics) == 62
    tables = {"convergence", "performance", "efficiency", "length", ""}  # the last: in none
    assert {metric.table for metric in metrics.values()} == tables
    sentences = [metric.meaning for metric in metrics.values()]
    assert all(re.fullmatch(r"[A-Z][^.]+(?:\.py[^.]+|'s[^.]+)*\.", s) for s in sentences), "one sentence each"
    assert [s for s in set(sentences) if sentences.count(s) > 1] == ["Seconds of a step without evaluation and saving."]
    for name, metric in metrics.items():
        ours = metric.ours
        assert ours or metric.missing, name
        for known in re.findall(r"[a-z_-]+/[\w/]+|learner_mfu", "" if ours.startswith("timing_s") else ours):
            assert definitions.define(known), f"{name}: {known} is not in the table of metrics"


def test_scripts_without_a_run_say_so(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2 and benchmark_report.main([str(tmp_path)]) == 2
    assert compare_runs.main([str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("no metrics.jsonl") == 3


CURVES = [sys.executable, str(REPO / "scripts" / "reports" / "curves.py")]


def test_curves_of_a_run_under_way_by_hand(tmp_path):
    """Half a last line is no step; the ending of --out is the format."""
    run_dir = make_run(tmp_path / "a", [2.0] * 4, [(0, 10)] * 4)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"training_step": 5, "epi')
    done = subprocess.run([*CURVES, run_dir, "--out", tmp_path / "a.svg"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- a: 4 steps, 8 episodes -->" in text and "<!-- not recorded in this run -->" in text
    done = subprocess.run([*CURVES, tmp_path / "b"], capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path / 'b'} is no run: it has no metrics.jsonl" in done.stderr


def test_the_picture_shades_the_interval_of_an_accuracy():
    """Of evaluations of 20 prompts with one response each: Wilson's intervals of 0.85 and 1."""
    from scripts.reports import curves, intervals

    drawn: list[Any] = []
    axis = types.SimpleNamespace(fill_between=lambda *of, **_: drawn.append(of))
    rows = [
        {"training_step": step, f"eval/{curves.CORRECT}": share} for step, share in ((0, 0.85), (5, None), (9, 1.0))
    ]
    rows = [row | {"eval/num_prompts": 20} for row in rows]
    curves.shade_held_out(axis, rows, 1)
    low, high = zip(*(intervals.wilson(share, 20) for share in (0.85, 1.0)), strict=True)
    assert drawn == [([0, 9], list(low), list(high))]
    curves.shade_held_out(axis, [{"training_step": 1}], 1)
    assert len(drawn) == 1


def test_no_panel_of_the_picture_reaches_into_another_or_beyond_it(tmp_path, monkeypatch):
    """With the widest numbers beside the axes, KL below 0 and a gap on a logarithmic axis, and names in the legend."""
    from scripts.reports import curves  # and matplotlib

    gap = {f"debug/vllm_vs_local_logprob_diff_{name}": x * 1e-6 for name, x in (("mean", 0.6), ("max", 2.4))}
    rows = [{"training_step": i, "episode": 8 * i, "objective/kl": -0.011 * (i - 1)} for i in (1, 2, 3)]
    rows = [row | {name: x * row["training_step"] for name, x in gap.items()} for row in rows]
    rows = [row | {f"time/{name}": 1.0 for name in common.PHASES_FAST} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(curves.plt, "close", drawn.append)
    curves.draw(tmp_path, tmp_path / "report.png")
    monkeypatch.undo()
    (figure,) = drawn
    boxes = [axis.get_tightbbox() for axis in figure.axes]
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width, (i, box)
        assert not any(box.overlaps(other) for other in boxes[:i]), i
    curves.plt.close(figure)


def test_the_control_is_drawn_beside_the_run(tmp_path, monkeypatch):
    """Seeds 1 and 2 of the majority: 0.1 and 0.3, 0.2 and 0.6, then only one is left; labels are another arm."""
    from scripts.reports import curves  # and matplotlib

    arms = [("labels", {"1": 1.0}, {"0": 1.0})]
    arms.append(("majority", {"1": 0.1, "2": 0.2, "3": 0.3}, {"0": 0.2, "2": 0.4, "3": 0.9}))
    arms.append(("majority", {"1": 0.3, "2": 0.6}, {"0": 0.4, "2": 0.2}))
    rows = [{"arm": arm, "correct": correct, "held_out": held_out} for arm, correct, held_out in arms]
    (tmp_path / "demo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = make_run(tmp_path / "a", [2.0] * 4, [(0, 10)] * 4)
    (run_dir / "args.json").write_text('{"eval_temperature": 0.0, "eval_pass_at_k": 1}')
    rows = [{"training_step": i, "episode": i, curves.HELD_OUT: 0.5, curves.CORRECT: 0.1 * i} for i in range(3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(curves.plt, "close", drawn.append)
    curves.draw(run_dir, tmp_path / "report.png", tmp_path / "demo.jsonl")
    monkeypatch.undo()
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    curves.plt.close(drawn[0])
    points = {label: list(map(tuple, line.get_xydata().round(6).tolist())) for label, line in lines.items()}
    assert points["training, no labels"] == [(1, 0.2), (2, 0.4)]
    assert points["held-out, no labels"] == [(0, 0.3), (2, 0.3)]
    assert set(points) == {
        "training rollouts",
        "held-out prompts, greedy, 95 % interval",
        "training, no labels",
        "held-out, no labels",
    }


@pytest.mark.parametrize(("scores", "panel"), [([2.5, 5], "entropy of the next token"), ([2.5, 5.5], "score")])
def test_the_picture_has_no_curve_twice(tmp_path, monkeypatch, scores, panel):
    """With a reward of 10 and right answers 0.25 and 0.5, scores 2.5 and 5 are the same curve; 5.5 has more in it."""
    from scripts.reports import curves  # and matplotlib

    (tmp_path / "args.json").write_text('{"verification_reward": 10.0}')
    rows = [{"training_step": 0, "eval/scores": 4.0}]
    for i, score in enumerate(scores):
        row = {"training_step": i + 1, "episode": i, "objective/scores": score, curves.CORRECT: 0.25 * (i + 1)}
        rows.append(row | {"policy/entropy_avg": 1.5 - i})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(curves.plt, "close", drawn.append)
    curves.draw(tmp_path, tmp_path / "report.png")
    monkeypatch.undo()
    second = drawn[0].axes[1]
    curves.plt.close(drawn[0])
    assert second.get_title() == panel
    assert second.lines[0].get_ydata().tolist() == ([1.5, 0.5] if panel != "score" else scores)


def test_a_drawing_that_fails_costs_the_picture_only(tmp_path, capsys, monkeypatch):
    run_dir = make_run(tmp_path / "a", [2.0] * 4, [(0, 10)] * 4)
    words = f"report {run_dir / 'report.png'}\nrollouts and checks: python scripts/reports/report.py {run_dir}"
    assert utils.draw_report(run_dir) == words and capsys.readouterr().out == ""
    monkeypatch.setattr(utils, "PROGRAM_S", 0.01)
    assert utils.draw_report(run_dir) == "no report"
    assert "WARNING: no report was drawn: " in capsys.readouterr().out
    monkeypatch.undo()
    (run_dir / "metrics.jsonl").write_text("no JSON\n")
    assert utils.draw_report(run_dir) == "no report"
    out = capsys.readouterr().out
    assert "WARNING: no report was drawn: json.decoder.JSONDecodeError" in out and out.count("\n") == 1
    assert f"To draw it: {' '.join([*CURVES, str(run_dir)])}\n" in out
