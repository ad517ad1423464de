"""Checksums of arrays: their definition, what they notice, and that shards add up."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nsa_jax.model import checksums

DTYPES = ("bool", "int8", "uint16", ml_dtypes.bfloat16, "float32", "int64", "float64", "complex64")


def example(dtype, shape=(3, 4, 5)):
    return np.random.default_rng(0).integers(-99, 99, size=shape).astype(dtype)


def by_loops(array):
    """The sum as its docstring defines it, in Python's integers."""
    words = array.view(f"u{min(4, array.itemsize)}")
    weights = [np.random.PCG64(axis).random_raw(size) | 1 for axis, size in enumerate(words.shape)]
    total = 0
    for index, word in np.ndenumerate(words):
        factors = [int(of_axis[place]) for of_axis, place in zip(weights, index, strict=True)]
        total += int(word) * int(np.prod(np.array(factors, object)))
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_sum_is_the_one_that_is_documented(dtype):
    array = example(dtype)

    assert checksums.of_arrays({"a": array}) == {"a": by_loops(array)}


def test_old_checkpoints_stay_readable():
    """These sums lie in checkpoints: a change of how they are computed would refuse all of them."""
    arrays = {"matrix": np.arange(6, dtype=np.float32).reshape(2, 3), "step": 7, "rate": 0.5}

    assert checksums.of_arrays(arrays) == {
        "matrix": "22280d92a2e00000",
        "step": "756f72aef4519099",
        "rate": "61a61a8d5be00000",
    }
    assert checksums.of_json({"nsa": {"b": 1.5, "a": None}}) == {"nsa": "504b1dfa"}


@pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_sum_of_an_array_is_that_of_its_parts(axis, dtype):
    array = example(dtype)
    first, second = np.split(array, [2], axis=axis)

    start = [2 if each == axis else 0 for each in range(3)]
    parts = int(checksums._sum(first, [0, 0, 0])) + int(checksums._sum(second, start))

    assert parts % 2**64 == int(checksums.of_arrays({"a": array})["a"], 16)


def test_a_long_vector_is_summed_in_stretches(monkeypatch):
    vector, whole = example("float32", (1000,)), checksums.of_arrays({"a": example("float32", (1000,))})

    monkeypatch.setattr(checksums, "STRETCH", 64)

    assert checksums.of_arrays({"a": vector}) == whole


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: np.dtype(dtype).name)
def test_every_changed_bit_and_every_exchange_of_neighbours_is_noticed(dtype):
    array = example(dtype, (2, 5))
    sums = {checksums.of_arrays({"a": array})["a"]}

    for bit in range(8 * array.nbytes):
        changed = bytearray(array.tobytes())
        changed[bit // 8] ^= 1 << bit % 8
        sums |= set(checksums.of_arrays({"a": np.frombuffer(changed, array.dtype).reshape(2, 5)}).values())
    exchanged = [array[:, [1, 0, 2, 3, 4]], array[::-1], np.zeros_like(array)]
    sums |= {checksums.of_arrays({"a": each})["a"] for each in exchanged}

    assert len(sums) == 1 + 8 * array.nbytes + len(exchanged)


def test_arrays_of_jax_numbers_and_strides_do_not_matter():
    array = example("float32", (4, 6))
    names = {
        "numpy": array,
        "jax": jnp.asarray(array),
        "columns first": np.asfortranarray(array),
        "a view": np.repeat(array, 2, axis=1)[:, ::2],
    }

    assert len(set(checksums.of_arrays(names).values())) == 1
    scalars = {"numpy": np.float32(0.5), "jax": jnp.float32(0.5), "array": np.array([0.5], np.float32)}
    assert len(set(checksums.of_arrays(scalars).values())) == 1


def test_what_is_copied_from_a_gpu_is_the_array():
    """The copy that is made of shards on other devices than the CPU, which has such memory too."""
    array = jnp.asarray(example("float32"))

    np.testing.assert_array_equal(checksums._copied(array, jax.devices()[0]), array)
