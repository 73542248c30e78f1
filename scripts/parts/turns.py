"""Turns: an environment (--env_file) or tools (--tools) answer the policy, in the words of its chat template.

A rollout is then: a turn of the policy, `first`, a text, (`between`, a text, ...) `last`, the next turn. These three
separators are found by rendering probe conversations. What an environment's file holds: see rewards.Episode. The last
two sections have turns that start together, and the metrics of rollouts with turns.
"""

import contextlib
import functools
import json
import math
import os
import re
import resource
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import utils
from rewards import MISSING, UserError, need
from scripts.parts import environments, worker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CUT_MARK_TOKENS = 8  # kept free for it
QUESTION = "Question"  # these stand in probe conversations
ANSWER = 'Heard "it"\n{1}'
SECOND_ANSWER = "Noted"
TURN = "Said"
THINKING_TURN = "<think>\nThought\n</think>\n\nSaid"


@dataclass(frozen=True)
class Environment:
    """Who answers the policy, and what stands around an answer.

    With role "" the separators are empty: an answer stands in the policy's own turn. `first` begins with the end token
    of the turn, which a policy that stopped has written itself.
    """

    path: str
    config: dict[str, Any]
    role: str
    stop: tuple[str, ...]  # texts that end a turn
    schemas: dict[str, dict[str, Any]]  # of the tools, by name, for the chat template
    first: str = ""
    between: str | None = ""  # None: the template takes one message only, and texts are lines of it
    last: str = ""
    resets: bool = False  # it speaks before the first turn too, behind the user's words with which prompts then end
    tail: str = ""  # what the template writes behind these

    def of_row(self, columns: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The tools' schemas for the chat template, and the config for the environment's file, by a row's columns tools
        and env_config. The flags' config counts before the row's: --tools names programs, which no data may choose.
        Raises ValueError for a row that is broken."""
        config = columns.get("env_config") or {}
        if isinstance(config, str):
            config = json.loads(config)
        need(isinstance(config, dict), f"env_config must be an object, got {config!r:.80}")
        names = columns.get("tools")
        if names is None:
            names = list(self.schemas)
        elif isinstance(names, str):
            names = [names]
        unknown = sorted(set(names) - set(self.schemas))
        need(not self.schemas or not unknown, f"tools {unknown}: --tools has {sorted(self.schemas)}")
        shown = [self.schemas[name] for name in names if name in self.schemas]
        return shown, config | self.config | {"active_tools": list(names)}

    def episode_of(self, r: utils.Rollout, max_steps: int) -> dict[str, Any]:
        """What the environment's file receives about r: the columns of its row, and the messages so far."""
        messages = list(r.prompt.episode["messages"])
        number = 0
        text = ""
        stopped = True
        for turn in r.turns:
            messages.append({"role": turn["role"], "content": turn["content"]})
            if turn["role"] == "assistant":
                number += 1
                text = turn["content"]
                stopped = turn["finish_reason"] == "stop"
        facts = {
            "messages": messages,
            "text": text,
            "turn": number,
            "steps_left": max_steps - number,
            "stopped": stopped,
        }
        return r.prompt.episode | facts

    def reward_of(self, r: utils.Rollout) -> float:
        """The sum of the rewards of the answers in r. NaN if an answer is missing."""
        answers = [turn for turn in r.turns if turn["role"] != "assistant"]
        if any(answer["status"] == "infra_error" for answer in answers):
            return math.nan
        return sum(answer["reward"] for answer in answers)

    def answer(self, texts: Sequence[str], ended: bool, room: int, tokenizer: "Tokenizer") -> tuple[list[int], str]:
        """The tokens that say `texts` to a policy, separators included, and the texts as they are said.

        `ended`: the policy has ended its turn with an end token. Texts have no white space around them, as templates
        have it, and are cut if together they would take more than half of the `room`, in tokens.
        """
        if self.between is None:
            texts = ["\n".join(texts)]
        if self.role:
            texts = [text.strip() for text in texts]
        texts = self.cut(texts, room, tokenizer)
        token_ids = ids_of(self.segments(texts, tokenizer), tokenizer)
        if ended:
            token_ids = token_ids[1:]
        return token_ids, "\n".join(texts)

    def first_words(self, texts: Sequence[str], room: int, tokenizer: "Tokenizer") -> tuple[list[int], str]:
        """The same for what a reset returned: a paragraph of the message with which the prompt ends."""
        first = "\n\n" if any(texts) else ""
        return replace(self, first=first, between=None, last=self.tail).answer(texts, False, room, tokenizer)

    def cut(self, texts: Sequence[str], room: int, tokenizer: "Tokenizer") -> list[str]:
        """The texts, cut to half of the room that the separators leave, in tokens."""
        left = (room - len(ids_of([self.first + self.last], tokenizer))) // 2
        kept = []
        for text in texts:
            tokens = ids_of(plain_parts(text, tokenizer), tokenizer)
            if len(tokens) > max(left, 0):
                begin = str(tokenizer.decode(tokens[: max(left - CUT_MARK_TOKENS, 0)]))
                text = begin.rstrip("\ufffd") + environments.CUT_MARK  # the last character may be half
            left -= len(tokens)
            kept.append(text)
        return kept

    def segments(self, texts: Sequence[str], tokenizer: "Tokenizer") -> list[str]:
        """Separators and texts in segments that are tokenized one by one: a special token within a text is split over
        two. A separator is in the segment of the text beside it, for a tokenizer may join the two."""
        segments = [self.first]
        for i, text in enumerate(texts):
            if i > 0:
                segments[-1] += self.between or ""
            begin, *others = plain_parts(text, tokenizer)
            segments[-1] += begin
            segments += others
        segments[-1] += self.last
        return segments

    def with_separators(self, tokenizer: "Tokenizer", eos_ids: Sequence[int]) -> "Environment":
        """The same with the separators of the tokenizer's chat template. Raises UserError if it has none."""
        schemas = list(self.schemas.values())
        tail = render_turns(tokenizer, schemas, []).rpartition(QUESTION)[2] if self.resets else ""
        if not self.role:
            return replace(self, tail=tail)
        first, between, last = find_separators(tokenizer, self.role, eos_ids, schemas)
        return replace(self, first=first, between=between, last=last, tail=tail)

    def open_prompt(self, text: str) -> str:
        """The text of a prompt, without the tail that the first words bring. Raises ValueError."""
        problem = (
            "the environment has a reset, whose words continue the user's: the last message has to be of that role"
        )
        need(text.endswith(self.tail), problem)
        return text.removesuffix(self.tail)


@functools.lru_cache(maxsize=4)
def _added_tokens(tokenizer: "Tokenizer") -> re.Pattern:
    """Matches the special tokens, the longest first."""
    names = [name for name in tokenizer.get_added_vocab() if len(name.strip()) > 1]
    names.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def plain_parts(text: str, tokenizer: "Tokenizer") -> list[str]:
    """A text in parts that have no special token, for a search result may have an <|im_end|>: each is cut in two."""
    cuts = [sum(match.span()) // 2 for match in _added_tokens(tokenizer).finditer(text)]
    starts = [0, *cuts]
    ends = [*cuts, len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def ids_of(segments: Sequence[str], tokenizer: "Tokenizer") -> list[int]:
    """The tokens of texts that are tokenized one by one."""
    token_ids = []
    for segment in segments:
        if segment:
            token_ids += tokenizer(segment, add_special_tokens=False)["input_ids"]
    return token_ids


def find_separators(
    tokenizer: "Tokenizer", role: str, eos_ids: Sequence[int], schemas: Sequence[dict[str, Any]] = ()
) -> tuple[str, str | None, str]:
    """Environment's first, between and last for a tokenizer's chat template. A probe conversation must come to the same
    tokens as its turns put together; else UserError with the reason."""
    render = functools.partial(render_turns, tokenizer, schemas)
    first, last = separators_around(TURN, role, tokenizer, render)
    separators_around(THINKING_TURN, role, tokenizer, render)
    between = None
    with contextlib.suppress(Exception):  # whatever a template raises that takes one answer to a turn only
        start = render([]) + TURN + first + ANSWER
        end = SECOND_ANSWER + last
        both = render([("assistant", TURN), (role, ANSWER), (role, SECOND_ANSWER)])
        if len(both) >= len(start + end) and both.startswith(start) and both.endswith(end):
            between = both[len(start) : len(both) - len(end)]
    ends_turn = first != "" and ids_of([first], tokenizer)[0] in eos_ids
    need_template(ends_turn, "writes no end token after an assistant's turn, at which the engine stops")
    return first, between, last


def separators_around(turn: str, role: str, tokenizer: "Tokenizer", render: Any) -> tuple[str, str]:
    """What the template writes before and after an answer to a turn. Raises UserError unless two turns with answers are
    what they are one by one, in text and in tokens."""
    conversation = [("assistant", turn), (role, ANSWER)]
    start = render([])
    try:
        once = render(conversation)
        twice = render(conversation * 2)
    except Exception as error:  # whatever a template raises
        need_template(False, f"takes no message of role {role!r} after an assistant's ({error})")
        raise
    need_template(turn in once, "drops or rewrites the thoughts of earlier turns")
    begins_alike = once.startswith(start + turn)
    opens = "begins an assistant's turn otherwise than it is written later: it opens a <think>, for instance"
    need_template(begins_alike, opens)
    first, found, last = once[len(start + turn) :].partition(ANSWER)
    need_template(found != "", f"rewrites what role {role!r} says")
    answer = first + ANSWER + last
    segments = [start, turn, answer, turn, answer]
    is_whole = twice == "".join(segments)
    need_template(is_whole, "writes a turn otherwise once others follow: it drops thoughts, for instance")
    same_tokens = ids_of([twice], tokenizer) == ids_of(segments, tokenizer)
    need_template(same_tokens, "joins tokens across the ends of turns")
    return first, last


def render_turns(tokenizer: "Tokenizer", schemas: Sequence[dict[str, Any]], turns: Sequence[tuple[str, str]]) -> str:
    """A conversation that begins with QUESTION and has these turns (role, content), up to the policy's next one."""
    messages = [{"role": role, "content": content} for role, content in (("user", QUESTION), *turns)]
    options: dict[str, Any] = {"tools": list(schemas)} if schemas else {}
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))


def need_template(condition: bool, reason: str) -> None:
    """Raises UserError with what is wrong with the chat template."""
    fix = 'take another --chat_template_name, or an environment whose about() gives another role (user, tool, "")'
    need(condition, f"the chat template {reason}, so turns cannot follow one another token by token: {fix}")


def load_environment(args: utils.Flags, tokenizer: "Tokenizer | None") -> Environment:
    """The environment of --env_file or --tools, in the tokenizer's chat template if one is given. Raises UserError."""
    worker.set_limit(resource.RLIMIT_NOFILE, 2**16)  # a worker takes two
    worker.OF_ENVIRONMENTS.most = args.pool_size or max(8, 2 * len(utils.ALL_CORES))
    if args.tools:
        flag = "--tools"
        path = os.path.abspath(utils.REPO / "scripts" / "tools" / "calls.py")
        config = tools_config(args)
    else:
        flag = "--env_file"
        path = os.path.abspath(args.env_file)
        config = {}
    about = environments.about(flag, path, config)
    role = about.get("role", "user")
    stop = tuple(about.get("stop", ()))
    schemas = about.get("schemas", {})
    environment = Environment(path, config, role, stop, schemas, resets=about["resets"])
    if tokenizer is None:
        return environment
    return environment.with_separators(tokenizer, utils.eos_token_ids(args, tokenizer))


def tools_config(args: utils.Flags) -> dict[str, Any]:
    """The config of scripts/tools/calls.py, the environment of --tools."""
    try:
        tool_configs = [json.loads(text) for text in args.tool_configs]
    except ValueError as error:
        raise UserError(f"--tool_configs {args.tool_configs}: not JSON: {error}") from None
    return {
        "tools": args.tools,
        "tool_call_names": args.tool_call_names,
        "tool_parser_type": args.tool_parser_type,
        "tool_configs": tool_configs,
        "tokenizer": utils.start_dir(args),
        "seconds": args.env_timeout,
    }


# --- Turns that start together: grpo_fast.py with --deterministic -----------------------------------------------------


class Rounds:
    """A batch decides about the bits of its tokens, so it must not depend on when an answer comes. Requests that an
    engine got in one message are a round: when all of them have ended and been answered, their next turns start in one
    message."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[str]] = {}  # of each request that is not over, the names of its round
        self.answered: dict[str, Any] = {}

    def start(self, names: list[str]) -> None:
        """A message with these requests goes to an engine."""
        self.rounds |= dict.fromkeys(names, names)

    def answer(self, name: str, request: Any) -> list[tuple[str, Any]]:
        """A request has been answered, and `request` is its next turn (None: it is over). Returns (name, next turn) of
        the whole round, in the order of its message, if this was the last answer, else nothing."""
        self.answered[name] = request
        members = self.rounds[name]
        if not all(member in self.answered for member in members):
            return []
        next_turns = []
        for member in members:
            del self.rounds[member]
            turn = self.answered.pop(member)
            if turn is not None:
                next_turns.append((member, turn))
        return next_turns


# --- Metrics of turns -------------------------------------------------------------------------------------------------

Calls = dict[tuple[str, str], float]  # (tool, "calls", "failures" or "seconds") -> number
COUNTED: dict[str, set[str]] = defaultdict(set)  # environment -> numbers of its own that this process has seen
CUT = "val/answers_cut"
TOLD: set[str] = set()  # warnings that have been printed


def note(rollouts: Sequence[utils.Rollout], metrics: utils.Metrics) -> None:
    """Add the metrics of those rollouts that have turns."""
    rollouts = [r for r in rollouts if r.turns]
    tools: set[str] = set()
    calls: Calls = defaultdict(float)
    lengths = []
    for r in rollouts:
        if r.prompt.environment is not None:
            tools |= r.prompt.environment.schemas.keys()
        note_tokens(r, metrics)
        note_environment(r, metrics)
        for turn in r.turns:
            count_calls(turn, calls)
        lengths.append(sum(turn["role"] == "assistant" for turn in r.turns))
    note_numbers(rollouts, metrics)
    metrics.add_all("val/turns", lengths)

    tools |= {tool for tool, _ in calls}
    for tool in sorted(tools):
        number = calls[tool, "calls"]
        metrics.add(f"tools/{tool}/avg_calls_per_rollout", number, len(rollouts))
        metrics.add(f"tools/{tool}/failure_rate", calls[tool, "failures"], number)
        metrics.add(f"tools/{tool}/avg_runtime", calls[tool, "seconds"], number)


def note_tokens(r: utils.Rollout, metrics: utils.Metrics) -> None:
    """Who made a rollout's tokens, and which share of each request the engine found in its prefix cache."""
    sampled = int(r.mask.sum())
    metrics.add("val/policy_tokens", sampled)
    metrics.add("val/environment_tokens", len(r.mask) - sampled)
    length = len(r.prompt.token_ids)  # of the request for the next turn
    for turn in r.turns:
        if turn["role"] == "assistant":
            metrics.add("val/prefix_cached_share", turn["cached"], length)
        length += turn["tokens"]


def note_environment(r: utils.Rollout, metrics: utils.Metrics) -> None:
    """A rollout's reward from its environment, the environment's failures, and which of its answers were cut."""
    name = environment_of(r)
    answers = [turn for turn in r.turns if turn["role"] != "assistant"]
    metrics.add(f"env/{name}/reward", sum(turn["reward"] for turn in answers))
    for status in MISSING:
        failures = sum(turn["status"] == status for turn in answers)
        metrics.add(f"env/{name}/{status}_rate", failures, len(answers))
    cut = sum(f"{environments.CUT_MARK}\n" in turn["content"] + "\n" for turn in answers)
    metrics.add(CUT, cut, len(answers))
    if cut and CUT not in TOLD and os.environ.get("RANK", "0") == "0":
        TOLD.add(CUT)
        fix = "raise --response_length, which counts answers too, or lower --max_steps"
        print(f"WARNING: an answer of {name} did not fit and was cut ({CUT} counts them): {fix}", flush=True)


def note_numbers(rollouts: Sequence[utils.Rollout], metrics: utils.Metrics) -> None:
    """The last value in each rollout of the numbers that its environment counts: 0 where it gave none, once any rollout
    has given one. Else a number that only failures have, and which is then 1, would be 1 on average."""
    found = []
    for r in rollouts:
        numbers: dict[str, float] = {}
        for turn in r.turns:
            for key, value in turn.get("metrics", {}).items():
                if not key.startswith("tools/"):
                    numbers[key] = value
        COUNTED[environment_of(r)] |= numbers.keys()
        found.append(numbers)
    for r, numbers in zip(rollouts, found, strict=True):
        name = environment_of(r)
        for key in sorted(COUNTED[name]):
            metrics.add(f"env/{name}/{key}", numbers.get(key, 0.0))


def environment_of(r: utils.Rollout) -> str:
    """The name of a rollout's environment: that of its file."""
    environment = r.prompt.environment
    return "environment" if environment is None else Path(environment.path).stem


def count_calls(turn: dict[str, Any], calls: Calls) -> None:
    """Add a turn's `tools/TOOL/calls`, `/failures` and `/seconds` to those of its tool and of all tools."""
    for key, value in turn.get("metrics", {}).items():
        if key.count("/") == 2 and key.startswith("tools/"):
            _, tool, quantity = key.split("/")
            calls[tool, quantity] += value
            calls["aggregate", quantity] += value
