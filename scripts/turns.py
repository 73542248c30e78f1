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
from scripts.parts import environments, turns, user_files
from scripts.parts.rows import jsonl_rows
from utils import need

SHOWN_OR_OMITTED = ("role", "content", "seconds")


def transcript(environment: turns.Environment, row: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """The row's responses and the environment's answers to them, up to its last word."""
    _, config = environment.of_row(row)
    messages = row.get("messages", [{"role": "user", "content": "?"}])
    episode = {"ground_truths": [row.get("ground_truth")], "config": config, "stopped": True}
    state = ""
    said: list[dict[str, Any]] = []
    responses = row["responses"]
    if environment.resets:
        responses = ["", *responses]
    for turn, text in enumerate(responses, start=1 - environment.resets):
        if turn > 0:
            said.append({"role": "assistant", "content": text})
        episode["messages"] = messages + [{"role": message["role"], "content": message["content"]} for message in said]
        episode |= {"text": text, "turn": turn, "steps_left": len(row["responses"]) - turn}
        answer = environments.ask(environment.path, state, episode, timeout_s)
        state = answer.pop("state")
        content = "\n".join(answer.pop("texts"))
        said.append({"role": environment.role or "tool", "content": content} | answer)
        if answer["done"]:
            break
    environments.release(state, timeout_s)
    return said


@dataclass(frozen=True, kw_only=True)
class CommandLine(utils.TurnFlags, utils.ModelFlags):
    """Tries an environment, or tools, on JSON lines {responses, ...}."""

    files: tyro.conf.Positional[list[str]]
    """The environment's file, unless --tools are given, and the JSON lines file."""


def show(row: Any, where: str, environment: turns.Environment, timeout_s: float) -> None:
    """Print the transcript of a row. Raises UserError for a row without responses."""
    has_responses = isinstance(row, dict) and isinstance(row.get("responses"), list)
    need(has_responses, f"{where}: no list of responses")
    for message in transcript(environment, row, timeout_s):
        print(f"{message['role']}: {rewards.printable(message['content'])}", end="")
        details = {name: value for name, value in message.items() if value and name not in SHOWN_OR_OMITTED}
        print(f"   {details}" if details else "")


def main() -> None:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        usage = "give the environment's file and the JSON lines file, or the latter first and then --tools"
        need(len(flags.files) == (1 if flags.tools else 2), usage)
        *env_file, path = flags.files
        need(Path(path).is_file(), f"{path}: no such file")
        user_files.PRINTS.begin_step(sys.maxsize)
        environment = turns.load_environment(replace(flags, env_file="".join(env_file)), None)
        for i, row in list(jsonl_rows(Path(path))):
            print(f"--- row {i}")
            show(row, f"{path} row {i}", environment, flags.env_timeout)
    except ValueError as error:  # a UserError, or a row that is not JSON
        raise SystemExit(f"turns.py: {error}") from None


if __name__ == "__main__":
    main()
