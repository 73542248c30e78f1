"""Put the files of the model that a training began with beside its weights, in place of what transformers wrote there.

    python scripts/parts/start_files.py MODEL START --dtype bfloat16 --eos 2 5

What training does not change is START's own, byte for byte: what transformers would write anew has names that older
versions of it and of vLLM misread, some (rope_parameters) without a word. MODEL's config.json then says its own dtype
and whether its head is tied, generation_config.json which tokens ended responses, and tokenizer_config.json, for
versions from before chat_template.jinja, the chat template. Each save of a run starts it.
"""

import argparse
import contextlib
import json
import shutil
from pathlib import Path

TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model spiece.model""".split()


def keep(path: Path, start: str, revision: str | None, dtype: str, tied: bool, eos: list[int]) -> None:
    """Those of `start`, a directory or the hub's name, at `revision`, to the model in the directory `path`."""
    from transformers.utils import cached_file

    architectures = json.loads((path / "config.json").read_text()).get("architectures")
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    for name in (*TOKENIZER_FILES, "generation_config.json", "config.json"):
        source = None
        with contextlib.suppress(OSError):  # a hub that is gone at the end of a run must not cost the model
            source = cached_file(start, name, revision=revision, **quiet)
        if name == "config.json" and source:  # that of a model of which only a part was loaded is not ours
            own = json.loads(Path(source).read_text()).get("architectures") == architectures
            source = source if own else None
        if source:
            shutil.copyfile(source, path / name)
    template = path / "chat_template.jinja"
    several = (path / "additional_chat_templates").exists()
    # stop strings are not written: generate() would refuse to run without a tokenizer
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((path / name).read_text())
        if name == "config.json":
            content |= dict.fromkeys({"dtype", "torch_dtype"} & content.keys() or {"dtype"}, dtype)
            content["tie_word_embeddings"] = tied
        elif name == "generation_config.json":
            content["eos_token_id"] = eos[0] if len(eos) == 1 else eos
        elif "chat_template" in content and template.exists() and not several:
            content["chat_template"] = template.read_text()
        (path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="directory, as save_pretrained wrote it")
    parser.add_argument("start", metavar="START", help="directory or hub name")
    parser.add_argument("--revision", help="commit of START; default: its main branch")
    parser.add_argument("--dtype", required=True, help="of MODEL's weights, as in config.json")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--eos", type=int, nargs="+", required=True, help="the ids that ended responses")
    options = parser.parse_args()
    keep(options.model, options.start, options.revision or None, options.dtype, options.tied, options.eos)


if __name__ == "__main__":
    main()
