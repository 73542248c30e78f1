"""Compiles what torch.compile makes of our code for GPUs that are not there: Inductor, Triton and NVIDIA's assembler.

    python -m tests.gpu_contract.compiler                 flex attention: every GPU, head size, dtype, window; an hour
    python -m tests.gpu_contract.compiler sm_89 sm_120    of these GPUs
    python -m tests.gpu_contract.compiler head            bytes of the compiled head a logit, kernel by kernel

Shapes are traced on a CPU without data, the graphs are rewritten to cuda and compiled for a device that its data sheet
describes. What comes back is what a GPU would load: each kernel with the shared memory it asks for.
"""

import contextlib
import copy
import importlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import grpo

SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes a block may have, by architecture
CUDA = torch.device("cuda", 0)


@dataclass
class Kernel:
    """A Triton kernel as it was compiled; `shared` bytes, or what Triton or the assembler said instead."""

    name: str
    shared: int
    problem: str
    source: str
    types: dict[str, str]  # of its arguments, pointers as *bf16


@dataclass
class Compiled:
    """What came out of some calls."""

    graphs: int = 0
    kernels: list[Kernel] = field(default_factory=list)
    code: list[str] = field(default_factory=list)  # of Inductor's wrappers


def missing() -> str:
    """Why nothing can be compiled for a GPU here, or nothing."""
    try:
        importlib.import_module("triton.backends.nvidia")
        ptxas = importlib.import_module("triton.knobs").nvidia.ptxas.path
    except (ImportError, RuntimeError) as error:
        return f"Triton or its ptxas is not installed: {error}"
    return "" if Path(ptxas).exists() else f"Triton has no ptxas at {ptxas}"


@contextlib.contextmanager
def device(arch: int, found: Compiled) -> Generator[None]:
    """A GPU of this architecture, as far as Inductor and Triton ask for it before anything runs."""
    import torch._inductor.config as inductor
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import get_fill_order
    from torch._inductor.runtime import hints, triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.utils import _triton

    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    driver = importlib.import_module("triton.runtime").driver
    flex_attention: Any = importlib.import_module("torch._higher_order_ops.flex_attention")  # not the operator in it

    about = types.SimpleNamespace(
        name="data sheet", major=arch // 10, minor=arch % 10, multi_processor_count=132, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        total_memory=80 << 30, L2_cache_size=50 << 20, gcnArchName="", shared_memory_per_block_optin=SHARED[arch],
    )  # fmt: skip
    active = types.SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0, get_active_torch_device=lambda: CUDA,
    )  # fmt: skip

    def precompile(self: Any, *_: Any, **__: Any) -> None:
        name, source = self.inductor_meta.get("kernel_name", ""), self.fn.src
        for config in self.configs:
            if any(k.shared > SHARED[arch] for k in found.kernels):
                return  # what cannot be loaded needs no more: the backward is the longest to compile
            shared, problem = 0, ""
            try:
                made = self._precompile_config(config).kernel
                shared = made.metadata.shared if hasattr(made, "metadata") else made.shared
            except Exception as error:  # of Triton, LLVM or the assembler, each with classes of its own
                problem = f"{type(error).__name__}: {error}"[:300]
            found.kernels.append(Kernel(name, shared, problem, source, self.triton_meta["signature"]))

    codegen = GraphLowering.codegen

    def kept(self: Any) -> Any:
        out = codegen(self)
        found.code.append(getattr(out[0], "value", str(out[0])))
        return out

    def permuted(out: torch.Tensor, strides: tuple[Any, ...]) -> torch.Tensor:  # torch's own copies, which asks CUDA
        order = get_fill_order(strides)
        return out.new_empty_strided(out.shape, flex_attention._construct_strides(out.shape, order))

    caches = hints.DeviceProperties.create, _triton.has_triton, _triton.triton_backend
    with contextlib.ExitStack() as stack:
        for name, answer in {
            "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": about,
            "get_device_capability": (arch // 10, arch % 10), "get_device_name": "data sheet",
            "get_rng_state": torch.get_rng_state(), "set_rng_state": None, "synchronize": None,
            "_exchange_device": -1, "_maybe_exchange_device": -1, "current_stream": types.SimpleNamespace(stream_id=0),
        }.items():  # fmt: skip
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for name, answer in {"get_device_properties": about, "current_device": 0, "device_count": 1}.items():
            fixed = staticmethod(lambda *_, answer=answer: answer)
            stack.enter_context(patch.object(CudaInterface, name, fixed))
            stack.enter_context(patch.object(CudaInterface.Worker, name, fixed, create=True))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True))
        stack.enter_context(patch.object(FakeTensorMode, "init_gpu_context", lambda *_: None, create=True))
        stack.enter_context(patch.object(driver, "_active", active))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(flex_attention, "_permute_strides", permuted))
        stack.enter_context(patch.object(CachingAutotuner, "precompile", precompile))
        stack.enter_context(patch.object(GraphLowering, "codegen", kept))
        stack.enter_context(inductor.patch(compile_threads=1, force_disable_caches=True))
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield


def backend(arch: int, found: Compiled) -> Callable[..., Any]:
    """For torch.compile: compiles each graph for a GPU (0: counts it), and goes on as if it had not."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def moved(x: Any) -> Any:
        if hasattr(x, "fake_mode") and x.device.type == "cpu":
            with x.fake_mode:
                return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)
        return x

    def compiler(backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            found.graphs += 1
            as_it_was = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
            if not arch:
                return as_it_was.forward
            for module in graph.modules():
                for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                    if node.kwargs.get("device") is not None:
                        node.kwargs = {**node.kwargs, "device": CUDA}
                    if "val" in node.meta:
                        node.meta["val"] = tree_map(moved, node.meta["val"])
            with device(arch, found):
                compile_fx_inner(graph, [moved(x) for x in inputs], is_backward=backward)
            return as_it_was.forward

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        inference_compiler=compiler(False),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Flex attention
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flex_for(arch: int, found: Compiled) -> Generator[None]:
    """utils.pack_attention(..., flex=True) compiles for this GPU. Tensors have no data."""
    from torch.nn.attention import flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, backend=backend(arch, found))
    with (
        patch.object(utils, "_flex_attention", lambda: compiled),
        patch.object(flex_attention, "_validate_device", lambda *_: None),  # it knows no backward on a CPU
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def attend(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int = 0) -> None:
    """Forward and backward of a pack's attention, as fit_flex_attention tries it; with a window as its layers do."""
    parts = [(tokens // 2, [tokens // 4, tokens - tokens // 2 - tokens // 4])]
    layout = utils.Layout(parts, torch.device("cpu"))
    q, k, v = (torch.ones(1, n, tokens, head_dim, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    options = {"layout": layout, "flex": True, "sliding_window": window}
    utils.pack_attention(torch.nn.Module(), q, k, v, None, **options)[0].sum().backward()


def fitting_options(arch: int, head_dim: int, dtype: torch.dtype, window: int = 0) -> tuple[int, list[Compiled]]:
    """Which of FLEX_OPTIONS is the first whose kernels this GPU can load (their number: none), and what each made."""
    tried = []
    for i, options in enumerate(utils.FLEX_OPTIONS):
        found = Compiled()
        with patch.object(utils, "FLEX_OPTIONS", [options]), flex_for(arch, found):
            attend(2048, 4, 2, head_dim, dtype, window)
        tried.append(found)
        if found.kernels and all(not k.problem and k.shared <= SHARED[arch] for k in found.kernels):
            return i, tried
    return len(utils.FLEX_OPTIONS), tried


# ---------------------------------------------------------------------------------------------------------------------
# The head
# ---------------------------------------------------------------------------------------------------------------------


def compile_head(arch: int, vocabulary: int, hidden: int, dtype: torch.dtype, entropy: bool) -> list[Compiled]:
    """Forward and backward of a chunk of the grpo."""
    out = []
    for work in (grpo.HeadLogprobs.forward_chunk, grpo.HeadLogprobs.backward_chunk):
        found = Compiled()
        torch._dynamo.reset()
        with FakeTensorMode(), torch.no_grad():
            run = grpo.chunk_function.__wrapped__(work, True, backend=backend(arch, found))
            x, weight = (torch.empty(n, hidden, dtype=dtype) for n in (3072, vocabulary))
            targets = torch.empty(3072, dtype=torch.long)
            normalizer, h, g, dh = (torch.empty(3072) for _ in range(4))
            more = (normalizer, h, g, dh if entropy else None) if work is grpo.HeadLogprobs.backward_chunk else ()
            run(x, weight, targets, *more, 1.0)
        out.append(found)
    return out


def logit_passes(kernel: Kernel) -> list[str]:
    """Loads and stores of a kernel that touch every logit, one entry each, with the type: those whose address moves
    with the innermost index of all of them."""
    whole = "r0_1" if "r0_numel" in kernel.source else "x2"
    touched = re.findall(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\), ", kernel.source)
    return [kernel.types[pointer].strip("*") for pointer, index in touched if re.search(rf"\b{whole}\b", index)]


SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def head_bytes(arch: int = 90, vocabulary: int = 152064, hidden: int = 3584, entropy: bool = False) -> dict[str, float]:
    """Bytes a logit of the compiled head in bfloat16, forward and backward together, counted in the generated kernels;
    of its products' reads and writes of logits; and of adding up the weight's gradient once a chunk."""
    forward, backward = compile_head(arch, vocabulary, hidden, torch.bfloat16, entropy)
    out = {}
    for name, found in (("forward", forward), ("backward", backward)):
        kernels = {k.name: k for k in found.kernels}.values()  # each once, whatever configurations were tried
        out[name] = float(sum(SIZES[t] for k in kernels for t in logit_passes(k)))
    out["products"] = 2.0 + 2.0 + 2 * 2.0  # logits written twice, their gradient read by two products
    out["gradient of the weight"] = (2 + 2 + 4 + 4) * hidden / (3 * grpo.LOGPROB_CHUNK)
    return out


def main() -> None:
    if problem := missing():
        raise SystemExit(f"compiler.py: {problem}")
    if "head" in sys.argv:
        for entropy in (False, True):
            parts = head_bytes(entropy=entropy)
            words = ", ".join(f"{name} {size:.1f}" for name, size in parts.items())
            which = "with" if entropy else "without"
            print(f"bytes a logit, {which} the entropy's gradient: {words}: {sum(parts.values()):.1f}")
        return
    for arch in SHARED:
        if len(sys.argv) > 1 and f"sm_{arch}" not in sys.argv:
            continue
        for head_dim, dtype, window in itertools.product((64, 128, 256), (torch.bfloat16, torch.float32), (0, 1024)):
            i, tried = fitting_options(arch, head_dim, dtype, window)
            most = [max((k.shared for k in found.kernels), default=0) for found in tried]
            fits = f"options {i}" if i < len(utils.FLEX_OPTIONS) else "NONE: rows"
            problems = sorted({k.problem for found in tried for k in found.kernels if k.problem})
            case = f"sm_{arch} head {head_dim} {str(dtype)[6:]}, window {window}"
            print(
                f"{case}: {fits}; shared {most} of {SHARED[arch]}",
                *problems,
                flush=True,
            )


if __name__ == "__main__":
    main()
