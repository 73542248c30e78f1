"""Turns: what stands between two turns is the template's, token by token; what was sampled stays as it was sampled."""

import json
import math
import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers

import grpo
import rewards
import utils
from scripts.parts import dumps, turns, worker
from tests.programs import is_alive, wait_until

# As published models do it, abridged: what comes before an assistant's turn, ends it, wraps an answer
PUBLISHED = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tool_response": "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "alternate": "{% for m in messages %}{% if (m.role == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "drops_thoughts": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "no_tools": "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
REASONS = {  # (template, role) -> why it is refused; the others go on
    ("olmo_thinker", "*"): "opens a <think>",
    ("olmo_thinker_code_rlzero", "*"): "begins an assistant's turn otherwise",
    ("olmo_thinker_rlzero", "*"): "begins an assistant's turn otherwise",
    ("r1_simple_chat_postpend_think", "*"): "opens a <think>",
    ("simple_chat", "*"): "begins an assistant's turn otherwise|no end token",
    ("tulu_thinker", "*"): "opens a <think>",
    ("tulu_thinker_r1_style", "*"): "opens a <think>",
    ("drops_thoughts", "*"): "drops or rewrites the thoughts of earlier turns",
    ("no_tools", "tool"): "takes no message of role 'tool'.*no tools",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return utils.load_tokenizer(grpo.Args(model_name_or_path=str(tiny_models())))


TEMPLATES = utils.CHAT_TEMPLATES | PUBLISHED


def words(rng):
    return " ".join(rng.choice("the answer is\nprint(7) 12 {'a': 1} \"so\" said it".split(" ")) for _ in range(5)) + "."


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_the_templates_tokens_or_is_refused(name, role, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[name])
    environment = turns.Environment("x.py", {}, role, (), {})
    if reason := REASONS.get((name, "*"), REASONS.get((name, role))):
        with pytest.raises(utils.UserError, match=reason) as refused:
            environment.with_separators(tokenizer, [tokenizer.eos_token_id])
        assert "--chat_template_name" in str(refused.value)
        return
    environment = environment.with_separators(tokenizer, [tokenizer.eos_token_id])
    assert (environment.between is None) == (name == "alternate")
    rng = random.Random(0)
    for _ in range(20):
        messages = [{"role": "user", "content": words(rng)}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for _ in range(rng.randint(1, 4)):
            said, stops = words(rng), rng.random() < 0.5
            heard = [
                rng.choice(["", "\n", " "]) + words(rng) + rng.choice(["", "\n\n"]) for _ in range(rng.randint(1, 3))
            ]
            tokens += tokenizer(said, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * stops
            ids, told = environment.answer(heard, stops, 10_000, tokenizer)
            tokens += ids
            joined = "\n".join(heard).strip()
            heard = [text.strip() for text in heard] if environment.between is not None else [joined]
            assert told == "\n".join(heard)
            messages += [{"role": "assistant", "content": said}, *({"role": role, "content": x} for x in heard)]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_text_has_no_special_tokens_however_it_is_cut(tokenizer):
    marks, rng = list(tokenizer.get_added_vocab()), random.Random(0)
    for _ in range(300):
        text = "".join(
            rng.choice([*marks, *marks, "<", "|", "im", "_end", "|>", " a", "\n", "é", "🙂"]) for _ in range(8)
        )
        ids = turns.ids_of(turns.plain_parts(text, tokenizer), tokenizer)
        assert not set(ids) & set(tokenizer.get_added_vocab().values())
        assert tokenizer.decode(ids) == text
    assert turns.plain_parts("The answer is 7.", tokenizer) == ["The answer is 7."]


def joining_tokenizer():
    """As those of Qwen and Olmo: punctuation and the line's end after it are one token, and so is an empty line."""
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    pieces.decoder = tokenizers.decoders.ByteLevel()
    text = ["7.\n</tool_response>\n\n}\n"] * 9
    kind = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=byte_level.alphabet(), show_progress=False)
    pieces.train_from_iterator(text, kind)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return made


@pytest.mark.parametrize("text", ["7.", "7", "}", "", "\n7.\n\n", "<|im_end|>"])
def test_a_tokenizer_may_join_an_answer_and_what_follows(text):
    """Together they are the template's tokens, but where a special token had to be taken apart."""
    tokenizer = joining_tokenizer()
    assert len(tokenizer.tokenize(".\n")) == 1
    tokenizer.chat_template = PUBLISHED["tool_response"]
    environment = turns.Environment("x.py", {}, "tool", (), {}).with_separators(tokenizer, [tokenizer.eos_token_id])
    messages = [{"role": "user", "content": "Go"}]
    start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids, told = environment.answer([text, text], True, 1000, tokenizer)
    messages += [{"role": "assistant", "content": "x"}, *[{"role": "tool", "content": text.strip()}] * 2]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert (
        tokenizer.decode(ids) == whole.removeprefix(start + "x<|im_end|>") and told == f"{text.strip()}\n{text.strip()}"
    )
    assert (ids == tokenizer.encode(whole)[len(tokenizer.encode(start + "x<|im_end|>")) :]) == (text != "<|im_end|>")


# --- Rollouts: a scripted engine, environments in real worker processes -----------------------------------------------


class Scripted(utils.Engine):
    """An engine that samples random tokens by the request's seed, one request a step, and notes what it was asked."""

    def __init__(self, tokenizer, most=6, in_rounds=False):
        self.tokenizer, self.eos_ids, self.most, self.in_rounds = tokenizer, [tokenizer.eos_token_id], most, in_rounds
        self.waiting, self.asked, self.together = {}, [], []

    @property
    def busy(self):
        return bool(self.waiting)

    def add(self, request_id, request):
        self.waiting[request_id] = request
        self.asked.append(request)

    def step(self):
        self.together.append(len(self.waiting))
        name = next(iter(self.waiting))
        request, rng = self.waiting[name], random.Random(self.waiting.pop(name).seed)
        ids = [rng.randrange(3, 512) for _ in range(rng.randint(1, self.most))][: request.max_tokens]
        stops = rng.random() < 0.6 and len(ids) < request.max_tokens
        ids += self.eos_ids if stops else []
        return [(name, utils.Generation(ids, [-1.0] * len(ids), "stop" if stops else "length", [3] * len(ids), 2))]


class Noting(Scripted):
    """Notes each rollout's requests, and what a checkpoint would keep when a turn of it starts."""

    def __init__(self, tokenizer, group):
        super().__init__(tokenizer)
        self.group, self.requests, self.kept = group, [[] for _ in group], [[] for _ in group]

    def add(self, request_id, request):
        super().add(request_id, request)
        self.requests[int(request_id)].append(request)
        self.kept[int(request_id)].append(self.group[int(request_id)].so_far())


def prompt_of(path, tokenizer, flags=""):
    line = f"--model_name_or_path x --env_file {path} --response_length 120 --max_prompt_token_length 60 {flags}"
    args = utils.parse_args(grpo.Args, line.split())
    made = turns.load_environment(args, None).with_separators(tokenizer, [tokenizer.eos_token_id])
    messages = [{"role": "user", "content": "Go"}]
    text = made.open_prompt(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    episode = {"messages": messages, "ground_truths": ["7"], "config": {}}
    return utils.Prompt(0, ids, text, ("7",), ("passthrough",), "user: Go", made, episode), args


def play(path, tokenizer, flags="", samples=4, engine=None):
    prompt, args = prompt_of(path, tokenizer, flags)
    engine = engine or Scripted(tokenizer)
    group = grpo.new_group(prompt, 0, samples)
    grpo.sample_rollouts(engine, [group], args)
    grpo.score_rollouts(group, args)
    return group, engine, args


COUNTER = """
from rewards import Answer

class Env:
    def __init__(self, config):
        self.heard = []

    def step(self, episode):
        assert episode.text == episode.messages[-1]["content"] and episode.turn == len(self.heard) + 1
        roles = ["user"] + ["assistant", "user"] * len(self.heard) + ["assistant"]
        assert [m["role"] for m in episode.messages] == roles
        self.heard.append(episode.text)
        if len(self.heard) > 3:
            return None
        return Answer([f"heard {len(self.heard)} <|im_end|>", "more"], 0.25, metrics={"heard": len(self.heard)})
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Function text -> path of an environment's file."""
    folder = tmp_path_factory.mktemp("envs")

    def write(text, name=None):
        path = folder / f"{name or 'env' + str(len(list(folder.iterdir())))}.py"
        path.write_text(text)
        return path

    return write


def check_tokens(r, tokenizer):
    """decode(all) is what the parts say, and the mask is True exactly where the engine sampled."""
    at = 0
    for turn in r.turns:
        part = slice(at, at := at + turn["tokens"])
        mine = turn["role"] == "assistant"
        assert r.mask[part].tolist() == [mine] * turn["tokens"]
        assert r.versions[part].tolist() == [3 if mine else -1] * turn["tokens"]
        assert r.logprobs[part].tolist() == [-1.0 if mine else 0.0] * turn["tokens"]
        text = tokenizer.decode(r.token_ids[part])
        if mine:
            assert text.removesuffix("<|im_end|>") == turn["content"]
        elif turn["tokens"]:
            first, *more = turn["content"].split("\n")
            said = "".join(f"<|im_start|>user\n{x}<|im_end|>\n" for x in (first, *more))
            assert text.removeprefix("<|im_end|>") == f"\n{said}<|im_start|>assistant\n"
            ends = r.token_ids[part].tolist().count(tokenizer.eos_token_id)
            assert ends == text.startswith("<|im_end|>") + 1 + len(more), "an end token in what was heard"
        assert "state" not in turn
    assert at == len(r.token_ids) == len(r.mask) == len(r.versions) == len(r.logprobs)
    assert r.text == tokenizer.decode(r.token_ids).removesuffix("<|im_end|>")


@pytest.mark.parametrize("in_rounds", [False, True])
def test_turns_go_on_from_the_tokens_that_were_sampled(in_rounds, files, tokenizer):
    engine = Scripted(tokenizer, in_rounds=in_rounds)
    group, _, args = play(files(COUNTER, "counter"), tokenizer, "--max_steps 9", samples=8, engine=engine)
    prompt = group[0].prompt
    requests = {}
    for r in group:
        check_tokens(r, tokenizer)
        assert r.over and len(r.token_ids) <= 120
        assert [t["role"] for t in r.turns] == (["assistant", "user"] * 4)[: len(r.turns)]
        assert r.verifiable == pytest.approx(0.25 * sum(t["role"] == "user" for t in r.turns))
        at = 0
        for k, turn in enumerate(r.turns):
            if turn["role"] == "assistant":
                known = grpo.Rollout(prompt, 0, r.sample, r.token_ids[:at], turns=r.turns[:k])
                requests[grpo.make_request(known, args)] = known
            at += turn["tokens"]
    assert set(engine.asked) == requests.keys() and len(engine.asked) == len(requests)
    for request, known in requests.items():
        assert request.prompt_ids == (*prompt.token_ids, *known.token_ids.tolist())
        assert request.max_tokens == 120 - len(known.token_ids)
    assert len({request.seed for request in requests}) == len(requests)
    assert sum(len(r.turns) > 3 for r in group) > 4, "hardly any turns: the test shows nothing"


def test_a_stop_string_ends_a_turn_and_an_answer_may_stand_inside_it(files, tokenizer):
    about = "def about(config):\n    return {'role': '', 'stop': ['</call>']}\n"
    path = files(about + "def step(episode):\n    return '<out>7</out>'\n")
    group, engine, _ = play(path, tokenizer, "--max_steps 2")
    assert all(request.stop == ("</call>",) for request in engine.asked)
    for r in group:
        check = [t for t in r.turns if t["role"] == "tool"]
        for turn in check:
            assert turn["content"] == "<out>7</out>"
        if r.turns[0]["finish_reason"] == "stop":  # with an end token nothing can stand inside the turn
            assert len(r.turns) == 2 and r.turns[1]["tokens"] == 0
        else:
            assert r.turns[1]["tokens"] == len(tokenizer.encode("<out>7</out>", add_special_tokens=False))


FAULTS = {  # what an environment does -> (status, what the policy is told)
    "raise ValueError('no such page')": ("crash", r"Error: ValueError: no such page"),
    "import time; time.sleep(60)": ("timeout", r"Error: no answer within 1 s"),
    "return 7": ("crash", r"Error: TypeError: step returned a int: .*"),
    "import os; os._exit(3)": ("crash", "Error: "),
    "return Answer('x', float('nan'))": ("crash", "Error: ValueError: step returned the reward nan"),
    "return 'x' * 10 ** 8": ("ok", r"x+ \[cut\]"),
    "return 'a' + chr(0xd800)": ("ok", r"a\?"),
    "raise ConnectionError('search is down')": ("infra_error", "Error: ConnectionError: search is down"),
    "import os; os.kill(os.getpid(), 9)": ("infra_error", "Error: killed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_an_outcome_and_is_counted(fault, files, tokenizer):
    status, told = FAULTS[fault]
    path = files(f"from rewards import Answer\n\ndef step(episode):\n    {fault.replace('; ', chr(10) + '    ')}\n")
    seconds = 1 if status == "timeout" else 60
    group, _, args = play(path, tokenizer, f"--max_steps 1 --env_timeout {seconds}", samples=2)
    metrics = utils.Metrics()
    utils.note_rollouts(group, args, metrics)
    out = metrics.reduce(utils.World(0, 0, 1, None))
    for r in group:
        answer = r.turns[1]
        assert answer["status"] == status and rewards.re.match(told, answer["content"]), answer
        assert math.isnan(r.score) == (status == "infra_error")
        assert len(r.turns) == (2 if status == "infra_error" else 3)
        assert sum(t["tokens"] for t in r.turns) == len(r.token_ids) <= 120
    if status != "ok":
        assert out[f"env/{path.stem}/{status}_rate"] == 1 and out[f"tools/{path.stem}/failure_rate"] == 1
    assert grpo.trainable([group], args) == [] if status == "infra_error" else True


def test_a_worker_killed_once_costs_nothing(files, tokenizer, tmp_path):
    mark = tmp_path / "mark"
    path = files(
        "import os\nclass Env:\n    def __init__(self, config):\n        self.n = 0\n    def step(self, episode):\n"
        f"        self.n += 1\n        if self.n == 2 and not os.path.exists({str(mark)!r}):\n"
        f"            open({str(mark)!r}, 'w').close()\n            os.kill(os.getpid(), 9)\n"
        "        return f'number {self.n}'\n"
    )
    (r,), _, _ = play(path, tokenizer, "--max_steps 3 --response_length 500", samples=1)
    assert mark.exists()
    assert [t["content"] for t in r.turns if t["role"] == "user"] == ["number 1", "number 2", "number 3"]


def test_rows_ask_for_an_environment_by_a_column(files, tokenizer, tmp_path):
    def load(*rows):
        data = tmp_path / "rows.jsonl"
        turn = [{"role": "user", "content": "Go"}]
        same = {"messages": turn, "ground_truth": "7", "dataset": "gsm8k"}
        data.write_text("".join(json.dumps(same | row) + "\n" for row in rows))
        args = grpo.Args(model_name_or_path="x", dataset_mixer_list=[str(data), "1.0"])
        environment = turns.Environment("x.py", {"run": 1}, "user", (), {"a": {"name": "a"}, "b": {"name": "b"}})
        return utils.load_prompts("dataset_mixer_list", args, tokenizer, environment)

    without = load({}, {})
    assert all(p.environment is not None for p in without)
    first, second, third = load({}, {"env_config": {"x": 2}}, {"tools": ["b"]})
    assert first.environment is None and first.episode == {}
    assert second.episode["config"] == {"run": 1, "x": 2, "active_tools": ["a", "b"]}
    assert third.episode["config"] == {"run": 1, "active_tools": ["b"]}
    with pytest.raises(utils.UserError, match=r"rows.jsonl row 1: tools \['c'\]: --tools has \['a', 'b'\]"):
        load({"tools": ["c"]})
    with pytest.raises(utils.UserError, match="row 1: env_config must be an object"):
        load({"env_config": [1]})


def test_what_a_dump_keeps_of_turns_trains_again(files, tokenizer):
    group, _, _ = play(files(COUNTER, "counter"), tokenizer)
    again = dumps.rollouts_of([json.loads(json.dumps(dumps.rollout_row(r, 1), default=str)) for r in group])
    for a, b in zip(group, again, strict=True):
        assert all((getattr(a, name) == getattr(b, name)).all() for name in utils.COLUMNS) and a.turns == b.turns


def test_a_rollout_goes_on_from_what_a_checkpoint_keeps_of_it(files, tokenizer, tmp_path):
    """Stopped at each point of its life, it comes to the same tokens as one that was not."""
    path = files(COUNTER, "counter")
    prompt, args = prompt_of(path, tokenizer)
    (whole,) = group = grpo.new_group(prompt, 0, 1)
    grpo.sample_rollouts(Scripted(tokenizer), [group], args)

    def finished(i, made):
        answer = grpo.end_turn(r, made, Scripted(tokenizer), args)
        kept.append(r.so_far())
        return answer

    r = grpo.Rollout(prompt, 0, 0)
    engine = Noting(tokenizer, [r])
    (kept,) = engine.kept
    engine.generate([grpo.make_request(r, args)], finished)
    kept.append(r.so_far())
    assert len(kept) > 5 and kept[0] == {} and kept[-1]["over"]
    for saved in kept[1:]:
        r = grpo.Rollout(prompt, 0, 0)
        torch.save(saved, tmp_path / "saved.pt")
        r.go_back(torch.load(tmp_path / "saved.pt", weights_only=True))
        if not r.over:
            engine = Scripted(tokenizer)
            waits = r.turns[-1]["role"] == "assistant"
            request = grpo.ask(r, engine, args).result() if waits else grpo.make_request(r, args)
            if request is not None:
                engine.generate([request], finished)
        assert all((getattr(r, name) == getattr(whole, name)).all() for name in utils.COLUMNS)


def test_metrics_of_turns(monkeypatch):
    monkeypatch.setattr(turns, "COUNTED", defaultdict(set))
    monkeypatch.setattr(turns, "TOLD", set())
    environment = SimpleNamespace(path="/x/game.py", schemas={"search": {}})
    prompt = utils.Prompt(0, (1,) * 10, "", (), (), "", environment)
    one = {"role": "assistant", "content": "", "tokens": 4, "cached": 0, "finish_reason": "stop"}
    answer = {"role": "tool", "content": "", "tokens": 6, "status": "ok", "seconds": 1.0, "reward": 0.5, "done": False}
    counts = {"tools/python/calls": 2.0, "tools/python/failures": 1.0, "tools/python/seconds": 3.0, "level": 4.0}
    r = utils.Rollout(prompt, 0, 0, [1] * 14, mask=[True] * 4 + [False] * 6 + [True] * 4)
    r.turns = [one, answer | {"metrics": counts}, one | {"cached": 16}]
    single = utils.Rollout(utils.Prompt(1, (1,), "", (), ()), 1, 0, [1], mask=[True])
    metrics = utils.Metrics()
    turns.note([r, r, single], metrics)
    found = metrics.reduce(utils.World(0, 0, 1, None))
    want = {
        "val/policy_tokens": 8, "val/environment_tokens": 6, "val/turns": 2, "val/turns_min": 2, "val/turns_max": 2,
        "val/prefix_cached_share": 16 / (10 + 20), "env/game/reward": 0.5, "env/game/level": 4,
        "tools/python/avg_calls_per_rollout": 2, "tools/python/failure_rate": 0.5, "tools/python/avg_runtime": 1.5,
        "tools/search/avg_calls_per_rollout": 0, "tools/aggregate/avg_calls_per_rollout": 2,
    }  # fmt: skip
    assert {name: found[name] for name in want} == want


# --- Environments that live: what cannot be pickled stays in its process ----------------------------------------------

LIVE = """
import os, pathlib, socket, subprocess, time
NOTES = pathlib.Path(__file__).with_suffix(".notes")

def note(*words):
    with NOTES.open("a") as file:
        file.write(" ".join(map(str, words)) + chr(10))

class Env:
    def __init__(self, config):
        self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.here, self.there = socket.socketpair()
        self.steps = 0
        note("open", os.getpid(), self.child.pid)

    def step(self, episode):
        self.steps += 1
        assert self.steps == episode.turn
        time.sleep(sum(map(ord, episode.text)) % 7 / 100)
        self.child.stdin.write(b"x")
        self.child.stdin.flush()
        self.there.send(self.child.stdout.read(1))
        assert self.here.recv(9) == b"x"
        DO
        return f"step {self.steps}"
"""
CLOSE = """
    def close(self):
        self.child.kill()
        self.child.wait()
        note("closed", os.getpid(), self.child.pid)
"""
RESET = """
    def reset(self, row):
        assert row.turn == 0 and row.text == ""
        return row.config.get("shown")
"""


def notes_of(path):
    """[word, pid of the worker, pid of its child], a list for each line."""
    lines = path.with_suffix(".notes").read_text().splitlines()
    return [[word, *map(int, pids)] for word, *pids in map(str.split, lines)]


def children_end(path):
    wait_until(lambda: not any(is_alive(child) for word, _, child in notes_of(path) if word == "open"))


@pytest.mark.parametrize("end", ["", CLOSE], ids=["no close", "close"])
def test_every_turn_of_a_rollout_meets_its_live_object(end, files, tokenizer):
    path = files(LIVE.replace("DO", "pass") + end)
    group, _, _ = play(path, tokenizer, "--max_steps 6 --response_length 400", samples=16)
    heard = [[t["content"] for t in r.turns if t["role"] == "user"] for r in group]
    assert heard == [[f"step {i}" for i in range(1, len(texts) + 1)] for texts in heard]
    assert sum(map(len, heard)) > 64
    for r in group:
        check_tokens(r, tokenizer)
    wait_until(lambda: sum(word == "closed" for word, *_ in notes_of(path)) == 16 * bool(end))
    assert len([1 for word, *_ in notes_of(path) if word == "open"]) == 16
    children_end(path)
    wait_until(lambda: not worker.OF_ENVIRONMENTS.keeping)


HANG = "if 'hang' in episode.config and episode.turn == 2:\n            "


@pytest.mark.parametrize(
    "fault, status, steps",
    [
        ("time.sleep(60)", "timeout", 2),
        ("os._exit(3)", "crash", 2),
        ("os.kill(os.getpid(), 9)", "infra_error", 2),
        ("raise OSError('down')", "infra_error", 2),
        ("raise ValueError('odd')", "crash", 4),
    ],
)
def test_a_live_object_that_fails_touches_no_other_rollout(fault, status, steps, files, tokenizer):
    path = files(LIVE.replace("DO", HANG + fault) + CLOSE)
    prompt, args = prompt_of(path, tokenizer, "--max_steps 4 --response_length 400 --env_timeout 2")
    config = {"hang": True}
    failing = replace(prompt, episode=prompt.episode | {"config": config})
    groups = [grpo.new_group(failing, 0, 1), grpo.new_group(prompt, 1, 4)]
    grpo.sample_rollouts(Scripted(tokenizer), groups, args)
    (r,), others = groups
    grpo.score_rollouts([r, *others], args)
    answers = [t for t in r.turns if t["role"] == "user"]
    assert len(answers) == steps and answers[1]["status"] == status
    assert math.isnan(r.score) == (status == "infra_error")
    assert all(t["status"] == "ok" for other in others for t in other.turns if t["role"] == "user")
    assert all(len(other.turns) == 9 for other in others)
    children_end(path)
    wait_until(lambda: not worker.OF_ENVIRONMENTS.keeping)


ASKS = """
import sys, time
from scripts.parts import environments, worker
worker.OF_ENVIRONMENTS.most = 4
episode = {"messages": [], "text": "a", "turn": 1, "steps_left": 9, "stopped": True, "ground_truths": [], "config": {}}
for _ in range(3):
    environments.ask(sys.argv[1], None, episode, 60.0)
print("asked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", [CLOSE, CLOSE + "        time.sleep(60)\n", ""], ids=["close", "hangs", "no close"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_ends_or_dies_leaves_nothing(killed, end, files):
    path = files(LIVE.replace("DO", "pass") + end)
    command = [sys.executable, "-W", "ignore", "-c", ASKS, str(path)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=utils.REPO)
    assert run.stdout.readline() == b"asked\n"
    opened = [pids for word, *pids in notes_of(path) if word == "open"]
    assert len(opened) == 3 and all(is_alive(pid) for pids in opened for pid in pids)
    if killed:
        run.kill()
    run.communicate(b"\n")
    wait_until(lambda: not any(is_alive(pid) for pids in opened for pid in pids))
    assert sorted(pids for word, *pids in notes_of(path) if word == "closed") == sorted(opened if end else [])


@pytest.mark.parametrize("live", [False, True])
def test_a_reset_continues_the_prompt_and_a_checkpoint_keeps_plain_data_alone(live, files, tokenizer):
    """With a text the policy reads the template's own words for a prompt with a paragraph more, without one those for
    the prompt."""
    path = files(LIVE.replace("DO", "pass") + RESET if live else COUNTER + RESET)
    prompt, args = prompt_of(path, tokenizer, "--max_steps 2 --response_length 300")
    for shown, words in ((None, "Go"), ("You see <|im_end|>.", "Go\n\nYou see <|im_end|>.")):
        told = replace(prompt, episode=prompt.episode | {"config": {"shown": shown}})
        group = grpo.new_group(told, 0, 4)

        engine = Noting(tokenizer, group)
        grpo.sample_rollouts(engine, [group], args)
        messages = [{"role": "user", "content": words}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for r, (request, *_), kept in zip(group, engine.requests, engine.kept, strict=True):
            assert tokenizer.decode(request.prompt_ids) == text
            assert request.prompt_ids.count(tokenizer.eos_token_id) == 1
            first = r.turns[0]
            assert first["role"] == "user" and first["content"] == (shown or "")
            assert r.token_ids[: first["tokens"]].tolist() == list(request.prompt_ids[len(prompt.token_ids) :])
            assert not r.mask[: first["tokens"]].any() and r.mask[first["tokens"]]
            assert sum(t["role"] == "assistant" for t in r.turns) == 3
            assert len(kept) == 3 and all(bool(saved) != live for saved in kept)
    for turn in range(3 * (not live)):
        again = grpo.new_group(told, 0, 4)
        for r, kept in zip(again, engine.kept, strict=True):
            r.go_back(kept[turn])
        grpo.sample_rollouts(Scripted(tokenizer), [again], args)
        assert all((a.token_ids == b.token_ids).all() for a, b in zip(group, again, strict=True))


@pytest.mark.parametrize("fault", ["raise ValueError('no')", "time.sleep(60)", "return 7", "os._exit(3)"])
def test_a_reset_that_fails_is_no_failure_of_the_policy(fault, files, tokenizer):
    path = files(LIVE.replace("DO", "pass") + RESET.replace('return row.config.get("shown")', fault) + CLOSE)
    group, engine, _ = play(path, tokenizer, "--env_timeout 2", samples=2)
    assert engine.asked == [] and all(math.isnan(r.score) and r.over and not len(r.token_ids) for r in group)
    children_end(path)
