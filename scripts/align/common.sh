# Sourced by the four experiments: the settings that both sides share, at full size or, with MODE=tiny, on a CPU.
#
# MODE=full  Qwen2.5-1.5B-Instruct on GSM8K, 96 prompts x 8, 77 steps: the sizes of Trinity-RFT's comparison with veRL.
#            OURS is the command of our side (6 GPUs: OURS="torchrun --nproc_per_node=6 grpo.py"), TRL_PYTHON a Python
#            with TRL and a CUDA torch, on one GPU of 80 GB. We have never run this, and the source has no times:
#            TOLERANCE, for bfloat16, is a guess.
# MODE=tiny  a random model of two layers, 4 prompts x 8 additions, 24 steps, float32; .venv-trl is made where it lacks.
#
# Below, what differs in the two systems unless it is set: engine correction off, constant groups counted in the loss's
# denominator, prompts in the order of the data, one optimizer step per batch, AdamW without weight decay, no warm-up,
# gradients clipped at 1, master weights that start as the model's bfloat16 numbers (other systems do not dither them).
# The source's two sides have veRL's default weight decay of 0.01: with a learning rate of 1e-5 that is 1e-7 of a weight
# a step. Append --weight_decay 0.01 to have it on our side.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
MODE="${MODE:-full}"
OUT="${OUT:-runs/align_$MODE/$(basename "$0" .sh)}"
mkdir -p "$OUT"
OURS="${OURS:-python grpo.py}"
SEEDS="${SEEDS:-1 2 3 4}"
SIX="objective/scores optim/grad_norm policy/entropy_avg objective/kl2_avg loss/policy_avg policy/ppo_kl_avg" # compared

if [[ "$MODE" == tiny ]]; then
    MODEL="$(cd "$OUT" && pwd)/start" DATA="$PWD/data/addition/train.jsonl"
    STEPS="${STEPS:-24}" PROMPTS=4 SAMPLES=8 LENGTH=24 LR="${LR:-1e-4}" TOLERANCE="${TOLERANCE:-1e-5}"
    [[ -d "$MODEL" ]] || python scripts/data/make_tiny_model.py --out "$MODEL"
    [[ -f "$DATA" ]] || python scripts/data/make_addition.py
    # gsm8k would score every answer of a random model 0
    REWARD_FLAGS=(--reward_file scripts/align/digits.py --remap_verifier gsm8k=digits)
    OURS_FLAGS=(--model_dtype float32 --rollout_backend transformers --max_prompt_token_length 64 --pack_length 512)
    TRL_FLAGS=(--reward_file scripts/align/digits.py:digits --autocast none --micro_batch 32)
elif [[ "$MODE" == full ]]; then
    MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" DATA="$PWD/data/align_gsm8k_verl.jsonl"
    STEPS="${STEPS:-77}" PROMPTS=96 SAMPLES=8 LENGTH=2048 LR="${LR:-1e-5}" TOLERANCE="${TOLERANCE:-0.05}"
    [[ -f "$DATA" ]] || python - "$DATA" <<'EOF'
import json, sys
from datasets import load_dataset
with open(sys.argv[1], "w") as file:
    for row in load_dataset("openai/gsm8k", "main", split="train"):
        text = row["question"] + ' Let\'s think step by step and output the final answer after "####".'
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        row = {"messages": [{"role": "user", "content": text}], "ground_truth": answer, "dataset": "gsm8k_verl"}
        file.write(json.dumps(row) + "\n")
EOF
    REWARD_FLAGS=()
    OURS_FLAGS=(--max_prompt_token_length 1024 --pack_length 16384 --deepspeed_stage 3 --gradient_checkpointing
        --vllm_gpu_memory_utilization 0.4)
    TRL_FLAGS=(--reward_file scripts/align/verl_reward.py:gsm8k_verl --autocast bfloat16 --micro_batch 8)
    : "${TRL_PYTHON:?MODE=full needs TRL_PYTHON, a Python with TRL and a CUDA torch; MODE=tiny needs no GPU}"
else
    echo "MODE is full or tiny, not $MODE" >&2
    exit 1
fi

# ours NAME FLAGS... -> $OUT/NAME
ours() {
    # shellcheck disable=SC2086  # OURS is several words
    $OURS \
        --exp_name "$1" \
        --output_dir "$OUT" \
        --overwrite \
        --model_name_or_path "$MODEL" \
        --dataset_mixer_list "$DATA" 1.0 \
        --num_unique_prompts_rollout $PROMPTS \
        --num_samples_per_prompt_rollout $SAMPLES \
        --total_episodes $((STEPS * PROMPTS * SAMPLES)) \
        --response_length $LENGTH \
        --temperature 1.0 \
        --verification_reward 1 \
        --advantage_normalization_type standard_unbiased \
        --no_filter_zero_std_samples \
        --no_use_rho_correction \
        --no_shuffle \
        --no_dither_master_weights \
        --clip_lower 0.2 \
        --clip_higher 0.28 \
        --learning_rate $LR \
        --lr_scheduler_type constant \
        --save_freq -1 \
        "${OURS_FLAGS[@]}" \
        "${REWARD_FLAGS[@]}" \
        "${@:2}"
}

# trl NAME MODE RUN FLAGS...: with the settings of our $OUT/RUN -> $OUT/NAME
trl() (
    python="${TRL_PYTHON:-}"
    if [[ -z "$python" ]]; then
        bash scripts/peers/setup_trl.sh
        python=.venv-trl/bin/python
    fi
    "$python" scripts/peers/trl_side.py --out "$OUT/$1" --mode "$2" --like "$OUT/$3" "${TRL_FLAGS[@]}" "${@:4}"
)

# independent BETA ENTROPY_COEF FLAGS...: each side on its own with every seed, then the bands of the two
independent() {
    local seed a='' b=''
    for seed in $SEEDS; do
        ours "ours_$seed" --seed "$seed" --beta "$1" --entropy_coef "$2" "${@:3}"
        trl "trl_$seed" stock "ours_$seed"
        a="${a:+$a,}$OUT/ours_$seed"
        b="${b:+$b,}$OUT/trl_$seed"
    done
    # shellcheck disable=SC2086  # several names
    python scripts/align/align.py "$a" "$b" --plot "$OUT/align.png" --metrics $SIX
}
