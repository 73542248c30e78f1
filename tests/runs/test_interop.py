"""Saved models in the hands of others: transformers, a vLLM server, the Hugging Face hub (a stand-in of it)."""

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import grpo
import utils
from scripts.parts import dumps
from tests import programs
from tests.conftest import REPO
from tests.hub import Server

PUSH = str(REPO / "scripts" / "push_to_hub.py")
TURNS = [{"role": "user", "content": "Say 3, then 7."}]
REWARD = "def many(response, ground_truth):\n    return len(set(response)) / 100\n"  # no two alike: all groups train
SMALL = """--model_dtype float32 --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 4 --response_length 8
    --max_prompt_token_length 48 --pack_length 128 --temperature 1.0 --learning_rate 1e-5 --lr_scheduler_type constant
    --beta 0 --save_freq 1 --total_episodes 16 --rollout_backend transformers --chat_template_name tulu""".split()


def greedy(model, ids, length=40):
    """Greedy continuation that stops nowhere, and the logprob of each of its tokens."""
    made = model.generate(torch.tensor([ids]), max_new_tokens=length, do_sample=False, eos_token_id=None, top_k=None)
    return made[0, len(ids) :].tolist()


def logprobs(model, prompt_ids, response_ids):
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(response_ids)[:, None])[:, 0]


def load(path):
    """Model, tokenizer and generation config as a user loads them: not one tensor missing, unexpected or misshapen."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval(), AutoTokenizer.from_pretrained(path), GenerationConfig.from_pretrained(path)


class Hub(Server):
    """The endpoints of the Hugging Face hub that an upload calls. `faults`: part of a path -> status."""

    def __init__(self):
        self.calls, self.files, self.commits, self.faults = [], {}, [], {}
        super().__init__()
        self.env = {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_good", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}

    def answer(self, command, path, body, headers):
        if path != "/api/agent-harnesses":
            self.calls.append((path, body))
        status = next((status for part, status in self.faults.items() if part in path), 200)
        if headers.get("Authorization") != "Bearer hf_good":
            status = 401
        answer = self.take(path, body) if status == 200 else {"error": "no"}
        return status, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def take(self, path, body):
        if path == "/api/repos/create":
            wanted = json.loads(body)
            return {"url": f"{self.url}/{wanted['organization'] or 'me'}/{wanted['name']}"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.commits.append(path)
            return {"commitUrl": f"{self.url}/me/x/commit/{'0' * 40}", "commitOid": "0" * 40}
        return {"id": "me/x"}


@pytest.fixture
def hub(monkeypatch):
    """A hub for the programs that are started."""
    hub = Hub()
    for name, value in hub.env.items():
        monkeypatch.setenv(name, value)
    yield hub
    hub.server.shutdown()


def run(script, model, data, out, *flags, env, ranks=0):
    line = [*programs.torchrun(ranks), script, "--model_name_or_path", str(model), "--output_dir", str(out)]
    line += ["--reward_file", str(data / "many.py"), "--dataset_mixer_list", str(data / "d.jsonl"), "1.0"]
    done = programs.run([*line, *SMALL, *flags], OMP_NUM_THREADS=1, **env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    (directory / "many.py").write_text(REWARD)
    with (directory / "d.jsonl").open("w") as file:
        for i in (3, 4, 5, 6):
            turns = [{"role": "user", "content": f"Say {i}, then 7."}]
            file.write(json.dumps({"messages": turns, "ground_truth": "7", "dataset": "many"}) + "\n")
    return directory


@pytest.fixture(scope="module")
def start(tiny_models, tmp_path_factory):
    """A start model with sampling defaults of its own, and a second end token that its greedy answer soon contains."""
    path = tmp_path_factory.mktemp("start") / "start"
    shutil.copytree(tiny_models(), path)
    model, tokenizer, config = load(path)
    tokenizer.chat_template = utils.CHAT_TEMPLATES["tulu"]
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    made = greedy(model, ids)
    end = next(i for i in range(4, 40) if made.index(made[i]) == i)
    config = json.loads((path / "generation_config.json").read_text())
    config |= {"eos_token_id": [config["eos_token_id"], made[end]], "do_sample": True, "top_k": 1}
    (path / "generation_config.json").write_text(json.dumps(config))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": config.pop("dtype")}))  # as older versions
    return path, made[end]


@pytest.fixture(scope="module")
def trained(start, data, tmp_path_factory):
    """Two steps on two ranks with sharded parameters, the model uploaded to a hub."""
    out, hub = tmp_path_factory.mktemp("runs"), Hub()
    flags = "--exp_name t --deepspeed_stage 3 --dump_steps all --push_to_hub --hf_repo_id org/t"
    done = run("grpo.py", start[0], data, out, *flags.split(), env=hub.env, ranks=2)
    hub.server.shutdown()
    return out / "t", hub, done


def test_saved_models_are_the_trained_policy(start, trained, world):
    """Bits of the weights, logprobs of the next rollouts, prompt tokens, end tokens, sampling defaults."""
    run_dir = trained[0]
    for step, path in ((1, run_dir / "step_1"), (2, run_dir / "step_2"), (2, run_dir / "model")):
        model, tokenizer, config = load(path)
        names = load_file(path / "model.safetensors").keys()
        assert names == load_file(start[0] / "model.safetensors").keys() and "lm_head.weight" not in names
        after = dumps.read_dump(run_dir, step)[1]["weights"]
        assert dumps.weights_hash(torch.nn.ModuleDict({"model": model}), world) == after
        assert json.loads((path / "config.json").read_text()) == json.loads((start[0] / "config.json").read_text())
        assert model.dtype == torch.float32 and model.config.tie_word_embeddings
        assert config.eos_token_id == [tokenizer.eos_token_id, start[1]] and config.top_k == 1 and config.do_sample
        assert config.temperature is None or config.temperature == 1.0
        ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
        prompts = [row["prompt_ids"] for step in (1, 2) for row in dumps.read_dump(run_dir, step)[0]]
        assert ids in prompts and tokenizer.decode(ids).startswith("<|user|>\nSay 3, then 7.")
        assert all(oct(file.stat().st_mode).endswith("644") for file in path.iterdir())
    rows, _ = dumps.read_dump(run_dir, 2)  # sampled with the weights of step 1
    first, before = load(run_dir / "step_1")[0], load(start[0])[0]
    for row in rows:
        want = torch.tensor(row["logprobs"])
        got, old = (logprobs(m, row["prompt_ids"], row["token_ids"]) for m in (first, before))
        assert (got - want).abs().max() < 2e-5 < 1e-4 < (old - want).abs().max()


def test_vllm_serves_the_saved_model(trained, start):
    """Started without a word on sampling: greedy by the model's own top_k, its chat template, its end tokens."""
    path = trained[0] / "model"
    model, tokenizer, _ = load(path)
    ids = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    made = greedy(model, ids)
    want = tokenizer.decode(made[: made.index(start[1])])
    generated = model.generate(torch.tensor([ids]), max_new_tokens=40)[0, len(ids) :].tolist()
    assert generated == made[: made.index(start[1]) + 1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", path, "--port", port]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", 256, "--served-model-name", "m"]
    command += ["--dtype", "float32"]  # "auto" would make bfloat16 of a float32 model
    log, own = trained[0] / "server.log", tempfile.mkdtemp()  # what it leaves when it is killed
    server = programs.Program(command, log, OMP_NUM_THREADS=1, TMPDIR=own)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path, **body):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Content-Type": "application/json"})
        with opener.open(request, json.dumps(body).encode() if body else None, timeout=60) as answer:
            return json.loads(answer.read() or "{}")

    try:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                ask("/health")
                break
            time.sleep(0.2)
        assert ask("/tokenize", model="m", messages=TURNS, add_generation_prompt=True)["tokens"] == ids
        answer = ask("/v1/chat/completions", model="m", messages=TURNS, max_tokens=40)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(own)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == start[1]
    assert choice["message"]["content"] == want
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_upload_of_a_run(trained):
    """The repository is private, and made before training; all files arrive with a card."""
    run_dir, hub, done = trained
    assert hub.files == {path.name: path.read_bytes() for path in (run_dir / "model").iterdir()}
    assert json.loads(hub.calls[0][1]) == {"name": "t", "organization": "org", "visibility": "private"}
    assert hub.commits == ["/api/models/org/t/commit/main"]
    card = hub.files["README.md"].decode()
    assert card.startswith("---\n") and "library_name: transformers" in card and "base_model" not in card
    assert "python grpo.py --model_name_or_path" in card and "hf_good" not in card + done.stdout + done.stderr


def test_failed_upload_keeps_run_and_exit_status(start, data, tmp_path):
    """grpo_fast.py: the hub refuses the model when it comes; the run ends well, its last line uploads the model."""
    hub = Hub()
    hub.faults = {"/preupload/": 403}
    flags = "--exp_name f --push_to_hub".split()
    done = run("grpo_fast.py", start[0], data, tmp_path, *flags, env=hub.env)
    assert hub.calls[0][0] == "/api/repos/create" and not hub.commits
    model = tmp_path / "f" / "model"
    assert f"{model} is complete, but was NOT uploaded: " in done.stderr and "403" in done.stderr
    load(model)
    again = done.stderr.splitlines()[-1].removeprefix("WARNING: to upload it: ")
    assert again == f"{sys.executable} {PUSH} {tmp_path / 'f'}"
    hub.faults = {}
    subprocess.run(again.split(), env=os.environ | hub.env, check=True, capture_output=True, timeout=120)
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert hub.commits == ["/api/models/me/f/commit/main"]


def make_args(path, **flags):
    known = {"exp_name": "x", "model_dtype": "bfloat16", "temperature": 0.6, "vllm_top_p": 0.9} | flags
    return replace(grpo.Args(model_name_or_path=str(path)), **known)


def save(path, out, world, **flags):
    args = make_args(path, **flags)
    policy = SimpleNamespace(model=utils.load_causal_lm(args).float(), modules=list)
    utils.save_model(policy, utils.load_tokenizer(args), out, args, world)
    return policy.model


def test_start_files_stay_as_they_are(tiny_models, tmp_path, world, monkeypatch):
    """A model of the hub's cache written by older versions, with files and values that today's would drop or refuse."""
    commit = "a" * 40
    repo = tmp_path / "cache" / "models--org--old"
    path = repo / "snapshots" / commit
    shutil.copytree(tiny_models("qwen2", False), path)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    config = json.loads((path / "config.json").read_text())
    config |= {"torch_dtype": config.pop("dtype"), "rope_theta": config.pop("rope_parameters")["rope_theta"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": 5, "temperature": 0.9, "top_p": 0.6}')
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer |= {"chat_template": (path / "chat_template.jinja").read_text(), "note": "kept"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer.model").write_bytes(b"\x0apieces")
    import huggingface_hub
    import transformers.utils.hub

    for module in (huggingface_hub.constants, transformers.utils.hub.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = save("org/old", tmp_path / "own", world)
    save("org/old", tmp_path / "tulu", world, chat_template_name="tulu")
    want = config | {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
    assert json.loads((tmp_path / "own" / "config.json").read_text()) == want
    generation = json.loads((tmp_path / "own" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 5], "temperature": 0.9, "top_p": 0.6}  # both ended responses
    for name in ("tokenizer_config.json", "tokenizer.json", "tokenizer.model"):
        a, b = ((p / name).read_bytes() for p in (path, tmp_path / "own"))
        assert a == b or json.loads(a) == json.loads(b), name
    tulu = utils.CHAT_TEMPLATES["tulu"]
    assert (tmp_path / "tulu" / "chat_template.jinja").read_text() == tulu
    assert json.loads((tmp_path / "tulu" / "tokenizer_config.json").read_text()) == tokenizer | {"chat_template": tulu}
    again = load(tmp_path / "own")[0]
    assert again.dtype == torch.bfloat16 and "lm_head.weight" in dict(again.named_parameters())
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name


@pytest.mark.parametrize(
    ("faults", "token", "words"), [({}, "", "no token"), ({"/auth-check/": 403}, "hf_good", "403")]
)
def test_upload_that_cannot_work_is_refused_before_training(hub, faults, token, words, monkeypatch, tmp_path, world):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    hub.faults = faults
    args = make_args(tmp_path, push_to_hub=True, hf_repo_id="me/x", output_dir=str(tmp_path))
    with pytest.raises(utils.UserError, match=f"--push_to_hub(?s:.)*{words}"):
        utils.prepare_run_dir(args, "0", world)
    assert not (tmp_path / "x").exists()
