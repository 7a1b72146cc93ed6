#!/usr/bin/env bash
# Stubs beside the protos. Usage: generate.sh OUT_DIR, or --check to compare with what is committed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: generate.sh OUT_DIR | --check}
if [ "$out" = --check ]; then
  tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
  "$0" "$tmp"
  bad=0
  for file in "$tmp"/pagewire/v1/*; do
    diff -u "protos/pagewire/v1/$(basename "$file")" "$file" || bad=1
  done
  [ $bad -eq 0 ] || { echo "stubs are stale: run make proto and commit" >&2; exit 1; }
  exit 0
fi
.venv-proto/bin/python -m grpc_tools.protoc -I protos \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/pagewire/v1/*.proto
# protoc derives the import path from the proto path; ours live one package deeper.
sed -i 's/^from pagewire\.v1 import/from protos.pagewire.v1 import/' "$out"/pagewire/v1/*_pb2*.py*
