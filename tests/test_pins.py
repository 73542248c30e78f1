"""What the code takes of pinned libraries beyond their public names: each has a row here, and fails when a pin moves.

A private name needs a row in PRIVATE: another name, or a public way, is better. Where a missing name would raise in a
run of the tests anyway, the row says which; where it would be passed over in silence, or only a GPU would tell, a test
here looks for it. Names that a library's object may have or not (OPTIONAL) are looked for on one that has them.
"""

import importlib.util
import inspect
import re
import subprocess
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from scripts.parts import packing
from tests.conftest import REPO

PRIVATE = {  # name -> what fails without it
    "_all_group_ranks_share_shm_group_name": "test_names_that_vllm_would_pass_over",
    "_attn_implementation": "each run: Policy.forward",
    "_cdata": "test_estimate",
    "_disable_adapters": "test_adapters_are_off_while_the_private_name_says_so",
    "_dynamo": "each run with vLLM: utils.prepare_compiler",
    "_FileSystemWriter": "each checkpoint",
    "_dump_snapshot": "test_names_that_only_a_gpu_or_rare_data_would_miss",
    "_functional_collectives": "test_sequence_parallel",
    "_get_sentence_tokenizer": "test_names_that_only_a_gpu_or_rare_data_would_miss",
    "_internal": "test_bench: torch's fake store",
    "_model_mapping": "each run: packing.check",
    "_no_split_modules": "test_sharding: a model would have no layers",
    "_prec": "test_pairs_of_answers",
    "_pytree": "each run with --gradient_checkpointing",
    "_record_memory_history": "test_names_that_only_a_gpu_or_rare_data_would_miss",
    "_supports_sdpa": "each run: packing.check",
    "_timeout": "test_names_that_only_a_gpu_or_rare_data_would_miss",
}
OF_PYTHON = set("_asdict _exit _fields _replace _run_exitfuncs _shutdown _thread _Unpickler".split())
OF_TEXTS = set("_StringOnlyDict _core _frombuffer _get_layout _inductor _local _reconstruct _reductions".split())
OPTIONAL = {  # of a config -> a kind of model that has it
    "attention_chunk_size": "llama4_text",
    "attn_logit_softcapping": "gemma2",
    "eos_token_id": "llama",
    "final_logit_softcapping": "gemma2",
    "head_dim": "qwen3",
    "layer_types": "qwen3_next",
    "layers_block_type": "zamba",
    "lm_head_multiplier": "falcon_h1",
    "logit_scale": "cohere",
    "logits_scaling": "granite",
    "max_position_embeddings": "llama",
    "num_attention_heads": "llama",
    "num_key_value_heads": "llama",
    "sliding_window": "mistral",
}


@pytest.fixture(scope="module")
def shipped():
    """Every Python file but tests, and what scripts/peers takes of its own pins."""
    names = subprocess.check_output(["git", "ls-files", "*.py"], cwd=REPO, text=True).split()
    return "\n".join((REPO / name).read_text() for name in names if not name.startswith(("tests/", "scripts/peers/")))


def test_each_private_name_has_a_row(shipped):
    """An attribute, import, argument or name for getattr with one underscore in front that is not of our own."""
    private = r"(_(?!_)\w+)"
    seen = set(re.findall(rf"[\w)\]]\.{private}", shipped))
    seen |= set(re.findall(rf"import {private}", shipped))
    seen |= set(re.findall(rf'attr\([\w.]+, "{private}"', shipped))
    seen |= set(re.findall(rf"\b{private}=(?!=)", shipped))
    own = set(re.findall(rf"(?:def |class |self\.|^ *){private}(?=[(:, =])", shipped, re.MULTILINE))
    unknown = seen - own - OF_PYTHON - OF_TEXTS - PRIVATE.keys()
    assert not unknown, f"{unknown}: take a public way, or add a row to PRIVATE and what fails without the name"
    assert seen >= PRIVATE.keys(), f"nobody takes {sorted(PRIVATE.keys() - seen)} any more: drop the rows"


def test_optional_names_and_kinds_of_configs_are_there(shipped):
    """getattr(config, name, None) would go on without it."""
    asked = set(re.findall(r'(?:get|has)attr\((?:config|text|text_config|model\.config), "(\w+)"', shipped))
    asked |= {"layer_types", "layers_block_type"}  # packing.other_layers asks for them in a loop
    assert asked | set(packing.SCALES) == OPTIONAL.keys()
    for name, kind in OPTIONAL.items():
        assert hasattr(CONFIG_MAPPING[kind](), name), name
    assert packing.RECURRENT | packing.KEEP_THEIR_WINDOW | packing.HAVE_SINKS <= set(CONFIG_MAPPING)


def test_optional_names_of_modules_and_tensors_are_there():
    """Without them hasattr and getattr would go on: with dropout, or with shards in place of whole tensors."""
    from tokenizers import Tokenizer
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes))
    (layer,) = model.model.layers
    assert hasattr(layer.self_attn, "attention_dropout")
    assert hasattr(DTensor, "device_mesh") and hasattr(DTensor, "full_tensor")
    assert hasattr(FSDPModule, "set_requires_gradient_sync")
    assert hasattr(PreTrainedTokenizerFast, "backend_tokenizer") and hasattr(Tokenizer, "normalizer")


def test_adapters_are_off_while_the_private_name_says_so():
    """peft's public enable_adapters would also take the adapters' gradients, which FSDP looks at only once."""
    from peft import LoraConfig, inject_adapter_in_model

    model = inject_adapter_in_model(LoraConfig(target_modules=["0"]), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    layer = model[0]
    assert not layer.disable_adapters
    layer._disable_adapters = True
    assert layer.disable_adapters and hasattr(layer, "lora_A")


def test_names_that_vllm_would_pass_over(shipped):
    """An assignment to a name that is gone changes nothing, and so does a variable that nobody reads."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("vLLM is not installed")
    folder = Path(vllm.submodule_search_locations[0])
    communicator = (folder / "distributed/device_communicators/cpu_communicator.py").read_text()
    assert "self._all_group_ranks_share_shm_group_name()" in communicator
    known = (folder / "envs.py").read_text()
    words = set(re.findall(r'"(VLLM_[A-Z0-9_]+)"', shipped))
    assert len(words) > 2 and [word for word in words if f'"{word}"' not in known] == []


def test_what_torchrun_tells_its_ranks():
    """grpo_fast.py would start ranks of its own inside torchrun's, and no restart would resume."""
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing import api

    told = inspect.getsource(local_elastic_agent) + inspect.getsource(api)
    assert "TORCHELASTIC_RUN_ID" in told and "TORCHELASTIC_RESTART_COUNT" in told


def test_names_that_only_a_gpu_or_rare_data_would_miss():
    """Those of NCCL, of which each torch has the stub; of a snapshot of a GPU's memory; and of nltk's sentences for
    IFEval, which would look for data that nobody installs."""
    from if_verifiable.ifeval import instructions_util

    stub = (Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text()
    options = stub.partition("class Options:")[2].partition("\nclass ")[0]
    assert "@_timeout.setter" in options
    assert "max_entries" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert callable(torch.cuda.memory._dump_snapshot)
    assert "_get_sentence_tokenizer()" in inspect.getsource(instructions_util)
