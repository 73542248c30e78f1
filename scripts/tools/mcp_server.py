"""A tool of an MCP server (Model Context Protocol): an example to copy, with the package mcp, which vLLM brings.

    python scripts/tools/mcp_server.py '{"name": "add", "arguments": {"a": 1, "b": 2}}' \
        --config '{"command": ["python", "my_server.py"]}'

Config: either command, which starts a server on standard input and output, or url, of a server over HTTP; timeout (20)
seconds. A server has many tools, and a policy calls them all through this one. For a fixed tool of its own, copy this
file and give it the server's schema: `python scripts/tools/mcp_server.py '{"name": "list", "arguments": {}}' --config
...` prints the schemas.
"""

import asyncio
import json
import sys
from pathlib import Path

TIMEOUT_S = 20.0

SCHEMA = {
    "type": "function",
    "function": {
        "name": "mcp",
        "description": "Calls a tool of a server; the tool list says which there are.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
            "required": ["name"],
        },
    },
}


async def ask(config: dict, name: str, arguments: dict) -> tuple[str, bool]:
    """(the text of the server's answer, whether its tool failed)."""
    import mcp

    target = config.get("url")
    if not target:
        program, *words = config["command"]
        target = mcp.StdioServerParameters(command=program, args=words)
    async with mcp.Client(target) as client:
        if name == "list":
            listed = await client.list_tools()
            return "\n".join(json.dumps(tool.model_dump(mode="json")) for tool in listed.tools), False
        try:
            result = await client.call_tool(name, arguments)
        except mcp.MCPError as error:  # no such tool, no such arguments
            return str(error), True
    texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
    return "\n".join(texts), result.is_error


def check(config: dict) -> None:
    """Raises ValueError, at start, for a time limit above the call's: then the policy would get the server's blame."""
    from scripts.tools import calls

    seconds = float(config.get("timeout", TIMEOUT_S))
    most = float(config.get("deadline", calls.TIMEOUT_S))
    if seconds >= most:
        raise ValueError(f'"timeout": {seconds:g} of a server is not below "deadline": {most:g} of the call (seconds)')


def call(config: dict, name: str, arguments: dict | None = None) -> str:
    """The tool's answer. Raises ValueError where the tool failed, ConnectionError where the server did."""
    try:
        reply = ask(config, name, arguments or {})
        text, failed = asyncio.run(asyncio.wait_for(reply, float(config.get("timeout", TIMEOUT_S))))
    except Exception as error:  # mostly groups of others
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
    if failed:
        raise ValueError(text)
    return text


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from scripts.tools import calls

    calls.trial(__file__)
