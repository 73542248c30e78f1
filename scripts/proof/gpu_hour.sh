#!/usr/bin/env bash
# For whoever has a GPU for an hour: tries everything on it that nobody could try without, and writes a page.
#
# Hardware: 1 NVIDIA GPU of 24 GB or more; more GPUs of one node are used (NCCL, stage 3, tensor parallelism). What does
# not fit is skipped. --tiny: a CPU, a minute or two (its own test).
# Expected: an hour on one H100 (not measured); runs/gpu_hour/README.md, to be sent to us or read.
# Needs no network once installed: models have random weights in public shapes.
# Ctrl-C is safe at any time: the page has what was found, and the same command goes on with the rest.
#
#  bash scripts/proof/gpu_hour.sh                     everything that is not in runs/gpu_hour yet
#  bash scripts/proof/gpu_hour.sh --short             fewer and shorter responses, for a quarter of an hour
#  bash scripts/proof/gpu_hour.sh --model DIR         a chat model of yours learns sums (without: SmolLM2, if it is there)
#  bash scripts/proof/gpu_hour.sh --only kernels      one check again (scripts/proof/gpu_hour.py has them, and what each passes by)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
exec python scripts/proof/gpu_hour.py "$@"
