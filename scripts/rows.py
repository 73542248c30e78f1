"""Print the rows of a data set as a run takes them, an object a line: see utils.Row.

    python scripts/rows.py openai/gsm8k:main 0.5 --split test --seed 1

NAME and AMOUNT are as in --dataset_mixer_list: 1.0 is a fraction, 1 a row; the seed fixes which rows. What NAME can
be, and which shapes rows have: see scripts/parts/rows.py. A row that cannot be used has its reason as "problem". If the
data set cannot be read, the last line is {"error": the reason} and the exit status is 1. A run starts this program for
each of its data sets.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.parts import rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("amount", metavar="AMOUNT", type=json.loads)
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--commit", default="", help="of a data set of the hub, which is in the cache; default: its main's"
    )
    functions = "functions of a reward file, which score the rows that name no verifier"
    parser.add_argument("--functions", nargs="*", default=[], help=functions)
    parser.add_argument("--aliases", nargs="*", default=[], help="names that stand for one of them")
    parser.add_argument("--columns", nargs="*", default=[], help="columns that they take; * is all")
    parser.add_argument("--environment", action="store_true", help="an environment may score the rows alone")
    args = parser.parse_args()
    own = (tuple(args.functions), tuple(args.aliases), tuple(args.columns))
    scoring = rows.Scoring(*own, environment=args.environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the run answers to Ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # and may have read enough
    if args.commit:  # a run has it in the cache
        from scripts.parts import hub

        hub.go_offline()
    try:
        for row in rows.drawn_rows(args.name, args.amount, args.split, args.seed, scoring, args.commit):
            print(json.dumps(row, default=str))
    except (ValueError, OSError) as error:  # OSError: a name that is too long, a file that may not be read
        print(json.dumps({"error": str(error)}))
        return 1
    except RecursionError:
        print(json.dumps({"error": f"{args.name}: a row is nested too deeply"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
