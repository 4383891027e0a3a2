#!/usr/bin/env bash
# Passes all tests, real mounts included. Sets up what is missing first. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
exec .venv/bin/python -m pytest "$@"
