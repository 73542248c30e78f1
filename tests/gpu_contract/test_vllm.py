"""What a GPU run asks of the installed vLLM, which no run on a CPU reaches: held against the sources in the wheel."""

import ast
import importlib.util
import os
import queue
import re
import sys
import threading
import types
from collections import deque
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo
import grpo_fast
import utils
from scripts.parts import addresses, guards

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
    args = utils.Flags(model_name_or_path="x")
    for device in ("cuda:0", "cuda:5", "cuda:5"):
        with pytest.raises(Enough):
            utils.VLLMEngine(args, None, utils.World(0, 0, 1, torch.device(device)), 1)
    assert seen == ["/cache/vllm/device_0", "/cache/vllm/device_5", "/cache/vllm/device_5"]

    # that vLLM still needs it, and looks at the variable whenever it asks
    for file in ("compilation/backends.py", "compilation/decorators.py"):
        assert 'f"rank_{rank}_{dp_rank}"' in source(file) and "envs.VLLM_CACHE_ROOT," in source(file)
    (ignored,) = re.findall(r"ignored_factors: set\[str\] = \{(.*?)\n    \}", source("envs.py"), re.DOTALL)
    assert {"LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "VLLM_CACHE_ROOT"} <= set(re.findall(r'"(\w+)"', ignored))
    assert '"VLLM_CACHE_ROOT": lambda:' in source("envs.py")


def test_cuda_graphs_reach_as_far_as_the_batch(monkeypatch):
    """vLLM captures up to 512 sequences by itself (1,024 on the largest GPUs), above 256 in steps of 16."""
    given = {}

    class LLM:
        def __init__(self, **options):
            given.update(options)
            raise Enough

    monkeypatch.setenv("VLLM_CACHE_ROOT", "before")
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM))

    def size(requests, device="cuda:0", **flags):
        given.clear()
        with pytest.raises(Enough):
            world = utils.World(0, 0, 1, torch.device(device))
            utils.VLLMEngine(utils.Flags(model_name_or_path="x", **flags), None, world, requests)
        assert given["max_num_seqs"] == min(requests, 1024)
        return given.get("max_cudagraph_capture_size")

    assert [size(n) for n in (64, 512, 513, 700, 1024, 5000)] == [None, None, 528, 704, 1024, 1024]
    assert size(5000, "cpu") is None and size(5000, vllm_enforce_eager=True) is None
    config, options = source("config/vllm.py"), source("engine/arg_utils.py")
    assert "1024 if current_platform.is_device_capability_family(100) else 512" in config
    assert "range(256, max_cudagraph_capture_size + 1, 16)" in config
    assert (
        "compilation_config.max_cudagraph_capture_size = (\n                self.max_cudagraph_capture_size" in options
    )


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
        engine.worker = types.SimpleNamespace(reload_weights=lambda weights_iterator: setattr(late, "weights", version))
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
    worker = types.SimpleNamespace(reload_weights=lambda weights_iterator: told.append("load"))
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
    told.clear()
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: told.append("give pinned memory back"))
    engine.sleep(1)  # vLLM copies the weights to pinned memory, and torch would keep that for the whole run
    engine.add("b", request)
    engine.load_weights([], 2)
    assert told == ["sleep 1", "wake None", "give pinned memory back", "load"]


def test_sleep_is_what_vllm_has():
    """Level 2 leaves weights and cache, either comes back by its tag, and the scheduler goes on when both are there."""
    assert "def sleep(self, level: int = 1" in source("entrypoints/llm.py")
    assert 'SLEEP_TAGS = frozenset(("weights", "kv_cache"))' in source("v1/executor/abstract.py")
    core = source("v1/engine/core.py")
    assert "fully_awake = not self.model_executor.is_sleeping" in core and "self.resume_scheduler()" in core
    assert "enable_sleep_mode: bool = False" in source("config/model.py")


def test_late_outputs_are_what_vllm_has():
    """What LateEngine and VLLMEngine.load_weights take for granted."""
    core, config = source("v1/engine/core.py"), source("config/vllm.py")
    assert "if len(batch_queue) < self.batch_queue_size and (" in core and "return None, model_executed" in core
    assert "future, scheduler_output, exec_model_fut = batch_queue.pop()" in core
    assert "return pp_size + 1" in config and "self.scheduler_config.async_scheduling = True" in config
    assert "scheduler_config.async_scheduling = False" in source("platforms/cpu.py")
    assert "self.engine_core = EngineCore(" in source("v1/engine/core_client.py")


def test_ranks_of_an_engine_do_the_same_in_the_same_order(monkeypatch):
    """With tensor parallelism a rank that adds, steps or loads at another time than the other hangs both."""
    ours, theirs = Pipe()
    told: queue.Queue = queue.Queue()  # what the first rank tells the second
    logs, objects, asked = {0: [], 1: []}, [], []

    class Ranked(LateEngine):
        def __init__(self, rank):
            super().__init__(2)
            self.rank = rank

        def step(self):
            logs[self.rank].append("step")
            return super().step()

        def add_request(self, name, prompt, params):
            logs[self.rank].append(f"add {name}")
            super().add_request(name, prompt, params)

    def make(args, tokenizer, world, requests):
        late = Ranked(world.rank)

        def reload(weights_iterator):
            logs[world.rank].append(f"load {[name for name, _ in weights_iterator]}")
            late.weights += 1

        worker = types.SimpleNamespace(reload_weights=reload)
        closed = types.SimpleNamespace(shutdown=lambda: None)
        late.engine_core = types.SimpleNamespace(engine_core=late, shutdown=closed.shutdown)
        return make_engine(monkeypatch, late, worker=worker, leave=types.SimpleNamespace(close=lambda: None))

    def broadcast(box, source=0):
        if threading.current_thread().name == "0":
            told.put(box[0] if isinstance(box, list) else box.clone())
            (objects if isinstance(box, list) else asked).append(box[0])
        else:
            box[0] = told.get(timeout=30)[0] if isinstance(box, torch.Tensor) else told.get(timeout=30)

    group = types.SimpleNamespace(broadcast=lambda *_: types.SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(
        grpo_fast, "join", lambda store, name, rank, size: utils.World(rank, rank, size, torch.device("cpu"))
    )
    monkeypatch.setattr(grpo_fast, "start_watchdog", lambda *_: None)
    monkeypatch.setattr(grpo_fast, "weights_group", lambda *_: (group, None))
    monkeypatch.setattr(addresses, "meet_learner", lambda meeting, index: theirs.send(index) or theirs)
    monkeypatch.setattr(grpo_fast.dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(grpo_fast.dist, "broadcast", broadcast)
    monkeypatch.setattr(utils, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(utils, "make_engine", make)
    monkeypatch.setattr(utils.STOP, "during", "")
    monkeypatch.setattr(
        guards, "echo_requests", lambda _: [utils.Request((i,), i, 1.0, 1) for i in range(guards.REQUESTS)]
    )
    store = types.SimpleNamespace(get=lambda key: b"host 1 00", set=lambda *_: None)
    args = grpo.Args(model_dtype="float32", vllm_tensor_parallel_size=2)
    ranks = [grpo_fast.Roles(1, 1, 2, False, 0, rank) for rank in range(2)]
    threads = [
        threading.Thread(
            target=grpo_fast.run_engine, args=(args, role, types.SimpleNamespace(store=store)), name=str(i), daemon=True
        )
        for i, role in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    assert ours.recv() == 0
    ours.send(("generate", [(name, utils.Request((1,), 0, 1.0, n)) for name, n in (("a", 50), ("b", 3))]))
    ours.send(("announce", 1))
    ours.send(("generate", [("c", utils.Request((1,), 0, 1.0, 2))]))  # for the new weights
    done = {}
    while (message := ours.recv())[0] != "ready":
        done |= message[1]
    assert set(done) == {"a", "b"}  # drained
    ours.send(("weights", 1, [[("w", (2,))]]))
    assert ours.recv()[:2] == ("loaded", 1)
    kind, (version, answers), _ = ours.recv()
    assert (kind, version, len(answers)) == ("echo", 1, guards.REQUESTS)  # before c: bits depend on the batch
    while "c" not in done:
        done |= ours.recv()[1]
    ours.send(("stop",))
    for thread in threads:
        thread.join(timeout=30)
    assert logs[0] == logs[1] and logs[0].index("load ['w']") < logs[0].index("add c")
    assert [kind for kind, *_ in objects] == ["generate", "weights", "generate", "stop"]  # an object is news
    assert logs[0].count("step") > 50 and len(asked) < 20  # no step of seven asks
    assert {name: made.versions.tolist() for name, made in done.items()} == {"a": [0] * 50, "b": [0] * 3, "c": [1] * 2}


def test_calls_into_vllm_are_there():
    """What VLLMEngine calls by name, in the runner of CPUs, in either of GPUs, and in the wheel's options."""
    for file in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        (arguments,) = re.findall(r"def reload_weights\((.*?)\) -> None:", source(file), re.DOTALL)
        assert "weights_iterator" in arguments, file
    worker = source("v1/worker/gpu_worker.py")
    assert "def reload_weights(self, *args, **kwargs)" in worker and "self.use_v2_model_runner" in worker
    executor = source("v1/executor/uniproc_executor.py")
    assert "self.driver_worker = WorkerWrapperBase(" in executor and "class ExecutorWithExternalLauncher" in executor
    assert 'rank = int(os.environ["RANK"])' in executor and 'local_rank = int(os.environ["LOCAL_RANK"])' in executor
    options = source("engine/arg_utils.py")
    tree = ast.parse(source(utils_options_file := "sampling_params.py"))
    known = {
        n.target.id for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.AnnAssign)
    }
    text = Path(utils.__file__).read_text()
    engine = text[text.index("class VLLMEngine(") : text.index("def cpu_engine_options(")]
    (given,) = re.findall(r"params = SamplingParams\((.*?)\n        \)", engine, re.DOTALL)
    assert set(re.findall(r"^            (\w+)=", given, re.MULTILINE)) <= known, utils_options_file
    (given,) = re.findall(r"self\.llm = LLM\((.*?)\n            \)", engine, re.DOTALL)
    for name in re.findall(r"^                (\w+)=", given, re.MULTILINE):
        assert re.search(rf"^    {name}\b", options, re.MULTILINE) or f" {name}:" in source("entrypoints/llm.py"), name
    assert "set_weight_version(self, weight_version: str)" in source("v1/engine/llm_engine.py")
    assert "weight_versions: list[WeightVersionSpan]" in source("outputs.py")
    assert "weight_version=outputs.weight_version" in source("v1/engine/llm_engine.py")
