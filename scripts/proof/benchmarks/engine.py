"""Benchmarks of vLLM in this process, on sums of two digits: bench.py rollout and sync."""

import functools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import grpo
import utils
from scripts.proof.benchmarks.common import BenchFlags, Result, ratio, side_by_side, spread, start_engine


def generate(engine: Any, requests: Sequence[utils.Request]) -> list[list[int]]:
    """Responses by our engine's loop."""
    engine.llm.reset_prefix_cache()
    return [made.token_ids.tolist() for made in engine.generate(requests)]


def generate_by_vllm(engine: Any, requests: Sequence[utils.Request]) -> list[list[int]]:
    """Responses to the same requests by LLM.generate of the same engine."""
    from vllm import SamplingParams

    engine.llm.reset_prefix_cache()
    prompts = []
    sampling = []
    for request in requests:
        options = dict(vars(request))  # seed, temperature, ...: vLLM's names
        del options["stop"]
        prompts.append({"prompt_token_ids": list(options.pop("prompt_ids"))})
        options |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}  # as our engine asks for them
        sampling.append(SamplingParams(**options, stop_token_ids=engine.eos_ids))
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def bench_rollout(options: BenchFlags) -> Result:
    """A step's generation: engine.generate and plain LLM.generate on the same engine with the same requests."""
    args, _, tokenizer, engine = start_engine(options)
    prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    requests = []
    for i in range(args.num_unique_prompts_rollout):
        prompt = utils.prompt_at(prompts, i, args.seed)
        for j in range(args.num_samples_per_prompt_rollout):
            requests.append(grpo.make_request(utils.Rollout(prompt, i, j), args))
    sides = {
        "engine.generate": lambda: generate(engine, requests),
        "LLM.generate": lambda: generate_by_vllm(engine, requests),
    }
    seconds, responses = side_by_side(sides, options.repeat)
    same = [ours == theirs for ours, theirs in zip(*responses.values(), strict=True)]
    tokens = {name: sum(map(len, made)) for name, made in responses.items()}
    table = {name: spread(seconds[name], tokens=tokens[name]) for name in sides}
    settings = {"requests": len(requests), "share_of_same_responses": statistics.mean(same)}
    speed = ratio(seconds["engine.generate"], seconds["LLM.generate"], 0.95)
    return Result(settings, table, {"our engine loop over LLM.generate": speed})


def exhaust(items: Iterable[Any]) -> None:
    for _ in items:
        pass


def copy_all(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.copy_(tensor)


def bench_sync(options: BenchFlags) -> Result:
    """The learner's weights into the engine of the same process, against three memory copies and vLLM's own reload."""
    args, world, _, engine = start_engine(options)
    policy = grpo.load_policy(args, world)
    full_weights = functools.partial(utils.full_weights, policy, utils.DTYPES[args.model_dtype])
    weights = [(name, tensor.clone()) for name, tensor in full_weights()]
    tensors = [tensor for _, tensor in weights]
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    sides = {
        "engine.load_weights": lambda: engine.load_weights(full_weights(), version=1),
        "memory copy": lambda: copy_all(tensors, buffers),
        "vLLM's reload": lambda: engine.worker.reload_weights(weights_iterator=iter(weights)),
        "full_weights alone": lambda: exhaust(full_weights()),
    }
    seconds, _ = side_by_side(sides, options.repeat)
    size = sum(tensor.nbytes for tensor in tensors)
    rounds = zip(seconds["memory copy"], seconds["vLLM's reload"], strict=True)
    copies_and_reload = [3 * copy + reload for copy, reload in rounds]
    gigabytes = size / 1e9
    table = {name: spread(values, gb=gigabytes) for name, values in seconds.items()}
    speed = ratio(seconds["engine.load_weights"], copies_and_reload, 1.0)
    settings = {"bytes": size, "tensors": len(weights)}
    return Result(settings, table, {"sync against 3 copies + vLLM's reload": speed})
