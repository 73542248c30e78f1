"""Whether a run's model has positions for its responses and heads for its learners, and a teacher the same vocabulary.

    python scripts/parts/fits.py output/grpo/args.json  of a run that there is

Every run asks before a model loads, with its flags as JSON. Reads configs and tokenizers only. Exit status 1, with the
flag, its value and the fix: prompt + response outgrow the positions of model or teacher, their attention heads cannot
be shared out over --sequence_parallel_size learners, or a token is another one to the teacher, whose KL would then mean
nothing: the first of those.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils


def check(args: utils.Flags) -> None:
    """Raises UserError unless all goes together."""
    from transformers import AutoConfig

    teacher, flag = args.of_reference(), "ref_model_name_or_path"  # the model itself where there is none
    configs = utils.pretrained(AutoConfig, args, "model_name_or_path"), utils.pretrained(AutoConfig, teacher, flag)
    length = args.max_prompt_token_length + max(args.response_length, args.eval_response_length or 0)
    for name, config in zip((args.model_name_or_path, teacher.model_name_or_path), configs, strict=True):
        heads, limit = getattr(config, "num_attention_heads", 1), config.max_position_embeddings
        if heads % args.sequence_parallel_size:
            fit = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            args.refuse(f"--sequence_parallel_size does not divide {name}'s {heads} attention heads: one of {fit} does")
        if length > limit:
            words = f"= {length} tokens, but {name} has {limit} positions"
            args.refuse(f"--max_prompt_token_length + --response_length {words}")
    if args.ref_model_name_or_path:
        check_teacher(args, teacher, [config.get_text_config().vocab_size for config in configs])


def check_teacher(args: utils.Flags, teacher: utils.Flags, rows: list[int]) -> None:
    """Raises UserError with the first token that is another one to the teacher; `rows` are those of the two heads."""
    from transformers import AutoTokenizer

    flag = "ref_model_name_or_path"
    both = (utils.pretrained(AutoTokenizer, a, name) for a, name in ((args, "model_name_or_path"), (teacher, flag)))
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in both)
    ours |= {} if rows[0] <= rows[1] else {rows[1]: "a row of the head"}  # which could be sampled
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            words = f"token {i} is {ours.get(i)!r} to the policy and {theirs.get(i)!r} to the teacher"
            args.refuse(f"--{flag}: {words}: take a teacher with the policy's vocabulary")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    given = sys.argv[1]
    by_run = given.startswith("{")
    values = json.loads(given if by_run else Path(given).read_text())
    try:
        check(utils.Flags(**{f.name: values[f.name] for f in fields(utils.Flags) if f.name in values}))
    except utils.UserError as error:
        if by_run:
            raise
        raise SystemExit(f"fits.py: {error}") from None


if __name__ == "__main__":
    main()
