"""What the programs of tests/programs.py import: here once, before they are forked. Starts no thread."""

import atexit
import gc
import importlib
import os

ENVIRONMENT = frozenset(os.environ)  # utils sets defaults for libraries
MODULES = """grpo grpo_fast scripts.sandbox tyro matplotlib.pyplot torch._inductor.compile_fx torch.distributed.run
    torch.utils.tensorboard transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3 vllm.entrypoints.llm
    vllm.model_executor.models.llama vllm.v1.executor.uniproc_executor vllm.v1.worker.cpu_worker"""
for name in MODULES.split():
    importlib.import_module(name)
gc.collect()
gc.freeze()  # the programs' collections need not look at what was imported
server = os.getpid()
atexit.register(lambda: os.getpid() == server and os._exit(0))  # no destructors, as utils.exit_process has it
