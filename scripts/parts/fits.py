"""Refuses models, lengths, learners and a teacher that do not fit together, and warns of prompts that do not fit the
run. Reads configs and tokenizers only.

Every run asks before a model loads, and probe.py asks the algorithm. Four things are refused: prompt and response have
more tokens together than model or teacher have positions; --sequence_parallel_size does not divide their attention
heads; policy and teacher have different vocabularies, so that the KL between them means nothing; and what packing.py
cannot compute.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import utils
from scripts.parts import packing, probe


def check(args: Any, prompts: Sequence[utils.Prompt]) -> None:
    """Raises UserError, with flag, value and fix, unless everything fits. `args` are grpo.Args, `prompts` those to
    train on."""
    from transformers import AutoConfig

    if os.environ.get("RANK", "0") == "0":
        problems = [] if args.load_batches else warnings_of(args, prompts)
        problems += [f"this copy of grpo.py: {found}; fine if you meant it" for found in probe.differences(args)]
        for problem in problems:
            print(f"WARNING: {problem}", flush=True)

    config = utils.pretrained(AutoConfig, args, "model_name_or_path")
    check_model(args, args.model_name_or_path, config)
    if args.ref_model_name_or_path:
        teacher = utils.pretrained(AutoConfig, args.of_reference(), "ref_model_name_or_path")
        check_model(args, args.ref_model_name_or_path, teacher)
        check_vocabulary(args, config.get_text_config().vocab_size, teacher.get_text_config().vocab_size)


def warnings_of(args: Any, prompts: Sequence[utils.Prompt]) -> list[str]:
    """What is probably a mistake: fewer prompts than a step takes, prompts that all begin with one token twice, and a
    reward function that scores none of them."""
    problems = []
    starts = {prompt.token_ids[:2] for prompt in prompts}
    first, *others = starts or [()]
    if not others and len(first) == 2 and first[0] == first[1]:
        problems.append(f"every prompt begins with token {first[0]} twice: template and tokenizer may both write it")
    if len(prompts) < args.num_unique_prompts_rollout:
        fewer = args.with_value("num_unique_prompts_rollout")
        reason = "an amount without a dot is a number of rows, and 1.0 is all of them"
        problems.append(f"{len(prompts)} prompts for {fewer}: a step takes some of them several times; {reason}")
    if args.reward_file:
        from scripts.parts import user_files

        scored = Counter(verifier for prompt in prompts for verifier in prompt.verifiers)
        for name in user_files.FUNCTIONS:
            fix = f"name it in their column dataset, or with --remap_verifier OLD={name}"
            if not scored[name]:
                problems.append(f"--reward_file {args.reward_file}: {name} scores none of the prompts: {fix}")
    return problems


def check_model(args: utils.Flags, name: str, config: Any) -> None:
    """Raises UserError unless a model has the heads and the positions that the flags ask for, and layers and a head
    that the learner can compute."""
    packing.check(args, name, config)
    heads = getattr(config, "num_attention_heads", 1)
    if heads % args.sequence_parallel_size:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        fix = f"one of {', '.join(divisors)} does"
        args.refuse(f"--sequence_parallel_size does not divide {name}'s {heads} attention heads: {fix}")

    longest_response = max(args.response_length, args.eval_response_length or 0)
    length = args.max_prompt_token_length + longest_response
    positions = config.max_position_embeddings
    if length > positions:
        sizes = f"= {length} tokens, but {name} has {positions} positions"
        args.refuse(f"--max_prompt_token_length + --response_length {sizes}")


def check_vocabulary(args: utils.Flags, rows: int, teacher_rows: int) -> None:
    """Raises UserError with the first token that differs. `rows` and `teacher_rows` are the sizes of the two heads."""
    from transformers import AutoTokenizer

    tokenizer = utils.pretrained(AutoTokenizer, args, "model_name_or_path")
    teacher_tokenizer = utils.pretrained(AutoTokenizer, args.of_reference(), "ref_model_name_or_path")
    tokens = token_of_id(tokenizer)
    teacher_tokens = token_of_id(teacher_tokenizer)
    if rows > teacher_rows:  # rows without a token can be sampled too
        tokens[teacher_rows] = "a row of the head"
    for i in sorted(tokens.keys() | teacher_tokens.keys()):
        token = tokens.get(i)
        teacher_token = teacher_tokens.get(i)
        if token != teacher_token:
            difference = f"token {i} is {token!r} to the policy and {teacher_token!r} to the teacher"
            args.refuse(f"--ref_model_name_or_path: {difference}: take a teacher with the policy's vocabulary")


def token_of_id(tokenizer: Any) -> dict[int, str]:
    """A tokenizer's vocabulary by id."""
    return {i: token for token, i in tokenizer.get_vocab().items()}
