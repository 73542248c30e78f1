"""A mix of datasets in open-instruct's shape as one train.jsonl: the RLVR mixes of Tulu 3 and OLMo 3.

    python scripts/data/rlvr.py --dataset_mixer_list NAME AMOUNT [NAME AMOUNT ...] [--out data/rlvr] [--seed 1]
        [--decontaminate EVAL ...]

NAME is a hub dataset (`org/name` or `org/name:config`), a .jsonl or .parquet file or a directory; AMOUNT a fraction
(1.0) or a number of rows (20000), as in grpo.py. Rows keep their verifiers, with two changes: names are in lower case,
and the older form of instruction labels (func_name, of RLVR-IFeval and the Tulu 3 mix) becomes IFEval's. Rows without a
prompt, a label or a verifier, or with a constraint that IFEval lacks, are dropped, and counted by reason.
"""

import collections
import json
import random
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils
from scripts.data import rows as data
from scripts.parts.rows import parse_row

# func_name -> (IFEval's constraint, {its argument: argument of the older form}). arXiv:2311.07911 has the constraints.
FUNCTIONS = {
    "verify_keywords": ("keywords:existence", {"keywords": "keyword_list"}),
    "verify_keyword_frequency": ("keywords:frequency", {"keyword": "word", "frequency": "N", "relation": "quantifier"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}),
    "verify_letter_frequency": (
        "keywords:letter_frequency",
        {"letter": "letter", "let_frequency": "N", "let_relation": "quantifier"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"num_paragraphs": "N"}),
    "validate_word_constraint": ("length_constraints:number_words", {"num_words": "N", "relation": "quantifier"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"num_sentences": "N", "relation": "quantifier"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"num_placeholders": "N"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"num_bullets": "N"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"num_highlights": "N"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"section_spliter": "section_splitter", "num_sections": "N"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"prompt_to_repeat": "original_prompt"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"capital_frequency": "N", "capital_relation": "quantifier"},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}


def ifeval_label(label: str) -> str:
    """An instruction label of the older form in IFEval's; any other is returned as it is.

    "at most N" is "less than N + 1". Raises ValueError for what IFEval does not have, such as "around N".
    """
    try:
        old = json.loads(label)
    except ValueError:
        return label
    if not isinstance(old, dict) or "func_name" not in old:
        return label
    if old["func_name"] not in FUNCTIONS:
        raise ValueError(f"no constraint of IFEval is {old['func_name']}")
    constraint, names = FUNCTIONS[old["func_name"]]
    kwargs = {new: old.get(name) for new, name in names.items()}
    relation = next((name for name in kwargs if name.endswith("relation")), None)
    if relation is not None:
        if kwargs[relation] not in ("at least", "at most", "less than"):
            raise ValueError(f"no relation of IFEval is {kwargs[relation]!r}")
        if kwargs[relation] == "at most":
            number = next(new for new, name in names.items() if name == "N")
            kwargs |= {relation: "less than", number: int(kwargs[number]) + 1}
    return json.dumps([{"instruction_id": [constraint], "kwargs": [kwargs]}])


def rlvr_row(row: dict) -> dict:
    """A row of any shape that the loader reads in that of scripts/data/rows.py. Raises ValueError for what is none."""
    messages, labels, verifiers = parse_row(row)
    labels = [ifeval_label(data.text_of(x)) if v == "ifeval" else x for x, v in zip(labels, verifiers, strict=True)]
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    return data.make_row(messages, labels, verifiers)


def draw(found: list[dict], amount: float | int, rng: random.Random) -> list[dict]:
    """That fraction or number of rows, in file order; a fraction above 1 repeats them."""
    count = round(amount * len(found)) if isinstance(amount, float) else amount
    whole, rest = divmod(count, len(found))
    return found * whole + [found[i] for i in sorted(rng.sample(range(len(found)), rest))]


def main() -> None:
    parser = data.parser(__doc__, "data/rlvr")
    parser.add_argument("--dataset_mixer_list", nargs="+", required=True, metavar="NAME AMOUNT")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=1, help="of the draw and the order")
    args = parser.parse_args()
    try:
        pairs = utils.parse_mixer("dataset_mixer_list", args.dataset_mixer_list)
    except utils.UserError as error:
        sys.exit(str(error))
    rng, mixed = random.Random(args.seed), []
    for name, amount in pairs:
        found, dropped = [], collections.Counter()
        for _, row in data.read_rows(name, args.split):
            try:
                found.append(rlvr_row(row))
            except ValueError as error:
                dropped[str(error)[:100]] += 1
        for reason, count in dropped.most_common():
            print(f"{name}: {count} rows dropped: {reason}")
        if isinstance(amount, int) and amount > len(found):
            sys.exit(f"--dataset_mixer_list {name} {amount}: only {len(found)} rows")
        if found:
            mixed += draw(found, amount, rng)
    rng.shuffle(mixed)
    counts = collections.Counter(v for row in mixed for v in parse_row(row)[2])
    print("verifiers: " + ", ".join(f"{verifier} {count}" for verifier, count in counts.most_common()))
    data.save_train([(data.question_of(row), row) for row in mixed], args)


if __name__ == "__main__":
    main()
