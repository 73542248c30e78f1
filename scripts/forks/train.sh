#!/usr/bin/env bash
# The curve of a fork: the debug task (train/debug/letters.sh) with a diff of this directory applied to a copy, with the
# flags of the command in the diff's head. Prints the mean score of steps 1, 5, 10, 15 and 20; the head has what was
# printed where it was made. `plain` is grpo.py as it is.
#
#   bash scripts/forks/train.sh dppo [FLAGS of grpo.py]
#
# Hardware: 2 CPU cores and 2 GiB of memory, no network; half a minute. All metrics are in runs/fork_NAME.
set -euo pipefail
name="${1:?usage: train.sh NAME of a diff, or plain [FLAGS of grpo.py]}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root="$PWD"
source scripts/setup.sh
diff="$root/scripts/forks/$name.diff"
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
    git apply "$diff"
    read -ra flags < <(sed -n 's/^    python grpo\.py \.\.\.//p' "$diff" | tail -n 1)
fi
set -m
bash scripts/train/debug/letters.sh --output_dir "$root/runs" --exp_name "fork_$name" "${flags[@]}" "${@:2}" &
job=$!
set +m
wait "$job"
job=""
python - "$root/runs/fork_$name/metrics.jsonl" <<'END'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1])]
scores = {row["training_step"]: row["objective/scores"] for row in rows}
steps = [step for step in (1, 5, 10, 15, 20) if step in scores]
print("score of steps", *steps, "is", *(f"{scores[step]:.2f}" for step in steps))
END
