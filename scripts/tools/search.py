"""The tool search: BM25 over a .jsonl file, or a retriever at a URL.

Config: either corpus, a file of rows {text or contents, title}, or url, a server with the protocol of Search-R1
(arXiv:2503.09516): {"queries": [text], "topk": 3, "return_scores": true} -> {"result": [[{"document": {"contents":
title, newline, text}, "score": 1.2}, ...]]}. top_k (3), max_characters of a document (1000). For a url: timeout (10)
seconds of a request, retries (3); all tries together end 3 s before the 30 s of a call. A server that cannot be
reached, hangs, or answers in another form, raises ConnectionError: a failure of infrastructure, unlike a query that
finds nothing.

BM25 is bm25s (arXiv:2407.03618) with its own defaults: Lucene's variant, k1 1.5, b 0.75, English stop words, no
stemmer. Each process that searches makes its own index at its first call.
"""

import functools
import json
import time
from typing import Any

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
SHARE = 0.9  # of the time of a call, for all tries


@functools.cache
def bm25(corpus: str) -> tuple[Any, list[dict]]:
    """(index, documents) of a .jsonl file. Raises FileNotFoundError, ValueError for a row without a text."""
    import bm25s

    documents = []
    with open(corpus, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            text = row.get("text", row.get("contents"))
            if not isinstance(text, str):
                raise ValueError(f"{corpus}, line {number}: no text and no contents")
            documents.append({"title": str(row.get("title", "")), "text": text})
    if not documents:
        raise ValueError(f"{corpus} is empty")
    index = bm25s.BM25()
    texts = [f"{document['title']} {document['text']}" for document in documents]
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, documents


def search_file(corpus: str, query: str, top_k: int) -> list[dict]:
    """The documents with a word of the query, best first; equal scores in the order of the file."""
    import bm25s

    index, documents = bm25(corpus)
    words = bm25s.tokenize([query], return_ids=False, show_progress=False)[0]
    if not words:
        return []
    scores = index.get_scores(words)
    found = [i for i, score in enumerate(scores) if score > 0]
    found.sort(key=lambda i: -scores[i])
    return [documents[i] for i in found[:top_k]]


def search_url(config: dict, query: str, top_k: int) -> list[dict]:
    """The same from a server. Raises ConnectionError after retries + 1 tries, 0.5, 1, 2, ... seconds apart, or when the
    time of all tries is over: that is less than the time of a call, so that the policy never gets the blame."""
    from scripts.parts import chat

    url = config["url"]
    content = {"queries": [query], "topk": top_k, "return_scores": True}
    end = time.monotonic() + SHARE * seconds_of_call(config)
    delay = DELAY_S
    for attempt in range(int(config.get("retries", 3)) + 1):
        if attempt:
            time.sleep(delay)
            delay *= 2
        seconds = min(float(config.get("timeout", TIMEOUT_S)), end - time.monotonic())
        try:
            answer = chat.post(url, content, seconds, MAX_REPLY)
            if answer.status_code == 200:
                return [document_of(row) for row in answer.json()["result"][0]]
            problem = f"status {answer.status_code}"
            if answer.status_code < 500 and answer.status_code != 429:
                break  # a refusal, which no second try changes
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else f"no answer within {seconds:.3g} s"
        if time.monotonic() + delay >= end:
            break
    raise ConnectionError(f"{url.rpartition('@')[2].partition('?')[0]}: {problem}")


def seconds_of_call(config: dict) -> float:
    """The time that a call has: see calls.Env.run."""
    from scripts.tools import calls

    return float(config.get("deadline", calls.TIMEOUT_S))


def document_of(row: dict) -> dict[str, str]:
    """A row of a server's reply, whose contents are title, newline, text."""
    title, _, text = row.get("document", row)["contents"].partition("\n")
    return {"title": title, "text": text}


def check(config: dict) -> None:
    """Raises ValueError, OSError or ImportError, at start, for a config without which no search can work."""
    if ("url" in config) == ("corpus" in config):
        raise ValueError('search needs either {"corpus": FILE.jsonl} or {"url": ...}')
    seconds = float(config.get("timeout", TIMEOUT_S))
    most = seconds_of_call(config)
    if seconds >= most:
        raise ValueError(f'"timeout": {seconds:g} of a try is not below "deadline": {most:g} of the call (seconds)')
    if "corpus" in config:
        bm25(config["corpus"])


def call(config: dict, query: str) -> str:
    """The documents found, as Search-R1 writes them. Raises ConnectionError, ValueError."""
    query = query.strip()
    if not query:
        raise ValueError("the query is empty")
    if len(query) > MAX_QUERY:
        raise ValueError(f"the query has more than {MAX_QUERY} characters")
    top_k = int(config.get("top_k", 3))
    if "url" in config:
        documents = search_url(config, query, top_k)
    else:
        documents = search_file(config["corpus"], query, top_k)
    limit = int(config.get("max_characters", 1000))
    lines = []
    for number, document in enumerate(documents, start=1):
        title = f" (Title: {document['title'].strip()})" if document["title"] else ""
        lines.append(f"Doc {number}{title}: {document['text'].strip()[:limit]}")
    return "\n".join(lines) or "No results."
