"""Serve a model with vLLM on this machine, as a solver or a judge for rewards, to whoever has the key.

    python scripts/serve.py MODEL                                    one server; prints the flags that use it
    python scripts/serve.py MODEL --num_engines 4 --devices_in_use 4  four servers, on GPUs 4 to 7

The first line that it prints, once all servers answer, is JSON: base_urls (OpenAI's protocol, on the loopback device)
and api_key. The servers end with this program: on Ctrl-C, on SIGTERM and, where its stdin is a pipe, when that closes.
Exit status 1, with the server's last lines, if a server does not come up or ends. kill -9 of this program leaves its
servers behind.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.parts import serve

if __name__ == "__main__":
    raise SystemExit(serve.main(__doc__))
