"""Upload the final model of a run to the Hugging Face hub, with a card: start model, flags, command line, evaluation.

    python scripts/parts/push_to_hub.py RUN                              to the repository that the run's flags name
    python scripts/parts/push_to_hub.py RUN --hf_repo_id ORGANIZATION/NAME  to another one
    python scripts/parts/push_to_hub.py RUN --check                      only make sure that an upload could work

--push_to_hub starts it twice: with --check before anything loads, so that a missing token costs no training, and at
the end. A repository that does not exist is made, private, and so is a branch. Exit status: 0 done, 1 not done and why.
"""

import argparse
import json
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub

SHOWN = """num_unique_prompts_rollout num_samples_per_prompt_rollout response_length temperature learning_rate beta
    loss_fn advantage_normalization_type chat_template_name stop_strings seed""".split()
RESULTS = ("eval/pass_at_1", "eval/objective/verifiable_correct_rate", "eval/scores", "eval/sequence_lengths")


def hub_repo(name: str, revision: str | None) -> str:
    """Full name of the repository, made if need be, with its branch.

    Raises ValueError: without a token, or where it may not be written.
    """
    flags = f"--push_to_hub --hf_repo_id {name}" + (f" --hf_repo_revision {revision}" if revision else "")
    if huggingface_hub.get_token() is None:
        raise ValueError(f"{flags}: no token: run `hf auth login`, or set HF_TOKEN, or drop --push_to_hub")
    api = huggingface_hub.HfApi()
    try:
        # private: what was meant for all is published in a click, what was not cannot be called back
        repo = api.create_repo(name, private=True, exist_ok=True).repo_id
        api.auth_check(repo, write=True)  # create_repo is content with a repository that it may read
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
    except Exception as error:  # of the name, of the network, of http
        raise ValueError(
            f"{flags}: {type(error).__name__}: {error}\nIs $HF_TOKEN (or `hf auth login`) of an account that may write "
            "there? Choose another --hf_repo_id, or drop --push_to_hub"
        ) from None
    return repo


def model_card(run_dir: Path, args: dict[str, Any]) -> str:
    """README.md of an uploaded model: where it comes from, how it was trained, what it scored."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    command = json.loads((run_dir / "environment.json").read_text())["command"]
    names = args["dataset_mixer_list"][::2]
    hub_names = {name.partition(":")[0] for name in names if name.count("/") == 1 and not Path(name).exists()}
    start = Path(args["model_name_or_path"])
    base = start.name if start.is_dir() else args["model_name_or_path"]
    data = huggingface_hub.ModelCardData(
        base_model=None if start.is_dir() else base,
        datasets=sorted(hub_names) or None,
        library_name="peft" if (run_dir / "model" / "adapter_config.json").exists() else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning"],
    )
    last = next((row for row in reversed(rows) if any(name.startswith("eval/") for name in row)), {})
    flags = "\n".join(f"| {name} | {args[name]} |" for name in SHOWN if args.get(name) not in (None, []))
    metrics = "\n".join(f"| {name} | {last[name]:.4g} |" for name in RESULTS if last.get(name) is not None)
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {args['exp_name']}\n\n"
        f"{base} after {rows[-1]['training_step']} steps and {rows[-1]['episode']} sampled responses of GRPO on "
        f"{', '.join(names)}.\n\n"
        f"| flag | value |\n|---|---|\n{flags}\n\n"
        + (f"| evaluation after step {last['training_step']} | |\n|---|---|\n{metrics}\n\n" if metrics else "")
        + f"```bash\n{shlex.join(['python', *command[1:]])}\n```\n"
    )


def push(run_dir: Path, args: dict[str, Any], name: str, revision: str | None) -> str:
    """Upload RUN/model with its card; the address of the commit."""
    model = run_dir / "model"
    (model / "README.md").write_text(model_card(run_dir, args))
    repo = hub_repo(name, revision)
    print(f"uploading {model} to {repo}", flush=True)
    message = f"Model of {args['exp_name']}"
    upload = huggingface_hub.HfApi().upload_folder
    return upload(repo_id=repo, folder_path=model, revision=revision, commit_message=message).commit_url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name of a run that is done")
    parser.add_argument("--hf_repo_id", help="NAME or ORGANIZATION/NAME; default: the run's own, else its name")
    parser.add_argument("--hf_repo_revision", help="branch; default: the run's own, else the main one")
    parser.add_argument("--check", action="store_true", help="token and repository only; RUN need not exist yet")
    parser.add_argument("--end_with_stdin", action="store_true", help="as a run starts it: end when the run is gone")
    options = parser.parse_args()
    if options.end_with_stdin:
        threading.Thread(target=lambda: os._exit(len(os.read(0, 1)) or 1), daemon=True).start()
    file, model = options.run / "args.json", options.run / "model"
    args = json.loads(file.read_text()) if file.exists() else {}
    name = options.hf_repo_id or args.get("hf_repo_id") or args.get("exp_name") or options.run.name
    revision = options.hf_repo_revision if options.hf_repo_revision is not None else args.get("hf_repo_revision")
    there = [name for name in ("config.json", "adapter_config.json") if (model / name).exists()]
    if not options.check and not there:
        parser.error(f"{model} is no model: give the output_dir/exp_name of a run that is done")
    try:
        if options.check:
            print(f"{hub_repo(name, revision)} can be written")
        else:
            print(f"uploaded: {push(options.run, args, name, revision)}")
    except Exception as error:  # of http, of hf_xet, of the disk
        told = f"{model} is complete, but was NOT uploaded: {type(error).__name__}: {error}"
        print(error if options.check else told, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
