"""Turns that start together: with --deterministic and somebody who answers, grpo_fast.py imports this.

A batch decides about the bits of its tokens, so it must not depend on when an answer comes. Requests that an engine got
in one message are a round: when all of them have ended and been answered, their next turns start in one message.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Round:
    """Requests that advance in lock-step."""

    names: list[str]
    unanswered: int
    next_turns: dict[str, Any] = field(default_factory=dict)


class Rounds:
    """The rounds of all requests that are not over."""

    def __init__(self):
        self.round_of: dict[str, Round] = {}

    def start(self, names: list[str]) -> None:
        """A message with these requests goes to an engine."""
        self.round_of |= dict.fromkeys(names, Round(names, len(names)))

    def answer(self, name: str, request: Any) -> list[tuple[str, Any]]:
        """A request has been answered, and `request` is its next turn (None: it is over). Returns (name, next turn) of
        the whole round, in the order of its message, if this was the last answer, else nothing."""
        members = self.round_of.pop(name)
        members.unanswered -= 1
        if request is not None:
            members.next_turns[name] = request
        if members.unanswered:
            return []
        return [(name, members.next_turns[name]) for name in members.names if name in members.next_turns]
