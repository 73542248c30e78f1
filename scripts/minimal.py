"""GRPO in one short file, the way into grpo.py: one device, one thing after the other, nothing but the algorithm.

    python scripts/minimal.py --model_name_or_path models/SmolLM2-135M-Instruct --dataset_mixer_list \
        data/largest/train.jsonl 1.0 --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --beta 0 \
        --response_length 8 --temperature 1.0 --learning_rate 1e-5 --total_episodes 640 --vllm_enforce_eager

The flags are grpo.py's. Where grpo.py packs nothing, both give the same numbers, bit for bit. What grpo.py adds to
    sample              stop strings, top-p, active sampling; an engine on every rank; judging while others sample
    compute_advantages  three other normalizations; format rewards, penalties, KL in the reward; scores that are missing
    make_batch          packs of many responses that share their prompts, in place of padded rows
    token_logprobs      logits in chunks that are not kept, entropy, gradient checkpointing
    grpo_loss           CISPO, GSPO, dual clip, four KLs, three means, masks of rho, an entropy bonus, exp kept finite
    main                any number of ranks, learning-rate schedules, --resume, evaluation, checkpoints, metrics

Shapes: P prompts of G responses in a step; B rows of at most T tokens in a batch, n of them of responses; H hidden
size, V vocabulary. Position t of a (B, T) tensor is about predicting targets[t]. Logprobs are in nats.
"""

import copy
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import utils  # isort: skip  (pins thread counts and sets vLLM's switches, so it comes before torch)

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import grpo
import rewards


@dataclass(frozen=True)
class Args:
    """Synchronous GRPO on one device; names and meanings as in grpo.py."""

    model_name_or_path: str  # hub name or directory of the causal LM to train
    dataset_mixer_list: list[str]  # NAME AMOUNT: hub dataset, directory, .jsonl or .parquet, and its share, as in 1.0
    model_revision: str | None = None  # of a hub name: branch, tag or commit
    trust_remote_code: bool = False  # run the code that comes with a model: read it first
    dataset_mixer_list_splits: list[str] = field(default_factory=lambda: ["train"])  # of a hub dataset
    system_prompt_override_file: str | None = None  # text file in place of the rows' own system messages
    exp_name: str = "minimal"  # the run writes output_dir/exp_name/rollouts.jsonl and, at its end, model/
    output_dir: str = "output"  # directory that holds runs
    seed: int = 1  # fixes data order and sampling
    model_dtype: Literal["bfloat16", "float32"] = "float32"  # of the engine and of the learner's matrix products
    max_prompt_token_length: int = 256  # longer prompts are left out
    response_length: int = 256  # most tokens of a response
    num_unique_prompts_rollout: int = 16  # P, prompts per step
    num_samples_per_prompt_rollout: int = 4  # G, responses per prompt: the group whose mean is the baseline
    temperature: float = 0.7  # of sampling; it also divides the learner's logits
    verification_reward: float = 10.0  # factor on the verifiers' 0..1 scores
    beta: float = 0.05  # KL coefficient, per token; 0 is off
    clip_lower: float = 0.2  # the ratio is clipped below at 1 - clip_lower
    clip_higher: float = 0.2  # the ratio is clipped above at 1 + clip_higher
    rho_clamp_upper_bound: float = 2.0  # bound of rho, which corrects for the engine's numerics
    learning_rate: float = 2e-5  # of AdamW; it stays what it is
    max_grad_norm: float = 1.0  # the global gradient norm is clipped here
    per_device_train_batch_size: int = 1  # B, responses per forward and backward
    total_episodes: int = 100_000  # responses of the whole run; steps = total_episodes // (P * G)
    num_epochs: int = 1  # passes over each step's responses
    num_mini_batches: int = 1  # optimizer steps per pass, each on its share of the prompts
    vllm_gpu_memory_utilization: float = 0.4  # share of the GPU the engine takes; the learner needs the rest
    vllm_enforce_eager: bool = False  # skip vLLM's compilation: starts faster, samples slower


@dataclass
class Rollout:
    """One response and what is known about it."""

    prompt: utils.Prompt  # its token ids, its labels and the verifiers that compare a response with them
    token_ids: list[int] = field(default_factory=list)
    vllm_logprobs: list[float] = field(default_factory=list)  # of token_ids, by the engine that sampled them
    text: str = ""
    score: float = 0.0
    advantage: float = 0.0


@dataclass
class Batch:
    """Rollouts as rows: prompt and response, padded on the right, where causal attention never looks. All (B, T)."""

    input_ids: Tensor
    targets: Tensor
    mask: Tensor  # bool: targets[t] is of the response, train on it
    advantages: Tensor
    vllm_logprobs: Tensor
    old_logprobs: Tensor | None = None  # of the policy before the step's updates
    ref_logprobs: Tensor | None = None  # of the start policy


def sample(engine: Any, prompts: list[utils.Prompt], step: int, args: Args) -> list[Rollout]:
    """The step's scored rollouts, G for each of the next P prompts of a stream that is shuffled anew each epoch."""
    from vllm import SamplingParams

    rollouts = []
    params = []
    options: Any = {"temperature": args.temperature, "max_tokens": args.response_length, "logprobs": 0}
    P = args.num_unique_prompts_rollout
    for position in range((step - 1) * P, step * P):
        prompt = grpo.prompt_at(prompts, position, args.seed)
        for j in range(args.num_samples_per_prompt_rollout):
            rollouts.append(Rollout(prompt))
            seed = utils.derive_seed(args.seed, position, j, 0)  # each response has its own
            params.append(SamplingParams(seed=seed, skip_special_tokens=False, **options))
    requests = [{"prompt_token_ids": list(r.prompt.token_ids)} for r in rollouts]
    outputs = engine.generate(requests, params, use_tqdm=False)
    for r, output in zip(rollouts, outputs, strict=True):
        response = output.outputs[0]
        r.text = response.text
        for token, logprobs in zip(response.token_ids, response.logprobs, strict=True):
            r.token_ids.append(token)
            r.vllm_logprobs.append(logprobs[token].logprob)
        r.score = score(r, args)
    return rollouts


def score(r: Rollout, args: Args) -> float:
    """verification_reward times the sum of the verifiers' scores of 0 to 1."""
    labels = zip(r.prompt.ground_truths, r.prompt.verifiers, strict=True)
    records = [rewards.RewardRecord(r.text, label, verifier, len(r.token_ids)) for label, verifier in labels]
    return args.verification_reward * sum(result.score for result in rewards.score(records))


def compute_advantages(scores: Tensor) -> Tensor:  # (P, G) -> (P, G)
    """A_i = (r_i - mean r) / (std r + 1e-8), within each group (DeepSeekMath, arXiv:2402.03300, 4.1.2)."""
    centered = scores - scores.mean(1, keepdim=True)
    std = centered.square().mean(1, keepdim=True).sqrt()
    return centered / (std + 1e-8)


def make_batch(rollouts: list[Rollout], device: torch.device) -> Batch:
    """Rollouts as the rows of a batch. The shift of targets against inputs happens here only."""
    rows = [torch.tensor([*r.prompt.token_ids, *r.token_ids]) for r in rollouts]
    ids = pad_sequence(rows, batch_first=True).to(device)  # (B, T + 1)
    targets = ids[:, 1:]
    mask = torch.zeros_like(targets, dtype=torch.bool)
    advantages = torch.zeros_like(targets, dtype=torch.float32)
    vllm_logprobs = torch.zeros_like(advantages)
    for i, r in enumerate(rollouts):
        start = len(r.prompt.token_ids) - 1  # the last token of the prompt predicts the first of the response
        response = slice(start, start + len(r.token_ids))
        mask[i, response] = True
        advantages[i, response] = r.advantage
        vllm_logprobs[i, response] = torch.tensor(r.vllm_logprobs)
    return Batch(ids[:, :-1], targets, mask, advantages, vllm_logprobs)


def token_logprobs(model: Any, batch: Batch, args: Args) -> Tensor:
    """log softmax(logits / temperature)[targets], float32 (B, T), 0 outside the responses."""
    with torch.autocast(batch.mask.device.type, torch.bfloat16, enabled=args.model_dtype == "bfloat16"):
        hidden = model.base_model(batch.input_ids, use_cache=False).last_hidden_state  # (B, T, H)
        logits = model.get_output_embeddings()(hidden[batch.mask]).float() / args.temperature  # (n, V)
    targets = batch.targets[batch.mask]  # (n,)
    target_logits = logits.gather(1, targets[:, None])[:, 0]
    logprobs = target_logits - logits.logsumexp(1)
    return torch.zeros_like(batch.advantages).masked_scatter(batch.mask, logprobs)


def grpo_loss(new_logprobs: Tensor, batch: Batch, tokens: int, args: Args) -> Tensor:
    """A micro-batch's part of sum_it (rho_it L_it + beta KL_it) / tokens of the mini-batch (DAPO, arXiv:2503.14476).

    L      max(-A ratio, -A clip(ratio, 1 - lower, 1 + higher)), ratio = exp(new - old)    PPO, arXiv:1707.06347, eq. 7
    rho    min(exp(old - vllm), bound): learner over engine probability of a sampled token    truncated IS, Ionides 2008
    KL     exp(ref - new) - 1 - (ref - new), from the start policy    arXiv:2402.03300, eq. 4
    """
    ratio = (new_logprobs - batch.old_logprobs).exp()  # (B, T)
    clipped_ratio = ratio.clamp(1 - args.clip_lower, 1 + args.clip_higher)
    unclipped_loss = -batch.advantages * ratio
    clipped_loss = -batch.advantages * clipped_ratio
    per_token = torch.maximum(unclipped_loss, clipped_loss)
    rho = (batch.old_logprobs - batch.vllm_logprobs).exp().clamp(max=args.rho_clamp_upper_bound)
    loss = (per_token * rho)[batch.mask].sum() / tokens
    if args.beta:
        d = new_logprobs - batch.ref_logprobs
        kl = torch.expm1(-d) + d
        loss = loss + args.beta * (kl[batch.mask].sum() / tokens)
    return loss


def main(args: Args) -> None:
    """Set up, then the loop: sync, sample, compare, update."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM

    G = args.num_samples_per_prompt_rollout
    B = args.per_device_train_batch_size
    rollouts_per_step = args.num_unique_prompts_rollout * G
    num_steps = args.total_episodes // rollouts_per_step
    run_dir = Path(args.output_dir, args.exp_name)
    utils.need(not run_dir.exists(), f"{run_dir} holds a run: give another --exp_name")
    run_dir.mkdir(parents=True)

    tokenizer = utils.pretrained(AutoTokenizer, args)
    prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)  # token ids of the tokenizer's chat template
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = LLM(
        utils.start_dir(args),
        trust_remote_code=args.trust_remote_code,
        dtype=args.model_dtype,
        max_num_seqs=rollouts_per_step,
        max_model_len=args.max_prompt_token_length + args.response_length,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        enforce_eager=args.vllm_enforce_eager,
        enable_chunked_prefill=device.type == "cuda",  # on a CPU seeds need prompts that are taken in whole
        logprobs_mode="processed_logprobs",  # after temperature: of the distribution that was sampled from
    )
    policy = utils.pretrained(AutoModelForCausalLM, args, dtype=torch.float32).to(device)
    ref_policy = copy.deepcopy(policy) if args.beta else None  # both without dropout, as from_pretrained leaves them
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=0.0, fused=True)

    for step in range(1, num_steps + 1):
        # sync the weights, sample and score
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(policy.state_dict().items())})
        rollouts = sample(engine, prompts, step, args)

        # compare within each group
        scores = torch.tensor([r.score for r in rollouts], dtype=torch.float64).view(-1, G)  # (P, G)
        advantages = compute_advantages(scores).float().flatten()
        for r, advantage in zip(rollouts, advantages.tolist(), strict=True):
            r.advantage = advantage

        # divide the groups into mini-batches, each a list of micro-batches
        mini_batches = []
        for indices in torch.arange(len(scores)).chunk(args.num_mini_batches):
            kept = []
            for i in indices.tolist():
                if scores[i].amin() < scores[i].amax():  # the advantages of equal scores are 0
                    kept += rollouts[i * G : (i + 1) * G]
            kept.sort(key=lambda r: -len(r.prompt.token_ids) - len(r.token_ids))  # so that rows need little padding
            mini_batches.append([make_batch(kept[i : i + B], device) for i in range(0, len(kept), B)])

        # logprobs from before any update
        with torch.no_grad():
            for batch in sum(mini_batches, []):
                batch.old_logprobs = token_logprobs(policy, batch, args)
                if args.beta:
                    batch.ref_logprobs = token_logprobs(ref_policy, batch, args)

        # an optimizer step for each mini-batch
        for mini_batch in mini_batches * args.num_epochs:
            tokens = sum(int(batch.mask.sum()) for batch in mini_batch)
            for batch in mini_batch:
                new_logprobs = token_logprobs(policy, batch, args)
                grpo_loss(new_logprobs, batch, tokens, args).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        # report
        print(f"{step}/{num_steps} score {scores.mean():.2f}", flush=True)
        with (run_dir / "rollouts.jsonl").open("a") as file:
            for r in rollouts:
                file.write(json.dumps({"training_step": step} | asdict(r)) + "\n")
    policy.save_pretrained(run_dir / "model")
    tokenizer.save_pretrained(run_dir / "model")


if __name__ == "__main__":
    try:
        main(utils.parse_args(Args))
    except utils.UserError as error:
        raise SystemExit(f"minimal.py: {error}") from None
