"""Natural Questions (Kwiatkowski et al., 2019) as train.jsonl and test.jsonl for a policy that searches.

A prompt says how to search (<search>words</search>) and to answer (<answer>...</answer>); the verifier is puzzle, exact
match with one of the golden answers after SQuAD's normalization, which is the reward of Search-R1 (arXiv:2503.09516).

    python scripts/data/nq_search.py [--source RUC-NLPIR/FlashRAG_datasets:nq, or DIR] [--out data/nq_search]

DIR has train.jsonl and test.jsonl with the columns question and golden_answers.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data import rows as data

PROMPT = """Find the answer to the question below. Think within <think> and </think> whenever you learn something new.
You may search as often as you need to: write <search>words to look for</search>, and the best documents are shown to
you. Once you know, write the answer alone within <answer> and </answer>, such as <answer>Paris</answer>.

Question: {question}"""


def nq_row(row: dict) -> dict:
    """The row of a question. Raises ValueError for one without an answer."""
    question = row["question"].strip()
    answers = [str(answer) for answer in row["golden_answers"]]
    if not question or not answers:
        raise ValueError("no question or no answer")
    mark = "" if question.endswith("?") else "?"
    made = data.question_row(PROMPT.format(question=question + mark), "", "puzzle")
    return made | {"ground_truth": answers}


def main() -> None:
    args = data.parser(__doc__, "data/nq_search", "RUC-NLPIR/FlashRAG_datasets:nq").parse_args()
    data.convert(args, nq_row)


if __name__ == "__main__":
    main()
