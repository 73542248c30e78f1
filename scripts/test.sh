#!/usr/bin/env bash
# Run the tests: bash scripts/test.sh [arguments of pytest]. Installs what they need; see setup.sh. Two processes share
# the test files, of a thread each; -n 0 gives one, in which a debugger works.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
