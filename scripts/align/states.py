"""Convert the state that another run saved after a step into a checkpoint of this project, for grpo.py --load_states.

    python scripts/align/states.py DIR STEP OUT --model M

The first of these in DIR is converted:

    global_step_N/actor     veRL's FSDP shards, model_world_size_W_rank_R.pt and optim_world_size_W_rank_R.pt of all W
                            ranks: strategy fsdp, with flat parameters or original ones, and fsdp2
    step_N or checkpoint-N  a Hugging Face directory: weights alone. OUT has moments of 0, as before a first step

OUT gets the weights in float32 and Adam's moments and step by parameter, whatever number of ranks wrote them. They are
held in memory twice: 12 bytes a weight, 24 while they are put together. M names the start model, for its architecture
where neither global_step_N/actor/huggingface nor step_N has a config.json.

A pickle is a program: torch reads plain data and its own tensors of it, and refuses everything else by name. Tried on
the files of veRL 0.9.1's own FSDP engine and checkpoint manager, written on two CPU ranks with torch 2.13 by both
strategies: weights and moments equal those of the same steps without FSDP. With another wrap_policy in veRL's
configuration, only strategy fsdp2 and use_orig_params=True can be read. Adapters (LoRA) cannot.
"""

import itertools
import os
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch.distributed.tensor import DTensor, Shard

from scripts.reports.common import parser

SHARDS = re.compile(r"(model|optim)_world_size_(\d+)_rank_(\d+)\.pt")
MOMENTS = ("exp_avg", "exp_avg_sq")

Moments = dict[str, dict[str, Any]]  # parameter -> step, exp_avg, exp_avg_sq; also a rank's optimizer.state_dict()


def read_shard(path: Path) -> Any:
    """A file of torch.save, by torch's reader of plain data and of its own tensors. Raises ValueError for others."""
    try:
        return torch.load(path, "cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))  # torch's other words say how to run it nevertheless
        reason = f"it asks for {asked[1]}" if asked else str(error).partition(". ")[0]
        raise ValueError(f"{path} is not a shard that can be read: {reason}") from error


@torch.no_grad()
def rows_of(part: DTensor) -> torch.Tensor:
    """A rank's rows of a sharded tensor. Raises ValueError where it is not sharded along its first dimension."""
    placement = part.placements[-1]
    if type(placement) is not Shard or placement.dim != 0:
        raise ValueError(f"a tensor of {tuple(part.shape)} is not shared out by rows")
    return part.to_local()


def whole(parts: list[Any]) -> torch.Tensor:
    """The tensor in float32 of all ranks' parts: rows of a DTensor, of which further ranks may have copies, or the same
    tensor everywhere."""
    if not isinstance(parts[0], DTensor):
        return parts[0].float()
    rows: list[torch.Tensor] = []
    for part in parts:
        if sum(map(len, rows)) < len(parts[0]):
            rows.append(rows_of(part).float())
    return torch.cat(rows).view(parts[0].shape)


def architecture(source: Path, model: str | None) -> Any:
    """The model without weights, and without memory for them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = [folder for folder in (source, source / "huggingface") if (folder / "config.json").is_file()]
    config = AutoConfig.from_pretrained(folders[0] if folders else model, trust_remote_code=False)  # may be another's
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def units(model: Any) -> list[list[str]]:
    """The names of the parameters in each flat parameter of FSDP, in its order: all that are in no block, then each
    block's (veRL wraps what the model names in _no_split_modules)."""
    classes = set(model._no_split_modules or ())
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    names = [name for name, _ in model.named_parameters()]
    inside = []
    for block in blocks:
        inside.append([name for name in names if name.startswith(f"{block}.")])
    wrapped = set(itertools.chain(*inside))
    outside = [name for name in names if name not in wrapped]
    return [outside, *inside]


def moments_of(shards: list[Moments], model: Any) -> Moments:
    """Parameter -> step, exp_avg, exp_avg_sq, of each rank's optimizer.state_dict(). Raises ValueError."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    indices = [i for group in shards[0]["param_groups"] for i in group["params"]]
    flat = len(indices) < len(shapes)  # one flat parameter for each unit, padded to equal shares of the ranks
    names_of = units(model) if flat else [[name] for name in shapes]
    if len(names_of) != len(indices):
        sizes = f"{len(indices)} parameters, the model {len(shapes)} in {len(units(model))} units of FSDP"
        raise ValueError(f"the optimizer has {sizes}: another wrap_policy is read with fsdp2 or use_orig_params=True")
    padding = len(shards) - 1 if flat else 0
    moments: Moments = {name: {} for name in shapes}
    for i, names in zip(indices, names_of, strict=True):
        entries = [shard["state"][i] for shard in shards if i in shard["state"]]
        if not entries:
            raise ValueError(f"no rank has the optimizer's state of {names[0]}")
        step = torch.as_tensor(entries[0]["step"], dtype=torch.float32)
        for moment in MOMENTS:
            numbers = joined([entry[moment] for entry in entries])
            sizes = [shapes[name].numel() for name in names]
            if not 0 <= len(numbers) - sum(sizes) <= padding:
                raise ValueError(f"{moment} of {names[0]}, ...: {len(numbers)} numbers for {sum(sizes)} weights")
            for name, values in zip(names, numbers[: sum(sizes)].split(sizes), strict=True):
                moments[name][moment] = values.view(shapes[name]).clone()
                moments[name]["step"] = step.clone()
    return moments


def joined(parts: list[Any]) -> torch.Tensor:
    """The numbers, in float32, of all ranks' parts of a DTensor or of a flat parameter."""
    if isinstance(parts[0], DTensor):
        return whole(parts).flatten()
    return torch.cat(parts).float()


def read_shards(actor: Path, kind: str, world: int) -> list[Any]:
    """Those of all ranks, or [] for an optimizer that no rank saved. Raises ValueError for ranks that are missing."""
    paths = [actor / f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    missing = [path.name for path in paths if not path.is_file()]
    if kind == "optim" and len(missing) == world:
        return []
    if missing:
        raise ValueError(f"{actor} lacks {', '.join(missing)}")
    return [read_shard(path) for path in paths]


def read_verl(actor: Path, model: Any) -> tuple[dict[str, torch.Tensor], Moments]:
    """Weights and moments, whole, of veRL's shards. Raises ValueError."""
    matches = [SHARDS.fullmatch(path.name) for path in actor.iterdir()]
    worlds = {int(match[2]) for match in matches if match}
    if len(worlds) != 1:
        raise ValueError(f"{actor}: shards of {sorted(worlds)} ranks")
    (world,) = worlds
    shards = read_shards(actor, "model", world)
    optimizers = read_shards(actor, "optim", world)
    adapters = [name for name in shards[0] if "lora_" in name]
    if adapters:
        raise ValueError(f"{actor} has adapters (LoRA), {adapters[0]}, ...: have veRL's model merger merge them")
    weights = {name: whole([shard[name] for shard in shards]) for name in shards[0]}
    return weights, moments_of(optimizers, model) if optimizers else {}


def find_state(source: Path, step: int) -> Path:
    """The directory of a step's state. Raises ValueError."""
    names = (f"global_step_{step}/actor", f"step_{step}", f"checkpoint-{step}")
    for name in names:
        if (source / name).is_dir():
            return source / name
    raise ValueError(f"{source} has no state of step {step}: none of {', '.join(names)}, nor checkpoints/step_{step}")


def convert(source: Path, step: int, out: Path, model_name: str | None) -> Path:
    """Write the checkpoint; returns what it was made of. Raises ValueError with the reason if it cannot."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    import utils
    from scripts.align.align import load_hf_state

    directory = find_state(source, step)
    model = architecture(directory, model_name)
    moments: Moments = {}
    if directory.name == "actor":
        weights, moments = read_verl(directory, model)
    else:
        weights = load_hf_state(directory)
    if not moments:
        for name, parameter in model.named_parameters():
            moments[name] = {"step": torch.tensor(0.0)} | dict.fromkeys(MOMENTS, torch.zeros(parameter.shape))

    policy: Any = torch.nn.Module()
    policy.model = model
    shapes = {name: value.shape for name, value in get_model_state_dict(policy).items()}
    saved = {name: weights.get(name.removeprefix("model.")) for name in shapes}
    wrong = [name for name, shape in shapes.items() if getattr(saved[name], "shape", None) != shape]
    if wrong:
        raise ValueError(f"{directory}: not the model's {', '.join(wrong[:3])}")
    state: dict[str, Any] = {"policy": {name: weight.float() for name, weight in saved.items()}}
    state["optimizer"] = {"state": {f"model.{name}": values for name, values in moments.items()}}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dcp.save(state, checkpoint_id=out / "state", no_dist=True)
    torch.save({"rng": utils.rng_state()}, out / "rank_0.pt")
    return directory


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("source", type=Path, metavar="DIR")
    flags.add_argument("step", type=int, metavar="STEP")
    flags.add_argument("out", type=Path, metavar="OUT")
    flags.add_argument("--model", help="directory or hub name of the start model")
    options = flags.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs are the run's
    try:
        print(f"{options.out} has the state of {convert(options.source, options.step, options.out, options.model)}")
    except (ValueError, OSError) as error:
        print(f"states.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
