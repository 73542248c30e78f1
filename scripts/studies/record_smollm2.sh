#!/usr/bin/env bash
# A record of SmolLM2-135M-Instruct of your own: fifteen arms and the controls on three tasks, all with the same seeds.
#
#   bash scripts/studies/record_smollm2.sh [--seeds 1-8] [--budget_minutes 60] [--jobs 1] [more flags of study.py run]
#   python scripts/study.py table runs/my_smollm2.jsonl
#
# It can be stopped at any time and goes on with the same line: what is done is in the file, seed by seed. RECORD=FILE
# names another file. Leave out the two bfloat16 arms on a processor without such instructions: there they take six times
# as long. The files in records/ were made in parts, with the arms and tasks that records.md says. To go on with one of
# them on its kind of processor, name its arms: python scripts/study.py run --out FILE --seeds 1-8 --arms base mini4 ...
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
python scripts/study.py run --out "${RECORD:-runs/my_smollm2.jsonl}" --tasks largest repeated second \
    --scale smollm2 --seeds 1-8 --controls --arms "${arms[@]}" "$@"
