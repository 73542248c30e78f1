"""Write RUN/report.html: one self-contained page that shows what a run did.

    python scripts/reports/report.py RUN [--out PAGE.html]

The page has data, code (page.js) and style (page.html) in it, and needs no network. Its content security policy lets no
other script run, so the text of a hostile response stays text. It has

checks      what a practitioner would look at first, each with its numbers and its threshold
curves      of metrics.jsonl, with the definition of a metric (scripts/reports/metrics.py) under the pointer
rollouts    (--save_traces or --dump_steps) by step, score and text. Tokens are coloured by |learner - engine| logprob
            where a row has the learner's logprobs, else by the engine's logprob. Of evaluations the first and the last

Its size is bounded by the constants below. The page says what was left out: groups are whole and evenly over the run.
"""

import base64
import hashlib
import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports.checks import check_run
from scripts.reports.common import parser, phases, read_json, read_lines, read_metrics
from scripts.reports.metrics import define

MAX_BYTES = 24_000_000  # of rollouts.jsonl, whose rows are longer than what is shown of them
MAX_STEPS = 2000
MAX_TOKENS = 2000
MAX_CHARACTERS = 8000


# --- Rollouts ---------------------------------------------------------------------------------------------------------


class Pieces:
    """Token ids as pieces of text. A token that is no whole character is joined with those after it."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]  # some tokenizers drop a leading space
        self.skip = len(self.decode(self.anchor))
        self.known: dict[tuple[int, ...], str] = {}

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids: list[int]) -> str:
        """The text of a piece, from memory if it was asked for before."""
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.decode(self.anchor + ids)[self.skip :]
        return self.known[key]

    def split(self, ids: list[int]) -> list[tuple[str, int, int]]:
        """(text, first token, one past the last) of each piece."""
        pieces = []
        start = 0
        for end in range(1, len(ids) + 1):
            text = self.text(ids[start:end])
            is_whole = not text.endswith("\ufffd")
            if is_whole or end - start >= 6 or end == len(ids):
                pieces.append((text, start, end))
                start = end
        return pieces


def load_pieces(run: Path, args: dict[str, Any], notes: list[str]) -> Pieces | None:
    """The tokenizer of RUN/model, or of a start model on this disk; else None and a note."""
    for directory in (run / "model", Path(args.get("model_name_or_path") or "")):
        if (directory / "tokenizer.json").exists() or (directory / "tokenizer_config.json").exists():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            from transformers import AutoTokenizer

            return Pieces(AutoTokenizer.from_pretrained(directory, trust_remote_code=False))
    notes.append("No tokenizer in RUN/model: responses are shown as text, without colours.")
    return None


def spans_of(row: dict[str, Any], pieces: Pieces) -> list[list[Any]]:
    """[text, engine's logprob, learner's logprob or None, who wrote it: 0 the policy, 1 its environment] of each piece.
    The logprobs are those of the piece's least likely token. No piece has tokens of both writers."""
    ids = row["token_ids"][:MAX_TOKENS]
    engine = row["logprobs"]
    learner = row.get("old_logprobs", [math.nan] * len(ids))
    by_policy = row.get("mask") or [True] * len(ids)

    spans = []
    start = 0
    for policy_wrote, tokens in itertools.groupby(by_policy[: len(ids)]):
        end = start + len(list(tokens))
        for text, first, past in pieces.split(ids[start:end]):
            worst = min(range(start + first, start + past), key=engine.__getitem__)
            has_learner = policy_wrote and not math.isnan(learner[worst])
            learned = round(learner[worst], 5) if has_learner else None
            spans.append([text, round(engine[worst], 5), learned, int(not policy_wrote)])
        start = end
    return spans


def show_rollout(row: dict[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    """A rollout as the page wants it."""
    shown = {name: row[name] for name in ("position", "sample", "score")}
    shown["advantage"] = float(np.mean(row["advantage"]))  # of several turns one for each token
    shown["audit"] = row.get("audit")  # null without --audit_verifier
    shown["step"] = row["training_step"]
    shown["tokens"] = len(row["token_ids"])
    shown["finish"] = row["finish_reason"]
    shown["prompt"] = row["prompt"][-MAX_CHARACTERS:]
    shown["text"] = row["text"][:MAX_CHARACTERS]
    shown["cut"] = len(row["text"]) > MAX_CHARACTERS or len(row["token_ids"]) > MAX_TOKENS
    shown["spans"] = spans_of(row, pieces) if pieces else []
    versions = {int(version) for version in row["versions"]}
    shown["versions"] = sorted(versions - {-1})  # the environment's
    turns = row.get("turns") or []
    shown["turns"] = [[turn["role"], turn.get("status") or turn.get("finish_reason"), turn["tokens"]] for turn in turns]

    shown["verifiers"] = row.get("verifiers")
    shown["results"] = json.dumps(row.get("results"), ensure_ascii=False, indent=1)[:MAX_CHARACTERS]
    shown["label"] = json.dumps(row.get("ground_truths"), ensure_ascii=False)[:MAX_CHARACTERS]
    return shown


def choose_rollouts(run: Path, args: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    """Rollouts of training to browse, in whole groups evenly over the run."""
    path = run / "rollouts.jsonl"
    if not path.exists():
        notes.append("No rollouts: the run had neither --save_traces nor --dump_steps.")
        return []
    stride = math.ceil(path.stat().st_size / MAX_BYTES)
    if stride > 1:
        notes.append(f"Of the groups of rollouts every {stride}th is on this page.")
    pieces = load_pieces(run, args, notes)
    shown: list[dict[str, Any]] = []
    groups = itertools.groupby(read_lines(path), key=lambda row: (row["training_step"], row["position"]))
    for _, rows in itertools.islice(groups, 0, None, stride or 1):
        shown += [show_rollout(row, pieces) for row in rows]
    return shown


def show_evaluations(run: Path) -> list[dict[str, Any]]:
    """The rollouts of the first and of the last evaluation in samples.jsonl. Their step is "eval N"."""
    evaluations = [row for row in read_lines(run / "samples.jsonl") if row.get("evaluation")]
    shown = []
    for evaluation in evaluations[:1] + evaluations[1:][-1:]:
        for position, row in enumerate(evaluation["rollouts"]):
            one = {"step": f"eval {row['training_step']}", "position": position, "sample": 0, "spans": []}
            one |= {"score": row["score"], "finish": row["finish_reason"], "prompt": row["prompt"][-MAX_CHARACTERS:]}
            one |= {"text": row["text"][:MAX_CHARACTERS], "label": str(row["ground_truths"])[:MAX_CHARACTERS]}
            shown.append(one)
    return shown


# --- The page ---------------------------------------------------------------------------------------------------------


def collect(run: Path) -> dict[str, Any]:
    """All that the page shows."""
    rows = read_metrics(run)
    args = read_json(run / "args.json")
    notes: list[str] = []
    page: dict[str, Any] = {"name": run.resolve().name, "args": args, "notes": notes}
    page["environment"] = read_json(run / "environment.json")
    page["checks"] = check_run(rows, args)
    page["rollouts"] = choose_rollouts(run, args, notes) + show_evaluations(run)

    drawn = rows
    if len(rows) > MAX_STEPS:
        stride = math.ceil(len(rows) / MAX_STEPS)
        notes.append(f"Curves have every {stride}th of {len(rows):,} steps; checks are of all steps.")
        drawn = rows[::stride]
    metrics = columns_of(drawn)
    definitions = {name: define(name) for name in metrics}
    page["steps"] = [row["training_step"] for row in drawn]
    page["metrics"] = metrics
    page["definitions"] = {name: text for name, text in definitions.items() if text}
    page["phases"] = [f"time/{phase}" for phase in phases(rows) if f"time/{phase}" in metrics]
    return page


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Metric -> its value at each step, None without one."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, (int, float))}
    columns = {}
    for name in sorted(names - {"training_step"}):
        values = [row.get(name) for row in rows]
        columns[name] = [None if value is None else float(f"{value:.6g}") for value in values]  # keeps the page small
    return columns


def write_page(run: Path, out: Path | None = None) -> Path:
    """Write the page and return its path. Raises ValueError when the run has no metrics."""
    data = json.dumps(collect(run), allow_nan=False, default=str)
    for character in "<>&":  # no text of a response can end the script element it is in
        data = data.replace(character, f"\\u{ord(character):04x}")
    folder = Path(__file__).parent
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (folder / "page.html").read_text(encoding="utf-8")
    page = page.replace("@DIGEST@", digest).replace("@SCRIPT@", script)
    page = page.replace("@DATA@", data)  # last: nothing in the data is replaced
    out = out or run / "report.html"
    out.write_text(page, encoding="utf-8")
    return out


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name of a run, also one under way")
    flags.add_argument("--out", type=Path, metavar="PAGE.html", help="instead of RUN/report.html")
    options = flags.parse_args(argv)
    try:
        path = write_page(options.run, options.out)
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
