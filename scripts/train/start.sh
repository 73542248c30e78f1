# Sourced by every recipe, from the root of the repository and with the recipe's own arguments: installs and activates
# the environment.
#
# With --dry_run a recipe prints its plan on any machine. Then nothing is started by SLURM or torchrun, no data are made
# and nothing is downloaded: one process plans for all ranks. ((dry_run)) is true then.

source scripts/setup.sh
dry_run=0
for word in "$@"; do
    [[ "$word" != --dry[_-]run* ]] || dry_run=1
done
recipe="$0"
[[ "$recipe" == /* ]] || recipe="$OLDPWD/$recipe"
nodes="$(sed -n 's/^#SBATCH --nodes=//p' "$recipe")" # empty for one node
# What ranks of several nodes show each other; srun hands it to all nodes
export GRPO_SECRET="${GRPO_SECRET:-$(od -An -N 16 -tx1 /dev/urandom | tr -d ' \n')}"

head_node="$([[ -z "$nodes" || -z "${SLURM_JOB_NODELIST:-}" ]] || scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# SCRIPT FLAGS... in 8 ranks of each node of the job. Torchrun starts all again, at most three times, when one has died
on_all_nodes() {
    srun --kill-on-bad-exit=0 torchrun \
        --nnodes "$SLURM_NNODES" \
        --nproc_per_node 8 \
        --max-restarts 3 \
        --rdzv_backend c10d \
        --rdzv_id "$SLURM_JOB_ID" \
        --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 20000))" \
        "$@"
}

if ((dry_run)); then
    SLURM_NNODES="$nodes" SLURM_JOB_ID=0 head_node=localhost

    srun() {
        while [[ "$1" == -* ]]; do shift; done
        "$@"
    }

    torchrun() { # what rank 0 of all these ranks would be told
        local count=1 ranks_per_node
        while [[ "$1" != grpo*.py ]]; do
            case "$1" in
            --nnodes) count="$2" ;;
            --nproc_per_node) ranks_per_node="$2" ;;
            esac
            shift
        done
        TORCHELASTIC_RUN_ID=plan RANK=0 WORLD_SIZE=$((count * ranks_per_node)) LOCAL_WORLD_SIZE="$ranks_per_node" \
            python "$@"
    }

    python() {
        if [[ "$1" == scripts/data/* ]]; then
            echo "first    python $*: left out in a dry run"
            makes_data=1
        else # what is left out would have made the files that are not there
            command python "$@" | sed "${makes_data:+s/^refused  \(--dataset.*\): no such file\$/later    \1: made first/}"
        fi
    }
elif [[ -n "$nodes" && -z "${SLURM_JOB_NODELIST:-}" ]]; then
    echo "$0 is for $nodes nodes: start it with sbatch, from the root of the repository. --dry_run plans it here." >&2
    exit 1
fi
