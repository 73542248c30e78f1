"""What ends a run that learns nothing, or learns from wrong numbers.

A guard changes nothing that a run computes. It asks for the end (utils.STOP.ask): the step is done, a checkpoint is
written, and what is wrong is the last line. Before the first step it refuses the run. --resume goes on from the
checkpoint, and may change the guard's flag. How often a healthy run trips each guard, and which faults each has found:
scripts/proof/guards.md.

gap        of each engine: the mean |learner - engine| logprob of the last 32 prompts, and --max_logprob_gap
echo       of each engine: a few logprobs that stay the same, bit by bit, although weights have changed
rewards    a verifier or an environment that gives no score in 3 steps in a row
gradients  no finite gradient in 3 steps in a row
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import rewards
import utils

# A response's tokens share contexts with the other responses to its prompt, and so their rounding: bfloat16 rounds a
# logit of 40 by up to 0.125, and the layers before it err as much. 48 tokens of one prompt had a mean of 0.21.
GAP_PROMPTS = 32
GAP_LIMITS = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.1}
TOLD_FLOAT32 = 1e-3  # of a gap in float32, whose rounding makes less than 1e-4
PATIENCE = 3  # steps in a row
LEAST_CALLS = 8  # without a score in these steps: fewer may be a row with a label that nothing can score
BEFORE = "before the first rollout"
WHAT_TO_TRY = (
    "What it is shows by what makes it go away: --model_dtype float32 (rounding), --rollout_backend transformers (vLLM "
    "or its copy of the weights). `python scripts/families.py` tries the model's family small. With --max_logprob_gap "
    "0 no gap ends a run, also one that goes on with --resume"
)


class Gap:
    """The gap between the learner's and the engine's logprobs of sampled tokens, which shows a bad weight sync.

    Of a token d = learner - engine logprob, rho = exp(d), and k3 = rho - 1 - d. Guards judges it."""

    def __init__(self):
        self.rows: list[torch.Tensor] = []  # of each batch: the sums of `add` and max |d|, read only in `reduce`
        self.rollouts: list[torch.Tensor] = []  # of each batch: sum |d| and tokens of each rollout (R, 2)
        self.positions: list[int] = []  # of the prompt of each rollout
        # of all ranks, see reduce
        self.metrics: dict[str, float] = {}
        self.prompts: dict[int, tuple[float, float]] = {}  # position -> sum |d| and tokens

    @torch.no_grad()
    def add(self, batch: Any) -> None:
        """Compare a grpo.Batch's learner logprobs, under the weights that sampled it, with the engine's. Tokens of
        version -1 do not count: no engine of this run has sampled what is replayed."""
        places = batch.places  # (n,) the sampled tokens, as indices of the flattened rows
        versions = np.concatenate([r.versions[r.mask] for r in batch.rollouts])
        if (versions < 0).any():
            sampled = torch.from_numpy(versions >= 0)
            places = places[sampled.to(places.device)]
        owners = batch.seq_ids.flatten()[places]  # (n,) the number of each one's rollout, from 1 on
        d = (batch.old_logprobs - batch.vllm_logprobs).flatten()[places].double()  # (n,)
        if len(d) == 0:  # a tool may have made all tokens
            return
        rho = d.exp()
        k3 = rho - 1 - d
        one = torch.ones_like(d)
        sums = [column.sum() for column in (one, d.abs(), d.square(), k3, rho, rho.square())]
        self.rows.append(torch.stack([*sums, d.abs().max()]))
        sizes = torch.stack([d.abs(), one], 1)  # (n, 2)
        self.rollouts.append(sizes.new_zeros(len(batch.rollouts) + 1, 2).index_add(0, owners, sizes)[1:])
        self.positions += [r.position for r in batch.rollouts]

    def reduce(self, args: utils.Flags, world: utils.World) -> Self:
        """Fill metrics and prompts with what all ranks have added. All ranks."""
        mine: tuple[list, list] = ([], [])
        if self.rows and utils.leads(args, world):
            sizes = torch.cat(self.rollouts).tolist()
            mine = (torch.stack(self.rows).tolist(), [*zip(self.positions, sizes, strict=True)])
        ranks = utils.all_gather(mine, world)
        rows = [row for rows, _ in ranks for row in rows]
        for position, (absolute, n) in [rollout for _, rollouts in ranks for rollout in rollouts]:
            before = self.prompts.get(position, (0.0, 0.0))
            self.prompts[position] = (before[0] + absolute, before[1] + n)
        if not rows:
            return self
        *columns, largest = zip(*rows, strict=True)
        n, *sums = [sum(column) for column in columns]
        mean, square, k3, rho, rho_square = [total / n for total in sums]
        variance = max(square - mean**2, 0.0)
        rho_variance = max(rho_square - rho**2, 0.0)
        self.metrics["debug/vllm_vs_local_logprob_diff_mean"] = mean
        self.metrics["debug/vllm_vs_local_logprob_diff_max"] = max(largest)
        self.metrics["debug/vllm_vs_local_logprob_diff_std"] = math.sqrt(variance)
        self.metrics["debug/vllm_local_reverse_kl"] = k3
        self.metrics["val/rho"] = rho
        self.metrics["val/rho_se"] = math.sqrt(rho_variance / n)
        return self


class Guards:
    """The guards of a run with some engines. The prompt at a stream position is sampled by engine position % engines.
    All ranks call its methods with the same numbers."""

    def __init__(self, args: Any, engines: int):
        self.args = args
        limit = args.max_logprob_gap
        self.limit = GAP_LIMITS[args.model_dtype] if limit is None else limit
        # Of each engine's last prompts: sum of |d| and number of tokens
        self.windows = [deque[tuple[float, float]](maxlen=GAP_PROMPTS) for _ in range(engines)]
        self.silent: Counter[str] = Counter()  # verifiers and environments: steps in a row without a score
        self.calls: Counter[str] = Counter()  # in these steps

    def judge_gap(self, gap: Gap, when: str) -> None:
        """Judge what learner and engines disagree about. Prompts that have not been seen yet count as if they had no
        gap. Logprobs that are no numbers end a run at its start; later a gradient that is not finite has its guard."""
        engines = len(self.windows)
        for position, (total, tokens) in gap.prompts.items():
            if tokens and math.isfinite(total):
                self.windows[position % engines].append((total, tokens))
            elif tokens and when == BEFORE:
                utils.STOP.ask(f"{when}: logprobs of the learner, or of engine {position % engines}, are no numbers")
        for engine, window in enumerate(self.windows):
            total, tokens = map(sum, zip((0.0, 0.0), *window, strict=True))
            mean = total / max(tokens, 1.0) * len(window) / GAP_PROMPTS
            if self.limit and mean > self.limit:
                utils.STOP.ask(
                    f"{when}: mean |learner - engine| logprob {total / tokens:.3g} over the last {len(window)} prompts "
                    f"of engine {engine} exceeds --max_logprob_gap {self.limit:g}. {WHAT_TO_TRY}"
                )
            elif self.args.model_dtype == "float32" and mean > TOLD_FLOAT32:
                problem = f"mean |learner - engine| logprob {mean:.1e}: rounding in float32 makes less than 1e-4"
                rewards.warn_once(f"engine {engine}", "gap", problem)

    def judge_rewards(self, metrics: dict[str, float], step: int) -> None:
        """Judge a step's numbers over all ranks: tell of each verifier and environment that gave no score, and ask for
        the end after PATIENCE such steps in a row."""
        for who, calls in silent_ones(metrics).items():
            self.silent[who] += 1
            self.calls[who] += calls
            steps = self.silent[who]
            silence = f"{who} gave no score in {f'{steps} steps in a row' if steps > 1 else 'a step'}"
            if steps >= PATIENCE and self.calls[who] >= LEAST_CALLS:
                mended = "mend it; where that changes a file of yours, --resume needs --resume_anyway"
                utils.STOP.ask(f"{silence}: {words_of(who)}. Nothing can be learned: {mended}")
            utils.say(f"WARNING: step {step}: {silence}")
        for who in scoring_ones(metrics):
            del self.silent[who], self.calls[who]  # of a Counter: no matter if there are none

    def judge_gradients(self, run: Any, step: Any, skipped: int) -> None:
        """Judge how many steps in a row have skipped an update for a gradient that is not finite."""
        state = run.state
        state["nonfinite_in_a_row"] = state["nonfinite_in_a_row"] + 1 if skipped else 0
        if not skipped:
            return
        run.logger.say(f"step {step.number}: non-finite gradient, update skipped")
        if state["nonfinite_in_a_row"] >= PATIENCE:
            utils.STOP.ask(
                f"non-finite gradients in {PATIENCE} steps in a row: the weights are those before them. --model_dtype "
                "float32 or a smaller --learning_rate may help; --save_traces shows what was sampled"
            )


def statuses_of(metrics: dict[str, float]) -> dict[str, Counter]:
    """Of each verifier: how many of a step's verifications had each status. From metrics reward/NAME_STATUS."""
    found: dict[str, Counter] = {}
    for metric, value in metrics.items():
        if not metric.startswith("reward/"):
            continue
        name, _, status = metric.removeprefix("reward/").rpartition("_")
        if status in ("answer", "error"):  # of no_answer and infra_error
            name, _, first = name.rpartition("_")
            status = f"{first}_{status}"
        if status in rewards.STATUSES:
            found.setdefault(name, Counter())[status] += int(value)
    return found


def silent_ones(metrics: dict[str, float]) -> dict[str, int]:
    """The verifiers and environments without a score in this step, and how often each was called.

    A function of --reward_file that always returned None, "does not apply", is silent where nothing else scored. An
    environment that always failed is so where no group has a gradient: the policy reads of its failures and goes on."""
    silent = {}
    scoring = scoring_ones(metrics)
    for name, counts in statuses_of(metrics).items():
        calls = counts.total() if not scoring else counts.total() - counts["no_answer"]
        if calls and f"verifier {name}" not in scoring:
            silent[f"verifier {name}"] = calls
    if not metrics.get("val/total_reward_groups"):
        for metric in metrics:
            folder, _, rest = metric.partition("/")
            name = rest.removesuffix("/crash_rate")
            if folder == "env" and name != rest and failure_rate(metrics, name) == 1:
                silent[f"environment {name}"] = LEAST_CALLS
    return silent


def scoring_ones(metrics: dict[str, float]) -> set[str]:
    """The verifiers and environments that gave a score in this step."""
    scoring = set()
    for name, counts in statuses_of(metrics).items():
        own = name in rewards.VERIFIERS and name not in rewards.BUILT_IN
        if counts["ok"] or (counts["no_answer"] and not own):
            scoring.add(f"verifier {name}")
    return scoring


def failure_rate(metrics: dict[str, float], environment: str) -> float:
    """The share of an environment's answers that failed."""
    rates = [metrics.get(f"env/{environment}/{status}_rate", 0.0) for status in rewards.MISSING]
    return round(sum(rates), 9)


def words_of(who: str) -> str:
    """What the last failed call of a verifier or environment said; of a reward file with its line."""
    _, _, name = who.partition(" ")
    said = {Path(whose).stem: words for (whose, _), words in rewards.WARNED.items()}
    return said.get(name, "no call said why")


# --- Echo: do an engine's logprobs change when the weights do? --------------------------------------------------------
#
# After each load of weights an engine answers the same requests of one token each. A logprob is made of all logits of
# the vocabulary: an engine whose answers all stay the same, bit by bit, has not got the weights. Weights may well stay
# the same, after a step without a gradient or one too small for bfloat16, and small moves are lost in the rounding of a
# logprob. So the learner keeps some of the numbers that it sends, and the engine is judged once they are LEAST_MOVED of
# their size away from those at its last new answer.

REQUESTS = 8
NUMBERS = 1024  # of each tensor that is sent
LEAST_MOVED = 1e-6  # about the rounding of a float32 logprob, as a share of it
KEPT_VERSIONS = 4  # an engine may answer later than the others

Answers = list[tuple[int, float]]  # token and logprob


def echo_requests(engine: utils.Sampler) -> list[utils.Request]:
    """The requests: prompts of one token, spread over the vocabulary."""
    size = len(engine.tokenizer)
    prompts = [size * (i + 1) // (REQUESTS + 1) for i in range(REQUESTS)]
    return [utils.Request((token,), seed=i, temperature=1.0, max_tokens=1) for i, token in enumerate(prompts)]


class Echo:
    """What the learner knows of the weights that it sends, and of each engine's answers. With --max_logprob_gap 0 none
    of them ends the run."""

    def __init__(self, args: utils.Flags):
        self.off = args.max_logprob_gap == 0
        self.lock = threading.Lock()  # weights and answers may be of two threads
        self.sent: dict[int, list[torch.Tensor]] = {}  # version -> some of the numbers of each tensor
        self.last: dict[int, tuple[Answers, int]] = {}  # engine -> its last new answer, and the version of its weights

    def note(self, version: int, tensor: torch.Tensor) -> None:
        """Keep some numbers of a tensor, or of several in one, that is sent."""
        step = max(1, tensor.numel() // NUMBERS)
        with self.lock:
            self.sent.setdefault(version, []).append(tensor.detach().flatten()[::step].clone())

    def watch(self, named_tensors: utils.NamedTensors, version: int) -> Any:
        """Yield the same, and note each tensor."""
        for name, tensor in named_tensors:
            self.note(version, tensor)
            yield name, tensor

    def judge(self, engine: int, version: int, generations: list[utils.Generation]) -> None:
        """Ask for the end of the run if the answers of an engine show that it has older weights than it says."""
        answers = [(int(one.token_ids[0]), float(one.logprobs[0])) for one in generations]
        with self.lock:
            before, since = self.last.get(engine, ([], version))
            if answers != before:
                self.last[engine] = (answers, version)
            elif not self.off and self.moved(since, version) >= LEAST_MOVED:
                utils.STOP.ask(
                    f"engine {engine} has not got the weights of step {version}: it computes with those of step "
                    f"{since}, for the logprobs of {REQUESTS} requests are the same bit by bit: a defect of the sync"
                )
            self.forget(version - KEPT_VERSIONS)

    def forget(self, version: int) -> None:
        """Drop the numbers of versions up to this one, but for those that an engine is compared with."""
        needed = {since for _, since in self.last.values()}
        for old in set(self.sent) - needed:
            if old <= version:
                del self.sent[old]

    def moved(self, before: int, now: int) -> float:
        """How far the numbers kept of one version are from those of another, as a share of their size:
        sum |new - old| / sum |old|. 0 where one is not kept."""
        if before == now or before not in self.sent or now not in self.sent:
            return 0.0
        old = torch.cat(self.sent[before]).float()
        new = torch.cat(self.sent[now]).float()
        distance = (new - old).abs().sum()
        size = old.abs().sum()
        return float(distance / size)


class Asker:
    """An engine's side in grpo_fast.py: requests beside those of the run, whose answers go to learner 0."""

    def __init__(self, engine: utils.Engine, send: Callable[[str, Any], None]):
        self.engine = engine
        self.send = send
        self.answers: dict[str, utils.Generation | None] = {}  # to the requests of the last weights

    def ask(self) -> None:
        """Add the requests: `take` finds the answers."""
        names = [f"echo {self.engine.version} {i}" for i in range(REQUESTS)]
        self.answers = dict.fromkeys(names)
        for name, request in zip(names, echo_requests(self.engine), strict=True):
            self.engine.add(name, request)

    def take(self, finished: Sequence[tuple[str, utils.Generation]]) -> list[tuple[str, utils.Generation]]:
        """What has finished without the answers. With the last of these all are sent."""
        others = [named for named in finished if not named[0].startswith("echo ")]
        if len(others) < len(finished):
            self.answers |= {name: generation for name, generation in finished if name in self.answers}
            answers = list(self.answers.values())
            if None not in answers:
                self.send("echo", (self.engine.version, answers))
        return others
