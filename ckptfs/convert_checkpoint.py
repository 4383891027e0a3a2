"""``python -m ckptfs.convert_checkpoint``: the command line of the public ``convert_checkpoint.py``.

Its commands list, convert, convert-config and diff are those of ``ckptfs``, with the same options. The module stands
beside the rooms because scripts call it by this name.
"""

from __future__ import annotations

from ckptfs.cli.main import main

if __name__ == "__main__":
    main()
