"""Turn a command line of open-instruct's GRPO into ours, and print what becomes of each flag.

    python scripts/translate.py --model_name_or_path M --kl_estimator kl3 --oe_eval_tasks a b ...

grpo.py and grpo_fast.py take such a line as it is, and print the same. See scripts/parts/translate.py.
"""

import shlex
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import grpo
from scripts.parts import translate


def main() -> None:
    argv = sys.argv[1:]
    if not argv or {"-h", "--help"} & set(argv):
        raise SystemExit(__doc__)
    done = translate.translate(argv, translate.names_of(grpo.Args))
    print(f"{done.text()}\n\npython grpo.py {shlex.join(done.line)}")


if __name__ == "__main__":
    main()
