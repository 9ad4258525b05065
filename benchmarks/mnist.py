"""The files that MNIST is distributed in."""

import gzip
import struct
from pathlib import Path

import numpy as np


def idx(path: Path) -> np.ndarray:
    """An array in the format that MNIST is distributed in."""
    raw = gzip.decompress(path.read_bytes())
    dimensions = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(dimensions)
