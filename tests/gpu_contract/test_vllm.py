"""What a GPU run asks of the installed vLLM, which no run on a CPU reaches: held against the sources in the wheel."""

import importlib.util
import os
import re
import sys
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo
import utils
from scripts.parts import checks

FOUND = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(FOUND is None, reason="vLLM is not installed")


def source(file: str) -> str:
    """Text of a file of the installed vLLM, which is not imported: that takes a quarter of a minute."""
    return (Path(FOUND.submodule_search_locations[0]) / file).read_text()


class Enough(Exception):
    """The engine has come as far as a test needs."""


def test_compiled_kernels_are_kept_apart_by_device(monkeypatch):
    """torch.compile writes the device's index into what it makes. vLLM keeps that under its rank, which is 0 in each of
    grpo_fast.py's engines, and its keys ignore the device: two engines must not share a directory."""
    seen = []

    class LLM:
        def __init__(self, **options):
            seen.append(os.environ["VLLM_CACHE_ROOT"])
            raise Enough

    monkeypatch.setenv("VLLM_CACHE_ROOT", "before")  # what the engine sets is taken back
    monkeypatch.setattr(utils, "VLLM_CACHE", "/cache/vllm")
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM))
    args = utils.Flags(model_name_or_path=".")
    for device in ("cuda:0", "cuda:5", "cuda:5"):
        with pytest.raises(Enough):
            utils.VLLMEngine(args, None, utils.World(0, 0, 1, torch.device(device)), 1)
    assert seen == ["/cache/vllm/device_0", "/cache/vllm/device_5", "/cache/vllm/device_5"]


class LateEngine:
    """vLLM's engine as it is on a GPU: a step starts a decoding step of all requests and returns the tokens of the one
    before (vllm/v1/engine/core.py, step_with_batch_queue, at most two batches), labelled with the version of when it
    returns them. A token tells the weights it is of."""

    def __init__(self, depth):
        self.depth, self.weights, self.left, self.made, self.label = depth, 0, {}, {}, "0"
        self.batch_queue, self.unfinished = deque() if depth > 1 else None, set()
        self.engine_core = types.SimpleNamespace(engine_core=self)

    def set_weight_version(self, label):
        self.label = label

    def add_request(self, name, prompt, params):
        assert params.output_kind == "final only" and params.flat_logprobs
        self.left[name], self.made[name] = params.max_tokens, []
        self.unfinished.add(name)

    def has_unfinished_requests(self):
        return bool(self.unfinished)

    def launch(self):
        batch = []
        for name in [n for n, left in self.left.items() if left]:
            self.left[name] -= 1
            batch.append((name, self.weights, self.left[name] == 0))
        return batch

    def step(self):
        if self.batch_queue is None:
            batch = self.launch()
        else:
            if any(self.left.values()):
                self.batch_queue.appendleft(self.launch())
                if len(self.batch_queue) < self.depth:
                    return []
            batch = self.batch_queue.pop() if self.batch_queue else []
        for name, weights, _ in batch:
            self.made[name].append((weights, self.label))
        return [self.output(name) for name, _, finished in batch if finished]

    def output(self, name):
        self.unfinished.remove(name)
        tokens, labels = zip(*self.made[name], strict=True)
        spans = [types.SimpleNamespace(version=v, start=i, end=i + 1) for i, v in enumerate(labels)]
        logprobs = types.SimpleNamespace(logprobs=[-1.0] * len(tokens))
        made = types.SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length", weight_versions=spans)
        return types.SimpleNamespace(request_id=name, outputs=[made], num_cached_tokens=0)


def worker_of(reload_weights):
    return types.SimpleNamespace(reload_weights=reload_weights, get_model=torch.nn.Module)


def make_engine(monkeypatch, llm_engine, **more):
    engine: Any = object.__new__(utils.VLLMEngine)
    engine.engine, engine.eos_ids, engine.stop_strings = llm_engine, [0], []
    engine.version = engine.asleep = engine.loads = 0
    vars(engine).update(more)
    kinds = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(FINAL_ONLY="final only"))
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(SamplingParams=types.SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_has_the_version_of_the_weights_that_made_it(depth, monkeypatch):
    """Depth 2 is vLLM's asynchronous scheduling, on for GPUs and off for CPUs: tokens that come after new weights were
    loaded are of the old ones still."""
    late = LateEngine(depth)
    engine = make_engine(monkeypatch, late)

    def add(name, tokens):
        engine.add(name, utils.Request((1,), 0, 1.0, tokens))

    def load(version):
        engine.worker = worker_of(lambda weights_iterator: setattr(late, "weights", version))
        engine.load_weights([], version)

    made = {}
    add("a", 8)
    add("b", 3)
    for _ in range(3):
        made |= engine.step()
    load(1)
    add("c", 4)
    for _ in range(2):
        made |= engine.step()
    load(2)
    load(3)  # again before a step
    while engine.busy:
        made |= engine.step()
    load(4)  # what is still under way then belongs to no request
    add("d", 2)
    while engine.busy:
        made |= engine.step()
    assert set(made) == set("abcd") and made["a"].versions.tolist() == [0, 0, 0, 1, 1, 3, 3, 3]
    for name, generation in made.items():
        assert generation.versions.tolist() == generation.token_ids.tolist(), name


def test_a_sleeping_engine_wakes_for_weights_or_a_request(monkeypatch):
    told = []
    llm = types.SimpleNamespace(
        sleep=lambda level: told.append(f"sleep {level}"),
        wake_up=lambda tags=None: told.append(f"wake {tags}"),
        llm_engine=types.SimpleNamespace(vllm_config=types.SimpleNamespace(model_config=types.SimpleNamespace())),
    )
    worker = worker_of(lambda weights_iterator: told.append("load"))
    engine = make_engine(monkeypatch, LateEngine(2), llm=llm, worker=worker)
    request = utils.Request((1,), 0, 1.0, 1)
    llm.llm_engine.vllm_config.model_config.enable_sleep_mode = False
    engine.sleep()
    assert told == []
    llm.llm_engine.vllm_config.model_config.enable_sleep_mode = True
    engine.sleep()
    engine.sleep()
    with pytest.raises(RuntimeError, match="gave its weights back: load_weights first"):
        engine.add("a", request)
    engine.load_weights([], 1)  # the weights' memory first, that of the cache when they are in
    engine.add("a", request)
    assert told == ["sleep 2", "wake ['weights']", "load", "wake ['kv_cache']"]


def test_either_runner_of_gpus_reloads_weights_from_an_iterator():
    for file in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        (arguments,) = re.findall(r"def reload_weights\((.*?)\) -> None:", source(file), re.DOTALL)
        assert "weights_iterator" in arguments, file


@pytest.mark.parametrize("name", checks.ENGINE_VARIABLES)
def test_variables_that_stop_an_engine_are_refused(monkeypatch, name):
    """But for the processes of an engine, which utils sets, the value that works is vLLM's own default."""
    works, _ = checks.ENGINE_VARIABLES[name]
    args = grpo.Args(model_name_or_path=".", dataset_mixer_list=[".", "1.0"])
    monkeypatch.setenv(name, works)
    assert not any(name in problem for problem in checks.refused_in_a_run(args, fast=True))
    monkeypatch.setenv(name, "0" if works == "1" else "1")
    assert any(name in problem for problem in checks.refused_in_a_run(args, fast=True))
    (default,) = re.findall(rf'getenv\("{name}", "(.)"\)', source("envs.py"))
    assert works == utils._ENVIRONMENT.get(name, default)
