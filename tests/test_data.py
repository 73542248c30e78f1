"""Data: every row shape and container gives the same prompt; broken input stops with file, row and reason."""

import dataclasses
import json
import math
import re
from dataclasses import replace

import pytest
import torch

import grpo
import utils
from scripts.data.make_tiny_model import make_tiny_model
from scripts.parts import checks, plan
from scripts.parts import rows as part_of_rows

QUESTION, LABEL = "What is 3 + 8?", "11"
USER = {"role": "user", "content": QUESTION}
ROW = {"messages": [USER], "ground_truth": LABEL, "dataset": "gsm8k"}
SHAPES = {
    "open_instruct": ROW,
    "verl": {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": LABEL},
        "extra_info": {"index": 0, "answer": "3 + 8 = 11\n#### 11"},
    },
    "gsm8k": {"question": QUESTION, "answer": "It is 3 + 8 = <<3+8=11>>11.\n#### 11"},
    "trl": {"prompt": [USER], "answer": LABEL, "verifier": "gsm8k"},
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return utils.load_tokenizer(grpo.Args(model_name_or_path=str(model_dir)))


def write_jsonl(path, rows):
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(n):
    """n rows whose label is their number"""
    return [
        {"messages": [{"role": "user", "content": f"Say {i}"}], "ground_truth": str(i), "dataset": "gsm8k"}
        for i in range(n)
    ]


READ_ROWS = utils.read_rows


def read_here(flag, name, amount, split, args):
    """As utils.read_rows, but in this process: the program that a run reads rows with takes a second to start."""
    if args.reward_file:  # the program is told of its functions
        yield from READ_ROWS(flag, name, amount, split, args)
        return
    try:
        for row in part_of_rows.drawn_rows(name, amount, split, args.seed):
            yield utils.Row(**json.loads(json.dumps(row)))
    except ValueError as error:
        raise utils.UserError(f"--{flag} {error}") from error


def load(tokenizer, *mixer, flag="dataset_mixer_list", by_program=False, **changes):
    args = grpo.Args(**{flag: [str(x) for x in mixer]}, **changes)
    with pytest.MonkeyPatch.context() as patch:
        if not by_program:
            patch.setattr(utils, "read_rows", read_here)
        return utils.load_prompts(flag, args, tokenizer)


def labels_of(prompts):
    return [p.ground_truths[0] for p in prompts]


# --- Shapes and containers --------------------------------------------------------------------------------------------


def save_as(container, rows, tmp_path):
    if container == "jsonl":
        return write_jsonl(tmp_path / "rows.jsonl", rows)
    if container == "directory":
        write_jsonl(tmp_path / "test.jsonl", [{"not": "read"}])
        write_jsonl(tmp_path / "train-0.jsonl", rows)
        return str(tmp_path)
    import datasets

    made = datasets.Dataset.from_list(rows)
    if container == "parquet":
        made.to_parquet(tmp_path / "rows.parquet")
        return str(tmp_path / "rows.parquet")
    if container == "saved_splits":
        made = datasets.DatasetDict({"train": made, "test": datasets.Dataset.from_list([{"not": "read"}])})
    made.save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


@pytest.mark.parametrize(
    "shape, container",
    [(shape, "jsonl") for shape in SHAPES]
    + [("verl", container) for container in ("parquet", "directory", "saved", "saved_splits")],
)
def test_every_shape_and_container_gives_the_same_prompt(tokenizer, tmp_path, shape, container):
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    verifier = "gsm8k_verl" if shape == "verl" else "gsm8k"
    want = [utils.Prompt(0, token_ids, text, (LABEL,), (verifier,), f"user: {QUESTION}")]
    name = save_as(container, [SHAPES[shape]], tmp_path)
    assert load(tokenizer, name, "1.0", by_program=container != "jsonl") == want


@pytest.mark.parametrize(
    "row, labels, verifiers",
    [
        ({"ground_truth": ["5", "five"], "dataset": ["gsm8k", "math"]}, ["5", "five"], ["gsm8k", "math"]),
        ({"ground_truth": ["5"], "dataset": ["GSM8K"]}, ["5"], ["gsm8k"]),
        ({"ground_truth": ["a", "b"], "dataset": "string_matcher"}, [["a", "b"]], ["string_matcher"]),
        ({"solution": "$\\frac{1}{2}$"}, ["$\\frac{1}{2}$"], ["math"]),
        ({"answer": "so\n#### 1,000", "dataset": "gsm8k_strict"}, ["1,000"], ["gsm8k_strict"]),
        ({"answer": "a #### b", "dataset": "string_matcher"}, ["a #### b"], ["string_matcher"]),
        ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}, ["72"], ["gsm8k_verl"]),
        ({"ground_truth": None, "answer": None, "solution": "5", "reward_model": None}, ["5"], ["math"]),
    ],
)
def test_labels_and_verifiers_of_a_row(row, labels, verifiers):
    assert part_of_rows.parse_row({"prompt": QUESTION} | row) == ([USER], labels, verifiers)


@pytest.mark.parametrize(
    "solution", ["We add two and two, so x = 4.", "First add.\nThen divide by two to get $\\frac{1}{2}$."]
)
def test_a_solution_of_prose_without_a_box_is_refused_with_its_row(tokenizer, tmp_path, solution):
    boxed = {"messages": [USER], "solution": f"{solution} So \\boxed{{4}}."}
    with pytest.raises(utils.UserError, match=r"row 2.*boxed"):
        load(tokenizer, write_jsonl(tmp_path / "a.jsonl", [boxed, boxed | {"solution": solution}]), "1.0")
    assert len(load(tokenizer, write_jsonl(tmp_path / "b.jsonl", [boxed]), "1.0")) == 1


def test_several_datasets_each_with_its_split(tokenizer, tmp_path):
    rows = numbered(6)
    for name, first in (("a", 0), ("b", 3)):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "train.jsonl", rows[first : first + 2])
        write_jsonl(tmp_path / name / "test.jsonl", rows[first + 2 : first + 3])
    mixer = tmp_path / "a", "1.0", tmp_path / "b", "1"
    assert len(load(tokenizer, *mixer)) == 3
    prompts = load(tokenizer, *mixer, dataset_mixer_list_splits=["train", "test"])
    assert labels_of(prompts) == ["0", "1", "5"]
    assert [p.index for p in prompts] == [0, 1, 2]


# --- Amounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount, count", [("1.0", 10), ("0.5", 5), ("0.3", 3), ("1", 1), ("4", 4), ("10", 10)])
def test_fractions_and_counts_take_a_fixed_subset_in_file_order(tokenizer, tmp_path, amount, count):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(10))
    labels = [int(label) for label in labels_of(load(tokenizer, path, amount))]
    assert len(labels) == count and labels == sorted(set(labels))
    assert [int(label) for label in labels_of(load(tokenizer, path, amount))] == labels
    others = {tuple(labels_of(load(tokenizer, path, amount, seed=seed))) for seed in range(6)}
    assert (len(others) > 1) == (count < 10)


@pytest.mark.parametrize(
    "rows, amount, told", [(3, "4", "only 3 rows"), (3, "0.1", r"a\.jsonl 0\.1"), (0, "1.0", "no rows")]
)
def test_amounts_that_a_file_does_not_have_are_refused(tokenizer, tmp_path, rows, amount, told):
    path = write_jsonl(tmp_path / "a.jsonl", numbered(rows))
    with pytest.raises(utils.UserError, match=told):
        load(tokenizer, path, amount)


# --- Generated data ---------------------------------------------------------------------------------------------------


def test_generated_training_and_evaluation_items_are_disjoint(tokenizer):
    def make(flag, seed=1):
        return load(tokenizer, "reasoning_gym:chain_sum", "20", flag=flag, seed=seed)

    train, held_out = make("dataset_mixer_list"), make("dataset_mixer_eval_list")
    assert len(train) == len(held_out) == 20
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert make("dataset_mixer_list") == train
    assert make("dataset_mixer_list", seed=100) != train
    label = json.loads(train[0].ground_truths[0])
    assert train[0].verifiers == ("reasoning_gym",) and label["task"] == "chain_sum"
    assert label["entry"]["question"] in train[0].text


# --- Prompts that do not fit, rows that are broken --------------------------------------------------------------------


def test_long_prompts_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    rows = numbered(4)
    rows[1]["messages"][0]["content"] = rows[3]["messages"][0]["content"] = "long " * 50
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    prompts = load(tokenizer, path, "1.0", max_prompt_token_length=40)
    assert labels_of(prompts) == ["0", "2"] and [p.index for p in prompts] == [0, 1]
    assert "--dataset_mixer_list: 2 of 4 prompts longer than 40 dropped" in capsys.readouterr().out
    exact = max(len(p.token_ids) for p in prompts)
    assert len(load(tokenizer, path, "1.0", max_prompt_token_length=exact)) == 2
    assert len(load(tokenizer, path, "1.0", max_prompt_token_length=1000)) == 4
    with pytest.raises(utils.UserError, match=r"--dataset_mixer_list: every prompt .*--max_prompt_token_length 3"):
        load(tokenizer, path, "1.0", max_prompt_token_length=3)


BROKEN = {
    "not JSON": ('{"messages": ', "not JSON"),
    "no prompt": ({"ground_truth": "1", "dataset": "gsm8k"}, r"no prompt: .*\['dataset', 'ground_truth'\]"),
    "content is no text": (ROW | {"messages": [{"role": "user", "content": ["Hi"]}]}, "content"),
    "no label": (ROW | {"ground_truth": None}, "no ground_truth"),
    "no verifier": ({"messages": [USER], "ground_truth": "11"}, "no dataset"),
    "unknown verifier": (ROW | {"dataset": "gms8k"}, "gms8k.*perhaps gsm8k"),
    "label cannot be scored": (ROW | {"ground_truth": "a few"}, "gsm8k: .*'a few'"),
    "too few labels": (ROW | {"ground_truth": ["1", "2"], "dataset": ["gsm8k"] * 3}, "2 ground truths for 3 verifiers"),
    "verifier is missing": (ROW | {"ground_truth": ["1", "2"], "dataset": ["gsm8k", None]}, "dataset|verifier"),
    "source is no text": ({"prompt": "?", "data_source": ["a"], "answer": "1"}, "data_source"),
    "half a character": (ROW | {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
}


@pytest.mark.parametrize("row, reason", BROKEN.values(), ids=BROKEN)
def test_broken_rows_are_refused_with_file_row_and_reason(tokenizer, tmp_path, row, reason):
    path = write_jsonl(tmp_path / "a.jsonl", [ROW, "", row, ROW])  # a blank line is no row
    with pytest.raises(utils.UserError, match=rf"a\.jsonl row 3: .*{reason}"):
        load(tokenizer, path, "1.0")


# --- Chat templates ---------------------------------------------------------------------------------------------------


TURNS = [{"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))]
BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}"
RENDERED = {  # the tiny model's end token is <|im_end|>
    "simple_chat": "User: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant:",
    "tulu": "<|user|>\nHi\n<|assistant|>\nHello<|im_end|>\n<|user|>\nBye\n<|assistant|>\n",
    "qwen_instruct_user_boxed_math": f"<|im_start|>user\nHi{BOXED}<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    f"<|im_start|>user\nBye{BOXED}<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", RENDERED)
def test_chat_templates(model_dir, tmp_path, name):
    tokenizer = utils.load_tokenizer(grpo.Args(model_name_or_path=str(model_dir), chat_template_name=name))
    path = write_jsonl(tmp_path / "a.jsonl", [ROW | {"messages": TURNS}])
    assert [p.text for p in load(tokenizer, path, "1.0", max_prompt_token_length=512)] == [RENDERED[name]]


@pytest.mark.parametrize("name", ["no/such-data:config", "../no_such_directory", "reasoning_gym:no_such"])
def test_data_that_cannot_be_had_is_told_in_a_line(tokenizer, name):
    with pytest.raises(utils.UserError, match=f"^--dataset_mixer_list {re.escape(name)}.*$"):
        load(tokenizer, name, "5", by_program=True)


def test_add_bos_begins_every_prompt_once(model_dir, tmp_path):
    args = grpo.Args(model_name_or_path=str(model_dir), chat_template_name="simple_chat", add_bos=True)
    tokenizer = utils.load_tokenizer(args)
    path = write_jsonl(tmp_path / "a.jsonl", [ROW | {"messages": TURNS}])
    (prompt,) = load(tokenizer, path, "1.0", max_prompt_token_length=512)
    assert prompt.text == tokenizer.bos_token + RENDERED["simple_chat"]
    assert prompt.token_ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in prompt.token_ids[1:]
    with pytest.raises(utils.UserError, match="--add_bos: .* writes one already"):
        utils.load_tokenizer(dataclasses.replace(args, chat_template_name=None))
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(utils.UserError, match="--add_bos: .* its tokenizer has none"):
        utils.load_tokenizer(dataclasses.replace(args, model_name_or_path=str(tmp_path)))


def test_lengths_beyond_the_models_positions_are_refused(model_dir):  # the tiny model has 2048
    args = grpo.Args(model_name_or_path=str(model_dir), max_prompt_token_length=1024, response_length=1024)
    plan.check_models(args, [])
    for change in (dict(response_length=1025), dict(eval_response_length=1025)):
        with pytest.raises(utils.UserError, match=r"--max_prompt_token_length 1024 .* 2049 tokens, .* 2048 positions"):
            plan.check_models(replace(args, **change), [])


# --- Order ------------------------------------------------------------------------------------------------------------


def stream(n, seed, epoch):
    return [grpo.prompt_at(range(n), epoch * n + i, seed) for i in range(n)]


def test_each_epoch_is_another_permutation():
    epochs = [stream(10, seed=1, epoch=e) for e in range(8)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 8
    assert len({tuple(stream(10, seed, 0)) for seed in range(5)}) == 5


def test_a_position_is_all_the_state_there_is():
    forward = {p: grpo.prompt_at(range(7), p, 3) for p in range(70)}
    for position in (69, 0, 33, 34, 68, 7, 6, 0):  # across more epochs than are remembered
        assert grpo.prompt_at(range(7), position, 3) == forward[position]


def test_seeds_are_the_same_on_every_machine():
    """Another seed would silently change the order of every resumed run."""
    # printf '(1, 0)' | b2sum -l 64 is 501bf6d9e18e0abf: little-endian, halved
    assert utils.derive_seed(1, 0) == 0xBF0A8EE1D9F61B50 // 2


def prompt(label="1", ids=(1, 2), verifier="gsm8k", index=0):
    return utils.Prompt(index, ids, "text", (label,), (verifier,))


def test_data_hash_sees_tokens_labels_verifiers_and_order():
    a, b = prompt("1"), prompt("2", index=1)
    same = utils.data_hash([a, b])
    assert utils.data_hash([prompt("1"), prompt("2", index=1)]) == same
    others = [
        [b, a],
        [a],
        [a, b, b],
        [a, prompt("3")],
        [a, prompt("2", ids=(1, 3))],
        [a, prompt("2", verifier="math")],
        [a, prompt(2)],
    ]
    assert len({same, *map(utils.data_hash, others)}) == len(others) + 1


# --- Batches ----------------------------------------------------------------------------------------------------------


def rollout(prompt_ids, position, token_ids, advantage=0.0, mask=None):
    """Token k of a response has logprob -k / 10"""
    logprobs, mask = [-k / 10 for k in token_ids], mask or [True] * len(token_ids)
    made = utils.Prompt(position, prompt_ids, "", ("1",), ("gsm8k",))
    return grpo.Rollout(made, position, 0, token_ids, logprobs, mask, [0] * len(token_ids), advantage=advantage)


CPU = torch.device("cpu")
TOOL = rollout((5, 6, 7), 0, [8, 9], advantage=1.5, mask=[True, False])  # 9 was put in by a tool, not by the policy
TWIN = rollout((5, 6, 7), 0, [3], advantage=-0.5)
OTHER = rollout((1,), 1, [2, 3, 4], advantage=-1.0)


def assert_placed(batch, targets, response_ids, advantages):
    """Per target (0: none): its logprob is -target / 10, its response, its advantage; all are 0 elsewhere"""
    assert batch.targets.tolist() == targets
    assert batch.seq_ids.tolist() == response_ids
    assert batch.advantages.tolist() == advantages
    torch.testing.assert_close(batch.vllm_logprobs, torch.tensor(targets) / -10)


def test_a_row_for_each_response():
    batch = grpo.make_batch([[[TOOL]], [[OTHER]]], CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [1, 2, 3, 0]]
    assert batch.response_mask.tolist() == [[False, False, True, False], [True, True, True, False]]
    assert_placed(
        batch,
        targets=[[0, 0, 8, 9], [2, 3, 4, 0]],
        response_ids=[[0, 0, 1, 1], [2, 2, 2, 0]],
        advantages=[[0.0, 0.0, 1.5, 1.5], [-1.0, -1.0, -1.0, 0.0]],
    )
    others = (batch.position_ids, batch.layout, batch.old_logprobs, batch.ref_logprobs)
    assert others == (None, None, None, None)  # causal, on the right only padding
    assert batch.responses == 2


def seen(layout, tokens):
    """Which positions each position of a pack attends to, read off the attention itself: values are one-hot."""
    query = torch.zeros(1, 1, tokens, 16)
    value = torch.eye(tokens, 16)[None, None]
    out, _ = utils.pack_attention(torch.nn.Module(), query, query, value, None, layout=layout)
    return (out[0, :, 0, :tokens] > 0).int().tolist()


def test_responses_share_a_pack_with_their_prompt():
    batch = grpo.make_batch([[[TOOL, TWIN], [OTHER]]], CPU)
    # the prompt's last token opens each segment, for it predicts the response's first
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 7, 1, 2, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0, 1, 1, 1, 1]]
    assert_placed(
        batch,
        targets=[[0, 0, 8, 9, 3, 2, 3, 4]],
        response_ids=[[0, 0, 1, 1, 2, 3, 3, 3]],
        advantages=[[0.0, 0.0, 1.5, 1.5, -0.5, -1.0, -1.0, -1.0]],
    )
    first = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    second = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert seen(batch.layout, 8) == [row + [0] * 3 for row in first] + [[0] * 5 + row for row in second]
    assert batch.responses == 3
    with pytest.raises(ValueError, match="a batch of its own"):
        grpo.make_batch([[[TOOL, TWIN]], [[OTHER]]], CPU)


def test_excluded_prompts_are_replaced_by_their_neighbours():
    """Every epoch stays as long; others keep their place; when all are excluded nothing is."""
    prompts = [utils.Prompt(i, (i,), "", (), ()) for i in range(7)]
    plain = [grpo.prompt_at(prompts, k, 3).index for k in range(21)]
    some = [grpo.prompt_at(prompts, k, 3, frozenset({2, 5})).index for k in range(21)]
    assert not {2, 5} & set(some) and set(some) == {0, 1, 3, 4, 6}
    assert all(a == b for a, b in zip(plain, some, strict=True) if a not in (2, 5))
    assert [grpo.prompt_at(prompts, k, 3, frozenset(range(7))).index for k in range(21)] == plain


def test_solved_prompts_are_excluded():
    """Mean score / highest score of the prompt's own verifiers against the rate; a missing score is not solved. The
    sampler before, which grpo_fast.py asks on, stays as it was."""

    def group(index, verifiers, *scores):
        prompt = utils.Prompt(index, (1,), "", ("7",) * verifiers, ("gsm8k",) * verifiers)
        return [grpo.Rollout(prompt, index, j, outcome=x, score=x) for j, x in enumerate(scores)]

    sampled = [group(0, 1, 10.0, 10.0), group(1, 2, 10.0, 10.0), group(2, 2, 20.0, 20.0), group(3, 1, 10.0, math.nan)]
    args = grpo.Args(num_samples_per_prompt_rollout=2, no_resampling_pass_rate=0.6)
    sampler = {"excluded": {9}, "of a fork": 1}
    seen = grpo.what_was_seen(sampled, args)
    assert grpo.next_sampler(sampler, seen, args) == {"excluded": {0, 2, 9}, "of a fork": 1}
    assert grpo.next_sampler(sampler, seen, replace(args, no_resampling_pass_rate=0.5))["excluded"] == {0, 1, 2, 9}
    assert grpo.next_sampler(sampler, seen, replace(args, no_resampling_pass_rate=None)) == sampler
    assert sampler == {"excluded": {9}, "of a fork": 1}


def test_a_folder_here_may_have_the_name_of_an_organization_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai").mkdir()
    assert not checks.is_missing_path("openai/gsm8k:main") and not checks.problem_of_data("openai/gsm8k")
    assert checks.is_missing_path("openai/rows.jsonl") and checks.is_missing_path("./openai/gsm8k")
