"""Make a Hugging Face model of a resumable checkpoint, as --save_freq would have saved it at that step, byte for byte,
but for the order of names in an adapter's config.

    python scripts/to_hf.py RUN                       the newest whole checkpoint, to RUN/step_N
    python scripts/to_hf.py RUN --step 40 --out DIR
    python scripts/to_hf.py RUN --model DIR           where the start model is, if not where args.json has it

One process on the CPU, whatever number of ranks and --deepspeed_stage wrote it. It holds the weights in float32 and
once more in the run's dtype: 6 bytes a weight in bfloat16, 46 GB for 7.6 billion. The start model is needed for its
architecture, tokenizer and what training does not change.

A checkpoint of others may be converted: only plain data is read of it, and what asks for code is refused.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def convert(run_dir: Path, step: int | None, out: Path | None, model: str | None, trust: bool) -> Path:
    """Write the model of a step (None: the newest checkpoint); returns its directory. Raises utils.UserError."""
    import utils
    from scripts.parts import hub
    from scripts.parts.checkpoints import checkpoint_dirs, newest, step_of

    if not (run_dir / "args.json").exists():
        raise utils.UserError(f"{run_dir} is no run: it has no args.json")
    args: Any = SimpleNamespace(**json.loads((run_dir / "args.json").read_text()))
    args.model_name_or_path = model or args.model_name_or_path
    args.trust_remote_code = trust
    hub.remember(run_dir)
    tokenizer = utils.load_tokenizer(args)  # reports a missing start model
    world = utils.init_distributed()
    checkpoints = run_dir / "checkpoints"
    checkpoint = newest(checkpoints, before=math.inf if step is None else step + 1)
    if checkpoint is None or step not in (None, step_of(checkpoint)):
        names = [path.name for path in checkpoint_dirs(checkpoints)]
        there = ", ".join(reversed(names)) or "none"
        raise utils.UserError(f"{run_dir} has no whole checkpoint of step {step or 'any'} (there: {there})")
    out = out or run_dir / checkpoint.name
    if out.exists():
        raise utils.UserError(f"{out} is there already: give another --out, or remove it")
    utils.save_model(load_policy(checkpoint, args), tokenizer, out, args, world)
    return out


def load_policy(checkpoint: Path, args: Any) -> Any:
    """A module with the checkpoint's model in float32 as `model`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    import utils
    from scripts.parts import adapters, checkpoints

    policy: Any = torch.nn.Module()
    policy.model = utils.load_causal_lm(args)
    adapted = getattr(args, "lora_rank", 0) > 0  # older runs have no such flag
    if adapted:
        adapters.add_adapters(policy.model, args)
    policy.model.float()
    state = {"policy": get_model_state_dict(policy, options=StateDictOptions(ignore_frozen_params=True))}
    checkpoints.need_plain(checkpoint / "state")
    dcp.load(state, checkpoint_id=checkpoint / "state")
    set_model_state_dict(policy, state["policy"], options=StateDictOptions(strict=not adapted))
    return policy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest whole one")
    parser.add_argument("--out", type=Path, help="directory of the model; default: RUN/step_N")
    parser.add_argument("--model", help="directory or hub name of the start model; default: that of args.json")
    parser.add_argument("--trust_remote_code", action="store_true", help="as in the run: its flag is not taken over")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: a GPU may be busy, or too small for float32
    import utils

    try:
        print(f"model {convert(options.run, options.step, options.out, options.model, options.trust_remote_code)}")
    except (utils.UserError, OSError) as error:
        print(f"to_hf.py: {error}", file=sys.stderr)
        return 2
    utils.dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
