"""An agent with a tool, written against OpenAI's client: it knows of no training.

    python grpo.py --env_file scripts/train/debug/agent.py ...    # rows {"prompt": "...<calc>2 * 3</calc>...", ...}

What it returns is added to the score. tests/runs/test_agent.py holds it against the same task as an environment.
"""

import re

import openai

from scripts.tools import calculator


def agent(base_url: str, row) -> float:
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=None)
    messages = list(row.messages)
    while True:
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        call = re.search(r"<calc>(.*?)</calc>", said.content or "")
        if call is None:
            return 0.5
        try:
            result = calculator.call({}, call[1])
        except (ValueError, ArithmeticError, SyntaxError) as error:
            result = str(error)
        messages.append({"role": "assistant", "content": said.content})
        messages.append({"role": "user", "content": result})
