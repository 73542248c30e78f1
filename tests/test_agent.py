"""An agent as environment: what its requests get, and which are refused. Runs: tests/runs/test_rollouts_of_turns.py."""

import json
import time
import types
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from rewards import Episode
from scripts.parts import agent, environments, guards

ROW = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 6?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def rollout():
    """Function (agent): a function from a turn of the policy to the environment's answer to it."""
    made = []

    def start(call, tools=()) -> Any:
        module: Any = types.ModuleType("mine")
        module.agent = call
        module.TOOLS = list(tools)
        agent.give_env(module)
        env = module.Env({})
        made.append(env)
        said = list(ROW)

        def turn(text):
            said.append({"role": "assistant", "content": text})
            answer = env.step(Episode(list(said), text, len(said), 9, True, ["8"], {}))
            texts = [answer.text] if isinstance(answer.text, str) else answer.text
            said.extend({"role": "user", "content": text} for text in texts)
            return answer

        turn.env = env  # ty: ignore[missing-attribute]
        return turn

    yield start
    for env in made:
        env.close()


def ask(base_url, messages, **options):
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=30.0, max_retries=0)
    return client.chat.completions.create(model="policy", messages=messages, **options).choices[0]


def test_requests_are_turns_and_what_the_agent_returns_is_the_reward(rollout):
    seen = []

    def mine(base_url, row):
        messages = list(row.messages)
        for words in ("more", [{"type": "text", "text": "and "}, {"type": "text", "text": "more"}]):
            said = ask(base_url, messages)
            seen.append((said.message.content, said.finish_reason))
            messages += [said.message, {"role": "user", "content": words}]
        seen.append(ask(base_url, messages).message.content)
        return 0.25

    turn = rollout(mine)
    assert turn(" one ").text == ["more"]
    assert turn("two").text == ["and more"]
    last = turn("three")
    assert last.done and last.reward == 0.25
    assert seen == [(" one ", "stop"), ("two", "stop"), "three"]


def test_tool_calls_of_the_policy_are_the_client_s(rollout):
    """Two calls get two answers; one that cannot be read stays text."""
    seen = []

    async def mine(base_url, row):
        messages = list(row.messages)
        said = ask(base_url, messages, tools=[TOOL])
        seen.append((said.finish_reason, said.message.content))
        messages.append(said.message)
        for call in said.message.tool_calls:
            result = str(sum(json.loads(call.function.arguments)["of"]))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        seen.append(ask(base_url, messages).message.content)

    turn = rollout(mine, [TOOL])
    call = '<tool_call>{"name": "add", "arguments": {"of": [2, 6]}}</tool_call>'
    assert turn(f"I add.\n{call}\n{call.replace('6', '7')}").text == ["8", "9"]
    last = turn("<tool_call>{nothing</tool_call>")
    assert last.done and last.reward == 0.0
    assert seen == [("tool_calls", "I add."), "<tool_call>{nothing</tool_call>"]


CHANGES = {
    "another system prompt": (0, lambda said: [{"role": "system", "content": "Be long."}, *ROW[1:]]),
    "more than the row in the first request": (0, lambda said: [*ROW, {"role": "user", "content": "quickly"}]),
    "a turn left out": (1, lambda said: [*ROW, {"role": "user", "content": "more"}]),
    "a turn edited": (1, lambda said: [*ROW, said | {"content": "no"}, {"role": "user", "content": "more"}]),
    "nothing new": (1, lambda said: [*ROW, said]),
    "another role": (1, lambda said: [*ROW, said, {"role": "system", "content": "more"}]),
    "an image": (1, lambda said: [*ROW, said, {"role": "user", "content": [{"type": "image_url"}]}]),
    "no messages": (1, lambda said: None),
    "a stream": (0, lambda said: ROW, {"stream": True}),
    "several choices": (0, lambda said: ROW, {"n": 2}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_no_next_turn_is_refused(rollout, name):
    """The score of an agent that does not catch it is missing: the environment raises an OSError."""
    after, messages, *options = CHANGES[name]

    def mine(base_url, row):
        if after:
            ask(base_url, row.messages)
        ask(base_url, messages({"role": "assistant", "content": "8"}), **dict(*options))

    turn = rollout(mine)
    with pytest.raises(OSError, match="BadRequestError"):
        turn("8")


def test_nobody_asks_without_the_address_and_nobody_waits_for_a_rollout_that_is_over(rollout):
    addresses, ends = [], []

    def mine(base_url, row):
        addresses.append(base_url)
        messages = [*row.messages, ask(base_url, row.messages).message, {"role": "user", "content": "more"}]
        try:
            ask(base_url, messages)
        except openai.OpenAIError as error:
            ends.append(error)

    turn = rollout(mine)
    turn("8")
    host = addresses[0].partition("/v1")[0].rpartition("/")[0]
    for path in ("/v1/chat/completions", "/x/v1/chat/completions"):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(host + path, data=b"{}", timeout=30.0)
    turn.env.close()  # at a limit
    while not ends:
        time.sleep(0.01)


def test_an_agent_that_fails_makes_the_score_missing(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def agent(base_url, row):\n    raise KeyError('mine')\n")
    episode = {"messages": [*ROW, {"role": "assistant", "content": "8"}], "text": "8", "turn": 1, "steps_left": 1}
    episode |= {"stopped": True, "ground_truths": ["8"], "config": {}}
    answer = environments.ask(str(tmp_path / "mine.py"), "", episode, 30.0)
    assert "KeyError" in capsys.readouterr().err
    assert answer["status"] == "infra_error" and answer["done"]
    assert "KeyError: 'mine' (mine.py, line 2)" in guards.words_of("environment mine")
    environments.close_live(answer["state"], 30.0)
