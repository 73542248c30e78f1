"""Benchmarks of the learner's forward and backward: bench.py learner and compiled."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import grpo
import utils
from scripts.proof.benchmarks.common import (
    BenchFlags,
    Result,
    draw_lengths,
    in_rounds,
    make_rollouts,
    matrix_product,
    ratio,
    side_by_side,
    spread,
)

# --- Our update -------------------------------------------------------------------------------------------------------


def learner_args(options: BenchFlags) -> grpo.Args:
    """Flags of a bare policy gradient, then the flags of grpo.py that were given."""
    flags = f"--model_name_or_path {options.model} --model_dtype {options.dtype} --pack_length {options.pack_length}"
    flags += " --per_device_train_batch_size 1 --beta 0 --no_load_ref_policy --max_logprob_gap 0"
    flags += " --rho_clamp_upper_bound 1 --temperature 1"
    return utils.parse_args(grpo.Args, [*flags.split(), *options.grpo_flags])


class Ours(NamedTuple):
    """A policy that is never changed, and how it is run."""

    policy: grpo.Policy
    args: grpo.Args
    world: utils.World

    def packs(self, rollouts: Sequence[grpo.Rollout], packing: str) -> list[grpo.Pack]:
        """The packs of the only learner."""
        return grpo.pack_rollouts(rollouts, packing, self.args.pack_length, 1, self.policy.pair_cost)[0]

    def update(self, batches: Sequence[Any]) -> float:
        """grpo.update without the optimizer's step. Returns the norm of the gradient, so it waits for a GPU."""
        no_step: Any = SimpleNamespace(step=lambda: None, zero_grad=self.policy.zero_grad, get_last_lr=lambda: [0.0])
        learner = grpo.Learner(self.policy, None, no_step, no_step)
        metrics = utils.Metrics()
        grpo.update(learner, [batches], self.args, self.world, metrics)
        return metrics.reduce(self.world)["optim/grad_norm"]

    def pack_and_update(self, rollouts: Sequence[grpo.Rollout], packing: str) -> float:
        """A step's training: packs, micro-batches, update. Returns the norm of the gradient."""
        packs = self.packs(rollouts, packing)
        return self.update(grpo.micro_batches(packs, packing, self.args, self.world.device))


# --- The bare loop ----------------------------------------------------------------------------------------------------


class BareBatch(NamedTuple):
    """A micro-batch of the bare loop, with n positions whose logits are computed."""

    inputs: dict[str, Any]  # of the model
    where: torch.Tensor  # (B, T) bool, n of them true
    targets: torch.Tensor  # (n,) tokens
    weights: torch.Tensor  # (n,) of their logprobs in the loss


def bare_pass(model: Any, attention: str, batches: Sequence[BareBatch]) -> float:
    """Policy gradient with a Hugging Face model and nothing of ours but, on packs, the attention. Returns the norm of
    the gradient."""
    model.set_attn_implementation(attention)
    for inputs, where, targets, weights in batches:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[where]  # (n, H)
        logits = model.get_output_embeddings()(hidden).float()  # (n, V)
        nll = cross_entropy(logits, targets, reduction="none")
        (nll * weights).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    return float(norm)


def prepare_packs(batches: Sequence[grpo.Batch], dense: bool) -> list[BareBatch]:
    """Packs for the bare loop: with our layout, or with the (T, T) mask of who attends to whom."""
    tokens = sum(int(batch.response_mask.sum()) for batch in batches)
    prepared = []
    for batch in batches:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.layout is not None:
            inputs["position_ids"] = batch.position_ids
            if dense:
                inputs["attention_mask"] = dense_mask(batch.layout)
            else:
                inputs["layout"] = batch.layout
        where = batch.response_mask
        prepared.append(BareBatch(inputs, where, batch.targets[where], batch.advantages[where] / tokens))
    return prepared


def dense_mask(layout: utils.Layout) -> torch.Tensor:
    """(1, 1, T, T) bool: who attends to whom in a pack, written out."""
    piece_of_token: list[int] = []
    segment_of_token: list[int] = []  # 0 is the prompt that the responses of the piece share
    for piece, (shared, own) in enumerate(layout.pieces):
        segment_of_token += [0] * shared
        for segment, length in enumerate(own, start=1):
            segment_of_token += [segment] * length
        piece_of_token += [piece] * (shared + sum(own))
    pieces = torch.tensor(piece_of_token, device=layout.device)
    segments = torch.tensor(segment_of_token, device=layout.device)
    same_piece = pieces == pieces[:, None]
    prompt_or_same_segment = (segments == 0) | (segments == segments[:, None])
    return (same_piece & prompt_or_same_segment).tril()[None, None]


def prepare_padded(rollouts: Sequence[grpo.Rollout], rows: int, device: Any) -> list[BareBatch]:
    """`rows` responses each with its own prompt, as TRL has them: prompts padded on the left and responses on the right
    to the longest of the rows. Padded positions of the responses have logits too."""
    tokens = sum(len(r.token_ids) for r in rollouts)
    right = functools.partial(pad_sequence, batch_first=True)
    left = functools.partial(right, padding_side="left")
    prepared = []
    for i in range(0, len(rollouts), rows):
        row_rollouts = rollouts[i : i + rows]
        prompts = [torch.tensor(r.prompt.token_ids) for r in row_rollouts]
        responses = [torch.tensor(r.token_ids.tolist()) for r in row_rollouts]
        advantages = [torch.full((len(r.token_ids),), r.advantage / tokens) for r in row_rollouts]
        response_ids = right(responses).to(device)
        input_ids = torch.cat([left(prompts).to(device), response_ids], dim=1)
        prompt_mask = left([torch.ones_like(ids) for ids in prompts])
        response_mask = right([torch.ones_like(ids) for ids in responses])
        attention_mask = torch.cat([prompt_mask, response_mask], dim=1).to(device)
        where = torch.zeros_like(input_ids, dtype=torch.bool)
        where[:, prompt_mask.shape[1] - 1 : -1] = True
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        prepared.append(BareBatch(inputs, where, response_ids.flatten(), right(advantages).flatten().to(device)))
    return prepared


# --- The benchmarks ---------------------------------------------------------------------------------------------------


# name of a ratio, its two sides, its target
COMPARED = (
    ("packs over a bare loop over the same packs", "packs_shared", "bare_packs", 0.9),
    ("packs over padded rows", "packs_shared", "padded", 2.0),
    ("packs over one by one", "packs_shared", "one_by_one", 1.0),
    ("packs over one by one, no shared prompts", "packs_plain", "one_by_one", 1.0),
    ("packs over packs without shared prompts", "packs_shared", "packs_plain", None),
    ("attention by pieces over a dense mask, bare", "bare_packs", "bare_dense", None),
)


def bench_learner(options: BenchFlags) -> Result:
    """Forward and backward of training, in real tokens per second: the tokens of each response and its prompt, whatever
    is computed. peak_share: the floating-point operations that the shared packs need, at the speed of a matrix product,
    as a share of the seconds.

    packs_shared   grpo.pack_rollouts and grpo.update, as in training: a pack has a prompt once for its responses
    bare_packs     a bare loop over the same packs, which are made before. The bare loops have weights and gradients in
                   --dtype alone and backward through logits that they kept. Ours have float32 beside them and compute
                   the logits twice
    packs_plain    as packs_shared, each response with its own prompt
    one_by_one     as packs_plain, each response a forward of its own
    padded         a bare loop over padded rows, which are made before
    bare_dense     bare_packs with a (T, T) mask, which is made before: what pack_attention avoids
    """
    args = learner_args(options)
    world = utils.init_distributed()
    dtype = utils.DTYPES[options.dtype]
    ours = Ours(grpo.load_policy(args, world), args, world)
    model = utils.load_causal_lm(args).to(world.device, dtype)
    lengths = draw_lengths(options.prompts, options)
    rollouts = make_rollouts(lengths, model.config.vocab_size, options.seed)
    packs = ours.packs(rollouts, "shared")
    batches = grpo.micro_batches(packs, "shared", args, world.device)
    padded = prepare_padded(rollouts, options.rows, world.device)
    bare_packs = prepare_packs(batches, dense=False)
    bare_dense = prepare_packs(batches, dense=True)
    product, product_operations = matrix_product(dtype, world.device)
    sides = {
        "packs_shared": lambda: ours.pack_and_update(rollouts, "shared"),
        "bare_packs": lambda: bare_pass(model, utils.PACK_ATTENTION, bare_packs),
        "packs_plain": lambda: ours.pack_and_update(rollouts, "plain"),
        "one_by_one": lambda: ours.pack_and_update(rollouts, "rows"),
        "padded": lambda: bare_pass(model, "sdpa", padded),
        "bare_dense": lambda: bare_pass(model, "sdpa", bare_dense),
        "matrix_product": product,
    }
    seconds, norms = side_by_side(sides, options.repeat)

    response_tokens = sum(sum(group.responses) for group in lengths)
    real_tokens = response_tokens + sum(group.prompt * len(group.responses) for group in lengths)
    pieces = [piece for pack in packs for piece in pack]
    tokens = sum(map(grpo.piece_length, pieces))
    pairs = sum(map(grpo.attended_pairs, pieces))
    table = {}
    for name, values in seconds.items():
        if name == "matrix_product":
            table[name] = spread(values)
        else:
            table[name] = spread(values, tokens=real_tokens) | {"grad_norm": norms[name]}
    operations = 3 * ours.policy.flops(tokens, pairs, response_tokens)
    peak_seconds = operations / product_operations * min(seconds["matrix_product"])
    for name in ("packs_shared", "bare_packs", "bare_dense"):
        table[name]["peak_share"] = peak_seconds / table[name]["seconds"]

    settings = {
        "real_tokens": real_tokens,
        "response_tokens": response_tokens,
        "packs": len(batches),
        "tokens_in_packs": tokens,
        "tokens_in_padded_rows": sum(batch.inputs["input_ids"].numel() for batch in padded),
    }
    ratios = {}
    for name, one, other, target in COMPARED:
        ratios[name] = ratio(seconds[one], seconds[other], target)
    return Result(settings, table, ratios)


def bench_compiled(options: BenchFlags) -> Result:
    """Forward and backward of training on the same shared packs, by plain layers and with --compile_layers. On a CPU
    the seconds are of this process's CPU time, because other jobs make the clock's longer. The first call of each side,
    which compiles, is a row of its own; graphs: how many torch.compile made."""
    args = learner_args(options)
    world = utils.init_distributed()
    sides = {}
    for name, compiled in (("plain", False), ("compiled", True)):
        policy = grpo.load_policy(dataclasses.replace(args, compile_layers=compiled), world)
        sides[name] = Ours(policy, args, world)
    lengths = draw_lengths(options.prompts, options)
    rollouts = make_rollouts(lengths, policy.model.config.vocab_size, options.seed)
    packs = sides["plain"].packs(rollouts, "shared")
    batches = grpo.micro_batches(packs, "shared", args, world.device)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time

    def timed_update(side: Ours) -> tuple[float, float]:
        start = clock()
        norm = side.update(batches)
        return clock() - start, norm

    calls = {name: functools.partial(timed_update, side) for name, side in sides.items()}
    graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rounds = in_rounds(calls, 1 + options.repeat, warm_up=False)
    tokens = sum(grpo.piece_length(piece) for pack in packs for piece in pack)
    table = {}
    seconds = {}
    for name, updates in rounds.items():
        (first, _), *others = updates
        seconds[name] = [passed for passed, _ in others]
        table[name] = spread(seconds[name], tokens=tokens) | {"first": first, "grad_norm": updates[-1][1]}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs_before
    settings = {"packs": len(packs), "tokens": tokens, "graphs": graphs}
    return Result(settings, table, {"compiled over plain layers": ratio(seconds["compiled"], seconds["plain"])})
