#!/usr/bin/env bash
# Passes all tests, or a ring of them, after setting up what is missing. Arguments go to pytest.
#   scripts/test.sh                             everything, as the gate does
#   scripts/test.sh unit                        no mounts, nothing slow
#   scripts/test.sh tests/conversion -k llama   one subject
# At most four processors share the files of tests. A selection by -k or of single files runs in one process,
# as a debugger wants it; a number of processes of your own (-n 2) comes after that.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test
if [ "${1-}" = unit ]; then
    set -- -m "not fuse and not reference and not slow" "${@:2}"
fi
processes=(-n auto --maxprocesses 4 --dist loadfile)
for argument in "$@"; do
    case "$argument" in -k* | *.py | *.py::*) processes=(-n 0) ;; esac
done
exec .venv/bin/python -m pytest "${processes[@]}" "$@"
