"""A stand-in for the read side of the Hugging Face hub, on loopback: models and data sets are folders of `root`.

root/models/ORG/NAME/ and root/datasets/ORG/NAME/ are the branch main of a repository. Its commit is a hash of its
files: change a file and main has moved, while commits that were asked for stay. What huggingface_hub, transformers,
datasets and vLLM ask for is answered as the hub does. `log` has the method, path and status of each request. A `fault`
answers in its place: see fails_with and cuts.
"""

import hashlib
import http.server
import itertools
import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

Files = dict[str, bytes]
Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


class Server:
    """Answers requests on loopback with `answer`, in threads of this process."""

    def __init__(self):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = server.answer(self.command, self.path, body, self.headers)
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, command: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer | None:
        """The answer to a request; None hangs up."""
        raise NotImplementedError


class Hub(Server):
    def __init__(self, root: Path):
        super().__init__()
        self.root = root
        self.log: list[str] = []
        self.commits: dict[tuple[str, str], Files] = {}  # (repository, commit) -> its files
        self.lock = threading.Lock()
        self.fault: Callable[[str, str, Mapping[str, str]], Answer | None] = lambda *_: None

    def environment(self, home: Path, offline: bool = False) -> dict[str, str]:
        """What a program needs to have this hub in place of the real one, with its cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def commit_of(self, repo: str) -> str:
        """The commit of main now; repo is models/ORG/NAME or datasets/ORG/NAME."""
        folder = self.root / repo
        files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        commit = sha1(repr([(name, sha1(content)) for name, content in files.items()]).encode())
        with self.lock:
            self.commits[repo, commit] = files
        return commit

    def answer(self, command: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        found = self.find(path, body, headers.get("Range"))
        answer = self.fault(command, path, headers) or found
        self.log.append(f"{command} {path} {answer[0]}")
        return answer

    def find(self, path: str, body: bytes, span: str | None) -> Answer:
        """The answer to a request, of whose file `span` is wanted."""
        url = urlparse(path)
        parts = unquote(url.path).strip("/").split("/")
        if parts[0] == "api" and len(parts) >= 4 and parts[1] in ("models", "datasets"):
            repo = "/".join(parts[1:4])
            kind, revision, *_ = [*parts[4:6], "", ""]
            rest = "/".join(parts[6:])
        elif "resolve" in parts[2:4]:
            parts = parts if parts[0] == "datasets" else ["models", *parts]
            repo, kind, revision, rest = "/".join(parts[:3]), "resolve", parts[4], "/".join(parts[5:])
        else:
            return missing("EntryNotFound")
        if not (self.root / repo).is_dir():
            return missing("RepoNotFound")
        commit = self.commit_of(repo) if revision in ("", "main") else revision
        files = self.commits.get((repo, commit))
        if files is None:
            return missing("RevisionNotFound")
        if kind == "resolve":
            return answer_file(files.get(rest), commit, span)

        answer: Any = {"id": repo.partition("/")[2], "sha": commit, "private": False, "gated": False, "tags": []}
        answer["siblings"] = [{"rfilename": name} for name in files]
        if kind == "tree":
            deep = parse_qs(url.query).get("recursive", [""])[0].lower() in ("true", "1")
            answer = tree(files, rest, deep)
            if not answer:
                return missing("EntryNotFound", commit)
        elif kind == "refs":
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit}
            answer = {"branches": [main], "converts": [], "tags": []}
        elif kind == "paths-info":
            names = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            answer = [entry(name, files[name]) for name in names if name in files]
        return 200, {"X-Repo-Commit": commit}, json.dumps(answer).encode()


def fails_with(status: int, part: str = "", code: str = "", every: int = 1, **headers: str):
    """A fault: requests with `part` in their path are answered so, or each so many of them."""
    asked = itertools.count(1)

    def fault(command: str, path: str, _: Mapping[str, str]) -> Answer | None:
        is_due = part in path and next(asked) % every == 0
        return (status, ({"X-Error-Code": code} if code else {}) | headers, b"{}") if is_due else None

    return fault


def cuts(content: bytes, part: str, times: int):
    """A fault: the first downloads of `content` end after half of it."""
    asked = itertools.count(1)

    def fault(command: str, path: str, _: Mapping[str, str]) -> Answer | None:
        if command != "GET" or part not in path or next(asked) > times:
            return None
        return 200, {"Content-Length": str(len(content)), "Connection": "close"}, content[: len(content) // 2]

    return fault


def missing(what: str, commit: str = "") -> Answer:
    return 404, {"X-Error-Code": what} | ({"X-Repo-Commit": commit} if commit else {}), b"{}"


def answer_file(content: bytes | None, commit: str, span: str | None) -> Answer:
    if content is None:
        return missing("EntryNotFound", commit)
    headers = {"X-Repo-Commit": commit, "ETag": f'"{sha1(content)}"', "Accept-Ranges": "bytes"}
    if not span:
        return 200, headers, content
    first, _, last = span.removeprefix("bytes=").partition("-")
    part = content[int(first) : int(last or len(content)) + 1]
    headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
    return 206, headers, part


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def entry(name: str, content: bytes) -> dict:
    return {"type": "file", "path": name, "size": len(content), "oid": sha1(content)}


def tree(files: Files, folder: str, deep: bool) -> list[dict]:
    """What is in a folder of a repository: files and, unless `deep`, the folders beside them."""
    prefix = f"{folder}/" if folder else ""
    found = {}
    for name, content in files.items():
        inside, _, below = name.removeprefix(prefix).partition("/")
        if name.startswith(prefix) and (deep or not below):
            found[name] = entry(name, content)
        elif name.startswith(prefix):
            found[inside] = {"type": "directory", "path": prefix + inside, "oid": sha1(name.encode()), "size": 0}
    return list(found.values())
