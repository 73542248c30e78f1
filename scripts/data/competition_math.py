r"""Mathematics with boxed answers as train.jsonl and test.jsonl, or eval.jsonl with --eval_rows.

The default is MATH (Hendrycks et al., arXiv:2103.03874): 7500 and 5000 rows with the columns problem and solution; the
label is the last \boxed{} of the solution, or the column answer, or DeepMath's final_answer, where there is one. Rows
without any are dropped and counted.

    python scripts/data/competition_math.py [--dataset DigitalLearningGmbH/MATH-lighteval, or FILE or DIR]
        [--out data/math] [--rows 30000] [--eval_rows 300] [--verifier math|solver] [--prompt_file FILE]

--rows draws that many, of which --eval_rows go to eval.jsonl. --prompt_file has {question} in it. --verifier solver
writes labels {"question", "answer"}: the response is then a guideline for a solver, which gets the bare question.
"""

import random
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rewards import last_box
from scripts.data import prepare as data


def math_row(row: dict, verifier: str, template: str) -> dict | None:
    """A row of problem and solution, or of question and answer; None without an answer. Raises KeyError."""
    question = (row.get("problem") or row["question"]).strip()
    answer = str(row.get("answer") or row.get("final_answer") or last_box(row.get("solution") or "") or "")
    if not answer.strip():
        return None
    label = {"question": question, "answer": answer} if verifier == "solver" else answer
    return data.question_row(template.replace("{question}", question), label, verifier)


def read(source: str, split: str, verifier: str, template: str) -> list[data.Row]:
    """The rows of a split; prints how many have no answer."""
    found = []
    missing = 0
    for where, row in data.read_rows(source, split):
        try:
            made = math_row(row, verifier, template)
        except KeyError as error:
            sys.exit(f"{where}: no column {error}")
        if made is None:
            missing += 1
        else:
            found.append(made)
    if missing:
        print(f"{source} {split}: {missing} rows without an answer dropped")
    return found


def main() -> None:
    parser = data.parser(__doc__, "data/math")
    parser.add_argument(
        "--dataset", default="DigitalLearningGmbH/MATH-lighteval", help="hub dataset, file or directory"
    )
    parser.add_argument("--rows", type=int, help="draw this many of the train rows (default: all)")
    parser.add_argument("--eval_rows", type=int, default=0, help="drawn rows for eval.jsonl instead of a test split")
    parser.add_argument("--verifier", choices=("math", "strict_math", "solver"), default="math")
    parser.add_argument("--prompt_file", type=Path, help="text with {question} (default: the question alone)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    args = parser.parse_args()
    template = "{question}"
    if args.prompt_file:
        template = args.prompt_file.read_text(encoding="utf-8").strip()
    if template.count("{question}") != 1:
        sys.exit(f"{args.prompt_file} must have {{question}} exactly once")

    train = read(args.dataset, "train", args.verifier, template)
    if args.rows is not None and args.rows > len(train):
        sys.exit(f"--rows {args.rows}: only {len(train)} rows with an answer")
    if args.rows is not None or args.eval_rows:
        train = random.Random(args.seed).sample(train, args.rows or len(train))
    data.write(train[args.eval_rows :], args.out / "train.jsonl")
    if args.eval_rows:
        data.write(train[: args.eval_rows], args.out / "eval.jsonl")
    else:
        data.write(read(args.dataset, "test", args.verifier, template), args.out / "test.jsonl")


if __name__ == "__main__":
    main()
