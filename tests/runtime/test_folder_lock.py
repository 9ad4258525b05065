"""The lock of a folder, with that of Unix and that of Windows."""

import fcntl
import importlib
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dif.runtime import archive
from dif.runtime.archive import lock_folder


def lock_bytes(file, mode, count):
    """Do what `msvcrt.locking` does, with Linux's locks of open files: they hold between files of one process, too."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 1, 0, count, 0))  # 1: from the position


MSVCRT = SimpleNamespace(LK_NBLCK=2, locking=lock_bytes)


def import_on_windows(name):
    if name == "fcntl":
        raise ImportError(name)
    return MSVCRT if name == "msvcrt" else importlib.import_module(name)


@pytest.fixture(params=["unix", "windows"])
def system(request, monkeypatch):
    if request.param == "windows":
        if not hasattr(fcntl, "F_OFD_SETLK"):
            pytest.skip("no locks of open files")
        monkeypatch.setattr(archive, "import_module", import_on_windows)
    return request.param


def test_changes_wait_for_each_other(system, tmp_path):
    happened, held = [], threading.Event()

    def change():
        held.wait()
        with lock_folder(tmp_path):
            happened.append("second")

    other = threading.Thread(target=change)
    other.start()
    with lock_folder(tmp_path) as locked:
        assert locked
        held.set()
        time.sleep(0.2)
        happened.append("first")
    other.join(5)
    assert happened == ["first", "second"]


def test_who_does_not_wait_is_told_of_others(system, tmp_path):
    with lock_folder(tmp_path, wait=False) as alone:
        assert alone
        with lock_folder(tmp_path, wait=False) as second:
            assert not second
        with lock_folder(tmp_path, "of something else", wait=False) as other:
            assert other
    with lock_folder(tmp_path, wait=False) as again:
        assert again


def test_the_lock_of_a_process_that_was_killed_is_gone(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom dif.runtime.archive import lock_folder\n"
        "with lock_folder(pathlib.Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        process.kill()
    with lock_folder(tmp_path):
        pass
