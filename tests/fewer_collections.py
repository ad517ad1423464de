"""Python looks for garbage less often: `pytest -p tests.fewer_collections`, from the root of the repository.

A process that has traced hundreds of programs holds millions of objects, and a tenth of its time would go
into looking at them. Programs that tests run import it themselves. This is not in `conftest.py`, on which
the proof of each GPU test rests.
"""

import gc

gc.set_threshold(50_000, 20, 20)
