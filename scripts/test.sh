#!/usr/bin/env bash
# Run the tests of the code: bash scripts/test.sh [arguments of pytest]. They pass after every right edit of your copy.
# --all adds those of the repository: style, diffs that apply, recipes, pages. Installs what they need; see setup.sh.
# Two processes share the test files, of a thread each; -n 0 gives one, in which a debugger works.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
which=(-m "not house")
if [[ ${1-} == --all ]]; then
    which=()
    shift
fi
OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${which[@]}" "$@"
