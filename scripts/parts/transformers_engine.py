"""An engine without vLLM (--rollout_backend transformers). utils.py imports this for such runs only."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TopPLogitsWarper

import utils


class TransformersEngine(utils.Engine):
    """Samples with `model.generate`. It is slower than vLLM: each batch takes as long as its longest row."""

    def __init__(self, args: utils.Flags, tokenizer: Any, world: utils.World, num_requests: int):
        super().__init__(args, tokenizer)
        dtype = utils.DTYPES[args.model_dtype]
        name = args.model_name_or_path
        auto_class = utils.class_of(utils.pretrained(AutoConfig, args), name)
        self.model: Any = utils.pretrained(auto_class, args, dtype=dtype)
        self.model.to(world.device).eval().requires_grad_(False)
        self.model.generation_config = type(self.model.generation_config)()  # else its sampling defaults apply
        if args.model_dtype != "float32":
            # For strided rows a CPU's product copies the head once a row: gigabytes, and a minute
            head = self.model.get_output_embeddings()
            head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        self.device = world.device
        self.batch_size = min(num_requests, 256)
        self.waiting: dict[str, utils.Request] = {}

    @torch.no_grad()
    def load_weights(self, named_tensors: utils.NamedTensors, version: int) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(parameters)
        parameters |= dict(self.model.named_buffers())
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"weights not sent to the engine: {sorted(missing)[:5]}")
        self.version = version

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, request_id: str, request: utils.Request) -> None:
        self.waiting[request_id] = request

    @torch.no_grad()
    def step(self) -> list[tuple[str, utils.Generation]]:
        """Sample a batch of waiting requests to their end: those with the shortest prompts and the same top_p and stop
        strings as the shortest one."""
        names = sorted(self.waiting, key=lambda name: len(self.waiting[name].prompt_ids))
        shortest = self.waiting[names[0]]
        batch = []
        for name in names:
            request = self.waiting[name]
            if request.stop == shortest.stop and request.top_p == shortest.top_p:
                batch.append(name)
        batch = batch[: self.batch_size]
        requests = [self.waiting.pop(name) for name in batch]
        return list(zip(batch, self._generate_batch(requests), strict=True))

    def _generate_batch(self, requests: list[utils.Request]) -> list[utils.Generation]:
        pad_id = self.eos_ids[0]
        width = max(len(request.prompt_ids) for request in requests)
        padded_ids = []
        attended = []
        for request in requests:
            length = len(request.prompt_ids)
            padding = width - length
            padded_ids.append([pad_id] * padding + list(request.prompt_ids))
            attended.append([0] * padding + [1] * length)
        input_ids = torch.tensor(padded_ids, device=self.device)
        attention_mask = torch.tensor(attended, device=self.device)

        stop_strings = [*self.stop_strings, *requests[0].stop]
        config = GenerationConfig(
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            eos_token_id=self.eos_ids,
            pad_token_id=pad_id,
            stop_strings=stop_strings or None,
        )
        sampler = SeededSampler(requests, self.device, self.on_token)
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([sampler]),
            tokenizer=self.tokenizer if stop_strings else None,
        )
        responses = sequences[:, width:].tolist()
        logprobs = torch.cat(sampler.logprobs, dim=1).tolist()  # (B, T)
        generations = []
        for i, request in enumerate(requests):
            generation = self._cut(responses[i], logprobs[i], request.max_tokens, stop_strings)
            generations.append(generation)
        return generations

    def _cut(
        self, ids: list[int], logprobs: list[float], max_tokens: int, stop_strings: Sequence[str]
    ) -> utils.Generation:
        """Cut a row where its response ended: `generate` pads finished rows to the longest of the batch."""
        length = min(len(ids), max_tokens)
        reason = "length"
        end = self._end_of(ids, stop_strings)
        if end is not None and end <= max_tokens:
            length = end
            reason = "stop"
        return utils.Generation(ids[:length], logprobs[:length], reason, [self.version] * length)

    def _end_of(self, ids: list[int], stop_strings: Sequence[str]) -> int | None:
        """The number of tokens up to and with the first end-of-sequence token or stop string; None without either."""
        for n, token in enumerate(ids, 1):
            if token in self.eos_ids:
                return n
            text = self.tokenizer.decode(ids[:n]) if stop_strings else ""
            if any(stop in text for stop in stop_strings):
                return n
        return None


class SeededSampler(LogitsProcessor):
    """Makes a greedy search sample from softmax(logits / temperature), by the Gumbel-max trick: it returns logprobs
    minus the log of exponential noise. Each request draws its noise from its own seed, on the device: a GPU draws other
    numbers from a seed than a CPU. Keeps the chosen tokens' logprobs."""

    def __init__(self, requests: Sequence[utils.Request], device: torch.device, on_token: Callable[[], None]):
        self.on_token = on_token
        temperatures = [[request.temperature or 1.0] for request in requests]
        greedy = [[request.temperature == 0] for request in requests]
        self.temperatures = torch.tensor(temperatures, device=device)
        self.greedy = torch.tensor(greedy, device=device)
        self.generators = [torch.Generator(device).manual_seed(request.seed) for request in requests]
        top_p = requests[0].top_p
        self.top_p = TopPLogitsWarper(top_p) if top_p < 1 else None
        self.logprobs: list[Tensor] = []  # (B, 1) each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.on_token()
        scores = scores.float() / self.temperatures  # (B, V)
        if self.top_p is not None:
            scores = self.top_p(input_ids, scores)
        logprobs = torch.log_softmax(scores, -1)
        noise = torch.empty_like(logprobs)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        noisy = torch.where(self.greedy, logprobs, logprobs - noise.log())
        chosen = noisy.argmax(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, chosen))
        return noisy
