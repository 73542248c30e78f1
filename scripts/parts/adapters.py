"""LoRA adapters, which train in place of the weights (--lora_rank). utils.py imports this for such runs only."""

import contextlib
import functools
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import utils
from scripts.parts import hub, run_files


def add_adapters(model: Any, args: utils.Flags) -> None:
    """Freeze the model and give each matrix of --lora_target_modules an adapter. A is random by seed and name (peft's
    uniform(-1, 1) / sqrt(inputs)), B zero: the policy is the model's, bit for bit. Raises UserError."""
    from peft import LoraConfig, inject_adapter_in_model

    matrices = matrices_of(model)
    known = sorted({name.rpartition(".")[2] for name in matrices})
    names: Any = args.lora_target_modules
    if names == ["all-linear"]:
        in_parts = utils.trained_parts(model) != [model]
        names = [*matrices] if in_parts else known
    start = args.model_name_or_path
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=names,
        base_model_name_or_path=start,
        revision=None if Path(start).is_dir() else hub.commit_of("model", start, args.model_revision),
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        args.refuse(f"--lora_target_modules: {str(error).strip().splitlines()[0]} Its matrices: {', '.join(known)}")
    model.requires_grad_(False)
    adapted = [f".{name}" for name in adapted_layers(model)]
    for name in names:  # peft passes over a name that it does not find, if it finds another
        if not any(weight.endswith(f".{name}.weight") for weight in adapted):
            args.refuse(f"--lora_target_modules: no matrix of a layer has the name {name}: {', '.join(known)}")
    for name, layer in adapted_layers(model).items():
        if name.removesuffix(".weight") not in matrices:
            args.refuse(f"--lora_target_modules: {name} is no matrix of a layer: take of {', '.join(known)}")
        layer.lora_A.requires_grad_(True).float()
        layer.lora_B.requires_grad_(True).float()
        generator = torch.Generator().manual_seed(utils.derive_seed(args.seed, name))
        torch.nn.init.kaiming_uniform_(layer.lora_A["default"].weight, math.sqrt(5), generator=generator)


def matrices_of(model: Any) -> dict[str, torch.nn.Linear]:
    """What --lora_target_modules all-linear adapts, by name: the matrices of the trained layers. The experts of a
    mixture are one tensor a layer, which has no adapter."""
    inside = {module for layer in utils.blocks_of(model) for module in layer.modules()}
    named = model.named_modules()
    return {name: module for name, module in named if module in inside and isinstance(module, torch.nn.Linear)}


def adapted_layers(model: Any) -> dict[str, Any]:
    """peft's layers with an adapter, by the checkpoint name of the weight that the adapter changes."""
    return {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapter_weights(model: Any) -> utils.NamedTensors:
    """(peft's name, whole float32 tensor) of A and B of each adapter. All ranks."""
    named = []
    for name, layer in adapted_layers(model).items():
        name_a, name_b = peft_names(name)
        named.append((name_a, layer.lora_A["default"].weight))
        named.append((name_b, layer.lora_B["default"].weight))
    yield from utils.gather_weights(named, torch.float32)


def peft_names(name: str) -> tuple[str, str]:
    """peft's names of A and B of the adapter that changes a weight."""
    prefix = "base_model.model." + name.removesuffix("weight")
    return f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"


def merged_weights(model: Any, dtype: torch.dtype) -> utils.NamedTensors:
    """(checkpoint name, whole tensor in `dtype`) of all weights: W + scaling B A where there is an adapter. All ranks
    must exhaust it in lock-step."""
    layers = adapted_layers(model)
    halves = dict(adapter_weights(model))
    for name, weight in utils.gather_weights(utils.named_weights(model), dtype):
        if name in layers:
            name_a, name_b = peft_names(name)
            product = halves[name_b] @ halves[name_a]
            change = layers[name].scaling["default"] * product
            weight = (weight.float() + change).to(dtype)
        yield name, weight


@contextlib.contextmanager
def without_adapters(model: Any) -> Generator[None]:
    """The model as it was before training: its adapters are off."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    yield
    for layer in layers:
        layer._disable_adapters = False


def save_adapters(model: Any, tokenizer: Any, path: Path, world: utils.World) -> Path:
    """Write the adapters in peft's format. All ranks gather, rank 0 writes. Returns where they are."""
    state = {}
    for name, tensor in adapter_weights(model):  # all ranks
        if world.is_main:
            state[name] = tensor.to("cpu", copy=True)
    if world.is_main:
        path = run_files.write_directory(path, functools.partial(write_adapters, model, state, tokenizer))
    dist.barrier()
    return path


def write_adapters(model: Any, state: dict[str, torch.Tensor], tokenizer: Any, path: Path) -> None:
    """Write adapters with these weights into a directory."""
    from safetensors.torch import save_file

    save_file(state, path / "adapter_model.safetensors", {"format": "pt"})
    model.peft_config["default"].save_pretrained(path)
    tokenizer.save_pretrained(path)
