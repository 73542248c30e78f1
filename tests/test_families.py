"""What models bring that Llama does not: experts, parts, a head with a bias, layers that draw numbers, more end tokens.

Tiny models by scripts/families.py, from their configs alone.
"""

import json
import logging
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
import grpo_fast
import utils
from scripts import families
from scripts.data import make_tiny_model
from scripts.parts import adapters, plan
from tests import programs
from tests.conftest import REPO
from tests.test_learner import VOCAB, make_args, make_rollouts, run_update

DOZEN = "qwen3_moe mixtral olmo2 phi gemma2 gemma3 gemma4_text qwen3_5 deepseek_v3 lfm2 seed_oss mistral3".split()
WITH_VLLM = "mixtral olmo2 gemma2 gpt_neox".split()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Function: family -> its tiny model, made once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("families") / family
            families.make_model(family, families.FAMILIES[family], made[family])
        return made[family]

    return make


def logprobs_of(policy, rollouts, world):
    batch = grpo.make_batch([[[r]] for r in rollouts], world.device)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return policy(batch, 1.0)[0][batch.response_mask]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gemma3", "qwen3_5", "llama"])
def test_an_engine_gets_the_names_shapes_and_values_of_the_files(model_of, world, family):
    """Whole or on the meta device, as grpo_fast.py plans them; a tied head comes under its own name too."""
    args = make_args(model_of(family), "--rollout_backend", "vllm")
    policy = grpo.load_policy(args, world)
    saved = families.weights_of(model_of(family))
    files = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    weights = dict(utils.engine_weights(policy, args))
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    sent = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    planned = {name: shape for bucket in grpo_fast.plan_weights(policy, args) for name, shape, _ in bucket}
    assert planned == sent
    assert "lm_head.weight" in sent
    assert {name: shape for name, shape in sent.items() if name in files or name != "lm_head.weight"} == files


@pytest.mark.parametrize("family", ["phi", "llama"])
def test_the_heads_bias_is_in_the_logprobs_and_trains(model_of, world, family):
    args = make_args(model_of(family))
    rollouts = make_rollouts()
    policy = grpo.load_policy(args, world)
    got = logprobs_of(policy, rollouts, world)
    want = []
    for r in rollouts:
        ids = torch.tensor([[*r.prompt.token_ids, *r.token_ids.tolist()]])
        with torch.no_grad():
            logp = torch.log_softmax(policy.model(ids).logits[0].float(), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        want.append(logp[-len(r.token_ids) :])
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)
    if family == "phi":
        after, _ = run_update(args, world, [rollouts])
        before = policy.model.lm_head.bias
        assert (after["lm_head.bias"] - before).abs().max() > 0


@pytest.mark.parametrize("family", ["seed_oss", "starcoder2", "opt", "gpt2"])
def test_dropout_of_any_name_is_off(model_of, world, family):
    args = make_args(model_of(family))
    policy = grpo.load_policy(args, world)
    rollouts = make_rollouts()
    assert torch.equal(logprobs_of(policy, rollouts, world), logprobs_of(policy, rollouts, world))
    assert policy.training
    assert grpo.choose_packing(policy, rollouts[0].prompt, args, world) == "shared"


def test_parts_that_text_does_not_train_stay_as_they_are(model_of, world, tmp_path):
    """The decoder and its embedding move, the vision part does not, also with weight decay. What is saved is whole."""
    start = model_of("gemma3")
    args = make_args(start, "--weight_decay", "0.5")
    learner = grpo.load_learner(args, world)
    assert grpo.choose_packing(learner.policy, make_rollouts()[0].prompt, args, world) == "shared"
    trained = {name for name, weight in learner.policy.model.named_parameters() if weight.requires_grad}
    assert trained and not any("vision" in name or "projector" in name for name in trained)
    packs = grpo.pack_rollouts(make_rollouts(), "shared", args.pack_length)[0]
    batches = [grpo.micro_batches(packs, "shared", args, world.device)]
    grpo.update(learner, batches, args, world, utils.Metrics())
    tokenizer = make_tiny_model.make_tokenizer(VOCAB)
    saved = utils.save_model(learner.policy, tokenizer, tmp_path / "model", args, world)
    before, after = families.weights_of(start), families.weights_of(saved)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("vision" in name or "projector" in name for name in moved)
    assert families.compare(start, saved)[1] == "yes"


def test_adapters_of_a_mixture_are_of_its_matrices(model_of, world):
    """all-linear leaves the experts out, which are one tensor. A name that is no matrix is refused."""
    args = replace(make_args(model_of("qwen3_moe")), lora_rank=4)
    policy = grpo.load_policy(args, world)
    adapted = {name.split(".")[-2] for name in adapters.adapted_layers(policy.model)}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= adapted and "experts" not in adapted
    with pytest.raises(utils.UserError, match="o_proj"):
        grpo.load_policy(replace(args, lora_target_modules=["gate_proj"]), world)


def test_a_token_costs_the_experts_that_it_uses(model_of, world):
    """By hand: 2 layers, 2 of 4 experts of 3 matrices 128 x 64, a router, and attention of 2 heads of 64 and 1."""
    model = utils.load_causal_lm(make_args(model_of("qwen3_moe")))
    matrices, head = utils.matmul_parameters(model)
    attention = 128 * 128 * 2 + 2 * 128 * 64
    assert matrices == 2 * (attention + 2 * 3 * 128 * 64 + 4 * 128)
    assert head == VOCAB * 128


def test_layers_with_heads_of_their_own(model_of):
    """Gemma 4's full attention has wider heads than its windows."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_of("gemma4_text"))
    widths = [layer.width for layer in utils.attention_heads(config)]
    assert len(set(widths)) == 2
    assert utils.attention_width(config) == sum(2 * width for width in widths)


def test_end_tokens_of_config_json(model_of, tmp_path):
    """Where there is no generation_config.json."""
    from transformers import AutoTokenizer

    path = tmp_path / "model"
    make_tiny_model.make_tiny_model(path)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 7]}))
    assert utils.eos_token_ids(make_args(path), AutoTokenizer.from_pretrained(path)) == [2, 7]


@pytest.mark.parametrize("begins", [True, False])
def test_prompts_without_the_bos_of_their_tokenizer_are_told(tmp_path, begins):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_model.make_tokenizer(512)
    bos = tokenizer.bos_token_id
    post = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)])
    tokenizer.backend_tokenizer.post_processor = post
    tokenizer.save_pretrained(tmp_path)
    start = (bos,) if begins else (9,)
    prompts = [utils.Prompt(i, (*start, 5, 6), "", (), ()) for i in range(64)]
    assert any("BOS" in problem for problem in plan.warnings_of(make_args(tmp_path), prompts)) is not begins


def test_values_for_the_chat_template(tiny_models, tmp_path):
    """The prompts have them, and so has the template that is saved. What the template lacks is refused."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{% if thinks is defined and not thinks %} no{% endif %}{{ also }}")
    messages = [{"role": "user", "content": "x"}]
    flags = ("--chat_template_name", template)

    def text(*more):
        tokenizer = utils.load_tokenizer(make_args(tiny_models(), *flags, *more))
        return tokenizer.apply_chat_template(messages, tokenize=False)

    assert text() == "x"
    assert text("--chat_template_kwargs", '{"thinks": false, "also": "\\"a\\u00e4"}') == 'x no"aä'
    with pytest.raises(utils.UserError, match="think_not"):
        text("--chat_template_kwargs", '{"think_not": false}')
    with pytest.raises(utils.UserError, match="chat_template_kwargs"):
        make_args(tiny_models(), "--chat_template_kwargs", "no").check()


@pytest.mark.house
@pytest.mark.runs
@pytest.mark.parametrize("backend, names", [("transformers", DOZEN), ("vllm", WITH_VLLM)])
def test_families_train_save_and_load(tmp_path, backend, names):
    """In float32. A row that has no gap has the run's last line in its place."""
    line = [REPO / "scripts/families.py", *names, "--dtypes", "float32", "--backends", backend, "--out", tmp_path]
    done = programs.run(line, timeout=900)
    rows = [line.split("  ") for line in done.stdout.splitlines() if line.split("  ")[0] in names]
    assert {row[0] for row in rows} == set(names), done.stdout + done.stderr
    for family, _, _, way, gap, _, loaded, vllm in rows:
        assert float(gap) < 1e-5 and loaded == "yes", (family, gap, loaded)
        assert way == ("rows" if family in ("qwen3_5", "lfm2") else "shared")
        assert not vllm or float(vllm) < 1e-5


@pytest.mark.parametrize("lost", [["Linear"], ["Dropout"], []])
def test_weights_that_vllm_leaves_out_end_the_run(lost):
    """vLLM logs a layer that loaded nothing, also one that has no weights, as all rotary embeddings."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def reload():
        with utils.no_weight_missing(model):
            for name in lost:
                logger.warning("%s: Failed to load weights", name)

    if lost == ["Linear"]:
        with pytest.raises(utils.UserError, match="rollout_backend transformers. Linear: Failed"):
            reload()
    else:
        reload()
