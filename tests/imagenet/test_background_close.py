"""What a dropped dataset leaves behind is closed in a thread, and the interpreter may end meanwhile."""

from __future__ import annotations

import gc
import threading

from monai_gds.imagenet.background_close import close_when_dropped
from tests.fresh import printed_by


class Owner:
    """Something that is dropped."""


def test_it_is_closed_in_another_thread_and_an_error_there_is_nobodys() -> None:
    closed: list[str] = []
    done = threading.Event()

    def fail() -> None:
        closed.append(threading.current_thread().name)
        raise ValueError("nobody is told")

    for close in (fail, lambda: (closed.append(threading.current_thread().name), done.set())):
        owner = Owner()
        close_when_dropped(owner, close)  # type: ignore[arg-type]
        del owner
        gc.collect()
    assert done.wait(20)
    assert closed == ["monai-gds-closing"] * 2


def test_the_interpreter_waits_for_what_is_being_closed() -> None:
    """A daemon thread that comes back from a C++ call while the interpreter ends would end the process with SIGABRT."""
    said = printed_by(
        """
import threading, torch
from monai_gds.imagenet.background_close import close_when_dropped

class Owner:
    pass

begun = threading.Event()

def close():
    begun.set()
    values = torch.rand(1000, 1000)
    for _ in range(20):
        values = (values @ values).clamp(-1, 1)
    print("closed", flush=True)

owner = Owner()
close_when_dropped(owner, close)
del owner
begun.wait(60)
        """,
        whole=True,
    )
    assert said == "closed"
