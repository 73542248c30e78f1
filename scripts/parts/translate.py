"""Turn a command line of open-instruct's GRPO into ours. What becomes of each flag is in train/open_instruct.tsv.

    python scripts/parts/translate.py --model_name_or_path M --kl_estimator kl3 --oe_eval_tasks a b ...

prints what happens to the flags that are not ours, in place of which one stands (alias), which need nothing here (same,
ignored) and without which a run would be another (missing), and then the line, in which --flag true is --flag. grpo.py
and grpo_fast.py start it for a line with either, with the names of their own in --known, and get all that as JSON. Exit
status 2, with the nearest name: nobody knows a flag.
"""

import difflib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

if not __package__:  # started as a program: its folder stands for the root, where the four files are
    sys.path[0] = str(Path(__file__).resolve().parents[2])

TABLE = (
    Path(__file__).resolve().parents[1] / "train" / "open_instruct.tsv"
)  # flag or flag=value, what happens, what or why


def translate(argv: Sequence[str], known: set[str]) -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """A command line without open-instruct's flags that are not ours, and what TABLE says of them: (what happens, what
    or why) -> flags. A flag that is neither `known` nor there ends the process with the nearest name."""
    table = {flag: (what, why) for flag, what, why in (x.split("\t") for x in TABLE.read_text().splitlines()[1:])}
    out: list[str] = []
    told: dict[tuple[str, str], list[str]] = {}
    unknown, tokens = [], list(argv)
    while tokens:
        token = tokens.pop(0)
        name, equals, value = token.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        end = next((i for i, t in enumerate(tokens) if t.startswith("--")), len(tokens)) if not equals else 0
        values, rest = [value] if equals else tokens[:end], tokens[end:]
        here = name in known or any(key.partition("=")[0] == name for key in table)
        flag, text = (name, " ".join(values) or "true") if here else (name.removeprefix("no_"), "false")
        row = table.get(f"{flag}={text.lower()}", table.get(flag)) if token.startswith("--") else None
        if row is not None:
            tokens, (what, why) = rest, row
            if what == "alias":
                instead = [v for word in why.split() for v in (values or [text] if word == "{}" else [word])]
                tokens, why = instead + rest, " ".join(instead)
            valued = flag == name and (what == "alias" or f"{flag}={text.lower()}" in table)  # --no_x says it itself
            shown = f" {text}" if valued else ""
            told.setdefault((what, why), []).append(f"--{name}{shown}")
        elif token.startswith("--") and name not in known and not name.startswith("tyro_"):
            near = difflib.get_close_matches(name, [*known, *table], 1, 0)[0].partition("=")[0]
            unknown.append(f"--{name}: no such flag; the nearest is --{near}")
        else:
            switch = token.startswith("--") and {name, f"no_{name}"} <= known
            if switch and (equals or tokens[:1] and tokens[0].lower() in ("true", "false")):
                value = value if equals else tokens.pop(0)
                if value.lower() not in ("true", "false"):
                    unknown.append(f"--{name} {value}: a yes/no flag takes true, false or nothing")
                token = f"--no_{name}" if value.lower() == "false" else f"--{name}"
            out.append(token)
    if unknown:
        print("\n".join(unknown), file=sys.stderr)
        raise SystemExit(2)
    return out, told


def main() -> None:
    argv = sys.argv[1:]
    started = argv[:1] == ["--known"]
    if started:
        known, argv = set(argv[1].split()), argv[2:]
    else:
        import grpo

        known = {f.name for f in fields(grpo.Args)} | {f"no_{f.name}" for f in fields(grpo.Args) if f.type is bool}
    if not argv or {"-h", "--help"} & set(argv) and not started:
        print(__doc__)
        return
    line, told = translate(argv, known)
    rows = [f"  {kind:8} {' '.join(flags)}: {why}" for (kind, why), flags in sorted(told.items())]
    words = "\n".join(["open-instruct's flags:", *rows]) if rows else ""
    missing = "; ".join(f"{' '.join(flags)}: {why}" for (kind, why), flags in told.items() if kind == "missing")
    if started:
        print(json.dumps([line, words, missing]))
    else:
        print(f"{words}\n\npython grpo.py {shlex.join(line)}")


if __name__ == "__main__":
    main()
