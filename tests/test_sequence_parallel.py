"""Several learners share the tokens of a pack (--sequence_parallel_size, Ulysses): the numbers are those of one."""

import dataclasses
import textwrap

import pytest
import torch

import grpo
import utils
from scripts.parts import adapters, plan
from tests import programs
from tests.test_learner import assert_same_update, long_rollouts, make_args, make_rollouts, sgd, update
from tests.test_lora import shake

SHAPES = {2: (4, 2), 3: (6, 2)}  # ranks that share a pack: heads, key-value heads; 3 ranks take each of 2 three times
REF = "--beta 0.1 --load_ref_policy"
UNBIASED = "--kl_in_reward --force_kl_in_reward --advantage_normalization_type standard_unbiased"
ADAPTERS = "--lora_rank 4 --lora_alpha 8 --pack_length 60"
TEACHER = "--ref_model_name_or_path TEACHER --load_ref_policy --beta 1 --kl_estimator kl2 --no_filter_zero_std_samples"
SMALL_STEPS = "--num_epochs 2 --max_grad_norm 1e-3"
OF_TWO = {  # flags of an update of two ranks
    "rows": "",
    "KL in reward": f"{REF} {UNBIASED}",
    "one by one": "--pack_length 1000",
    "cispo": "--loss_fn cispo --loss_denominator 50 --entropy_coef 0.01 --pack_length 60",
    "rho": "--rho_mask_sequence_level --rho_mask_lower_bound 0.95 --rho_mask_upper_bound 1.2",
    "KL": f"{REF} --kl_estimator 3",
}
OF_MORE = {  # of three ranks, and of two of four
    "dapo": "--pack_length 60",
    "epochs": f"{REF} {SMALL_STEPS} --num_mini_batches 2 --pack_length 40",
    "stage 3": f"{SMALL_STEPS} --deepspeed_stage 3 --pack_length 60",
    "gspo": "--loss_fn gspo --loss_denominator sequence --pack_length 60",
    "LoRA, KL": f"{ADAPTERS} {REF} {SMALL_STEPS} --num_mini_batches 2",
    "LoRA, stage 3": f"{ADAPTERS} --deepspeed_stage 3 --gradient_checkpointing",
    "a teacher": f"{TEACHER} --pack_length 60",
    "a teacher in the reward": f"{TEACHER} --kl_in_reward --advantage_normalization_type centered",
    "LoRA, a teacher": f"{ADAPTERS} {TEACHER} --deepspeed_stage 3",
}
CASES = OF_TWO | OF_MORE


def make_model(directory, heads, kv_heads):
    """A tiny model with other numbers of heads than those of the other tests."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3", vocab_size=512, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def weights_of(policy, args):
    named = adapters.adapter_weights(policy.model) if args.lora_rank else utils.full_weights(policy, torch.float32)
    return {name: tensor.clone() for name, tensor in named}


def learn(model, world, case, *flags):
    """The update of a case: what trains before and after it, and its metrics."""
    args = make_args(model, *CASES[case].replace("TEACHER", f"{model}_teacher").split(), *flags)
    learner = grpo.load_learner(args, world)
    policy = learner.policy
    if args.lora_rank:
        shake(policy)
    elif args.load_ref_policy and "teacher" not in case:  # else the KL is 0
        for p in learner.ref_policy.parameters():
            utils.shard_of(p).mul_(1.02)
    before = weights_of(policy, args)
    learner = dataclasses.replace(learner, optimizer=sgd(policy))

    rollouts = long_rollouts() if case == "one by one" else make_rollouts()
    for r in rollouts:
        r.tokenless = []
        if "teacher" in case:
            r.advantage = 0.0
    groups = [rollouts[i : i + 3] for i in range(0, len(rollouts), 3)]
    size = args.sequence_parallel_size
    parts = args.num_mini_batches
    mine = []
    for i in range(parts):  # each mini-batch of all ranks is that of one
        mine.append(grpo.all_rollouts(groups[i::parts][world.rank // size :: world.size // size]))
    metrics = update(learner, mine, args, world, "rows" if case == "rows" else "shared")
    return before, weights_of(policy, args), metrics


def refusals(model, world, *flags):
    """How a good model packs; what is said of one whose layers mix neighbouring tokens, and of another attention."""
    args = make_args(model, *flags)
    policy = grpo.load_policy(args, world)
    prompt = make_rollouts()[0].prompt
    said = [grpo.choose_packing(policy, prompt, args, world)]
    hook = policy.model.base_model.layers[0].register_forward_hook(
        lambda _module, _inputs, out: out + 3 * torch.roll(out, 1, dims=1)
    )
    for attention in (None, "sdpa"):
        policy.model.config._attn_implementation = attention or policy.model.config._attn_implementation
        with pytest.raises(utils.UserError) as error:
            grpo.choose_packing(policy, prompt, args, world)
        said.append(str(error.value))
        hook.remove()
    return said


SCRIPT = """
    import torch
    import utils
    from tests import test_sequence_parallel as test
    world = utils.init_distributed()
    flags = ("--sequence_parallel_size", {size})
    found = {{}}
    for case in test.OF_TWO if world.size == 2 else test.OF_MORE:
        found[case] = test.learn({model!r}, world, case, *flags)
    if world.size == 2:
        found["refusals"] = test.refusals({model!r}, world, *flags)
    torch.save(found, f"{out}/{{world.rank}}.pt")
    torch.distributed.barrier()
    utils.exit_process()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Function (size, number) -> the model, and what each of `number` ranks found, `size` of which share a pack."""
    made = {}

    def get(size, number):
        if (size, number) not in made:
            out = tmp_path_factory.mktemp(f"ranks_{size}_{number}")
            model = make_model(out / "model", *SHAPES[size])
            make_model(out / "model_teacher", size, 1)
            script = out / "script.py"
            script.write_text(textwrap.dedent(SCRIPT.format(model=str(model), out=out, size=size)))
            done = programs.run([*programs.torchrun(number), script], OMP_NUM_THREADS=1)
            assert done.returncode == 0, done.stderr[-8000:]
            made[size, number] = model, [torch.load(out / f"{rank}.pt") for rank in range(number)]
        return made[size, number]

    return get


LARGE = [pytest.param(3, 3, marks=pytest.mark.house), pytest.param(2, 4, marks=pytest.mark.house)]  # a minute each


@pytest.mark.runs
@pytest.mark.parametrize("size, number", [(2, 2), *LARGE])
def test_updates_are_those_of_one_learner(ranks, world, size, number):
    """Weights or adapters and every metric, each counted once; all ranks end with the same bits."""
    model, everyone = ranks(size, number)
    for case in OF_TWO if number == 2 else OF_MORE:
        before, one, metrics = learn(model, world, case)
        _, weights, found = everyone[0][case]
        # after several steps of norm 1 the rounding of the weights themselves shows, whose norm is 20
        assert_same_update(one, weights, before, 3e-6 if SMALL_STEPS in CASES[case] else 1e-6)
        assert all(torch.equal(weights[name], other[case][1][name]) for other in everyone for name in weights)
        assert metrics["optim/grad_norm"] and not metrics["bad"] and metrics.keys() == found.keys()
        for name in metrics:
            if not name.startswith("time/"):
                assert found[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-8), f"{case}: {name}"


@pytest.mark.runs
def test_models_that_it_cannot_split_are_refused(ranks, world):
    """Layers that mix neighbouring tokens, another attention: two reasons."""
    for found in ranks(2, 2)[1]:
        packing, *reasons = found["refusals"]
        assert packing == "shared" and len(set(reasons)) == 2
        assert all(reason.startswith("--sequence_parallel_size 2: Qwen3ForCausalLM") for reason in reasons)


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_fit(tmp_path):
    args = make_args(make_model(tmp_path, 6, 2), "--sequence_parallel_size", 4)
    with pytest.raises(
        utils.UserError, match=r"--sequence_parallel_size 4 .* 6 attention heads: one of 1, 2, 3, 6 does"
    ):
        plan.check_models(args, [])
    teacher = make_model(tmp_path / "teacher", 3, 1)
    flags = f"{TEACHER} --sequence_parallel_size 2".replace("TEACHER", str(teacher))
    with pytest.raises(utils.UserError, match=rf"--sequence_parallel_size 2 .* {teacher}'s 3 attention heads: .*1, 3 "):
        plan.check_models(make_args(tmp_path, *flags.split()), [])
