"""MNIST: a part is in this folder, the rest is read from a folder or downloaded.

Only data belong here; what is computed from them belongs to a study.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dif

EMBEDDED = (6_000, 1_000)  # training and test images included here, the first of each set
_ALL = (60_000, 10_000)  # training and test images of the full data set
_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # address of the files
_FILES = {  # name: (sha256 as distributed, sha256 unpacked)
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte.gz": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte.gz": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}


@dataclass(frozen=True, eq=False)
class Digits:
    """Images, (n, 28, 28) uint8, and labels, (n,), of the training and of the test set."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def mnist(n: int = EMBEDDED[0], n_test: int = EMBEDDED[1], *, data: str | os.PathLike[str] | None = None) -> Digits:
    """Return the first n training and n_test test images of MNIST (LeCun, Cortes, Burges; CC BY-SA 3.0).

    Args:
        n: Number of training images.
        n_test: Number of test images.
        data: A folder with the four files as distributed (idx, gzip). None: use the part included here, or
            if that is too small, download the files into the user's cache (with pooch). Checksums are verified.

    >>> digits = mnist(100, 10)
    >>> digits.train.shape, digits.train_labels[:3].tolist()
    (torch.Size([100, 28, 28]), [5, 0, 4])
    """
    if not (1 <= n <= _ALL[0] and 1 <= n_test <= _ALL[1]):
        raise dif.InvalidInputError(
            f"MNIST has {_ALL[0]} training and {_ALL[1]} test images; `n` is {n} and `n_test` is {n_test}."
        )
    if data is not None:
        arrays = [_read(Path(data) / name) for name in _FILES]
    elif n <= EMBEDDED[0] and n_test <= EMBEDDED[1]:
        with np.load(Path(__file__).with_name("mnist.npz"), allow_pickle=False) as stored:
            arrays = [stored[f"{part}_{kind}"] for part in ("train", "test") for kind in ("images", "labels")]
    else:
        arrays = [_read(_download(name)) for name in _FILES]
    tensors = [torch.tensor(array[:count]) for array, count in zip(arrays, (n, n, n_test, n_test), strict=True)]
    return Digits(tensors[0], tensors[1].long(), tensors[2], tensors[3].long())


def _download(name: str) -> Path:
    """Download a file of MNIST into the user's cache, unless it is there, and return its path."""
    import pooch

    return Path(
        pooch.retrieve(
            _MIRROR + name, f"sha256:{_FILES[name][0]}", fname=name, path=pooch.os_cache("dif"), progressbar=False
        )
    )


def _read(path: Path) -> np.ndarray:
    """Read an array from a file of MNIST (idx, gzip) and verify its checksum."""
    if not path.is_file():
        raise FileNotFoundError(
            f"The folder {str(path.parent)!r} has no file {path.name!r}. "
            f"A data folder must contain the four files of MNIST: {', '.join(_FILES)}."
        )
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise _damaged_error(path, f"is no gzip file ({type(error).__name__}: {error})") from error
    checksum = hashlib.sha256(raw).hexdigest()
    if checksum != _FILES[path.name][1]:
        raise _damaged_error(path, f"has the sha256 {checksum[:16]}… when unpacked")
    dimensions = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(dimensions)


def _damaged_error(path: Path, state: str) -> dif.InvalidInputError:
    """Build the error for a file whose content is not that of MNIST."""
    expected = _FILES[path.name][1][:16]
    return dif.InvalidInputError(f"The MNIST file {str(path)!r} {state}, not {expected}…; download it again.")
