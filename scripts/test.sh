#!/usr/bin/env bash
# Run the tests: bash scripts/test.sh [arguments of pytest]. Installs what they need; see setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
python -m pytest tests "$@"
