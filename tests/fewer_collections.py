"""Python looks for garbage less often: `pytest -p tests.fewer_collections`, from the root of the repository.

A process that has traced hundreds of programs holds millions of objects, and a tenth of its time would go
into looking at them. When all is done it does not look at all; Python would once, and pytest five times.
Programs that tests run import it themselves. This is not in `conftest.py`, on which the proof of each GPU
test rests.

What JAX has compiled goes before a process has as many memory maps as Linux allows, 65530: XLA ends with a
segmentation fault then. Each program has some, and a worker of pytest runs thousands.
"""

import atexit
import gc
import pathlib

MOST_MAPS = 40_000  # looked at after each file of tests; one adds 15,000 at most

_MAPS = pathlib.Path("/proc/self/maps")

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)


def pytest_sessionfinish():
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Drops all programs after a file of tests, if there are too many."""
    if (nextitem is not None and nextitem.path == item.path) or not _MAPS.exists():
        return
    with _MAPS.open("rb") as maps:
        many = sum(1 for _ in maps) > MOST_MAPS
    if many:
        import jax

        jax.clear_caches()
        gc.collect()
