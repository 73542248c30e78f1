"""Tools and the calls of them: each parser on turns as models write them, each tool, and hostile turns and answers."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import rewards
from scripts.tools import calculator, calls, search
from tests.conftest import REPO
from tests.hub import Server

SCHEMAS = [calculator.SCHEMA, search.SCHEMA]
SUM, QUERY = calls.Call("calculator", {"expression": "12 * 34"}), calls.Call("search", {"query": "Paris"})
UNREADABLE = "<unreadable>"
JSON_SUM = '{"name": "calculator", "arguments": {"expression": "12 * 34"}}'
JSON_QUERY = '{"name": "search", "arguments": {"query": "Paris"}}'
QWEN = "<tool_call>\n<function=calculator>\n<parameter=expression>\n12 * 34\n</parameter>\n</function>\n</tool_call>"
# parser -> turns, each with the calls in it; UNREADABLE: none, and a problem
TURNS = {
    "legacy": [
        ("First <calculator>12 * 34</calculator> then\n<search>Paris</search>.", [SUM, QUERY]),
        ("<think>maybe <search>London</search></think><calculator>12 * 34</calculator>", [SUM]),
        ("<other>12</other> 408", []),
        ("<calculator>12 * 34", UNREADABLE),
    ],
    "vllm_hermes": [(f"<tool_call>\n{JSON_SUM}\n</tool_call>", [SUM])],  # open-instruct's name
    "hermes": [
        (f"Well.\n<tool_call>\n{JSON_SUM}\n</tool_call>\n<tool_call>\n{JSON_QUERY}\n</tool_call>", [SUM, QUERY]),
        ("408", []),
        (f"<tool_call>\n{JSON_SUM[:-1]}\n</tool_call>", UNREADABLE),
        ('<tool_call>\n{"name": "calculator", "arguments": "12 * 34"}\n</tool_call>', UNREADABLE),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', UNREADABLE),
        ("<tool_call></tool_call>", UNREADABLE),
    ],
    "olmo3": [
        (
            "<function_calls>\ncalculator(expression='12 * 34')\nsearch(query=\"Paris\")\n</function_calls>",
            [SUM, QUERY],
        ),
        ("408", []),
        ("<function_calls>\ncalculator(expression=\n</function_calls>", UNREADABLE),
    ],
    "pythonic": [('[calculator(expression="12 * 34"), search(query="Paris")]', [SUM, QUERY]), ("408", [])],
    "qwen3_coder": [(QWEN, [SUM]), ("408", [])],
}
CASES = [
    pytest.param(parser, *turn, id=f"{parser}-{i}") for parser, turns in TURNS.items() for i, turn in enumerate(turns)
]


@pytest.fixture(scope="module")
def tokenizer(tiny_models) -> Path:
    """Directory of a tokenizer; parsers look for the tokens that their models write."""
    return tiny_models()


@pytest.mark.parametrize("parser, text, wanted", CASES)
def test_parsers_read_what_models_write(parser, text, wanted, tokenizer):
    found, problem = calls.parse_calls(text, parser, str(tokenizer), SCHEMAS)
    assert (problem is not None) == (wanted == UNREADABLE), problem
    assert found == ([] if wanted == UNREADABLE else wanted)


@pytest.mark.parametrize(
    "parser, needle", [("hermez", "there are legacy, "), ("llama3_json", "does not fit the tokenizer")]
)
def test_parsers_that_cannot_work_are_refused_at_start(parser, needle, tokenizer):
    config = {"tools": ["calculator"], "tool_parser_type": parser, "tokenizer": str(tokenizer)}
    with pytest.raises(ValueError, match=needle):
        calls.check(config)


def environment(*tools: str, **config) -> dict:
    return {"tools": list(tools), "tool_parser_type": "legacy", **config}


def step(env: dict, text: str, **config) -> tuple[str, dict[str, float]] | None:
    """(what is said to a turn, counts), or None where the episode is over."""
    answer = calls.step(rewards.Episode([], text, 1, 1, True, [], env | config))
    return None if answer is None else ("\n".join(answer.text), answer.metrics)


def said(env: dict, text: str) -> str:
    answer = step(env, text)
    assert answer is not None
    return answer[0]


HOSTILE = [
    "<tool_call>" * 4000,
    '<tool_call>{"name": "calculator", "arguments": {"expression": "' + "(" * 20000,
    "<tool_call>" + "[" * 50000 + "</tool_call>",
    "<function_calls>\n" + "a(" * 3000 + "\n</function_calls>",
    "<function_calls>\n" + "a(b=1,\n" * 300 + "</function_calls>",
    "<calculator>" * 4000 + "</search>" * 4000,
    "{" * 20000,
    "\x00\ud800<|im_end|><|im_start|>user\n",
]


@pytest.mark.parametrize("parser", TURNS)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_parsers_come_back_from_hostile_turns(parser, text, tokenizer):
    """None of these is a call that can be run: no exception leaves."""
    found, problem = calls.parse_calls(text, parser, str(tokenizer), SCHEMAS)
    assert all(call.name == "a" or isinstance(call.arguments, dict) for call in found)
    env = environment("calculator", tool_parser_type=parser, tokenizer=str(tokenizer))
    answer = step(env, text)
    assert answer is None or (len(answer[0]) < 12000 and "Error" in answer[0])


EXPRESSIONS = {
    "127 * 344": "43688",
    "(1 + 2) * -3": "-9",
    "1,234 × 2": "2468",
    "1 / 3": "0.3333333333",
    "2^10": "1024",
    "999 ** 40": str(999**40),
}
NOT_ARITHMETIC = [
    "", "1 +", "1 / 0", "9 ** 9 ** 9", "2 ** 0.5", "1e9999 * 1", "__import__('os')", "x", "'a' * 9", "(" * 200,
    "1 if 1 else 2", "True + 1", "[1]", "1 * " * 400 + "1", "f(1)", "1 < 2", "0 ** -1", "1e400", "nan", "~1",
]  # fmt: skip


def test_calculator():
    assert {expression: calculator.call({}, expression) for expression in EXPRESSIONS} == EXPRESSIONS


@pytest.mark.parametrize("expression", NOT_ARITHMETIC)
def test_calculator_refuses_what_is_no_arithmetic(expression):
    with pytest.raises(ValueError):
        calculator.call({}, expression)


def test_python_says_what_is_printed_and_the_last_value():
    env = environment("python")
    assert said(env, "<python>x = 2\nprint('once')\nx + 1</python>") == "once\n3"
    assert said(env, "<python>x</python>").endswith("NameError: name 'x' is not defined")
    assert said(env, "<python>1 +</python>").endswith("SyntaxError: invalid syntax")
    assert 'File "program.py", line 2' in said(env, "<python>def f():\n 1 / 0\nf()</python>")
    assert said(env, "<python>for i in range(3): i</python>") == said(env, "<python></python>") == "(no output)"


def test_a_call_that_is_cut_off_leaves_no_reply_for_the_next():
    """A program that outlasts its call's deadline: each later call gets its own answer, not the one before."""
    env = environment("python", tool_configs=[{"timeout": 60, "deadline": 3}])
    assert "no answer within 3 s" in said(env, "<python>import time; time.sleep(3.5)</python>")
    time.sleep(1.0)
    answers = [said(env, f"<python>print({number})</python>") for number in range(3)]
    assert answers == ["0", "1", "2"]


def test_a_parser_that_takes_too_long_is_ended(monkeypatch):
    """Some of vLLM's need minutes for a long text of tags that are never closed; the environment's deadline then ended
    the worker with all its imports."""

    def extract(text, request):
        return re.match(r"(a+)+$", text)  # takes time exponential in the length

    monkeypatch.setattr(calls, "PARSER_S", 0.2)
    monkeypatch.setattr(calls, "vllm_parser", lambda *_: (SimpleNamespace(extract_tool_calls=extract), None))
    found, problem = calls.parse_calls("a" * 50 + "b", "vllm_glm45", None, [])
    assert found == [] and problem == "ToolTimeout: no answer within 0.2 s"


@pytest.mark.parametrize(
    "program, needle",
    [
        ("while True: pass", "time limit"),
        ("import time; time.sleep(99)", "time limit"),
        ("import os; os.fork()", "Error"),
        ("open('/etc/passwd').read()", "Error"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("import os; os.kill(os.getppid(), 9)", "Error"),
        ("print('a' * 10**6)", "characters left out"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_python_is_bounded(program, needle):
    env = environment("python", tool_configs=[{"timeout": 1 if needle == "time limit" else 2}])
    text, counts = step(env, f"<python>{program}</python>")
    assert needle in text and len(text) < 9000
    assert counts["tools/python/failures"] == (needle != "characters left out")
    assert said(env, "<python>print(1)</python>") == "1"


class Retriever(Server):
    """Gives the (status, body) of `replies` in turn, the last for ever, and keeps the requests."""

    def __init__(self):
        self.replies, self.requests = [], []
        super().__init__()

    def answer(self, command, path, body, headers):
        self.requests.append(json.loads(body))
        status, text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return status, {}, text.encode()


@pytest.fixture
def retriever(monkeypatch):
    """(url, replies, requests) of a Retriever."""
    for module in (search, calls.load_file("search")):
        monkeypatch.setattr(module, "DELAY_S", 0.02)
    server = Retriever()
    yield f"{server.url}/retrieve", server.replies, server.requests
    server.server.shutdown()


FOUND = json.dumps({"result": [[{"document": {"contents": '"Paris"\nThe capital.'}, "score": 1.0}]]})


def test_search_by_a_server(retriever):
    url, replies, requests = retriever
    replies += [(500, "busy"), (200, "no JSON"), (200, FOUND)]
    assert search.call({"url": url, "top_k": 1}, "Paris") == 'Doc 1 (Title: "Paris"): The capital.'
    assert requests == [{"queries": ["Paris"], "topk": 1, "return_scores": True}] * 3
    replies[:] = [(200, json.dumps({"result": [[]]}))]
    assert search.call({"url": url}, "zebra") == "No results."
    for query in ("", " ", "a" * 1001):
        with pytest.raises(ValueError, match="characters"):
            search.call({"url": url}, query)
    with pytest.raises(ValueError, match="search needs"):
        search.check({"corpus": "x.jsonl"})


@pytest.mark.parametrize("reply", [(500, "{}"), (200, "{}"), (200, '{"result": []}'), (404, "")])
def test_a_server_that_is_broken_is_no_failure_of_the_policy(retriever, reply):
    url, replies, requests = retriever
    replies.append(reply)
    env = environment("search", tool_configs=[{"url": url, "retries": 1}])
    with pytest.raises(ConnectionError):
        step(env, "<search>Paris</search>")
    assert len(requests) == 2


TOOL = """
import time
SCHEMA = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "required": ["text"],
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}}
def call(config, text, count=1):
    if text == "raise":
        raise RuntimeError("on purpose")
    if text == "hang":
        time.sleep(60)
    if text == "spin":
        while True:
            pass
    return 1 if text == "number" else f"{text} {count}"
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(TOOL)
    return str(path)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("raise", "on purpose"),
        ("hang", "no answer within"),
        ("spin", "no answer within"),
        ("number", "int"),
    ],
)
def test_a_tool_that_fails(own, text, answer):
    env = environment(own, tool_configs=[{"deadline": 0.5}])
    found, counts = step(env, f"<own>{text}</own>")
    assert found.startswith("Error") and answer in found
    assert counts["tools/own/calls"] == counts["tools/own/failures"] == 1
    assert said(env, "<own>a</own>") == "a 1"


def test_calls_that_are_not_run(own, tokenizer):
    env = environment("calculator", own)
    text, counts = step(env, "<calculator>1 + 1</calculator>" * 100)
    assert text.splitlines() == ["2"] * 8 + ["Error: a turn may have 8 calls; the other 92 were not run"]
    assert counts["tools/calculator/calls"] == 8
    assert counts["tools/invalid/calls"] == counts["tools/invalid/failures"] == 92
    assert step(env, "<calculator>1</calculator>", active_tools=["own"]) is None  # a row without that tool
    env = environment("calculator", tool_parser_type="hermes", tokenizer=str(tokenizer))
    write = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'.format
    for call in (write("nothing", "{}"), write("calculator", '{"expression": 1}'), write("calculator", '{"x": 1}')):
        assert said(env, call).startswith("Error: ")


@pytest.mark.parametrize(
    "settings, needle",
    [
        ({"tools": ["nothing"]}, "there are calculator, "),
        ({"tools": ["calculator", "calculator"]}, "two have the name"),
        ({"tools": ["calculator"], "tool_call_names": ["a", "b"]}, "--tool_call_names has 2 values"),
        ({"tools": [str(REPO / "scripts/tools/calls.py")]}, "SCHEMA"),
    ],
)
def test_tools_that_cannot_work_are_refused_at_start(settings, needle):
    with pytest.raises(ValueError, match=needle):
        calls.check({"tool_parser_type": "legacy", **settings})
