"""Checks of options take the ends of their ranges, and what they say; `test_bad_calls` has who asks them."""

import math

import numpy as np
import pytest
from messages import refused

from nsa_jax import option_checks


def test_ints_may_be_the_first_and_the_last_of_their_range():
    option_checks.check_int(a=2**31 - 1, b=np.int64(-(2**62)))
    option_checks.check_int(low=-3, high=5, a=-3, b=5, c=np.int8(5))


MESSAGES = [
    (option_checks.check_int, True, TypeError, "a must be an int, got bool. Pass a whole number."),
    (option_checks.check_ints, 3, TypeError, "a must be a sequence of ints, got int. Pass a list."),
    (option_checks.check_ints, "3", TypeError, "a must be a sequence of ints, got str. Pass a list."),
    (option_checks.check_ints, np.array(3), TypeError, "a must be a sequence of ints, got ndarray. Pass"),
    (option_checks.check_ints, [3, 2.5], TypeError, r"a\[1\] must be an int, got float. Pass a whole"),
    (option_checks.check_number, "3", TypeError, "a must be a number, got str. Pass an int or a float."),
    (option_checks.check_number, math.nan, ValueError, "a must be finite, got nan. Pass an ordinary number."),
    (option_checks.check_positive, True, TypeError, "a must be a number, got bool. Pass an int or a float."),
    (option_checks.check_positive, 0.0, ValueError, "a must be finite and above 0, got 0.0. Pass a positive"),
    (option_checks.check_flag, "no", TypeError, "a must be True or False, got str. Pass a bool."),
    (option_checks.check_function, 3, TypeError, "a must be a function, got int. Pass a function."),
    (option_checks.check_dtype, "bf16", ValueError, "a must be floating, got 'bf16'. Pass one of"),
    (option_checks.check_dtype, np.int32, ValueError, "a must be floating, got int32. Pass one of"),
]


@pytest.mark.parametrize(
    ("check", "value", "error", "told"), MESSAGES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_what_is_said(check, value, error, told):
    with refused(error, f"^{told}"):
        check(a=value)


def test_names_that_are_not_known():
    with refused(ValueError, r"^a must be one of \('x', 'y'\), got 'z'\. Choose one of them\."):
        option_checks.check_choice(("x", "y"), a="z")


@pytest.mark.parametrize("value", [-4, 6, 2**31], ids=str)
def test_ints_beyond_their_range_are_refused(value):
    with refused(ValueError, f"a must be at (least|most) -?[35], got {value}"):
        option_checks.check_int(low=-3, high=5, a=value)


@pytest.mark.parametrize("values", [[3, 4], (3,), range(3, 9), np.array([3, 4]), []], ids=repr)
def test_sequences_of_ints(values):
    option_checks.check_ints(low=3, a=values)
    with refused(ValueError, rf"a\[{len(values)}\] must be at least 3, got 2\."):
        option_checks.check_ints(low=3, a=[*values, 2])


@pytest.mark.parametrize("dtype", ["bfloat16", np.float16, np.dtype("float32"), float], ids=str)
def test_floating_dtypes_have_many_names(dtype):
    option_checks.check_dtype(dtype=dtype)
