"""Make a checkpoint of this project's format of the state that another run saved after a step: grpo.py --load_states.

    python scripts/align/states.py DIR STEP OUT --model M

What is found in DIR, in this order:

    global_step_N/actor     veRL's FSDP shards, model_world_size_W_rank_R.pt and optim_world_size_W_rank_R.pt of all W
                            ranks: strategy fsdp, with flat parameters or original ones, and fsdp2
    step_N or checkpoint-N  a Hugging Face directory: weights alone. OUT has moments of 0, as before a first step

OUT gets the weights in float32 and Adam's moments and step by parameter, whatever number of ranks wrote them. They are
held in memory twice: 12 bytes a weight, 24 while they are put together. M is where the architecture comes from, if not
from global_step_N/actor/huggingface or step_N.

A pickle is a program. Of veRL's only what a state needs is run, on stand-ins for torch's classes of shards; everything
else is refused by name. Tried on what veRL 0.9.1's own FSDP engine and checkpoint manager wrote on two CPU ranks with
torch 2.13, of both strategies: weights and moments are those of the same steps without FSDP. Of a wrap_policy of veRL's
configuration only strategy fsdp2 and use_orig_params=True can be read; adapters (LoRA) cannot.
"""

import argparse
import itertools
import os
import pickle
import re
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

SHARDS = re.compile(r"(model|optim)_world_size_(\d+)_rank_(\d+)\.pt")
MOMENTS = ("exp_avg", "exp_avg_sq")


class StandIn:
    """What a pickle has of an object of torch.distributed: its arguments and its state."""

    arguments: tuple
    state: dict[str, Any]

    def __new__(cls, *arguments: Any, **_: Any):
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # (dict, slots)
            self.state.update(part or {})


class Shard(StandIn):
    """A placement along one dimension."""


class Sharded(StandIn):
    """A DTensor: its whole size, and this rank's part of it."""

    @property
    def size(self) -> torch.Size:
        return self.arguments[1]

    @property
    def rows(self) -> torch.Tensor:
        """This rank's rows. Raises ValueError where it is not rows that are shared out."""
        last = self.state["_spec"].state["placements"][-1]
        if not isinstance(last, Shard) or (*last.arguments, *last.state.values())[0] != 0:
            raise ValueError(f"a tensor of {tuple(self.size)} is not shared out by rows")
        return self.state["_local_tensor"]


def _wrapper(cls: type, *arguments: Any) -> Any:
    return cls(*arguments)


def _rebuild_from_type(function: Any, cls: type, arguments: tuple, state: Any) -> Any:
    made = function(*arguments)
    made.__setstate__(state)
    return made


class StateUnpickler(pickle.Unpickler):
    """Of torch.distributed everything is a stand-in; of torch what makes tensors."""

    ALLOWED = {
        "collections.OrderedDict": OrderedDict,
        "torch.Size": torch.Size,
        "torch.device": lambda *_: torch.device("cpu"),
        "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
        "torch._utils._rebuild_wrapper_subclass": _wrapper,
        "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        "torch.serialization._get_layout": lambda *_: None,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed."):
            return {"DTensor": Sharded, "Shard": Shard}.get(name) or type(name, (StandIn,), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"refused: the pickle asks for {module}.{name}, which no state needs")
        return self.ALLOWED[f"{module}.{name}"]


def read_shard(path: Path) -> Any:
    """A file of torch.save, without running anything it says. Raises ValueError that names what was refused."""
    reader = types.SimpleNamespace(Unpickler=StateUnpickler, load=None, __name__="states")
    try:
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is not a shard that can be read: {error}") from error


def whole(parts: list[Any]) -> torch.Tensor:
    """The tensor in float32 of all ranks' parts: rows of a DTensor, of which further ranks may have copies, or the same
    tensor everywhere."""
    if not isinstance(parts[0], Sharded):
        return parts[0].float()
    rows, size = [], 0
    for part in parts:
        if size < parts[0].size[0]:
            rows.append(part.rows.float())
            size += len(rows[-1])
    return torch.cat(rows).view(parts[0].size)


def architecture(source: Path, model: str | None) -> Any:
    """The model without weights, and without memory for them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    place = source if (source / "config.json").is_file() else source / "huggingface"
    config = AutoConfig.from_pretrained(place if (place / "config.json").is_file() else model)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def units(model: Any) -> list[list[str]]:
    """The names of the parameters in each flat parameter of FSDP, in its order: all that are in no block, then each
    block's (veRL wraps what the model names in _no_split_modules)."""
    blocks = [n for n, m in model.named_modules() if type(m).__name__ in set(model._no_split_modules or ())]
    names = [name for name, _ in model.named_parameters()]
    inside = [[name for name in names if name.startswith(f"{block}.")] for block in blocks]
    return [[name for name in names if name not in set(itertools.chain(*inside))], *inside]


def moments_of(shards: list[dict[str, Any]], model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter -> step, exp_avg, exp_avg_sq, of each rank's optimizer.state_dict(). Raises ValueError."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    indices = [i for group in shards[0]["param_groups"] for i in group["params"]]
    out: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    flat = len(indices) < len(shapes)  # one flat parameter for each unit
    kinds = units(model) if flat else [[name] for name in shapes]
    if len(kinds) != len(indices):
        sizes = f"{len(indices)} parameters, the model {len(shapes)} in {len(units(model))} units of FSDP"
        raise ValueError(f"the optimizer has {sizes}: another wrap_policy is read with fsdp2 or use_orig_params=True")
    for i, names in zip(indices, kinds, strict=True):
        there = [shard["state"][i] for shard in shards if i in shard["state"]]
        if not there:
            raise ValueError(f"no rank has the optimizer's state of {names[0]}")
        for moment in MOMENTS:
            parts = [entry[moment] for entry in there]
            found = whole(parts).flatten() if isinstance(parts[0], Sharded) else torch.cat(parts).float()
            sizes = [shapes[name].numel() for name in names]
            if len(found) - sum(sizes) not in range(len(shards) if flat else 1):  # flat ones are padded to even shares
                raise ValueError(f"{moment} of {names[0]}, ...: {len(found)} numbers for {sum(sizes)} weights")
            for name, values in zip(names, found[: sum(sizes)].split(sizes), strict=True):
                out[name][moment] = values.view(shapes[name]).clone()
        for name in names:
            out[name]["step"] = torch.as_tensor(there[0]["step"], dtype=torch.float32).clone()
    return out


def read_verl(actor: Path, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Weights and moments, whole, of veRL's shards. Raises ValueError for ranks that are missing."""
    found = [m for m in (SHARDS.fullmatch(path.name) for path in actor.iterdir()) if m]
    worlds = {int(m[2]) for m in found}
    if len(worlds) != 1:
        raise ValueError(f"{actor}: shards of {sorted(worlds)} ranks")
    (world,) = worlds
    shards: dict[str, list[Any]] = {}
    for kind in ("model", "optim"):
        paths = [actor / f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing and (kind == "model" or len(missing) < world):
            raise ValueError(f"{actor} lacks {', '.join(missing)}")
        shards[kind] = [] if missing else [read_shard(path) for path in paths]
    if adapters := [name for name in shards["model"][0] if "lora_" in name]:
        raise ValueError(f"{actor} has adapters (LoRA), {adapters[0]}, ...: have veRL's model merger merge them")
    weights = {name: whole([shard[name] for shard in shards["model"]]) for name in shards["model"][0]}
    return weights, moments_of(shards["optim"], model) if shards["optim"] else {}


def convert(source: Path, step: int, out: Path, model_name: str | None) -> Path:
    """Write the checkpoint; returns what it was made of. Raises ValueError with the reason if it cannot."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    import utils
    from scripts.align.align import load_hf_state

    names = (f"global_step_{step}/actor", f"step_{step}", f"checkpoint-{step}")
    found = next((source / name for name in names if (source / name).is_dir()), None)
    if found is None:
        raise ValueError(
            f"{source} has no state of step {step}: none of {', '.join(names)}, nor checkpoints/step_{step}"
        )
    model = architecture(found, model_name)
    weights, moments = read_verl(found, model) if found.name == "actor" else (load_hf_state(found), {})
    policy: Any = torch.nn.Module()
    policy.model = model
    shapes = {name: value.shape for name, value in get_model_state_dict(policy).items()}
    for name in shapes:  # a tied head is left out or there twice
        weights.setdefault(name.removeprefix("model."), weights.get(_embeddings(model)))
    wrong = [n for n, shape in shapes.items() if getattr(weights[n.removeprefix("model.")], "shape", None) != shape]
    if wrong:
        raise ValueError(f"{found}: not the model's {', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)}")
    state: dict[str, Any] = {"policy": {name: weights[name.removeprefix("model.")].float() for name in shapes}}
    if not moments:
        fresh = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        moments = {name: {"step": torch.tensor(0.0)} | dict.fromkeys(MOMENTS, x) for name, x in fresh.items()}
    state["optimizer"] = {"state": {f"model.{name}": values for name, values in moments.items()}}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dcp.save(state, checkpoint_id=out / "state", no_dist=True)
    torch.save({"rng": utils.rng_state()}, out / "rank_0.pt")
    return found


def _embeddings(model: Any) -> str:
    """The parameter that a tied head is; "" where it is not."""
    tied = model.config.tie_word_embeddings
    weight = model.get_input_embeddings().weight
    return next((name for name, p in model.named_parameters() if p is weight), "") if tied else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="DIR")
    parser.add_argument("step", type=int, metavar="STEP")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", help="directory or hub name of the start model")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs are the run's
    try:
        print(f"{options.out} has the state of {convert(options.source, options.step, options.out, options.model)}")
    except (ValueError, OSError) as error:
        print(f"states.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
