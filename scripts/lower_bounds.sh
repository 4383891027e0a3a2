#!/usr/bin/env bash
# Tests ckptfs with the oldest versions of its packages that pyproject.toml allows, in an environment of its own.
# Where they cannot be had for this Python (no wheels, no network), it says so and exits 0. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${CKPTFS_LOWER_BOUNDS:-.venv/lower-bounds}
python=.venv/bin/python
pins=$("$python" - <<'END'
import re
text = open("pyproject.toml").read().partition("dependencies = [")[2].partition("]")[0]
print(*(f"{name}=={low}" for name, low in re.findall(r'"([\w-]+)>=([\d.]+)', text)))
END
)
stamp="$folder/.$(echo "$pins" | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    rm -rf "$folder"
    "$python" -m venv "$folder"
    # shellcheck disable=SC2086
    if ! "$folder/bin/pip" install --quiet --disable-pip-version-check --prefer-binary $pins \
        pytest pytest-timeout hypothesis safetensors >"$folder/pip.log" 2>&1; then
        echo "SKIPPED lower bounds: they cannot be installed here: $(tail -n 1 "$folder/pip.log")"
        exit 0
    fi
    touch "$stamp"
fi
[ $# -gt 0 ] || set -- tests/formats/hdf5/test_filters.py tests/formats/test_config_files.py tests/formats/hdf5/test_index.py
echo "Testing with $pins"
PYTHONPATH=$PWD exec "$folder/bin/python" -m pytest -q -p no:cacheprovider "$@"
