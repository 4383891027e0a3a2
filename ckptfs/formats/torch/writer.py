"""Files for ``torch.load``: a zip archive of stored records, laid out before any tensor is read.

=======================================  ======================================================================
record                                   content
=======================================  ======================================================================
``<prefix>/data.pkl``                    the state dict (`pickler`)
``<prefix>/byteorder``                   ``little``
``<prefix>/data/<n>``                    storage n: the tensor, 4 bytes of CRC-32, zeros (`sealed.Sealed`)
``<prefix>/version``                     ``3``
``<prefix>/.data/serialization_id``      40 digits, always the same
=======================================  ======================================================================

A tensor is the beginning of its storage, which is a few bytes longer: torch refuses records that are longer than
their storage. The record ``.format_version`` is left out: with it torch may compute offsets that hold for its own
writer only.
"""

from __future__ import annotations

from ckptfs.formats.extents import ExtentFile
from ckptfs.formats.nested import Value
from ckptfs.formats.sealed import Sealed, sealed_nbytes
from ckptfs.formats.torch.pickler import pickle_state
from ckptfs.formats.zip import Content, zip_file
from ckptfs.tensors.tensor import nbytes

SERIALIZATION_ID = b"0" * 40


def torch_file(state: Value, *, prefix: str = "archive") -> ExtentFile:
    """A file for ``torch.load`` that holds *state*: nested containers as `nested.nested_state` makes them.

    Tensors are contiguous; the same tensor object in two places shares one storage. Reads no tensor data.
    """
    pickle, tensors = pickle_state(state, sealed_nbytes)
    records: list[tuple[str, Content]] = [
        ("data.pkl", [pickle]),
        ("byteorder", [b"little"]),
        *((f"data/{i}", [Sealed(tensor)] if nbytes(tensor) else []) for i, tensor in enumerate(tensors)),
        ("version", [b"3\n"]),
        (".data/serialization_id", [SERIALIZATION_ID]),
    ]
    return zip_file((f"{prefix}/{name}", content) for name, content in records)
