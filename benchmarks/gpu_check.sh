#!/usr/bin/env bash
# Everything about the GPU path that one GPU can tell, in less than 8 minutes: correctness, speed, a whole model.
#   benchmarks/gpu_check.sh [--out FOLDER]              on a machine with a GPU
#   benchmarks/gpu_check.sh --dry-run [--out FOLDER]    anywhere: small shapes, in Triton's interpreter
# PYTHON chooses the interpreter of Python. Prints a table, writes FOLDER/gpu_check.json, and ends with 1 if a line says FAIL.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:tests:benchmarks${PYTHONPATH:+:$PYTHONPATH}" TRITON_DEFAULT_FP_FUSION=1 PYTHONUNBUFFERED=1
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then
    export TRITON_INTERPRET=1
  fi
done
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
