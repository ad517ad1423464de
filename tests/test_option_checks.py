"""Checks of options take the ends of their ranges; `test_bad_calls` has what they refuse."""

import numpy as np
import pytest
from messages import refused

from nsa_jax import option_checks


def test_ints_may_be_the_first_and_the_last_of_their_range():
    option_checks.check_int(a=2**31 - 1, b=np.int64(-(2**62)))
    option_checks.check_int(low=-3, high=5, a=-3, b=5, c=np.int8(5))


@pytest.mark.parametrize("value", [-4, 6, 2**31], ids=str)
def test_ints_beyond_their_range_are_refused(value):
    with refused(ValueError, f"a must be at (least|most) -?[35], got {value}"):
        option_checks.check_int(low=-3, high=5, a=value)


@pytest.mark.parametrize("dtype", ["bfloat16", np.float16, np.dtype("float32"), float], ids=str)
def test_floating_dtypes_have_many_names(dtype):
    option_checks.check_dtype(dtype=dtype)
