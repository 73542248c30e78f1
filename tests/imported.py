"""What the programs of tests/programs.py import: here once, before they are forked. Starts no thread, with
TORCHINDUCTOR_COMPILE_THREADS=1."""

import atexit
import gc
import importlib
import os
import sys

ENVIRONMENT = frozenset(os.environ)  # utils sets defaults for libraries
MODULES = """grpo grpo_fast scripts.parts.checkpoints scripts.parts.dumps scripts.parts.guards 
    scripts.parts.plan scripts.parts.packing scripts.parts.sandbox scripts.parts.run_files
    scripts.parts.transformers_engine tyro tyro._backends._argparse_formatter typeguard peft
    torch._inductor.compile_fx torch.distributed.checkpoint torch.distributed.checkpoint.state_dict
    torch.distributed.run torch.utils.tensorboard transformers.optimization
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3 vllm.entrypoints.llm
    vllm.entrypoints.launchers.cli_args
    vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    vllm.model_executor.layers.quantization.online.base vllm.model_executor.models.llama
    vllm.plugins.lora_resolvers.filesystem_resolver vllm.plugins.lora_resolvers.hf_hub_resolver
    vllm.v1.attention.backends.cpu_attn vllm.v1.core.sched.scheduler
    vllm.v1.executor.uniproc_executor vllm.v1.worker.cpu_worker nltk"""
UNITS = "TESTS_OF_UNITS" in os.environ  # which start no engine of vLLM, compile nothing and train no adapters
for name in MODULES.split():
    if UNITS and name.startswith(("vllm.", "peft", "torch._inductor", "torch.utils.tensorboard", "nltk")):
        continue
    importlib.import_module(name)
    if name == "grpo" and not UNITS:
        importlib.import_module("utils").prepare_compiler()

import torch  # noqa: E402
from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

get_checkpoint_conversion_mapping("llama")  # makes those of all models
import grpo  # noqa: E402
import utils  # noqa: E402

utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])  # docstrings are read, expressions are compiled
# torchrun's name for each event, of inspect.stack(), which looks at every module eighteen times: 2 s
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
if not UNITS:
    import vllm.logger
    from torch._inductor import cpu_vec_isa
    from vllm.config.logging import LoggingConfig
    from vllm.platforms import cpu, current_platform
    from vllm.v1.sample.sampler import Sampler

    cpu_vec_isa.valid_vec_isa_list()  # each takes a compiler and a Python to see
    with torch.inference_mode():  # what vLLM compiles for its first response
        Sampler().gather_logprobs(torch.zeros(2, 512), 0, torch.zeros(2, dtype=torch.int64))
    # what each engine would do again: half a second for a look at every name of every module, and one of loggers
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    vllm.logger.configure_logging_if_needed(LoggingConfig())
    cpu.GiB_bytes //= 32  # of VLLM_CPU_KVCACHE_SPACE, which has whole ones: an engine fills them with zeros
    gc.unfreeze = lambda: None  # at its end it would, and look at all that was imported, several times
    gc.get_freeze_count = lambda: 1  # an engine asks whether there are any: 0.2 s to count them
gc.collect()
gc.freeze()  # the programs' collections need not look at what was imported
server = os.getpid()
atexit.register(lambda: os.getpid() == server and os._exit(0))  # no destructors, as utils.exit_process has it
