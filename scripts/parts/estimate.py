"""What --dry_run says of memory and of splits: the GiB of a learner at the peak of an update and of an engine with its
cache, and which division of the GPUs into learners and engines makes a step shortest.

Both count a model without memory, on torch's meta device, from its config.json alone. Not in the GiB: CUDA's and NCCL's
own, and fragmentation. The seconds are those of data sheets, for comparison alone.
"""

import csv
import functools
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import utils
from scripts.parts import packing, plan, run_files

GIB = 2**30
# GiB that a sleeping engine keeps: CUDA's context, workspaces and graphs. A 1,000B model kept 7 (vLLM issue 47654)
ASLEEP = 4
SEATS = 1024  # responses that an engine decodes at once, at most
SHOWN = 3  # splits
SHAPES = Path(__file__).parents[1] / "data" / "shapes.tsv"  # of models that people train, as their configs have them
FIFTH = 5  # of a data sheet's speed, which no run has


@dataclass(frozen=True)
class GPU:
    """A data sheet: dense bfloat16 operations a second, bytes a second of the memory, GiB of memory."""

    operations: float
    bandwidth: float
    memory: float


GPUS = {
    "h100": GPU(989e12, 3.35e12, 80),
    "h200": GPU(989e12, 4.8e12, 141),
    "h20": GPU(148e12, 4.0e12, 96),
    "a100": GPU(312e12, 2.04e12, 80),
    "4090": GPU(165e12, 1.01e12, 24),
}


@dataclass(frozen=True)
class Setup:
    """A run to be estimated."""

    args: Any  # grpo.Args
    learners: int
    shared_gpu: bool  # learner and engine are on one GPU
    logprob_chunk: int  # tokens whose logits exist at once

    @property
    def shards(self) -> int:
        """Learners that share a copy of the model."""
        shared = self.args.fsdp_shard_size or self.learners
        return shared if self.args.deepspeed_stage >= 2 else 1


@dataclass(frozen=True)
class Card:
    """The GPU that is planned for."""

    bytes: float
    words: str
    sheet: GPU | None  # None: its speed is not known


def planned_card() -> Card:
    """The GPU that PLAN_GPU names, this machine's or, without one, an H100. Raises ValueError for an unknown name."""
    name = os.environ.get("PLAN_GPU", "")
    if name:
        if name not in GPUS:
            raise ValueError(f"no data sheet of a GPU {name}; there are {', '.join(GPUS)}")
        return Card(GPUS[name].memory * GIB, name, GPUS[name])
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = [sheet for name, sheet in GPUS.items() if name in properties.name.lower()]
        return Card(properties.total_memory, "this machine's", known[0] if known else None)
    words = f"no GPU here, so one of 80 GiB; PLAN_GPU={'|'.join(GPUS)} plans for another"
    return Card(80 * GIB, words, GPUS["h100"])


# --- What is counted of a model ---------------------------------------------------------------------------------------


class KeptAttention(torch.autograd.Function):
    """In place of attention: keeps what flash and flex attention keep for their backward."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out


def meta_model(config: Any, dtype: torch.dtype, repeats: int, lora_rank: int) -> Any:
    """A model without memory, whose attention has the keys and values `repeats` times."""
    from transformers import AttentionInterface

    def kept(_module, query, key, value, *_, **__):
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        return KeptAttention.apply(query, key, value).transpose(1, 2), None

    name = f"kept_{repeats}"  # transformers finds the function by it, in each forward
    AttentionInterface.register(name, kept)
    with torch.device("meta"):
        auto_class = utils.class_of(config, config.name_or_path)
        options = {"dtype": dtype, "attn_implementation": name, "trust_remote_code": utils.is_own_code(config)}
        model = auto_class.from_config(config, **options)
    if lora_rank:
        from peft import LoraConfig, inject_adapter_in_model

        from scripts.parts import adapters

        options = LoraConfig(r=lora_rank, target_modules=[*adapters.matrices_of(model)], task_type="CAUSAL_LM")
        inject_adapter_in_model(options, model, low_cpu_mem_usage=True)  # freezes the rest
        model.to(dtype)
    return model


def kept_for_backward(model: Any, tokens: int) -> int:
    """Bytes that a forward of `tokens` tokens on the meta device keeps for its backward, weights apart."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)


class Model:
    """Numbers of weights of a model, and the bytes of what its forward keeps."""

    def __init__(self, config: Any, dtype: torch.dtype, repeats: int = 1, lora_rank: int = 0):
        self.model = meta_model(config, dtype, repeats, lora_rank)
        self.config = config.get_text_config()
        self.itemsize = dtype.itemsize  # bytes of a weight in compute dtype
        self.layers = utils.blocks_of(self.model)
        self.all = sum(p.numel() for p in self.model.parameters())
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.frozen = self.all - self.trained
        in_layers = sum(p.numel() for layer in self.layers for p in layer.parameters())
        self.outside = self.all - in_layers

    @functools.cached_property
    def groups(self) -> list[int]:
        """Weights of each group of layers that FSDP gathers at once."""
        groups = utils.layer_groups(self.layers, self.itemsize)
        return [sum(p.numel() for layer in group for p in layer.parameters()) for group in groups]

    def gathered(self, stage: int) -> float:
        """Bytes of what a forward gathers: with stage 3 the two largest groups of layers and what is in no layer."""
        if stage != 3:
            return self.itemsize * self.all
        return self.itemsize * (self.outside + sum(sorted(self.groups)[-2:]))

    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in an engine's cache."""
        return 2 * self.itemsize * sum(layer.keys * layer.width for layer in utils.attention_heads(self.config))

    def activations(self, args: Any, tokens: int) -> float:
        """Bytes of activations that an update of `tokens` tokens keeps. With gradient checkpointing: the input of each
        layer, and all of the one that is recomputed."""
        kept = kept_for_backward(self.model, tokens)
        if not args.gradient_checkpointing:
            return kept
        inputs = len(self.layers) * tokens * self.config.hidden_size * self.itemsize
        return kept / len(self.layers) + inputs

    def forward(self, tokens: float, pairs: float, answered: float) -> float:
        """Operations of a forward: 2 a weight and token that meet, 4 a (query, key) pair and number of the heads."""
        matrices, head = utils.matmul_parameters(self.model)
        return 2 * matrices * tokens + 4 * utils.attention_width(self.config) * pairs + 2 * head * answered


@dataclass(frozen=True)
class Counted:
    """What does not depend on the number of learners."""

    policy: Model
    reference: Model  # the teacher, or the policy itself
    activations: float  # bytes of a learner's part of a pack
    tokens: int  # of that part


def count(setup: Setup, config: Any, ref_config: Any = None) -> Counted:
    """Count a policy and its teacher. Ranks that share a pack have a part of its tokens, and of attention's heads."""
    args = setup.args
    ranks = args.sequence_parallel_size
    _, kv_heads, _ = utils.attention_heads(config)[0]
    repeats = ranks // math.gcd(kv_heads, ranks)
    dtype = torch.float32 if args.model_dtype == "float32" else torch.bfloat16
    policy = Model(config, dtype, repeats, args.lora_rank)
    reference = policy if ref_config is None else Model(ref_config, dtype)
    tokens = -(-args.pack_length // ranks)
    return Counted(policy, reference, policy.activations(args, tokens), tokens)


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory_parts(setup: Setup, counted: Counted) -> dict[str, float]:
    """Bytes on a learner's GPU at the peak of an update, by what they are for; and of a GPU of an engine:
    engine_weights, and engine_token for each token in its cache.

    With N weights on S shards: master weights and gradients 4 N / S each, Adam 8 N / S, gathered in compute dtype all
    of N, or with stage 3 two groups of layers (utils.GROUP_BYTES) and what is in no layer. With lora_rank only adapters
    have gradients, float32 and Adam: the model is frozen, and its own reference policy. What `offload` names is in
    `host`."""
    args = setup.args
    policy = counted.policy
    shards = setup.shards
    is_plain = utils.needs_no_wrapper(args, setup.learners, trains=True)
    gathered = 0.0 if is_plain else policy.gathered(args.deepspeed_stage)
    activations_and_head = peak_bytes(setup, counted, is_plain)
    update = 4 * policy.trained / shards + gathered + activations_and_head
    kept, more = reference_bytes(setup, counted, update)
    parts: dict[str, float] = {
        "weights": (4 * policy.trained + policy.itemsize * policy.frozen) / shards,
        "gradients": 4 * policy.trained / shards,
        "Adam": 8 * policy.trained / shards,
        "reference": kept + more,
        "gathered": gathered,
        "activations and head": activations_and_head,
        "host": 0.0,
        "engine_weights": policy.itemsize * (policy.frozen or policy.all) / args.vllm_tensor_parallel_size,
        "engine_token": policy.token_bytes() / args.vllm_tensor_parallel_size,
    }
    if "reference" in args.offload:
        parts["reference"] = more
        parts["host"] += kept
    return parts


def saved_bytes(setup: Setup, policy: Model) -> float:
    """Bytes that a save gathers at once, beside an engine that is awake: the largest weight, and of shards also the
    message and the weight before, which may be as large (utils.gather_weights). Adapters are gathered all, and merged
    in float32."""
    largest = max(p.numel() for p in policy.model.parameters())
    gathered = policy.itemsize * largest * (1 if setup.shards == 1 else 3)
    if setup.args.lora_rank:
        gathered += 4 * (policy.trained + 2 * largest)
    return gathered


def logit_bytes(setup: Setup, counted: Counted, model: Model) -> int:
    """Bytes of the logits that exist at once, with what is computed of them."""
    return 12 * min(setup.logprob_chunk, counted.tokens) * model.config.get_text_config().vocab_size


def peak_bytes(setup: Setup, counted: Counted, is_plain: bool) -> float:
    """Bytes of activations and gradients at the worst moment: the head's backward; the forward of the last group; the
    reduction of the gradients of the embeddings, and of each group of layers, when their activations are gone.
    `is_plain`: no FSDP, each gradient is added up at once."""
    policy = counted.policy
    activations = counted.activations
    gradient = 4 if is_plain else 4 + policy.itemsize  # bytes of a weight's
    if setup.args.lora_rank:
        gradient = 0
    groups = policy.groups
    if is_plain:
        groups = [max(p.numel() for layer in policy.layers for p in layer.parameters())]
    in_layers = policy.all - policy.outside
    head = policy.model.get_output_embeddings().weight.numel() * gradient + logit_bytes(setup, counted, policy)
    # a forward has a group as it was gathered beside its weights, which the next group would be otherwise
    copy = policy.itemsize * groups[0] if setup.args.deepspeed_stage == 3 and len(groups) == 1 else 0
    moments = [activations + head, activations + copy, policy.outside * gradient]
    for group in groups:
        moments.append(group * gradient + activations * (1 - group / in_layers))
    return max(moments)


def reference_bytes(setup: Setup, counted: Counted, update: float) -> tuple[float, float]:
    """Bytes of the reference policy's weights, and those that its forward needs beyond the `update` bytes of an update,
    before which they are freed. Both are 0 for adapters, whose frozen model it is, and where there is none."""
    args = setup.args
    reference = counted.reference
    is_own = args.lora_rank > 0 and reference is counted.policy
    if is_own or not args.load_ref_policy:
        return 0.0, 0.0
    is_plain = utils.needs_no_wrapper(args, setup.learners, args.ref_policy_update_freq is not None)
    gathered = 0.0 if is_plain else reference.gathered(args.deepspeed_stage)
    forward = gathered + logit_bytes(setup, counted, reference)
    itemsize = reference.itemsize if args.ref_policy_update_freq is None else 4  # float32 if it is refreshed
    kept = itemsize * reference.all / setup.shards
    return kept, max(0.0, forward - update)


def learner_bytes(parts: dict[str, float]) -> float:
    """Bytes of the learner in memory_parts."""
    return sum(size for name, size in parts.items() if not name.startswith(("engine", "host")))


def responses_at_once(setup: Setup, parts: dict[str, float], gpu: float) -> int:
    """Responses, all as long as the flags allow, that an engine's cache holds on GPUs of so many bytes."""
    args = setup.args
    room = args.vllm_gpu_memory_utilization * gpu - parts["engine_weights"]
    longest = args.max_prompt_token_length + args.response_length
    return max(0, int(room / (parts["engine_token"] * longest)))


def memory_text(setup: Setup, counted: Counted, card: Card) -> str:
    """The estimate in some lines and, where it is more than a GPU's memory, what helps."""
    args = setup.args
    parts = memory_parts(setup, counted)
    learner = learner_bytes(parts)
    engine = args.vllm_gpu_memory_utilization * card.bytes
    longest = args.max_prompt_token_length + args.response_length
    responses = responses_at_once(setup, parts, card.bytes)
    used = learner
    if setup.shared_gpu and args.vllm_sleep == "off":
        used = learner + engine
    elif setup.shared_gpu:  # learner and engine take turns; weights, Adam and reference stay
        between = parts["weights"] + parts["Adam"] + parts["reference"] + engine + saved_bytes(setup, counted.policy)
        used = max(learner + ASLEEP * GIB, between)
    of_learner = {name: size for name, size in parts.items() if not name.startswith(("engine", "host"))}
    sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in of_learner.items())
    lines = [
        f"memory   of a GPU: {card.bytes / GIB:.0f} GiB ({card.words})",
        f"         learner, GiB a GPU: {sizes}: {learner / GIB:.1f}",
        f"         engine, {args.vllm_gpu_memory_utilization:g} of {card.bytes / GIB:.0f} GiB: weights "
        f"{parts['engine_weights'] / GIB:.1f} and {parts['engine_token'] / 1024:.0f} KiB a token, {responses:,} "
        f"responses of {longest:,} tokens at once",
    ]
    if args.offload:
        host = f"{parts['host'] / GIB:.1f}, twice that at most: torch rounds each block up to a power of two"
        lines.append(f"         host memory, GiB a learner, of {', '.join(args.offload)}: {host}")
    if used > 0.95 * card.bytes or not responses:
        full = f"that is {used / GIB:.0f} of {card.bytes / GIB:.0f} GiB"
        lines.append(f"         WARNING: {full}. What helps: scripts/proof/README.md, Memory and splits")
    return "\n".join(lines)


# --- Splits -----------------------------------------------------------------------------------------------------------


def step_operations(setup: Setup, counted: Counted) -> float:
    """Operations of all learners in a step whose prompts are computed once. A backward is two forwards, or one where
    adapters train; reference, old logprobs and checkpointing take a forward each."""
    args = setup.args
    prompt = args.max_prompt_token_length
    response = args.response_length
    responses = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    tokens = args.num_unique_prompts_rollout * prompt + responses * response
    pairs = args.num_unique_prompts_rollout * prompt**2 / 2 + responses * response * (prompt + response / 2)
    forward = counted.policy.forward(tokens, pairs, responses * response)

    passes = (2 if args.lora_rank else 3) + args.gradient_checkpointing
    operations = args.num_epochs * passes * forward
    if args.num_epochs * args.num_mini_batches > 1 or args.kl_in_reward:
        operations += forward
    if args.load_ref_policy:
        operations += counted.reference.forward(tokens, pairs, responses * response)
    return operations


def sampling_seconds(setup: Setup, counted: Counted, engines: int, at_once: int, sheet: GPU) -> float:
    """Seconds in which an engine makes its share of a step: reads of all weights in each decoding step and of the cache
    in each token, or operations, if they take longer. `at_once`: responses that its cache holds."""
    args = setup.args
    policy = counted.policy
    prompt = args.max_prompt_token_length
    response = args.response_length
    responses = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout / engines
    batch = min(responses, at_once, SEATS)
    steps = responses / batch * response
    moved = steps * policy.itemsize * (policy.frozen or policy.all)
    moved += responses * response * (prompt + response / 2) * policy.token_bytes()
    operations = policy.forward(prompt + response, (prompt + response) ** 2 / 2, response) * responses
    gpus = args.vllm_tensor_parallel_size
    return max(moved / (gpus * sheet.bandwidth), operations / (gpus * sheet.operations))


def step_seconds(setup: Setup, counted: Counted, card: Card, sheet: GPU, engines: int) -> tuple[float, float]:
    """Seconds of a step's learning and of its sampling."""
    parts = memory_parts(setup, counted)
    at_once = responses_at_once(setup, parts, card.bytes)
    operations = step_operations(setup, counted)
    learning = operations / setup.learners / sheet.operations
    sampling = sampling_seconds(setup, counted, engines, max(1, at_once), sheet)
    return learning, sampling


def splits_text(setup: Setup, counted: Counted, card: Card, sheet: GPU) -> str:
    """The best divisions of the GPUs and the one that the flags ask for, a line each, the shortest step first. With
    --async_steps both sides work at the same time."""
    args = setup.args
    tp = args.vllm_tensor_parallel_size
    gpus = setup.learners + args.vllm_num_engines * tp
    together = math.lcm(args.sequence_parallel_size, args.fsdp_shard_size or 1)
    found = []  # (seconds of a step, learners, words)
    for learners in range(together, gpus, together):
        engines, rest = divmod(gpus - learners, tp)
        if rest:
            continue
        split = replace(setup, learners=learners)
        parts = memory_parts(split, counted)
        learner = learner_bytes(parts)
        learning, sampling = step_seconds(split, counted, card, sheet, engines)
        seconds = learning + sampling
        if args.async_steps:
            seconds = max(learning, sampling)
        says = f"{plan.short(seconds)} s, learners {plan.short(learning)}, engines {plan.short(sampling)}"
        if learner > 0.95 * card.bytes or not responses_at_once(setup, parts, card.bytes):
            seconds = math.inf
            says = f"no room: a learner takes {learner / GIB:.0f} GiB, an engine {parts['engine_weights'] / GIB:.0f}"
        found.append((seconds, learners, f"{learners} + {engines}: {says}"))
    lines = [
        f"splits   of {gpus} GPUs into learners + engines; seconds of a step at a data sheet's speed, if all responses "
        f"have {args.response_length:,} tokens"
    ]
    for place, (seconds, learners, says) in enumerate(sorted(found)):
        is_own = learners == setup.learners
        if is_own or (place < SHOWN and seconds < math.inf):
            mark = "  <- these flags" * is_own
            lines.append(f"         {says}{mark}")
    return "\n".join(lines)


def seconds_text(setup: Setup, counted: Counted, card: Card, sheet: GPU) -> str:
    """The seconds of a step of grpo.py, whose ranks have an engine each, as a range."""
    learning, sampling = step_seconds(setup, counted, card, sheet, setup.learners)
    least = learning + sampling
    most = FIFTH * least
    share = sampling / least
    length = f"if all responses have {setup.args.response_length:,} tokens"
    seconds = f"{plan.short(least)} to {plan.short(most)} s, at a data sheet's speed and at a fifth of it"
    return f"time     of a step, {length}: {seconds}; {share:.0%} of it is sampling"


# --- All of it --------------------------------------------------------------------------------------------------------


def told(setup: Setup, has_splits: bool) -> str:
    """Packing, memory and splits, or why there is no estimate. Raises UserError for a model that a run refuses."""
    args = setup.args
    try:
        card = planned_card()
        config = config_of(args)
        ref_config = config_of(args.of_reference(), "ref_model_name_or_path") if args.ref_model_name_or_path else None
        plan.check_model(args, args.model_name_or_path, config)
        if ref_config is not None:
            plan.check_model(args, args.ref_model_name_or_path, ref_config)
        lines = [f"packing  {packing.expected(config, args)}"]
        counted = count(setup, config, ref_config)
        lines.append(memory_text(setup, counted, card))
        if card.sheet is None:
            known = "|".join(GPUS)
            lines.append(f"time     not estimated: no data sheet of this GPU; PLAN_GPU={known} plans for another")
        else:
            seconds = splits_text if has_splits else seconds_text
            lines.append(seconds(setup, counted, card, card.sheet))
    except utils.UserError:
        raise
    except (OSError, ValueError) as error:
        return f"memory   not estimated: {error}"
    return "\n".join(lines)


def config_of(args: Any, flag: str = "model_name_or_path") -> Any:
    """A model's config, or one of its shapes. Raises ValueError where this machine has neither, UserError for one that
    a run refuses."""
    name = args.model_name_or_path
    directory = run_files.on_this_machine(name, args.model_revision)
    config = known_config(name)
    if directory is None and config is not None:
        return config
    if directory is None:
        raise ValueError(f"no config.json of {name} on this machine (hf download {name} config.json)")
    from transformers import AutoConfig

    return utils.pretrained(AutoConfig, args, flag, directory)


def known_config(name: str) -> Any:
    """A config of the shapes in SHAPES, for a model's name with or without what follows (-Instruct); else None."""
    from transformers import CONFIG_MAPPING

    wanted = name.rpartition("/")[2] + "-"
    known = []
    with SHAPES.open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if wanted.startswith(row["model"] + "-"):
                known.append(row)
    if not known:
        return None
    row = max(known, key=lambda row: len(row["model"]))
    row.pop("model")
    kind = CONFIG_MAPPING[row.pop("model_type")]
    config = kind(**{key: json.loads(value) for key, value in row.items()})
    config.name_or_path = name
    return config
