"""Does a family of models train? A tiny random model of each is made from its config, trained, saved and loaded again.

    python scripts/families.py                                  # all families of the table below
    python scripts/families.py qwen3_moe olmo2 --dtypes float32 --backends transformers
    python scripts/families.py glm4_moe '{"n_routed_experts": 4, "moe_intermediate_size": 64}'    # one of your own

A family is a line of FAMILIES, or any model_type of transformers, with values of its config as JSON after it. Each
trains two updates with grpo.py, in each dtype, with each --rollout_backend that this machine has. Columns:

packing     how responses are packed
gap         the largest mean |learner - engine| logprob: before the first rollout and of each update
moved       trained weights that differ from the start's, of all
loaded by   transformers without a missing or unexpected weight; with vLLM an engine, its gap before a rollout

A row that has no gap has the run's last line in its place. The exit status is 1 if there is one.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.reports.common import table

SECONDS = 300  # of a run
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False}
LINEAR = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
LINEAR |= {f"linear_{name}": 32 for name in ("key_head_dim", "value_head_dim")}
DELTA = LINEAR | {"layer_types": ["linear_attention", "full_attention"]}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
MLA |= {"num_key_value_heads": 2, "head_dim": None, "topk_method": "noaux_tc"}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GEMMA = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {  # model_type: values of its config, or of the text part of its config
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": GEMMA | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "gemma3_text": GEMMA,
    "gemma3": GEMMA,
    "gemma4_text": GEMMA
    | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    | {"final_logit_softcapping": None, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 16},
    "mistral": {"sliding_window": 16},
    "mistral3": {},
    "ministral3": {},
    "mixtral": MOE | {"num_local_experts": 4, "sliding_window": None},
    "phi": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "phi3": {"sliding_window": None},
    "olmo": {"num_key_value_heads": 2},
    "olmo2": {"tie_word_embeddings": False},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": MOE | {"num_experts": 4, "intermediate_size": 64},
    "olmo_hybrid": DELTA,
    "qwen2_moe": MOE | {"num_experts": 4, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "qwen3_moe": MOE | {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen3_next": DELTA | MOE | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA | {"tie_word_embeddings": True},
    "qwen3_5": DELTA | {"tie_word_embeddings": True},
    "qwen3_5_moe": DELTA | MOE | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}},
    "deepseek_v3": MOE | MLA | ROUTED,
    "glm4": {},
    "glm4_moe": MOE | ROUTED,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False} | GEMMA,
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 2048},
    "gpt_neox": {},
    "smollm3": {},
    "exaone4": {},
    "ernie4_5": {},
    "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "granite": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 32}
    | {"mamba_d_state": 16, "num_local_experts": 0, "shared_intermediate_size": 128, "position_embedding_type": "rope"},
    "lfm2": {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "bloom": {"n_layer": 2, "n_head": 2},
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.1},
    "seed_oss": {},
    "arcee": {},
    "apertus": {},
    "cohere2": {"logit_scale": 1.0},
    "hunyuan_v1_dense": {},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2}
VISION |= {"num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 128, "deepstack_visual_indexes": [0]}
PACKINGS = {"own prompt": "plain", "computed once": "shared", "WARNING": "rows"}  # words of the console
TRAINING = """--exp_name run --overwrite --save_freq -1 --local_eval_every -1 --lr_scheduler_type constant
    --num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 4 --response_length 24 --pack_length 320
    --learning_rate 1e-3 --temperature 1.0"""
REWARD = """def vowels(response, ground_truth):
    return sum(letter in "aeiou" for letter in response) / max(len(response), 1)
"""


def config_of(family: str, values: dict[str, Any], ids: dict[str, int], vocabulary: int) -> Any:
    """A config of two layers of width 128 with the given values; one with parts has a vision part of one layer."""
    from transformers import CONFIG_MAPPING

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048, "initializer_range": 0.1}
    sizes |= {"vocab_size": vocabulary, **ids} | values
    sizes = {name: value for name, value in sizes.items() if value is not None or name != "head_dim"}
    kind = CONFIG_MAPPING[family]
    text = type(kind().get_text_config())
    if not hasattr(text, "num_key_value_heads"):
        sizes.pop("num_key_value_heads", None)  # transformers' model would have more than vLLM reads here
    if "text_config" not in kind.sub_configs:
        return kind(**sizes)
    tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]} if "tie_word_embeddings" in sizes else {}
    parts: Any = {"text_config": text(**sizes).to_dict(), "vision_config": VISION}
    return kind(**parts, **ids, **tied)


def make_model(family: str, values: dict[str, Any], out: Path) -> None:
    """Write a model with random weights and a tokenizer. Weights drawn narrower than 0.05 are drawn anew with 0.1, so
    that the next token depends on the context; biases too, which are zero at first and could be left out unseen."""
    import torch
    import transformers

    import utils
    from scripts.data import make_tiny_model

    tokenizer = make_tiny_model.make_tokenizer(512)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = config_of(family, values, ids, len(tokenizer))
    torch.manual_seed(0)
    model = utils.class_of(config, family).from_config(config)
    model = model.float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and weight.std() < 0.05:
                weight.normal_(0.0, 0.1)
            if name.endswith("bias"):
                weight.normal_(0.0, 0.05)
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def train(model: Path, out: Path, dtype: str, backend: str, updates: int, flags: Sequence[str]) -> float:
    """Train with grpo.py in this process. Returns the largest gap of an update."""
    import grpo

    out.mkdir(parents=True, exist_ok=True)
    data = out / "rows.jsonl"
    with data.open("w") as file:
        for prompt in ("Write 0", "Say it 1", "Speak of 2", "Tell me 3"):
            turns = [{"role": "user", "content": prompt}]
            file.write(json.dumps({"messages": turns, "ground_truth": 3, "dataset": "vowels"}) + "\n")
    (out / "vowels.py").write_text(REWARD)
    line = ["--model_name_or_path", model, "--dataset_mixer_list", data, "1.0", "--reward_file", out / "vowels.py"]
    line += ["--output_dir", out, "--model_dtype", dtype, "--rollout_backend", backend, "--vllm_enforce_eager"]
    line += ["--total_episodes", 16 * updates, *TRAINING.split(), *flags]
    grpo.main(grpo.utils.parse_args(grpo.Args, [str(word) for word in line]))
    metrics = [json.loads(text) for text in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return max(row["debug/vllm_vs_local_logprob_diff_mean"] for row in metrics)


def weights_of(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: weight for file in directory.glob("*.safetensors") for name, weight in load_file(file).items()}


def compare(start: Path, saved: Path) -> list[str]:
    """[moved, what transformers misses]."""
    import transformers

    import utils

    before = weights_of(start)
    after = weights_of(saved)
    words = ""
    if before.keys() != after.keys():
        words = f"names differ: {sorted(before.keys() ^ after.keys())[:3]}"
    moved = sum(not after[name].equal(before[name].to(after[name].dtype)) for name in before if name in after)
    kind = utils.class_of(transformers.AutoConfig.from_pretrained(saved), str(saved))
    _, found = kind.from_pretrained(saved, output_loading_info=True)
    lost = [f"{what} {sorted(names)[:3]}" for what, names in found.items() if names]
    return [f"{moved}/{len(before)}", words or "; ".join(lost) or "yes"]


def in_child(result: Any, log: Path, function: Any, *arguments: Any) -> None:
    """Run a function with its output in a file; put what it returns into a pipe."""
    import torch

    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    try:
        result.send(function(*arguments))
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).strip()}" if str(error).strip() else repr(error), flush=True)


def run(log: Path, function: Any, *arguments: Any) -> Any:
    """What a function returns in a child, or the last line of its output as a str."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(theirs, log, function, *arguments))
    child.start()
    theirs.close()
    try:
        returned = ours.recv() if ours.poll(SECONDS) else f"no end within {SECONDS} s"
    except EOFError:
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [i for i, text in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b", text)]
        last = lines[errors[-1] :] if errors else lines[-1:]
        returned = " ".join([*map(str.strip, last[:2])])[:200] or "nothing was printed"
    child.join(2)
    if child.is_alive() and child.pid:
        os.killpg(child.pid, signal.SIGKILL)
    return returned


def try_family(family: str, values: dict[str, Any], dtype: str, backend: str, out: Path, flags: list[str]) -> list[str]:
    """A row of the table."""
    row = [family, dtype, backend]
    start = out / family / "start"
    if not start.exists():
        problem = run(out / f"{family}.log", make_model, family, values, start)
        if problem:
            return [*row, "", f"not made: {problem}", "", "", ""]
    place = out / family / f"{backend}-{dtype}"
    log = place.with_suffix(".log")
    gap = run(log, train, start, place, dtype, backend, 2, flags)
    printed = log.read_text(errors="replace")
    packing = "".join(re.findall(r"^packing  (.+)$", printed, re.MULTILINE))
    way = next((name for words, name in PACKINGS.items() if words in packing), "")
    if isinstance(gap, str):
        return [*row, way, gap, "", "", ""]
    start_gap = re.search(r"before the first rollout mean (\S+)", printed)
    largest = max(gap, float(start_gap[1]) if start_gap else math.nan)
    moved = run(place.with_suffix(".saved.log"), compare, start, place / "run" / "model")
    if isinstance(moved, str):
        moved = ["", moved]
    loaded = ""
    if backend == "vllm":
        again = run(place.with_suffix(".again.log"), train, place / "run/model", place / "again", dtype, backend, 1, [])
        loaded = again if isinstance(again, str) else f"{again:.0e}"
    return [*row, way, f"{largest:.0e}", *moved, loaded]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="of the table, or a model_type, each with JSON after it if needed")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=[], help="default: transformers, and vllm where it is there")
    parser.add_argument("--flags", default="", help="more flags of grpo.py, in one text")
    parser.add_argument("--out", type=Path, help="a directory that keeps models, runs and logs")
    args = parser.parse_args()

    os.environ |= {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import grpo  # noqa: F401  children are forked from a process that has imported

    has_vllm = importlib.util.find_spec("vllm") is not None
    if has_vllm:
        importlib.import_module("vllm.v1.engine.llm_engine")
    backends = args.backends or ["transformers", *(["vllm"] if has_vllm else [])]
    wanted = dict.fromkeys(FAMILIES) if not args.families else {}
    name = ""
    for word in args.families:
        if word.startswith("{"):
            wanted[name] = json.loads(word)
        else:
            name = word
            wanted[name] = None
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        for family, given in wanted.items():
            values = FAMILIES.get(family, {}) if given is None else given
            for backend in backends:
                for dtype in args.dtypes:
                    rows.append(try_family(family, values, dtype, backend, out, args.flags.split()))
                    print("  ".join(rows[-1]), flush=True)
    head = ["family", "dtype", "backend", "packing", "gap", "moved", "transformers", "vLLM"]
    print(table(head, rows, (0, 1, 2, 3, 4, 6)))
    return any(not re.match(r"\d", row[4]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
