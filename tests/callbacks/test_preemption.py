"""`GracefulPreemption` in this process: it leaves nothing behind, and a second run starts afresh."""

import os
import signal
import threading

from rlite.callbacks import GracefulPreemption


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_second_run_knows_nothing_of_the_signal_of_the_first_and_no_file_stays_open() -> None:
    preemption, handlers = GracefulPreemption(), [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    before = _num_open_files()
    for sends in (True, False):
        preemption.on_train_start(None, None)
        assert _num_open_files() == before + 2
        assert not preemption.requested
        if sends:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.requested
        preemption.teardown(None, None, "fit")
        assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)] == handlers
        assert signal.set_wakeup_fd(-1) == -1, "the wake-up pipe is gone"
        for thread in threading.enumerate():
            if thread.name == "rlite-preemption":
                thread.join()
        assert _num_open_files() == before
