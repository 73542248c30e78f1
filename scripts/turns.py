"""Tries an environment, or tools, by hand: prints the transcripts.

    python scripts/turns.py my_env.py RESPONSES.jsonl             # rows {responses: [a text for each turn], ...}
    python scripts/turns.py RESPONSES.jsonl --tools calculator

A row may have messages, ground_truth and env_config, as rows of a data set. grpo.py and grpo_fast.py take the same
file with --env_file, or the same --tools. See rewards.Episode for what is in the file.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import rewards
import utils
from scripts.parts import turns
from scripts.parts.rows import jsonl_rows
from utils import need


def transcript(environment: turns.Environment, row: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """The turns of the row's responses and the environment's answers to them, up to its last word."""
    _, config = environment.of_row(row)
    messages, turns, state = row.get("messages", [{"role": "user", "content": "?"}]), [], None
    told = {"ground_truths": [row.get("ground_truth")], "config": config, "stopped": True}
    for turn, text in enumerate(row["responses"], start=1):
        turns.append({"role": "assistant", "content": text})
        said = [{"role": t["role"], "content": t["content"]} for t in turns]
        now = {"messages": messages + said, "text": text, "turn": turn, "steps_left": len(row["responses"]) - turn}
        answer = rewards.ask_environment(environment.path, state, told | now, timeout_s)
        state, content = answer.pop("state"), "\n".join(answer.pop("texts"))
        turns.append({"role": environment.role or "tool", "content": content} | answer)
        if answer["done"]:
            break
    return turns


@dataclass(frozen=True, kw_only=True)
class CommandLine(utils.TurnFlags, utils.ModelFlags):
    """Tries an environment, or tools, on JSON lines {responses, ...}."""

    files: tyro.conf.Positional[list[str]]
    """The environment's file, unless --tools are given, and the JSON lines file."""


def main() -> None:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        words = "give the environment's file and the JSON lines file, or the latter first and then --tools"
        need(len(flags.files) == 2 - bool(flags.tools), words)
        *env_file, path = flags.files
        need(Path(path).is_file(), f"{path}: no such file")
        environment = utils.load_environment(replace(flags, env_file="".join(env_file)))
        for i, row in list(jsonl_rows(Path(path))):
            given = isinstance(row, dict) and isinstance(row.get("responses"), list)
            need(given, f"{path} row {i}: no list of responses")
            print(f"--- row {i}")
            for turn in transcript(environment, row, flags.env_timeout):
                rest = {k: v for k, v in turn.items() if k not in ("role", "content", "seconds") and v}
                print(f"{turn['role']}: {turn['content']}" + (f"   {rest}" if rest else ""))
    except ValueError as error:  # a UserError, or a row that is not JSON
        raise SystemExit(f"turns.py: {error}") from None


if __name__ == "__main__":
    main()
