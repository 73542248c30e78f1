"""GSM8K (Cobbe et al., arXiv:2110.14168) as train.jsonl (7473 rows) and test.jsonl (1319), from the hub or local files.

--prompt plain is the question alone; verl appends the sentence of verl's example, whose reward wants "#### ANSWER"
(--remap_verifier gsm8k=gsm8k_verl); boxed asks for a box.

    python scripts/data/gsm8k.py [--prompt verl] [--source openai/gsm8k:main, or DIR] [--out data/gsm8k]

DIR has train.jsonl and test.jsonl with the columns question and answer, as in the authors' repository.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data import prepare as data

PROMPTS = {
    "plain": "{question}",
    "verl": '{question} Let\'s think step by step and output the final answer after "####".',
    "boxed": "{question}\n\nReason step by step, and put the final answer within \\boxed{{}}.",
}


def gsm8k_row(row: dict, prompt: str) -> dict:
    """The row of a question whose solution ends in `#### ANSWER`. Raises ValueError where it does not."""
    solution, marker, answer = row["answer"].rpartition("####")
    if not marker:
        raise ValueError(f"no #### in {row['answer'][-80:]!r}")
    text = PROMPTS[prompt].format(question=row["question"].strip())
    return data.question_row(text, answer.strip().replace(",", ""), "gsm8k")


def main() -> None:
    parser = data.parser(__doc__, "data/gsm8k")
    parser.add_argument("--source", default="openai/gsm8k:main", help="hub dataset or local directory")
    parser.add_argument("--prompt", choices=PROMPTS, default="plain")
    args = parser.parse_args()
    for split in ("train", "test"):
        rows = []
        for where, row in data.read_rows(args.source, split):
            try:
                rows.append(gsm8k_row(row, args.prompt))
            except (KeyError, ValueError) as error:
                sys.exit(f"{where}: {error!r}")
        data.write(rows, args.out / f"{split}.jsonl")


if __name__ == "__main__":
    main()
