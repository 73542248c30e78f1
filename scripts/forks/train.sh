#!/usr/bin/env bash
# The curve of a fork: the debug task (train/debug/letters.sh) with a diff of this directory applied to a copy, with the
# flags of the command in the diff's head. Prints the mean score of steps 1, 5, 10, 15 and 20; the head has what was
# printed where it was made. `plain` is grpo.py as it is. A fork that the debug task lacks something for has it added
# below, or is trained on largest_digit, a task with labels (data/make_tasks.py), with studies/fly as model. `plain
# largest_digit` is that task without a diff.
#
#   bash scripts/forks/train.sh NAME of a diff, or its path, or plain [largest_digit] [FLAGS of grpo.py]
#
# Hardware: 2 CPU cores and 2 GiB of memory, no network; half a minute. All metrics are in runs/fork_NAME or
# runs/fork_NAME_TASK.
set -euo pipefail
name="${1:?usage: train.sh NAME of a diff, or its path, or plain [largest_digit] [FLAGS of grpo.py]}"
shift
diff=""
if [[ -f "$name" ]]; then # of your own
    diff="$(realpath "$name")"
    name="$(basename "$name" .diff)"
fi
here="$(dirname "${BASH_SOURCE[0]}")"
cd "$here/../.."
root="$PWD"
source scripts/setup.sh
diff="${diff:-$root/scripts/forks/$name.diff}"
copy="$(mktemp -d)"
job=""

# Ctrl-C and the signal of `timeout` reach this shell alone: the run is a process group of its own
clean_up() {
    [[ -z "$job" ]] || kill -TERM -- "-$job" 2>/dev/null || true
    rm -rf "$copy"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

git ls-files -z | xargs -0 cp --parents -t "$copy"
ln -s "$root/.venv" "$copy/.venv"
cd "$copy"

flags=()
if [[ "$name" != plain ]]; then
    if git apply --reverse --check "$diff" 2>/dev/null; then
        echo "train.sh: $name is applied here already"
    elif ! git apply "$diff"; then
        echo "train.sh: $diff does not fit this grpo.py: commit or undo your change of those lines" >&2
        exit 1
    fi
    read -ra flags < <(sed -n 's/^    python grpo\.py \.\.\.//p' "$diff" | tail -n 1) || true
    ((${#flags[@]} + $#)) || echo "train.sh: $diff names no flags in its head: give them behind it, as --loss_fn $name"
fi

# What a fork needs and the debug task lacks, and the metric that shows what it learns
metric=objective/scores
run="fork_$name"
task=()
case "$name" in
echo) # an environment, which says what the policy can foretell
    metric=loss/echo
    flags=(--echo_coef 0.1)
    task=(--env_file scripts/forks/counter.py --max_steps 3 --per_turn_max_tokens 6 --response_length 64)
    ;;
repetition) # n-grams that come twice in a short response
    metric=val/advantages
    sed -i 's/^REPEATED = .*/REPEATED = 3/' grpo.py
    task=(--response_length 32 --repetition_penalty 1)
    ;;
esac

has_labels=""
case "$name" in
ttrl | luffy) has_labels=yes ;;
esac
if [[ "${1:-}" == largest_digit ]]; then
    has_labels=yes
    shift
fi
if [[ -n "$has_labels" ]]; then # which answers are compared with
    run+=_largest_digit
    data=data/tasks/largest_digit
    metric=eval/objective/verifiable_correct_rate
    python scripts/data/make_tasks.py
    task=(--model_name_or_path scripts/studies/fly --total_episodes 1280 --response_length 14 --local_eval_every 5
        --dataset_mixer_list "$data/train.jsonl" 1.0 --dataset_mixer_eval_list "$data/eval.jsonl" 1.0
        --remap_verifier learned=gsm8k)
fi
if [[ "$name" == luffy ]]; then # an expert, who gives the label
    sed -Ei 's/("ground_truth": ("[^"]*"))/\1, "expert": \2/' "$data/train.jsonl"
    printf 'def learned(response, ground_truth, expert):\n    return response.strip() == ground_truth\n' >expert.py
    task+=(--reward_file expert.py --remap_verifier reasoning_gym=learned)
fi

set -m
bash scripts/train/debug/letters.sh --output_dir "$root/runs" --exp_name "$run" "${flags[@]}" "${task[@]}" "$@" &
job=$!
set +m
wait "$job"
job=""
[[ " $* " != *" --dry_run "* ]] || exit 0
python - "$root/runs/$run/metrics.jsonl" "$metric" <<'END'
import json
import sys

path, metric = sys.argv[1:]
rows = [json.loads(line) for line in open(path)]
values = {row["training_step"]: row[metric] for row in rows if metric in row}
steps = [step for step in (1, 5, 10, 15, 20) if step in values]
if metric == "objective/scores":
    print("score of steps", *steps, "is", *(f"{values[step]:.2f}" for step in steps))
else:
    print(metric, "of steps", *steps, "is", *(f"{values[step]:.3g}" for step in steps))
END
