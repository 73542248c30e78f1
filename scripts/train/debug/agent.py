"""An agent with a tool, written against OpenAI's client: it knows of no training.

    python scripts/data/make_products.py
    python grpo.py --env_file scripts/train/debug/agent.py --dataset_mixer_list data/products/train.jsonl 1.0 ...

It returns no reward of its own: the rows have a verifier.
"""

import re

import openai

from scripts.tools import calculator

TOOLS = [calculator.SCHEMA]


def agent(base_url: str, row) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=None)
    messages = list(row.messages)
    while True:
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        call = re.search(r"<calc>(.*?)</calc>", said.content or "")
        if call is None:
            return
        try:
            result = calculator.call({}, call[1])
        except (ValueError, ArithmeticError, SyntaxError) as error:
            result = str(error)
        messages.append({"role": "assistant", "content": said.content})
        messages.append({"role": "tool", "content": result, "tool_call_id": "calc"})
