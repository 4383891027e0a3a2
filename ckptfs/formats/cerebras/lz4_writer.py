"""A Cerebras checkpoint with LZ4 chunks, as the real writer makes them. Its size is known only when it is written."""

from __future__ import annotations

from collections.abc import Callable

from ckptfs.formats.cerebras.state import State
from ckptfs.formats.cerebras.writer import RELEASE, plan_mdl
from ckptfs.formats.hdf5.writer import Write, write_lz4_chunks


def write_lz4(
    state: State, write: Write, *, release: str = RELEASE, progress: Callable[[int], object] | None = None
) -> None:
    """Write the file of *state*; *progress* gets the decoded bytes of each tensor. Raises what `mdl_file` raises."""
    write_lz4_chunks(plan_mdl(state, release=release, lz4=True), write, progress=progress)
