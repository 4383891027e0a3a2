"""How a child process of the HDF5 reader is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = "import sys; sys.path.append(sys.argv[2]); from MODULE import main; main()"


def child_command(request: Mapping[str, Any], module: str = "ckptfs.formats.h5_child") -> list[str]:
    """The command that runs *module*, here `h5_child`; ``sys.argv[1]`` is the request, as JSON.

    The request gets our ``sys_path``: the child starts without site-packages, as looking for them costs a third of
    its start, and takes the path when it needs one.
    """
    sys_path = [os.path.abspath(entry) for entry in sys.path]
    text = json.dumps({**request, "sys_path": sys_path})
    return [sys.executable or "python3", "-I", "-S", "-c", _START.replace("MODULE", module), text, _ROOT]
