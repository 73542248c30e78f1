"""An environment of tools: it reads the calls in a turn, runs them in order, and answers with their results.

A tool is a file with SCHEMA, a function's schema as OpenAI has it, and `call(config, **arguments) -> str`. An exception
becomes the answer "Error: ..." and counts as a failure. An OSError (ConnectionError, TimeoutError, ...) is a failure of
infrastructure instead, and makes the sample missing.

Parsers are vLLM's (hermes, olmo3, llama3_json, ...; open-instruct writes vllm_ before the name) and `legacy`,
open-instruct's plain tags: <search>text</search> gives text to the tool's first required argument. Parsers read only
the text after the last </think>.
"""

import contextlib
import functools
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import rewards
from scripts.parts import user_files

MAX_CALLS = 8  # of a turn; the others are refused
MAX_CHARACTERS = 8192  # of the answer to a call: its two ends are kept
TIMEOUT_S = 30.0  # of a call
PARSER_S = 5.0  # of a turn: some of vLLM's patterns take minutes for a long text whose tags are never closed
SHARE_OF_CALLS = 0.9  # of the time of a turn: the environment must answer before it is ended from outside
LEAST_S = 0.1  # of a call, however little the others have left
# Where a call begins in the forms of vLLM's parsers, which take one that is not well-formed for plain text
OPENERS = "<tool_call <function <|python_tag|> [TOOL_CALLS] <|tool_call <start_function <｜tool▁call".split()
VARIABLE = re.compile(r"((?:\w+ )?)\$([A-Za-z_]\w*)")  # `$NAME`, `Bearer $NAME`
ROLES = {"olmo3": "environment"}  # of answers, where a family's chat template has another than tool


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class ToolTimeout(Exception):
    pass


# --- Parsers ----------------------------------------------------------------------------------------------------------


@functools.cache
def vllm_parser(parser_type: str, tokenizer: str, schemas: str) -> tuple[Any, Any]:
    """(vLLM's parser of that name, the request that it asks for). Its imports take 10 s of a CPU and 0.6 GiB.

    tokenizer: a path. schemas: JSON. Raises ValueError for a name that vLLM lacks, or a tokenizer without the
    tokens that the parser needs.
    """
    import transformers
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a call that a parser cannot read is told to the policy
    names = ToolParserManager.list_registered()
    if parser_type not in names:
        raise ValueError(f"--tool_parser_type {parser_type} is not known; there are legacy, {', '.join(names)}")
    request = ChatCompletionRequest(model="policy", messages=[], tools=json.loads(schemas))
    try:
        parser = ToolParserManager.get_tool_parser(parser_type)(
            transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False), request.tools
        )
    except Exception as error:  # each has its own
        raise ValueError(f"--tool_parser_type {parser_type} does not fit the tokenizer {tokenizer}: {error}") from None
    return parser, request


def tagged_calls(text: str, schemas: list[dict]) -> tuple[list[Call], str | None]:
    """The calls <name>text</name>, one after the other; text is the tool's first required argument, else its first."""
    calls: list[Call] = []
    if not schemas:
        return calls, None
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    opening = re.compile(f"<({'|'.join(map(re.escape, functions))})>")
    match = opening.search(text)
    while match:
        name = match[1]
        closing = f"</{name}>"
        end = text.find(closing, match.end())
        if end < 0:
            return calls, f"<{name}> is never closed"
        parameters = functions[name].get("parameters", {})
        arguments = parameters.get("required") or parameters.get("properties") or ["text"]
        calls.append(Call(name, {next(iter(arguments)): text[match.end() : end]}))
        match = opening.search(text, end + len(closing))
    return calls, None


def parse_calls(
    text: str, parser_type: str, tokenizer: str | None, schemas: list[dict]
) -> tuple[list[Call], str | None]:
    """(the calls of a turn in order, what is wrong with one that cannot be read, or None).

    text: as sampled, special tokens included, without the end of turn. Neither a call nor a problem: plain text. vLLM's
    parsers drop all calls of a turn in which one is broken. Raises ValueError as vllm_parser does.
    """
    text = rewards.final_text(text)
    if parser_type == "legacy":
        return tagged_calls(text, schemas)
    parser, request = vllm_parser(parser_type.removeprefix("vllm_"), str(tokenizer), json.dumps(schemas))
    try:
        with deadline(PARSER_S):
            found = parser.extract_tool_calls(text, request).tool_calls
    except Exception as error:  # a parser's bug on such a text
        return [], f"{type(error).__name__}: {error}"[:200]
    calls = []
    for call in found:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except ValueError as error:
            return calls, f"the arguments of {call.function.name} are not JSON: {error}"
        if not isinstance(arguments, dict):
            return calls, f"the arguments of {call.function.name} are not an object"
        calls.append(Call(call.function.name, arguments))
    if not calls and any(opener in text for opener in OPENERS):
        return [], "it is not well-formed"
    return calls, None


# --- Tools ------------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    module: types.ModuleType
    config: dict[str, Any]
    schema: dict[str, Any]


@functools.cache
def load_file(tool: str) -> types.ModuleType:
    """The module of a tool: a name in scripts/tools, or a path. Raises ValueError for a file that is no tool."""
    path = Path(tool) if tool.endswith(".py") else Path(__file__).parent / f"{tool}.py"
    if not path.is_file():
        files = sorted(Path(__file__).parent.glob("*.py"))
        known = [file.stem for file in files if "\nSCHEMA" in file.read_text("utf-8")]
        raise ValueError(f"--tools {tool}: no file {path}; there are {', '.join(known)}, or give a path")
    try:
        module = user_files.load_file(str(path), f"tool_{path.stem}")
        schema = module.SCHEMA["function"]
        if not isinstance(schema["name"], str) or not callable(module.call):
            raise TypeError("its name is no text, or call is no function")
    except Exception as error:
        raise ValueError(f"--tools {tool}: {type(error).__name__}: {error}") from error
    return module


def load_tools(
    tools: list[str], names: list[str] | None = None, configs: list[dict] | None = None
) -> dict[str, Loaded]:
    """call name -> tool, with its config and its schema under that name. Raises ValueError."""
    for flag, values in (("tool_call_names", names), ("tool_configs", configs)):
        if values and len(values) != len(tools):
            raise ValueError(f"--{flag} has {len(values)} values and --tools {len(tools)}: give one for each, or none")
    loaded: dict[str, Loaded] = {}
    for number, tool in enumerate(tools):
        module = load_file(tool)
        name = names[number] if names else module.SCHEMA["function"]["name"]
        if name in loaded:
            raise ValueError(f"--tools: two have the name {name}; --tool_call_names gives others")
        schema = {"type": "function", "function": {**module.SCHEMA["function"], "name": name}}
        config = from_environment(configs[number]) if configs else {}
        loaded[name] = Loaded(module, config, schema)
    return loaded


def from_environment(value: Any) -> Any:
    """A tool's config with the values of its `$NAME`. Raises ValueError for one that is not set."""
    if isinstance(value, dict):
        return {key: from_environment(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [from_environment(entry) for entry in value]
    found = VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    before, variable = found.groups()
    if variable not in os.environ:
        raise ValueError(f"{value} in --tool_configs is not set: export {variable}")
    return before + os.environ[variable]


def check(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas of all tools. Raises ValueError, at start, for a config with which calls cannot work.

    config: tools, tool_call_names, tool_configs, tool_parser_type as the flags of these names; tokenizer; seconds, the
    time of a turn's calls together."""
    tools = load_tools(config["tools"], config.get("tool_call_names"), config.get("tool_configs"))
    for name, (module, settings, _) in tools.items():
        try:
            getattr(module, "check", lambda _: None)(settings)
        except Exception as error:
            raise ValueError(f"--tools {name}: {type(error).__name__}: {error}") from error
    schemas = [tool.schema for tool in tools.values()]
    parse_calls("", config["tool_parser_type"], config.get("tokenizer"), schemas)
    return schemas


def about(config: dict[str, Any]) -> dict[str, Any]:
    """For the trainer, at start: the role of answers in the chat, texts that end a turn, schemas by name."""
    parser = config["tool_parser_type"].removeprefix("vllm_")
    schemas = {schema["function"]["name"]: schema for schema in check(config)}
    stop = [f"</{name}>" for name in schemas] if parser == "legacy" else []
    return {"role": ROLES.get(parser, "tool"), "stop": stop, "schemas": schemas}


def prepare(config: dict[str, Any]) -> None:
    """Do once what takes long: vLLM's imports, an index, a sandbox. A worker does it before an answer's time starts."""
    check_once(json.dumps({name: value for name, value in config.items() if name.startswith(("tool", "tokenizer"))}))


@functools.cache
def check_once(config: str) -> None:
    check(json.loads(config))


@contextlib.contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Raises ToolTimeout in a block that takes longer; a call into C that never returns is not interrupted by it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise ToolTimeout(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def bounded(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text without what no tokenizer takes, and only its two ends where it is longer than limit characters."""
    dropped = len(text) - limit
    if dropped > 0:
        text = f"{text[: limit // 2]}\n[{dropped} characters left out]\n{text[len(text) - limit // 2 :]}"
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def run(call: Call, tools: dict[str, Loaded], end: float) -> tuple[str, bool]:
    """(the answer to a call, whether the call failed). end: of the turn's time. Raises OSError where infrastructure
    failed."""
    if call.name not in tools:
        return f"Error: there is no tool {call.name[:40]!r}; there are {', '.join(tools)}", True
    module, config, _ = tools[call.name]
    seconds = min(float(config.get("deadline", TIMEOUT_S)), end - time.monotonic())
    seconds = max(seconds, LEAST_S)
    try:
        with deadline(seconds):
            answer = module.call(config | {"deadline": seconds}, **call.arguments)
        if not isinstance(answer, str):
            raise TypeError(f"the tool returned {type(answer).__name__} and no text")
    except (OSError, ImportError):  # not the policy's fault
        raise
    except Exception as error:
        return f"Error: {str(error) or type(error).__name__}", True
    return answer, False


def step(episode: rewards.Episode) -> rewards.Answer | None:
    """The tools' answers to a turn, a message for each call; None for a turn without a call.

    Metrics are tools/NAME/calls, failures and seconds. NAME is `invalid` for calls that cannot be read, calls of
    unknown tools, and calls beyond MAX_CALLS.
    """
    config = episode.config
    end = time.monotonic() + SHARE_OF_CALLS * config.get("seconds", math.inf)
    tools = load_tools(config["tools"], config.get("tool_call_names"), config.get("tool_configs"))
    active = config.get("active_tools", tools)
    tools = {name: tool for name, tool in tools.items() if name in active}
    schemas = [tool.schema for tool in tools.values()]
    calls, problem = parse_calls(episode.text, config["tool_parser_type"], config.get("tokenizer"), schemas)
    if not calls and problem is None:
        return None

    answers: list[str] = []
    metrics: dict[str, float] = {}
    for call in calls[:MAX_CALLS]:
        start = time.monotonic()
        answer, failed = run(call, tools, end)
        answers.append(bounded(answer))
        name = call.name if call.name in tools else "invalid"
        count_calls(metrics, name, failed, time.monotonic() - start)
    left_out = len(calls) - MAX_CALLS
    if left_out > 0:
        answers.append(f"Error: a turn may have {MAX_CALLS} calls; the other {left_out} were not run")
        count_calls(metrics, "invalid", True, calls=left_out)
    if problem is not None:
        answers.append(f"Error: a call cannot be read: {bounded(problem, 200)}")
        count_calls(metrics, "invalid", True)
    return rewards.Answer(answers, metrics=metrics)


def count_calls(metrics: dict[str, float], name: str, failed: bool, seconds: float = 0.0, calls: int = 1) -> None:
    """Add calls of a tool to the metrics."""
    counts = {"calls": calls, "failures": calls * failed, "seconds": seconds}
    for key, value in counts.items():
        metric = f"tools/{name}/{key}"
        metrics[metric] = metrics.get(metric, 0.0) + value
