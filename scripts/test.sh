#!/usr/bin/env bash
# Passes all tests, real mounts included. Sets up what is missing first. Arguments go to pytest.
# Processors share the files of tests, at most four; `-n 0` runs them one after the other, as a debugger wants it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile "$@"
