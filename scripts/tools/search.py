"""The tool search: a retriever at a URL, with the protocol of Search-R1 (arXiv:2503.09516).

It gets {"queries": [text], "topk": 3, "return_scores": true} and gives {"result": [[{"document": {"contents": title,
newline, text}, "score": 1.2}, ...]]}. Config: url; top_k (3); max_characters of a document (1000); timeout (10) seconds
of a request; retries (3). All tries together take less than the time of a call. A server that cannot be reached, hangs,
or answers in another form, raises ConnectionError: a failure of infrastructure, unlike a query that finds nothing.
"""

import time

from scripts.parts import chat

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches documents and returns the best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "words to search for"}},
            "required": ["query"],
        },
    },
}
MAX_QUERY = 1000  # characters
MAX_REPLY = 8 * 2**20  # bytes
DELAY_S = 0.5  # before the second try
TIMEOUT_S = 10.0  # of a try
DEADLINE_S = 30.0  # of a call
SHARE = 0.9  # of the time of a call, for all tries


def found(config: dict, query: str) -> list[str]:
    """The contents of the documents, best first. Raises ConnectionError after retries + 1 tries, 0.5, 1, 2, ... seconds
    apart, or when the time of all tries is over: before that of the call, so that the policy never gets the blame."""
    content = {"queries": [query], "topk": int(config.get("top_k", 3)), "return_scores": True}
    end = time.monotonic() + SHARE * float(config.get("deadline", DEADLINE_S))
    delay = DELAY_S
    for attempt in range(int(config.get("retries", 3)) + 1):
        if attempt:
            time.sleep(delay)
            delay *= 2
        seconds = min(float(config.get("timeout", TIMEOUT_S)), end - time.monotonic())
        try:
            answer = chat.post(config["url"], content, seconds, MAX_REPLY)
            if answer.status_code != 200:
                raise ConnectionError(f"status {answer.status_code}")
            rows = answer.json()["result"][0]
            return [row.get("document", row)["contents"] for row in rows]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else f"no answer within {seconds:.3g} s"
        if time.monotonic() + delay >= end:
            break
    address = config["url"].rpartition("@")[2].partition("?")[0]
    raise ConnectionError(f"{address}: {problem}")


def check(config: dict) -> None:
    """Raises ValueError, at start, for a config without which no search can work."""
    if "url" not in config:
        raise ValueError('search needs {"url": ...}, a retriever with the protocol of Search-R1')


def call(config: dict, query: str) -> str:
    """The documents found, as Search-R1 writes them. Raises ConnectionError, ValueError."""
    query = query.strip()
    if not 0 < len(query) <= MAX_QUERY:
        raise ValueError(f"the query has {len(query)} characters: it must have 1 to {MAX_QUERY}")
    limit = int(config.get("max_characters", 1000))
    lines = []
    for number, contents in enumerate(found(config, query), start=1):
        title, _, text = contents.partition("\n")
        named = f" (Title: {title.strip()})" if title else ""
        lines.append(f"Doc {number}{named}: {text.strip()[:limit]}")
    return "\n".join(lines) or "No results."
