"""Locks on a folder, with those of Unix and those of Windows."""

import fcntl
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dif.runtime import folder_lock
from dif.runtime.folder_lock import ByteLocks, WholeFileLocks, lock_folder, use_folder


def lock_bytes(file, mode, count):
    """Do what `msvcrt.locking` does, with Linux's locks of open files: they hold between files of one process, too."""
    kind = fcntl.F_UNLCK if mode == MSVCRT.LK_UNLCK else fcntl.F_WRLCK
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, 1, 0, count, 0))  # 1: from the present position


MSVCRT = SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=lock_bytes)


@pytest.fixture(params=["unix", "windows"])
def system(request, monkeypatch):
    if request.param == "windows":
        if not hasattr(fcntl, "F_OFD_SETLK"):
            pytest.skip("no locks of open files")
        monkeypatch.setattr(folder_lock, "find_locks", lambda: ByteLocks(MSVCRT))
    return request.param


def test_changes_wait_for_each_other(system, tmp_path):
    happened, held = [], threading.Event()

    def change():
        held.wait()
        with lock_folder(tmp_path):
            happened.append("second")

    other = threading.Thread(target=change)
    other.start()
    with lock_folder(tmp_path):
        held.set()
        time.sleep(0.2)
        happened.append("first")
    other.join(5)
    assert happened == ["first", "second"]


def test_a_folder_in_use_is_noticed_until_the_last_user_leaves(system, tmp_path):
    with use_folder(tmp_path) as first:
        assert not first
        second = use_folder(tmp_path)
        assert second.__enter__()
        with use_folder(tmp_path) as third:
            assert third
    with use_folder(tmp_path) as fourth:  # the first user has left, the second has not
        assert fourth
    second.__exit__(None, None, None)
    with use_folder(tmp_path) as alone:
        assert not alone


def test_the_lock_of_a_process_that_was_killed_is_gone(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom dif.runtime.folder_lock import lock_folder\n"
        "with lock_folder(pathlib.Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        process.kill()
    with lock_folder(tmp_path):
        pass


def test_each_system_gets_its_locks(monkeypatch):
    assert isinstance(folder_lock.find_locks(), WholeFileLocks)

    def import_on_windows(name):
        if name == "fcntl":
            raise ImportError(name)
        return MSVCRT

    monkeypatch.setattr(folder_lock, "import_module", import_on_windows)
    assert isinstance(folder_lock.find_locks(), ByteLocks)
