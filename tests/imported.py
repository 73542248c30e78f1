"""What the programs of tests/programs.py import: here once, before they are forked. Starts no thread, with
TORCHINDUCTOR_COMPILE_THREADS=1."""

import atexit
import gc
import importlib
import os

ENVIRONMENT = frozenset(os.environ)  # utils sets defaults for libraries
MODULES = """grpo grpo_fast scripts.sandbox tyro tyro._backends._argparse_formatter peft matplotlib.pyplot
    torch._inductor.compile_fx torch.distributed.run torch.utils.tensorboard
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3 vllm.entrypoints.llm
    vllm.entrypoints.launchers.cli_args
    vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    vllm.model_executor.layers.quantization.online.base vllm.model_executor.models.llama
    vllm.v1.executor.uniproc_executor vllm.v1.worker.cpu_worker"""
UNITS = "TESTS_OF_UNITS" in os.environ  # which start no engine of vLLM, compile nothing and train no adapters
for name in MODULES.split():
    if UNITS and name.startswith(("vllm.", "peft", "torch._inductor", "torch.utils.tensorboard")):
        continue
    importlib.import_module(name)
    if name == "grpo" and not UNITS:
        importlib.import_module("utils").prepare_compiler()

import torch  # noqa: E402

if not UNITS:
    from torch._inductor import cpu_vec_isa
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    cpu_vec_isa.valid_vec_isa_list()  # each takes a compiler and a Python to see
    for rows in (2, 3):  # what vLLM compiles for its first response, and then for any number of them
        with torch.inference_mode():
            batched_count_greater_than(torch.zeros(rows, 512), torch.zeros(rows, 1))
gc.collect()
gc.freeze()  # the programs' collections need not look at what was imported
server = os.getpid()
atexit.register(lambda: os.getpid() == server and os._exit(0))  # no destructors, as utils.exit_process has it
