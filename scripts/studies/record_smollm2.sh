#!/usr/bin/env bash
# The record of SmolLM2-135M-Instruct: the demo's task and two harder ones, all arms with the same seeds.
#
#   bash scripts/studies/record_smollm2.sh [--seeds 1-8] [--budget_minutes 60] [--jobs 1] [more flags of study.py run]
#   python scripts/study.py table scripts/studies/records/smollm2{,_repeated,_second}.jsonl \
#       --tasks largest repeated second
#
# It can be stopped at any time and goes on with the same line: what is done is in the files, seed by seed.
# Rows of another processor than a file's are refused: smollm2.jsonl and smollm2_second.jsonl are of a Zen 3. The rows
# of a Zen 4 are in smollm2_avx512{,_repeated}.jsonl (RECORD=scripts/studies/records/smollm2_avx512).
# `repeated` and `second` have files of their own: they were added when the controls and the calibration had shown that
# `differences` and `last` are hardly learned. The two bfloat16 arms take six times as long without such instructions.
# The base: 8 prompts x 8 samples, centered advantages, one update a step, no KL, token mean, float32.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
python scripts/data/get_smollm2.py
[[ -d data/tasks/repeated ]] || python scripts/data/make_tasks.py

arms=(
    "base"
    "mini4: --num_mini_batches 4"
    "late4: grpo_fast.py --async_steps 4"
    "bfloat16: --model_dtype bfloat16"  # master weights float32, dithered, as by default
    "bfloat16_plain: --model_dtype bfloat16 --no_dither_master_weights"
    "standard: --advantage_normalization_type standard"
    "maxrl@scripts/forks/maxrl.diff: --advantage_normalization_type maxrl"
    "sequence: --loss_denominator sequence"
    "beta: --beta 0.05 --load_ref_policy"
    "group4: --num_unique_prompts_rollout 16 --num_samples_per_prompt_rollout 4"
    "active: --active_sampling"
    "cispo4: --loss_fn cispo --num_mini_batches 4"
    "gspo4: --loss_fn gspo --num_mini_batches 4"
    "dppo4@scripts/forks/dppo.diff: --loss_fn dppo --num_mini_batches 4"
    "lora: --lora_rank 32 --lora_alpha 64 --learning_rate 3e-4"
)
record=${RECORD:-scripts/studies/records/smollm2}
python scripts/study.py run --out "$record.jsonl" --tasks largest last differences \
    --scale smollm2 --seeds 1-8 --controls --jobs 1 --arms "${arms[@]}" "$@"
python scripts/study.py run --out "${record}_repeated.jsonl" --tasks repeated \
    --scale smollm2 --seeds 1-8 --controls --jobs 1 --arms "${arms[@]}" "$@"
python scripts/study.py run --out "${record}_second.jsonl" --tasks second \
    --scale smollm2 --seeds 1-8 --jobs 1 --arms "${arms[@]}" "$@"
