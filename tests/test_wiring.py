"""What no formula shows: who hands which flag, number and group to whom. Stub engines, no vLLM."""

import threading
import types
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import grpo
import grpo_fast
import utils
from scripts.parts import checkpoints, guards
from tests.test_learner import make_args, make_rollouts

# --- The collector of grpo_fast.py: no bit depends on when anything arrives -------------------------------------------


class Answered:
    """Engines that have answered everything when they are asked, prompt i with the text texts[i % len(texts)], or with
    what `say` is replaced by."""

    def __init__(self, *texts, engines=2):
        self.texts, self.eos_ids, self.changed = texts, [0], threading.Condition()
        self.tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
        self.connections, self.finished, self.watchdog = [None] * engines, {}, self
        self.dead = ""
        self.messages = []  # (engine, names)

    def beat(self):
        pass

    def submit(self, requests, index=None):
        self.messages.append((index, [name for name, *_ in requests]))
        for name, request, finished in requests:
            text = self.say(name, request.prompt_ids[0])
            finished(utils.Generation([ord(c) for c in text], [-1.0] * len(text), "stop", [0] * len(text)))

    def say(self, name, prompt):
        return self.texts[prompt % len(self.texts)]

    def wait_for(self, condition, what):
        assert condition(), f"would wait for {what}"

    def take(self, names):
        return 0.0


def make_collector(*texts, prompts=8, state=None, flags=""):
    """A real collector of steps of 2 prompts x 2 samples; prompt i is the token i and asks for 7."""
    line = "--model_name_or_path x --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 2 --async_steps 0 "
    line += f"--response_length 64 --max_prompt_token_length 8 --pack_length 72 --total_episodes 400 {flags}"
    args = utils.parse_args(grpo.Args, line.split())
    data = [utils.Prompt(i, (i, 1), "", ("7",), ("gsm8k",)) for i in range(prompts)]

    def pack(rollouts):
        return grpo.pack_rollouts(rollouts, "shared", args.pack_length)

    return grpo_fast.Collector(Answered(*texts), data, args, state or grpo.start_state(), pack)


def prompts_of(collector):
    return {position: group[0].prompt.index for position, group in collector.in_flight.items()}


@pytest.mark.parametrize("ahead", [0, 1])
def test_exclusions_of_a_position_are_those_of_the_weights_that_admitted_it(ahead):
    """Whether the next step is collected before or after the weights of this one arrive is a matter of timing."""
    flags = "--async_steps 1 --deterministic --no_resampling_pass_rate 0.5"
    collector = make_collector("7", "7", "7", "1", prompts=4, flags=flags)
    collector.engines_have(0)
    steps = [collector._collect() for _ in range(1 + ahead)]
    collector.asks_no_more(1)
    collector.engines_have(steps[0].cursor)
    first, both = ({g[0].prompt.index for p in range(n) for g in [collector.in_flight[p]]} - {3} for n in (2, 4))
    want, late = ([grpo.prompt_at(collector.prompts, p, 1, frozenset(x)).index for p in (4, 5)] for x in (first, both))
    assert [prompts_of(collector)[p] for p in (4, 5)] == want != late
    assert steps[0].sampler["excluded"] == first


def test_a_step_that_runs_dry_waits_for_weights_that_are_new_enough():
    """With --active_sampling it then starts no more groups than it needs: the next step would find them too old."""
    collector = make_collector("7", flags="--async_steps 1 --active_sampling")
    waits = []

    def wait_for(condition, what):
        while not condition():
            waits.append((what, collector.version))
            collector.version += 1  # as engines_have does

    collector.engines.wait_for = wait_for
    collector.engines_have(0)
    assert (collector.admitted, collector.version) == (4, 0)
    groups = [collector.in_flight[position] for position in range(4)]
    collector.consumed = 4
    collector.number = 4  # it trains weights of update 3, and may take tokens of update 2
    collector._admit_more(grpo_fast.StepData(groups=groups[:1], sampled=groups))
    assert waits == [("newer weights", 0), ("newer weights", 1)]
    assert collector.admitted == 5, "one of two groups with a gradient is missing"


def test_active_sampling_admits_what_steps_will_take_and_what_is_too_old_expires():
    """Steps took 8 groups for 2 with a gradient; then every group has one. By hand: 2 x 8 - sqrt(2 x 8 x 3) = 9.07."""
    state = grpo.start_state() | {"taken": (8,) * 8}
    collector = make_collector("7", flags="--async_steps 1 --active_sampling", state=state)
    collector.engines.say = lambda name, _: "7" if name.endswith("/0") else "1"
    collector.engines_have(0)
    assert collector.admitted == 9
    first, second = collector._collect(), collector._collect()
    assert (first.cursor, second.cursor, first.expired, second.expired) == (2, 4, [], [])
    collector.engines_have(first.cursor)  # (7 x 8 + 2) / 8 = 7.25 a step: 2 + 14.5 - 6.17
    assert collector.admitted == 10
    third = collector._collect()
    assert [group[0].position for group in third.expired] == [4, 5, 6, 7, 8], "the first weights have admitted them"
    assert [group[0].position for group in third.groups] == [9, 10]
    for data in (first, second, third):
        data.shares = [[[data.groups]]]
        counts = collector.account(data)
    assert (counts["batch/groups_expired"], counts["val/expired_tokens"]) == (5, 10) and not utils.STOP.because
    saved = collector.checkpoint(third.cursor)
    assert saved["taken"] == (8, 8, 8, 8, 8, 2, 2, 2) and saved["counts"]["started"] == 11


def test_a_collector_goes_on_without_the_prompts_that_a_checkpoint_excludes():
    state = grpo.start_state() | {"sampler": {"excluded": {2, 5}}}
    collector = make_collector("7", flags="--async_steps 3", state=state)
    collector.engines_have(0)
    assert len(collector.in_flight) == 8 and not {2, 5} & set(prompts_of(collector).values())


def test_a_rollout_of_a_checkpoint_is_as_old_as_its_oldest_token():
    state = grpo.start_state() | {"step": 5, "cursor": 10}
    tokens = {"token_ids": [5, 6], "logprobs": [-1.0] * 2, "mask": [True] * 2, "versions": torch.tensor([-1, 3])}
    state["rollouts"] = {10: (6, {0: tokens, 1: {}})}
    collector = make_collector("7", "1", flags="--async_steps 1 --active_sampling", state=state)
    collector.engines_have(10)
    assert collector.admitted_by == {10: 3, 11: 5, 12: 5, 13: 5}
    assert prompts_of(collector)[10] == 6 != grpo.prompt_at(collector.prompts, 10, collector.args.seed).index
    assert [group[0].position for group in collector._collect().expired] == [10]


def test_the_collector_asks_the_sampler_of_a_fork(monkeypatch):
    def next_group(prompts, position, sampler, args):
        return grpo.new_group(prompts[7 - position], position, position + 1)

    monkeypatch.setattr(grpo, "next_group", next_group)
    collector = make_collector("7")
    collector.engines_have(0)
    assert [(len(group), group[0].prompt.index) for group in collector._collect().sampled] == [(1, 7), (2, 6)]


def test_data_without_any_gradient_end_a_step_after_ten_rounds():
    collector = make_collector("7", flags="--active_sampling")
    collector.engines_have(0)
    data = collector._collect()
    assert (len(data.sampled), data.groups) == (10 * 2, [])


@pytest.mark.parametrize("flags, taken, ahead", [
    ("--async_steps 3", (9, 9), 8),
    ("--async_steps 0 --active_sampling", (9, 9), 2),
    ("--async_steps 3 --active_sampling", (), 8),
    ("--async_steps 3 --active_sampling", (2, 2, 2), 8),  # every group has a gradient
    ("--async_steps 1 --active_sampling", (2, 3), 4),  # 5 - sqrt(5 x 1/4) is less than without the flag
    ("--async_steps 3 --active_sampling", (4, 4), 12),  # 16 - sqrt(4 x 4 x 1)
])  # fmt: skip
def test_groups_ahead(flags, taken, ahead):
    args = make_collector("7", flags=flags).args
    assert grpo_fast.groups_ahead(args, taken) == ahead


def test_staleness_is_that_of_the_policys_own_tokens_and_bounded():
    """Step 4 trains weights of update 3. Tokens of versions 2 and 3 are one and no updates old, an answer's none, and
    replayed ones, of version -1, too. A token older than async_steps is a defect of the admission and ends the run."""
    args = utils.parse_args(grpo.Args, "--model_name_or_path x --async_steps 1".split())
    prompt = utils.Prompt(0, (0, 1), "", ("7",), ("gsm8k",))
    r, replayed = [utils.Rollout(prompt, 0, j) for j in range(2)]
    r.append(utils.Generation([5, 6], [-1.0, -1.0], "stop", [2, 3]))
    r.append_answer([8, 8])
    replayed.append(utils.Generation([5], [-1.0], "stop", [-1]))
    metrics = utils.Metrics()
    grpo_fast.note_staleness([[[[r, replayed]]]], 4, args, metrics)
    found = metrics.reduce(utils.World(0, 0, 1, torch.device("cpu")))
    assert found["val/num_steps_off_policy"] == 0.5
    assert (found["val/model_step_min"], found["val/model_step"], found["val/model_step_max"]) == (2, 2.5, 3)
    grpo_fast.note_staleness([[[[replayed]]]], 9, args, metrics)
    assert not utils.STOP.because
    grpo_fast.note_staleness([[[[r]]]], 5, args, metrics)
    assert "step 5 has tokens 2 updates old" in utils.STOP.because


def test_without_asynchrony_the_batches_of_an_engine_do_not_depend_on_arrival():
    """One message for each engine holds all its requests; the transformers engine answers it before it reads on."""
    collector = make_collector("1", flags="--num_unique_prompts_rollout 3")
    collector.engines_have(0)
    assert collector.engines.messages == [(0, ["0/0", "0/1", "2/0", "2/1"]), (1, ["1/0", "1/1"])]
    later = make_collector("1", flags="--async_steps 1")
    later.engines_have(0)
    assert [index for index, _ in later.engines.messages] == [None] * 4  # who has least to do

    read = []
    connection = types.SimpleNamespace(poll=lambda _: True, recv=lambda: read.append(1) or ("generate", []))
    inbox = grpo_fast.Inbox(connection, False, only_when_idle=True)
    assert inbox.next(busy=True) is None and not read
    assert grpo_fast.Inbox(connection, False).next(busy=True) and len(read) == 1
    assert inbox.next(busy=False) and len(read) == 2


@pytest.mark.parametrize("flags", ["", "--async_steps 1 --deterministic", "--rollout_backend transformers"])
def test_an_evaluation_and_the_next_rollouts_share_no_batch_in_a_fixed_order(flags):
    """Bits of a token depend on its batch, and on the prompts that vLLM still keeps."""
    collector = make_collector("1", flags=flags)
    assert grpo_fast.fixed_order(collector.args).messages
    collector.engines_have(0)
    asked = len(collector.engines.messages)
    with pytest.raises(AssertionError, match="would wait for the evaluation"):
        collector.engines_have(2)
    assert len(collector.engines.messages) == asked
    collector.version = 0
    collector.asks_no_more(1)
    collector.engines_have(2)
    assert len(collector.engines.messages) > asked


def test_requests_of_an_evaluation_are_shared_out_whatever_else_runs():
    sent = []
    engines: Any = types.SimpleNamespace(connections=[None] * 2, take=len)
    engines.submit = lambda named, index=None: sent.append((index, [request for _, request, _ in named]))
    grpo_fast.Engines.generate(engines, list(range(5)), lambda i, made: None)
    assert sent == [(0, [0, 2, 4]), (1, [1, 3])]


@pytest.mark.parametrize("steps, kept", [(0, []), (1, [2, 3])])
def test_a_checkpoint_has_whole_batches_of_older_weights_only(steps, kept, tmp_path):
    """Half a batch of the newest weights would leave the other half a batch of its own after a resume."""
    collector = make_collector("1", "7", flags=f"--async_steps {steps} --deterministic")
    collector.engines_have(0)
    data = collector._collect()
    collector.account(data)
    collector.asks_no_more(1)
    collector.engines_have(data.cursor)
    saved = collector.checkpoint(data.cursor)
    assert sorted(saved["rollouts"]) == kept
    before = prompts_of(collector)
    torch.save(saved, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    state = grpo.start_state() | {"cursor": data.cursor, "step": 1} | saved
    again = make_collector("1", "7", flags=f"--async_steps {steps} --deterministic", state=state)
    again.engines_have(data.cursor)
    assert prompts_of(again) == before
    asked = {int(name.split("/")[0]) for _, names in again.engines.messages for name in names}
    assert asked == set(before) - set(kept)
    for position in kept:
        for was, now in zip(collector.in_flight[position], again.in_flight[position], strict=True):
            for name, dtype in utils.COLUMNS.items():
                had, got = getattr(was, name), getattr(now, name)
                assert had.dtype == got.dtype == dtype and had.tolist() == got.tolist() and len(got), name


def test_a_checkpoint_waits_for_weights_that_allow_its_rollouts():
    """They travel while the next update runs. Without its rollouts a resumed run sampled them from newer weights."""
    collector = make_collector("1", "7", flags="--async_steps 1 --deterministic")
    collector.engines_have(0)
    collector.asks_no_more(1)
    steps, waits = [collector._collect() for _ in range(2)], []
    wait_for = collector.engines.wait_for

    def arrive(condition, what):
        if not condition():
            waits.append(what)
            collector.engines_have(steps[0].cursor)  # as the sender does, in its own time
        wait_for(condition, what)

    collector.engines.wait_for = arrive
    assert sorted(collector.checkpoint(steps[1].cursor)["rollouts"]) == [4, 5] and len(waits) == 1
    short = make_collector("1", "7", flags="--async_steps 1 --deterministic --total_episodes 12")
    short.engines_have(0)
    short.asks_no_more(2)
    for _ in range(2):
        cursor = short._collect().cursor
        short.engines_have(cursor)
    assert sorted(short.checkpoint(cursor)["rollouts"]) == [4, 5]  # the last step's
    assert not short.checkpoint(cursor + 2)["rollouts"]  # there are none after it


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_the_gap_of_every_engine_is_measured(tiny_models, world, bad):
    """By itself: the mean over three engines would hide one."""
    args = make_args(tiny_models(), "--vllm_num_engines", 3, "--per_device_train_batch_size", 1)
    args = replace(args, max_logprob_gap=0.5)
    policy, prompt = grpo.load_policy(args, world), utils.Prompt(0, (5, 6, 7), "", (), ())
    batch = grpo.make_batch([[[grpo.Rollout(prompt, 0, 0, [8, 9], [0.0, 0.0], [True, True])]]], world.device)
    grpo.fill_logprobs(policy, [batch], "old_logprobs", 1, args)

    class Three(grpo_fast.Engines):
        def __init__(self):
            self.versions = []

        def wait_loaded(self, version):
            self.versions.append(version)

        def generate(self, requests, finished):
            for i in range(len(requests)):
                logprobs = batch.old_logprobs[0, 2:] - float(i % 3 == bad)
                finished(i, utils.Generation([8, 9], logprobs, "length", [4, 4]))

    run = types.SimpleNamespace(engine=Three(), args=args, world=world, train_prompts=[prompt])
    run.learner = types.SimpleNamespace(policy=policy)
    gap = grpo_fast.check_engines(run, 4)
    guards.Guards(args, 3).judge_gap(gap, "now")
    assert run.engine.versions == [4]
    assert (f"prompts of engine {bad}" in utils.STOP.because) == (bad is not None) == bool(utils.STOP.because)


def test_neighbours_get_the_same_packs(world, monkeypatch):
    """--sequence_parallel_size 2 with four learners: ranks 0 and 1 share the first packs, 2 and 3 the others."""
    data = grpo_fast.StepData(pickled=[[[grpo_fast.to_bytes([[n]])] for n in m] for m in (("a", "bb"), ("ccc", "d"))])
    args, sent, told = grpo.Args(sequence_parallel_size=2), [], []
    monkeypatch.setattr(
        grpo_fast.dist, "scatter_object_list", lambda mine, parts: told.extend(parts) or mine.__setitem__(0, parts[0])
    )
    done, loads = types.SimpleNamespace(wait=lambda: None), grpo_fast.pickle.loads
    monkeypatch.setattr(grpo_fast.dist, "isend", lambda x, i: sent.append((i, loads(x.numpy()))) or done)
    packs, *_ = grpo_fast.scatter(data, args, utils.World(0, 0, 4, world.device))
    assert packs == [[[["a"]]], [[["ccc"]]]]
    assert sent == [(i, [[n]]) for i, share in ((1, ("a", "ccc")), (2, ("bb", "d")), (3, ("bb", "d"))) for n in share]
    sizes = [[[len(p) for p in share] for share in m] for m in data.pickled]
    assert [part[0] for part in told] == [[m[i] for m in sizes] for i in (0, 0, 1, 1)]


def real_engines(sent, flags=""):
    """grpo_fast.Engines of one engine that never answers and appends what it is told to `sent`."""
    connection = types.SimpleNamespace(recv=threading.Event().wait, send=sent.append)
    args = utils.parse_args(grpo.Args, f"--model_name_or_path x {flags}".split())
    return grpo_fast.Engines([connection], types.SimpleNamespace(beat=lambda: None), None, [], args)


def test_turns_of_a_round_start_together_and_others_at_once():
    """With --deterministic no batch may depend on when an answer comes."""
    for flags, starts in (("", [["b"], ["a"]]), ("--deterministic", [["a", "b"]])):
        sent = []
        engines = real_engines(sent, f"--tools calculator {flags}")
        answers = {name: Future() for name in "abc"}
        first = utils.Request((1,), 0, 1.0, 1)
        engines.submit([grpo_fast.NamedRequest(name, first, lambda made, a=a: a) for name, a in answers.items()])
        for name in "cba":
            engines._ended(name, 0, utils.Generation([5], [0.0], "stop", [0]))
        for name in "bca":  # c is over, the others have a second turn
            answers[name].set_result(None if name == "c" else utils.Request((1, 2), 0, 1.0, 1))
        assert [[name for name, _ in requests] for _, requests in sent] == [["a", "b", "c"], *starts]
        assert not engines.dead and set(engines.finished) == {"c"} and set(engines.on_end) == {"a", "b"}


def test_an_error_of_a_fork_in_a_response_shows_its_line(capsys):
    """The learner waits for the response, and once ended with the words alone."""
    engines = real_engines([])
    engines.submit([grpo_fast.NamedRequest("a", utils.Request((1,), 0, 1.0, 1), lambda made: 1 / 0)])
    engines._ended("a", 0, utils.Generation([5], [0.0], "stop", [0]))
    assert "test_wiring.py" in capsys.readouterr().err
    with pytest.raises(utils.UserError, match="ZeroDivisionError"):
        engines.take(["a"])


@pytest.mark.parametrize("steps, cursor, started", [(0, 4, 4), (1, 3, 4)])
def test_active_sampling_without_asynchrony_takes_whole_rounds_as_grpo_py_does(steps, cursor, started):
    """Else the rest of a round would train one update late; with asynchrony it may, and is not wasted."""
    collector = make_collector("7", prompts=1, flags=f"--active_sampling --async_steps {steps}")
    collector.engines.say = lambda name, _: {"0": "77", "3": "71"}.get(name[0], "17")[int(name[-1])]
    collector.engines_have(0)
    data = collector._collect()
    assert [g[0].position for g in data.groups] == [1, 2]
    assert (data.cursor, collector.counts["started"]) == (cursor, started)


# --- From the flags to the loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2])
def test_gradients_are_reduced_after_the_last_micro_batch_only(tiny_models, world, monkeypatch, parts):
    """Also one that holds nothing, of a rank that has fewer of them than another."""
    seen = []
    monkeypatch.setattr(utils, "gradient_sync", lambda policy, args, last: seen.append(last))
    monkeypatch.setattr(utils, "all_reduce", lambda values, *more: [v + (len(more) > 1) for v in values])  # MAX: + 1
    args = make_args(tiny_models(), "--per_device_train_batch_size", 2)
    rollouts = make_rollouts(groups=2)
    batches = []
    for part in [rollouts] if parts == 1 else [rollouts[:4], rollouts[4:]]:
        (packs,) = grpo.pack_rollouts(part, "rows", 64)
        batches.append(grpo.micro_batches(packs, "rows", args, world.device))
    grpo.update(grpo.load_learner(args, world), batches, args, world, utils.Metrics())
    assert seen == ([False] * 3 + [True] if parts == 1 else [False, False, True, False, True])


@pytest.mark.parametrize("flags, given, each", [("--async_steps 0", 3, 3), ("", 3, 1), ("--vllm_num_engines 3", 8, 2)])
def test_ranks_get_the_threads_that_grpo_py_would_have(flags, given, each, monkeypatch):
    """Bits depend on their number. Ranks that compute at the same time share those that a user has given."""
    from scripts.parts import launch

    seen = []
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # restored afterwards
    monkeypatch.setattr(grpo_fast.sys, "argv", ["grpo_fast.py"])
    monkeypatch.setattr(launch, "launch", lambda *_: seen.append(grpo_fast.os.environ["OMP_NUM_THREADS"]))
    before = torch.get_num_threads()
    torch.set_num_threads(given)  # as torch does for OMP_NUM_THREADS when it is imported
    try:
        grpo_fast.launch(utils.parse_args(grpo.Args, f"--model_name_or_path x {flags}".split()))
    finally:
        torch.set_num_threads(before)
    assert seen == [str(each)]


# --- From the flags to the engine -------------------------------------------------------------------------------------


def request(position=3, sample=1, evaluation=False, **flags):
    prompt = utils.Prompt(0, (5, 6), "", ("7",), ("gsm8k",))
    r = grpo.Rollout(prompt, position, sample, evaluation=evaluation)
    args = grpo.Args(**flags)
    return grpo.make_request(r, grpo.evaluation_args(args) if evaluation else args)


def test_a_seed_is_of_run_position_sample_and_kind():
    """Another seed would also change what a resumed run samples."""
    made = [request(p, s, e, seed=seed) for p in range(3) for s in range(3) for e in (False, True) for seed in (1, 2)]
    assert len({r.seed for r in made}) == len(made) == 36
    assert request(seed=4).seed == utils.derive_seed(4, 3, 1, 0)
    assert request(seed=4, evaluation=True).seed == utils.derive_seed(4, 3, 1, 1)


def test_what_is_asked_for_in_training_and_in_evaluation():
    flags = dict(temperature=0.6, eval_temperature=0.3, response_length=11, vllm_top_p=0.8)
    want = utils.Request((5, 6), request().seed, 0.6, 11, 0.8)
    assert request(**flags) == want
    evaluation = replace(want, seed=request(evaluation=True).seed, temperature=0.3)
    assert request(evaluation=True, **flags) == evaluation
    longer = replace(evaluation, max_tokens=17)
    assert request(evaluation=True, **flags, eval_response_length=17) == longer
    assert request(**flags, eval_response_length=17) == want
    greedy = replace(evaluation, temperature=0.0, top_p=1.0)  # the most likely token is in every nucleus
    flags["eval_temperature"] = 0.0
    assert request(evaluation=True, **flags) == greedy
    several = replace(evaluation, temperature=0.6)
    assert request(evaluation=True, **flags, eval_pass_at_k=2) == several


# --- Sampling on several ranks ----------------------------------------------------------------------------------------


@pytest.fixture
def other(monkeypatch):
    """The other one of two ranks: in how many rounds it lacks groups, and what it saw."""
    found = types.SimpleNamespace(lacks=0, seen=[])

    def all_reduce(values, world):
        found.lacks -= 1
        return [values[0] + (found.lacks >= 0)]

    monkeypatch.setattr(utils, "all_reduce", all_reduce)
    monkeypatch.setattr(utils, "all_gather", lambda mine, world: [mine, found.seen])
    return found


def sample(state, *flags):
    """(positions chosen, positions sampled, prompt indices) of rank 0's part of a step of 4 prompts x 2 samples on two
    ranks. Of prompts 0, 3, 6, ... all responses are right, of 1, 4, ... none, else the first."""

    def generate(requests, finished):
        for i, asked in enumerate(requests):
            text = {0: "7", 1: "1", 2: "17"[i % 2]}[asked.prompt_ids[0] % 3]
            finished(i, utils.Generation([ord(text)], [-1.0], "stop", [0]))

    line = "--model_name_or_path x --num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 2"
    args = utils.parse_args(grpo.Args, [*line.split(), *flags])
    data = [utils.Prompt(i, (i,), "", ("7",), ("gsm8k",)) for i in range(12)]
    engine = types.SimpleNamespace(generate=generate, tokenizer=Answered().tokenizer, eos_ids=[0])
    world = utils.World(0, 0, 2, torch.device("cpu"))
    run: Any = types.SimpleNamespace(engine=engine, train_prompts=data, state=state, args=args, world=world)
    chosen, sampled = grpo.sample_groups(run, utils.Timer())
    return *([g[0].position for g in groups] for groups in (chosen, sampled)), [g[0].prompt.index for g in sampled]


def test_active_sampling_goes_on_while_any_rank_lacks_groups(other):
    """As many rounds on both, since cursors must agree; what is too much on one is dropped."""
    state = grpo.start_state()
    other.lacks = 6
    chosen, sampled, indices = sample(state, "--active_sampling", "--no_shuffle")
    assert indices == [p % 12 for p in sampled] and len(sampled) == 7 * 2 and state["cursor"] == 7 * 4
    assert chosen == [2, 8]
    other.lacks = 99
    assert len(sample(grpo.start_state(), "--active_sampling")[1]) == grpo.MAX_SAMPLING_ROUNDS * 2


def test_exclusions_of_all_ranks_are_kept_and_used(other):
    state = grpo.start_state()
    other.seen = [grpo.Seen(1, 2, [10.0, 10.0], 10.0)]
    for _ in range(6):  # two epochs of 12 prompts, half of each
        before = state["sampler"]["excluded"]
        indices = sample(state, "--no_resampling_pass_rate", "1.0")[2]
        assert not before & set(indices)
        assert state["sampler"]["excluded"] == before | {2} | {i for i in indices if i % 3 == 0}
    assert state["sampler"]["excluded"] == {0, 2, 9}


# --- Starts and ends --------------------------------------------------------------------------------------------------


def test_the_model_is_saved_before_engines_are_waited_for(monkeypatch, tmp_path):
    """An engine that dies after the last step costs no model."""
    order = []
    monkeypatch.setattr(utils, "save_model", lambda *_: order.append("model"))
    run: Any = mock.MagicMock(args=grpo.Args(total_episodes=64), run_dir=tmp_path, state={"step": 1})  # one step
    run.checkpoints.wait = lambda: order.append("checkpoint")
    run.engine.stop.side_effect = RuntimeError("engine 0 is gone")
    with pytest.raises(RuntimeError, match="engine 0 is gone"):
        grpo.finish(run)
    assert order == ["checkpoint", "model"]


def test_evaluation_has_penalties_of_its_own_length(world, monkeypatch):
    """Five tokens of eight are not overlong; those of training's four would be."""
    prompt = utils.Prompt(0, (1,), "", ("7",), ("gsm8k",))
    r = utils.Rollout(prompt, 0, 0, [5] * 5, [-1.0] * 5, [True] * 5, finish_reason="stop")
    monkeypatch.setattr(grpo, "sample_rollouts", lambda _, groups, *__: groups[0].__setitem__(0, r))
    args = grpo.Args(overlong_buffer_length=2, response_length=4, eval_response_length=8)
    out = grpo.evaluate(mock.MagicMock(args=args, eval_world=world, eval_prompts=[prompt], state={"step": 0}))
    assert out["eval/scores"] == out["eval/objective/overlong_penalty"] == 0


def test_what_a_killed_run_left_is_removed_before_any_rank_writes_a_checkpoint(tmp_path, monkeypatch):
    """Rank 0 once removed the file of a rank that was faster: the checkpoint then lacked it, and nobody was told."""
    left = tmp_path / "checkpoints" / "step_1.tmp"
    left.mkdir(parents=True)
    seen = []
    monkeypatch.setattr(checkpoints.dist, "new_group", lambda backend: backend)
    monkeypatch.setattr(checkpoints.dist, "barrier", lambda group: seen.append((group, left.exists())))
    checkpoints.Writer(tmp_path, 3, utils.World(0, 0, 2, torch.device("cpu")))
    assert seen == [("gloo", False)]
