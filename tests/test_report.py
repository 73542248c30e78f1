"""The reports of a run: the page in a real browser, the comparison and the benchmark tables against numbers by hand."""

import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import quote

import pytest

import utils
from scripts.reports import benchmark_report, compare_runs, report
from tests.conftest import REPO
from utils import read_dump

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, no google-chrome: apt-get install chromium")
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script> &lt; \u2028 @DATA@ @SCRIPT@ \x00 '\"`${1}"
)


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
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "grpo.py", *flags.split()], cwd=REPO, env=env, capture_output=True, text=True
    )
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


def browse(page, tmp_path, fragment="", screenshot=None):
    """The page's document after its script has run, as Chromium prints it."""
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=4000".split()
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,2600"]
    flags += [f"--screenshot={screenshot}"] if screenshot else ["--dump-dom"]
    done = subprocess.run([BROWSER, *flags, f"file://{page}{fragment}"], capture_output=True, timeout=60)
    return done.stdout.decode(errors="replace")


def drawn(dom):
    """The document without the data and the script, which would contain everything anyhow."""
    assert "data-ready" in dom, "the page's script did not reach its end"
    return re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


# the page


def boxes(data):
    return sum(n > 0 for h in data["histograms"] for column in h["counts"] for n in column)


@needs_browser
def test_a_long_run_has_smoothed_curves_and_shared_bars(tmp_path):
    """Of 330 steps three share a bar; the mean is drawn over the values."""
    page = report.write_page(make_run(tmp_path / "run", [2.0, 3.0, 7.0] * 110, [(0.0, 10.0)] * 330, steps=330))
    shown, data = drawn(browse(page, tmp_path)), report.collect(tmp_path / "run")
    assert shown.count("<rect") == boxes(data) + 110 * len(data["phases"]) and data["phases"]
    assert shown.count('opacity="0.25"') == shown.count('opacity="1"') > 5
    labels = re.findall(r'text-anchor="end">([^<]+)<', shown[shown.index("Seconds per phase") :])
    assert labels[:5] == ["0", "1", "2", "3", "4"]  # a bar is the mean of 2, 3 and 7 s
    path = re.findall(r'opacity="1" d="M([^"]+)"', shown[shown.index("Seconds per step") :])[0]
    heights = [float(point.split()[1]) for point in path.split("L")]
    assert max(heights[20:-20]) - min(heights[20:-20]) < 0.2 * (190 - 24 - 8)  # without smoothing 5 of at most 8 s


@needs_browser
def test_the_page_shows_the_run(learned, tmp_path):
    page = report.write_page(learned, tmp_path / "page.html")
    shown = drawn(browse(page, tmp_path))
    for title in ("Checks", "Curves", "Histograms over time", "Time and throughput", "Rollouts", "Configuration"):
        assert f">{title}</h2>" in shown
    data = report.collect(learned)
    assert len(data["histograms"]) == 4 and shown.count("<rect") == boxes(data) + 4 * len(data["phases"])
    assert shown.count("stroke-dasharray") == 3  # two clip bounds, rho_clamp_upper_bound
    assert shown.count("<path") >= 20 and "1 - clip_lower = 0.8, 1 + clip_higher = 1.2" in shown
    assert "256 rollouts" in shown and "learning_rate" in shown and "git_commit" in shown
    assert 'data-metric="policy/entropy_avg"' in shown
    assert (
        "http://" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
        and "https://" not in page.read_text()
    )
    browse(page, tmp_path, screenshot=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000  # a blank one is a tenth of that


@needs_browser
def test_rollouts_are_filtered_and_coloured(learned, tmp_path):
    page = report.write_page(learned, tmp_path / "page.html")
    rows = [json.loads(line) for line in (learned / "rollouts.jsonl").read_text().splitlines()]
    wanted = [r for r in rows if r["training_step"] == 3 and r["score"] >= 5]
    shown = drawn(browse(page, tmp_path, "#step=3&min=5"))
    assert f">{len(wanted)} rollouts" in shown
    trained = next(r for r in report.collect(learned)["rollouts"] if any(s[2] is not None for s in r["spans"]))
    name = f"{trained['step']}:{trained['position']}:{trained['sample']}"
    shown = drawn(browse(page, tmp_path, f"#step={trained['step']}&find={quote(trained['text'][:4])}&open={name}"))
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
def test_values_and_definitions_show_under_the_pointer_and_by_keyboard(learned, tmp_path):
    """Events are made by a script added to the page, which its policy would not let run and is therefore taken out."""
    page, last = report.write_page(learned, tmp_path / "page.html"), report.read_metrics(learned)[-2:]
    text = page.read_text().replace('http-equiv="Content-Security-Policy"', 'name="none"')
    page.write_text(text.replace("</body>", PROBE.replace("GAP", report.GAP)))
    title = re.search("<title>(.*?)</title>", browse(page, tmp_path))[1]
    by_mouse, left, by_key, by_focus, focused, same_row = json.loads(html.unescape(title))
    names = [f"{report.GAP}_mean", f"{report.GAP}_max"]
    explained = "{}\n{}\nhealthy: {}".format(
        names[1], *report.define(names[1])
    )  # the upper curve's, as both are at its top
    for tip, row in ((by_mouse, last[1]), (by_key, last[0])):
        step, *values, nothing = tip.removesuffix(explained).splitlines()
        assert step == f"step {row['training_step']}" and nothing == "" and tip.endswith(explained)
        shown = {name: float(value) for name, value in map(str.split, values)}
        assert shown == pytest.approx({n: row[n] for n in names}, rel=1e-2)
    assert left is True and by_focus == explained and focused == "open" and same_row is True


@needs_browser
def test_a_hostile_response_stays_text(tmp_path):
    run = make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4)
    hostile = rollout(1, 0, 0, 10.0, HOSTILE, HOSTILE)
    (run / "rollouts.jsonl").write_text(json.dumps(hostile) + "\n")
    (run / "args.json").write_text(json.dumps({"exp_name": HOSTILE}))
    page = report.write_page(run)
    dom = browse(page, tmp_path)
    assert "<title>run: report</title>" in dom
    shown = drawn(dom)
    assert "<img" not in shown and shown.count(html.escape("</script>", quote=False)) >= 4
    assert page.read_text().count("</script>") == 2  # the data's and the page's own
    assert "script-src 'sha256-" in dom


@needs_browser
def test_without_its_hash_the_script_does_not_run(tmp_path):
    """The policy holds in this browser: a page with one more script in it does not run that one."""
    page = report.write_page(make_run(tmp_path / "run", [2.0] * 4, [(0.0, 10.0)] * 4))
    page.write_text(page.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    assert "<title>run: report</title>" in browse(page, tmp_path)


def test_tokens_join_to_the_text_and_gaps_are_those_of_the_dump(learned):
    data = report.collect(learned)
    rows = {(r["step"], r["position"], r["sample"]): r for r in data["rollouts"]}
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
    metrics = report.read_metrics(learned)[-1]
    rows = [r for r in read_dump(learned, 4)[0] if "new_logprobs" in r]
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


def checks(change):
    rows = [{"training_step": s, "episode": 64 * s} | FINE | (change if s > 8 else {}) for s in range(1, 11)]
    return report.check_run(rows, {"model_dtype": "bfloat16", "beta": 0.01, "response_length": 128})


def test_a_healthy_run_has_no_warning():
    found = checks({})
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
    bad = [c for c in checks({metric: value}) if not c["fine"]]
    assert [c["name"] for c in bad] == [name] and number in bad[0]["numbers"]


def test_every_metric_of_a_run_has_the_readmes_definition(learned):
    names = {k for line in (learned / "metrics.jsonl").read_text().splitlines() for k in json.loads(line)}
    assert [n for n in sorted(names) if report.define(n) is None] == []
    assert report.define("val/made_up") is None
    assert report.define("policy/entropy_avg")[1] == "falls, not to 0"
    assert report.define("val/sequence_lengths_max")[0] == "response tokens"
    assert report.define("objective/gsm8k_correct_rate") == report.define("objective/verifiable_correct_rate")
    assert report.define("time/generation")[0].startswith("seconds")
    assert report.define("optim/grad_norm") == ("gradient norm before clipping", "stable")
    assert report.define("val/rho_weight") == ("importance weight used", "1")
    assert "engines" in report.define("val/engine_idle_share")[0]  # a part with commas is not divided
    assert "clipfrac < 0.1" in report.define("policy/clipfrac_avg")[1]  # nor a healthy range in words
    assert "truncated" in report.define("val/rho_clipfrac")[0] and "clipped" in report.define("policy/clipfrac_avg")[0]


# the comparison

A, B = [(0.0, 0.0), (0.0, 10.0), (10.0, 10.0), (0.0, 10.0)], [(0.0, 10.0), (10.0, 10.0), (10.0, 10.0), (0.0, 10.0)]


@pytest.fixture
def pair(tmp_path):
    sync = {2: {"time/weight_sync": 0.5}}
    a, b = make_run(tmp_path / "a", [9.0, 2.0, 2.0, 2.0], A), make_run(tmp_path / "b", [9.0, 4.0, 5.0, 3.0], B, sync)
    where = {"command": ["/bin/python", "../grpo.py", "--x"], "git_commit": "0123456789abcdef", "git_dirty": True}
    (a / "environment.json").write_text(json.dumps(where | {"device": "cpu", "world_size": 1}))
    (a / "wandb_id.txt").write_text("ab12cd\n")
    return a, b


def test_comparison_by_hand(pair, capsys):
    """Step 1 apart: means 2 and 4 s; prompt differences 5, 5, 0, 0: mean 2.5, s 2.887, t(3) 3.182."""
    assert compare_runs.main(list(map(str, pair))) == 0
    text = capsys.readouterr().out
    assert (
        "| avg total_time | **2.00** | 4.00 |" in text and "| sum total_time (step 1 too) | **15.0** | 21.0 |" in text
    )
    assert "| Wall clock (min) | **1.25** | 1.35 |" in text and "| total_time | 9.00 | 9.00 |" in text
    assert "| avg learner_tok/s_step | **50** | 26 |" in text and "| avg response_length | 20.0 | 20.0 |" in text
    assert [x for x in text.splitlines() if x.endswith("|  |  |")] == [
        f"| **{part}** |  |  |" for part in ("Throughput", "Timing (s)", "Gap, reward and accuracy")
    ]
    assert "| a | grpo.py | ? (?) | cpu | ab12cd | 0123456789ab + changes |" in text and "| cpu | — | ? |" in text
    assert "| seconds before it | 60.0 | 60.0 |" in text
    assert "25 tokens/s, a 50 (0.50x): 1.00x the tokens in 2.00x the seconds" in text
    assert "training +2.00 s" in text and "`vllm_enforce_eager`: a True, b False" in text
    half = 3.182 * math.sqrt(25 / 3) / 2
    low, high = f"{2.5 - half:+.4g}", f"{2.5 + half:+.4g}"
    assert f"| score | 4 | 5 | 7.5 | +2.5 | {low} to {high} | 0.5 |" in text  # signs: 8 of 16 ways are as far
    assert "**Score** of a and b cannot be told apart on the same 4 prompts" in text
    assert "Step 1** of b took 9.00 s, 2.25x" in text
    assert "| avg weight_sync | — | 0.50 |" in text and text.count("### ") == 2
    assert "| 2 | 25 | 100 | 20.0 | 4.00 | 1.00 | 3.00 | 0.50 |" in text
    assert "| 3 | 20 | 100 | 20.0 | 5.00 | 1.00 | 4.00 | — |" in text
    assert (pair[0].parent / "comparison.png").stat().st_size > 10_000


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
    assert "**Reward** of a and c: 1.000 and 2.000, means over steps." in text and "**Score**" not in text
    assert (
        "**c** is the slowest by both, 12 tokens/s since the start and 1.53 min; its mean reward, 2.000, is not" in text
    )
    assert "| avg verifiable_reward | 1.000 | **3.000** | 2.000 |" in text


def test_a_difference_that_is_there_is_found(tmp_path, capsys):
    a = make_run(tmp_path / "a", [2.0] * 12, [(0.0, 10.0)] * 6 + [(0.0, 0.0)] * 6, steps=12)
    b = make_run(tmp_path / "b", [2.0] * 12, [(10.0, 10.0)] * 12, steps=12)
    assert compare_runs.main([str(a), str(b)]) == 0
    assert "**Score** of a and b differs on the same 12 prompts" in capsys.readouterr().out


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


def test_t_quantiles():
    """From any table."""
    for freedom, value in ((1, 12.706), (4, 2.776), (8, 2.306), (15, 2.131), (30, 2.042), (1000, 1.962)):
        assert compare_runs.t_quantile(freedom) == pytest.approx(value, abs=1.5e-3)


# the benchmark report


def test_benchmark_by_hand(tmp_path, capsys):
    """Learning rate in full; 300 tokens in 6 s after step 1, with 4 s of validation and saving inside 10 s."""
    judged = {
        "eval/objective/verifiable_correct_rate": 1.0,
        "eval/reward/gsm8k_ok": 3,
        "eval/reward/gsm8k_no_answer": 1,
    }
    extra = {2: {"time/eval": 1.0}, 4: {"time/eval": 1.0, "time/saving": 2.0} | judged}
    run = make_run(tmp_path / "run", [9.0, 2.0, 2.0, 2.0], A, extra)
    (run / "wandb_id.txt").write_text("ab12cd\n")
    assert benchmark_report.main([str(run)]) == 0
    text = (run / "benchmark.md").read_text()
    assert "| `actor/lr` | `lr` | 1.000e-06 | 1.000e-06 | schedule constant: constant |" in text
    assert "per process, over all steps 50; with 4.0 s of validation and saving inside 30" in text
    assert "| `critic/rewards/mean` | `objective/scores` | 0.5 | 0.66667 |" in text
    assert "| `prompt_length/mean` | `val/num_step_tokens` less responses | 30 | 30 |" in text
    assert "| `response_length/clip_ratio` | `val/stop_rate` | 0.25 | 0.25 |" in text
    assert "share correct of 4 prompts; 95 % interval 0.5101 to 1.0000" in text  # 1 / (1 + 1.96^2 / 4)
    assert "| `actor/entropy` | `policy/entropy_avg` | — | — | not recorded in this run |" in text
    assert "| `critic/rewards/mean` | ▁▅█▅ | 0 | 0.5 |" in text  # 0, 0.5, 1, 0.5
    assert "| `timing_per_token_ms/gen` | ▁▁▁▁ | 25 | 25 |" in text  # 1 s for 2 responses of 20 tokens
    assert "| `timing_per_token_ms/update_actor` | █▁▁▁ | 80 | 10 |" in text  # 8 s and 1 s for 100 tokens
    assert "- **`actor/lr`**, ours `lr`: learning rate (healthy: stable)" in text and "| **Wandb** | ab12cd |" in text
    assert "Too few steps to speak of convergence" in text and "It ran on a CPU." in text
    assert (run / "benchmark.png").stat().st_size > 10_000 and "benchmark.md" in capsys.readouterr().out


def test_benchmark_names_are_the_documents_and_each_is_defined():
    names = [
        n for part in ("CONVERGENCE", "PERFORMANCE", "EFFICIENCY", "LENGTHS") for n in getattr(benchmark_report, part)
    ]
    assert all(report.define(benchmark_report.OURS[n]) for n in names if n in benchmark_report.OURS)
    assert [n for n in names if n not in benchmark_report.OURS] == ["prompt_length/mean"]
    wanted = """actor/lr actor/pg_loss actor/pg_clipfrac actor/entropy actor/kl_loss val-core/reward/mean@1
        critic/rewards/mean critic/advantages/mean critic/returns/mean perf/mfu/actor perf/throughput perf/time_per_step
        timing_s/generate_sequences timing_s/update_actor prompt_length/mean response_length/mean
        response_length/clip_ratio"""
    assert set(wanted.split()) <= set(names)


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
    assert "<!-- a: 4 steps, 8 rollouts -->" in text and "<!-- not recorded in this run -->" in text
    done = subprocess.run([*CURVES, tmp_path / "b"], capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path / 'b'} is no run: it has no metrics.jsonl" in done.stderr


def test_a_drawing_that_fails_costs_the_picture_only(tmp_path, capsys, monkeypatch):
    run_dir = make_run(tmp_path / "a", [2.0] * 4, [(0, 10)] * 4)
    assert utils.draw_report(run_dir) == f"report {run_dir / 'report.png'}" and capsys.readouterr().out == ""
    monkeypatch.setattr(utils, "DRAWING_S", 0.01)
    assert utils.draw_report(run_dir) == "no report"
    assert "WARNING: no report was drawn: " in capsys.readouterr().out
    monkeypatch.undo()
    (run_dir / "metrics.jsonl").write_text("no JSON\n")
    assert utils.draw_report(run_dir) == "no report"
    out = capsys.readouterr().out
    assert "WARNING: no report was drawn: json.decoder.JSONDecodeError" in out and out.count("\n") == 1
    assert f"To draw it: {' '.join([*CURVES, str(run_dir)])}\n" in out
