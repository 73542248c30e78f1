"""LoRA: only adapters train, what the engine gets is merged, and the start model is the policy without them."""

import dataclasses
import json
import math

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import grpo
import utils
from scripts.parts import adapters
from tests.test_learner import assert_same_update, make_args, make_rollouts, plain_logprobs, sgd, update

LORA = ("--lora_rank", 4, "--lora_alpha", 8)


def lora_args(model, *flags):
    return make_args(model, *LORA, *flags)


def shake(policy, size=0.05):
    """Adapters as training leaves them: none is zero."""
    utils.shard_again(policy)
    with torch.no_grad():
        for name, layer in adapters.adapted_layers(policy.model).items():
            b = layer.lora_B["default"].weight
            noise = torch.randn(b.shape, generator=torch.Generator().manual_seed(len(name))) * size
            if isinstance(b, DTensor):
                noise = distribute_tensor(noise, b.device_mesh, b.placements)
            utils.shard_of(b).copy_(utils.shard_of(noise))


def batch_of(rollouts, device="cpu"):
    return grpo.make_batch([[[r]] for r in rollouts], torch.device(device))


def logprobs(policy, batch):
    with torch.no_grad():
        return policy(batch, 1.0)[0]


def with_weights(args, world, weights):
    """The model without adapters, with these weights."""
    plain = grpo.load_policy(dataclasses.replace(args, lora_rank=0), world)
    utils.shard_again(plain)
    with torch.no_grad():
        for name, p in plain.model.named_parameters():
            utils.shard_of(p).copy_(weights[name])
    return plain


@pytest.mark.parametrize("dtype, stage", [("float32", 0), ("bfloat16", 3)])
def test_the_policy_starts_as_the_model_and_is_it_without_adapters(tiny_models, world, dtype, stage):
    """Bit for bit, before training and after: that is the reference policy, which takes no memory."""
    flags = ("--model_dtype", dtype, "--deepspeed_stage", stage, "--load_ref_policy", "--beta", 0.1)
    args = lora_args(tiny_models(), *flags)
    learner = grpo.load_learner(args, world)
    batch = batch_of(make_rollouts())
    plain = grpo.load_policy(dataclasses.replace(args, lora_rank=0), world)
    want = logprobs(plain, batch)
    assert learner.ref_policy is learner.policy
    kinds = {(p.dtype, p.requires_grad) for p in learner.policy.parameters()}
    assert kinds == {(utils.DTYPES[dtype], False), (torch.float32, True)}
    assert torch.equal(logprobs(learner.policy, batch), want)
    shake(learner.policy)
    assert (logprobs(learner.policy, batch) - want).abs().max() > 0.01
    grpo.fill_logprobs(learner.ref_policy, [batch], "ref_logprobs", 1, dataclasses.replace(args, temperature=1.0))
    assert torch.equal(batch.ref_logprobs, want)
    assert (logprobs(learner.policy, batch) - want).abs().max() > 0.01, "the adapters stayed off"


@pytest.mark.parametrize("arch, tied", [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_merged_weights_compute_what_the_adapters_do(tiny_models, world, arch, tied):
    args = lora_args(tiny_models(arch, tied))
    policy = grpo.load_policy(args, world)
    batch = batch_of(make_rollouts())
    names = [name for name, _ in utils.named_weights(policy.model)]
    plain = grpo.load_policy(dataclasses.replace(args, lora_rank=0), world)
    assert names == [name for name, _ in utils.named_weights(plain.model)]
    shake(policy)
    merged = {name: tensor.clone() for name, tensor in utils.full_weights(policy, torch.float32)}
    start = dict(utils.full_weights(plain, torch.float32))
    for name, layer in adapters.adapted_layers(policy.model).items():
        delta = utils.shard_of(layer.get_delta_weight("default"))
        torch.testing.assert_close(merged[name] - start[name], delta, rtol=1e-4, atol=1e-6)
    changed = {name for name in names if not torch.equal(merged[name], start[name])}
    assert changed == set(adapters.adapted_layers(policy.model)) and len(changed) == 14
    plain = with_weights(args, world, merged)
    torch.testing.assert_close(logprobs(policy, batch), logprobs(plain, batch), rtol=1e-5, atol=1e-5)


def trained(args, world, packing="shared"):
    """Adapters after an update, and the learner. They are shaken first: A has a gradient."""
    learner = grpo.load_learner(args, world)
    shake(learner.policy)
    learner = dataclasses.replace(learner, optimizer=sgd(learner.policy))
    update(learner, [make_rollouts()], args, world, packing)
    weights = {name: tensor.clone() for name, tensor in adapters.adapter_weights(learner.policy.model)}
    return weights, learner


def test_only_adapters_train_and_the_split_does_not_matter(tiny_models, world):
    args = lora_args(tiny_models(), "--pack_length", 1000)
    fresh = grpo.load_policy(args, world)
    shake(fresh)
    start = {name: tensor.clone() for name, tensor in adapters.adapter_weights(fresh.model)}
    whole, learner = trained(args, world)
    frozen = {n: utils.shard_of(p) for n, p in fresh.named_parameters() if not p.requires_grad}
    utils.shard_again(learner.policy)
    now = {n: utils.shard_of(p) for n, p in learner.policy.named_parameters() if not p.requires_grad}
    assert all(torch.equal(frozen[name], now[name]) for name in frozen) and len(frozen) > 10
    for flags in ({"pack_length": 60}, {"gradient_checkpointing": True}, {"deepspeed_stage": 3}):
        other, _ = trained(dataclasses.replace(args, **flags), world)
        assert_same_update(whole, other, start)
    rows, _ = trained(args, world, packing="rows")
    assert_same_update(whole, rows, start)


def test_adapters_depend_on_seed_and_name_alone(tiny_models, world):
    first = dict(adapters.adapter_weights(grpo.load_policy(lora_args(tiny_models()), world).model))
    torch.manual_seed(99)
    again = dict(adapters.adapter_weights(grpo.load_policy(lora_args(tiny_models()), world).model))
    other = dict(adapters.adapter_weights(grpo.load_policy(lora_args(tiny_models(), "--seed", 2), world).model))
    assert all(torch.equal(first[name], again[name]) for name in first)
    halves = {name: name.split(".")[-2] for name in first}
    starts = {tuple(first[name].flatten()[:8].tolist()) for name, half in halves.items() if half == "lora_A"}
    assert len(starts) == 14  # no two start alike, those of one shape neither
    assert all(torch.equal(first[name], other[name]) == (half == "lora_B") for name, half in halves.items())
    for name, half in halves.items():
        a = first[name]
        bound = 1 / math.sqrt(a.shape[1])
        assert (a.abs().max() <= bound and a.std() > 0.5 * bound) if half == "lora_A" else not a.any()


@pytest.mark.parametrize("names, fix", [
    (["lm_head"], "lm_head.weight is no matrix of a layer"),
    (["embed_tokens"], "embed_tokens.weight is no matrix of a layer"),
    (["query"], "Target modules .*query.* not found"),
    (["query", "q_proj"], "the name query"),
])  # fmt: skip
def test_what_cannot_have_an_adapter_is_refused(tiny_models, world, names, fix):
    with pytest.raises(utils.UserError, match=rf"--lora_target_modules {' '.join(names)}: .*{fix}"):
        grpo.load_policy(lora_args(tiny_models("llama", False), "--lora_target_modules", *names), world)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_adapter_is_pefts_and_the_merged_model_transformers(tiny_models, world, tmp_path, dtype):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = tiny_models("qwen2", False)
    args = lora_args(model, "--model_dtype", dtype, "--lora_merge")
    policy = grpo.load_policy(args, world)
    rollouts = make_rollouts()
    shake(policy)
    utils.save_model(policy, utils.load_tokenizer(args), tmp_path / "model", args, world)
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["base_model_name_or_path"] == str(model) and not list(tmp_path.glob("*.tmp"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=utils.DTYPES[dtype])
    loaded = PeftModel.from_pretrained(base, tmp_path / "model")
    saved = {n.replace(".default", ""): p for n, p in loaded.named_parameters() if ".lora_" in n}
    ours = dict(adapters.adapter_weights(policy.model))
    assert saved.keys() == ours.keys() and all(torch.equal(saved[name], ours[name]) for name in ours)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model_merged", dtype="auto")
    assert merged.dtype == utils.DTYPES[dtype]
    weights = dict(utils.full_weights(policy, utils.DTYPES[dtype]))
    assert all(torch.equal(p, weights[name]) for name, p in merged.named_parameters())
    for name in adapters.adapted_layers(policy.model):  # added before the sum is rounded
        a, b = (ours[half] for half in adapters.peft_names(name))
        start = loaded.get_parameter(f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight")
        assert torch.equal(merged.get_parameter(name), (start.float() + 2 * (b @ a)).to(merged.dtype))
    batch = batch_of(rollouts)
    want = logprobs(policy, batch)
    tolerance = 1e-5 if dtype == "float32" else 0.1
    for other in (loaded, merged):
        with torch.no_grad():
            got, _ = plain_logprobs(other, rollouts[0], 1.0)
        torch.testing.assert_close(got, want[0][batch.seq_ids[0] == 1], rtol=1e-4, atol=tolerance)


def test_a_checkpoint_holds_adapters_alone_and_goes_back(tiny_models, world, tmp_path):
    args = lora_args(tiny_models(), "--total_episodes", 6400)
    _, learner = trained(args, world)
    adam, scheduler = grpo.make_optimizer(learner.policy, args)
    for p in learner.policy.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    adam.step()
    learner = dataclasses.replace(learner, optimizer=adam, scheduler=scheduler)
    want = {name: tensor.clone() for name, tensor in utils.full_weights(learner.policy, torch.float32)}
    checkpoints = utils.Checkpoints(tmp_path, 3, world)
    extra = grpo.start_state() | {"scheduler": scheduler.state_dict()}
    checkpoints.save(1, learner.modules(args), adam, extra)
    checkpoints.wait()
    size = sum(f.stat().st_size for f in (tmp_path / "checkpoints" / "step_1").rglob("*.distcp"))
    adapted = sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in learner.policy.parameters() if not p.requires_grad)
    assert 12 * adapted < size < 12 * adapted + 4 * frozen
    fresh = grpo.load_learner(args, world)
    utils.Checkpoints(tmp_path, 3, world).resume(tmp_path / "checkpoints" / "step_1", fresh, args)
    got = dict(utils.full_weights(fresh.policy, torch.float32))
    assert all(torch.equal(got[name], want[name]) for name in want)
    kept, found = ([o.state[p] for p in o.param_groups[0]["params"]] for o in (adam, fresh.optimizer))
    assert len(found) == 28 and all(utils.shard_of(state["exp_avg"]).abs().sum() > 0 for state in found)
    for a, b in zip(kept, found, strict=True):
        assert len(a) == 3 and all(torch.equal(utils.shard_of(a[name]), utils.shard_of(b[name])) for name in a)


def test_states_of_other_runs_are_refused(tiny_models, tmp_path):
    (tmp_path / "step_1").mkdir()
    with pytest.raises(utils.UserError, match="--load_states .*--lora_rank"):
        lora_args(tiny_models(), "--load_states", tmp_path).check()
