"""Two runs on the same cores: idle OpenMP threads sleep at once while other processes want their cores.

libgomp, the OpenMP library of PyTorch on Linux, lets a thread that waits for work loop for milliseconds before it
sleeps. Alone on the machine that is fast. Beside another process each loop keeps a core from it, and both become many
times slower. libgomp stops looping when a process has more OpenMP threads than there are cores; so while the cores are
crowded we add a team of threads that sleeps. The threads that compute, and so all results, stay the same.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

INTERVAL = 0.5  # seconds
CROWDED = 100  # switches a second in which the system takes a core away; alone 5 to 80, beside another run 140 and more


def sleep_when_crowded(cores: int) -> None:
    """Watch from now on whether other processes want the cores. Without effect where there is no libgomp."""
    global _watching
    if _watching or sys.platform != "linux" or (library := _libgomp()) is None:
        return
    _watching = True
    threading.Thread(target=_watch, args=(library, cores), name="crowding", daemon=True).start()


_watching = False


def _watch(library: ctypes.CDLL, cores: int) -> None:
    import resource

    crowd: threading.Event | None = None
    switches, when = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.monotonic()
    while True:
        time.sleep(INTERVAL)
        before, then = switches, when
        switches, when = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.monotonic()
        crowded = switches - before > CROWDED * (when - then)
        if crowded and crowd is None:
            crowd = threading.Event()
            threading.Thread(target=_sleeping_team, args=(library, cores + 1, crowd), daemon=True).start()
        elif not crowded and crowd is not None:
            crowd.set()  # the team ends with its thread
            crowd = None


def _sleeping_team(library: ctypes.CDLL, threads: int, end: threading.Event) -> None:
    nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
    library.GOMP_parallel(nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
    end.wait()


def _libgomp() -> ctypes.CDLL | None:
    """The library that this process has loaded already; None if there is none."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libgomp" in os.path.basename(line.split()[-1])}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None
