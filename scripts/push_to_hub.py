"""Upload the final model of a run to the Hugging Face hub, with a card: start model, data, command line.

    python scripts/push_to_hub.py RUN                                  to the repository that the run's flags name
    python scripts/push_to_hub.py RUN --hf_repo_id ORGANIZATION/NAME   to another one
    python scripts/push_to_hub.py RUN --check                          only make sure that an upload could work

--push_to_hub starts it twice: with --check before anything loads, so that a missing token costs no training, and at
the end. A repository that does not exist is made, private. Exit status: 0 done, 1 not done and why.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import huggingface_hub


def hub_repo(name: str) -> str:
    """Full name of the repository, which is made if need be.

    Raises ValueError: without a token, or where the repository may not be written.
    """
    flags = f"--push_to_hub --hf_repo_id {name}"
    if huggingface_hub.get_token() is None:
        raise ValueError(f"{flags}: no token: run `hf auth login`, or set HF_TOKEN, or drop --push_to_hub")
    api = huggingface_hub.HfApi()
    try:
        # Private: it takes a click to publish a model later, and nothing takes a published one back
        repo = api.create_repo(name, private=True, exist_ok=True).repo_id
        api.auth_check(repo, write=True)  # create_repo succeeds for a repository that may only be read
    except Exception as error:  # of the name, of the network, of http
        raise ValueError(
            f"{flags}: {type(error).__name__}: {error}\nIs $HF_TOKEN (or `hf auth login`) of an account that may write "
            "there? Choose another --hf_repo_id, or drop --push_to_hub"
        ) from None
    return repo


def model_card(run_dir: Path, args: dict[str, Any]) -> str:
    """README.md of an uploaded model: where it comes from and how it was trained."""
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    environment = json.loads((run_dir / "environment.json").read_text())
    start = args["model_name_or_path"]
    is_local = Path(start).is_dir()
    is_adapter = (run_dir / "model" / "adapter_config.json").exists()
    header = huggingface_hub.ModelCardData(
        base_model=None if is_local else start,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning"],
    )
    name = Path(start).name if is_local else start
    data = ", ".join(args["dataset_mixer_list"][::2])
    line = shlex.join(["python", *environment["command"][1:]])
    parts = [
        f"---\n{header.to_yaml()}\n---\n",
        f"# {args['exp_name']}\n",
        f"{name} after {last['training_step']} steps and {last['episode']} sampled responses of GRPO on {data}.\n",
        f"```bash\n{line}\n```\n",
    ]
    return "\n".join(parts)


def push(run_dir: Path, args: dict[str, Any], name: str) -> str:
    """Upload RUN/model with its card; returns the address of the commit."""
    model = run_dir / "model"
    (model / "README.md").write_text(model_card(run_dir, args))
    repo = hub_repo(name)
    print(f"uploading {model} to {repo}", flush=True)
    message = f"Model of {args['exp_name']}"
    api = huggingface_hub.HfApi()
    return api.upload_folder(repo_id=repo, folder_path=model, commit_message=message).commit_url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name of a run that is done")
    parser.add_argument("--hf_repo_id", help="NAME or ORGANIZATION/NAME; default: the run's own, else its name")
    parser.add_argument("--check", action="store_true", help="token and repository only; RUN need not exist yet")
    options = parser.parse_args()
    model = options.run / "model"
    has_model = (model / "config.json").exists() or (model / "adapter_config.json").exists()
    if not options.check and not has_model:
        parser.error(f"{model} is no model: give the output_dir/exp_name of a run that is done")
    file = options.run / "args.json"
    args = json.loads(file.read_text()) if file.exists() else {}
    name = options.hf_repo_id or args.get("hf_repo_id") or args.get("exp_name") or options.run.name
    try:
        if options.check:
            print(f"{hub_repo(name)} can be written")
        else:
            print(f"uploaded: {push(options.run, args, name)}")
    except Exception as error:  # of http, of hf_xet, of the disk
        problem = f"{options.run / 'model'} is complete, but was NOT uploaded: {type(error).__name__}: {error}"
        print(error if options.check else problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
