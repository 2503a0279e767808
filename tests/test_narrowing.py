"""Conversion of arrays to the types in which JAX holds them."""

import re

import jax
import numpy as np
import pytest

from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import held_dtype, narrowed

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "dtype", ["bool", "i1", "i2", "i4", "i8", "u1", "u4", "u8", "f2", "f4", "f8", ">i4", ">f8"]
)
def test_the_held_type_is_the_one_that_jax_gives(dtype):
    native = np.zeros(1, dtype).astype(np.dtype(dtype).newbyteorder("="))
    assert held_dtype(dtype) == jax.numpy.asarray(native).dtype


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([-(2**31), 2**31 - 1]), "int32"),
        (np.array([2**32 - 1], np.uint64), "uint32"),
        (np.array([-128.0, 127.0, -0.0]), "int8"),
        (np.array([0.0, 255.0], np.float16), "uint8"),
        (np.array([0, 1]), "bool"),
        (np.array([True, False]), "int32"),
        (np.array([1, 2], ">i4"), "int32"),
        (np.array([3.4e38, -1e-46]), "float32"),  # the second is rounded to 0
        (np.array([2**40 + 1]), "float32"),
        (np.array([np.nan, np.inf]), "float32"),
        (np.zeros((0, 2)), "int32"),
    ],
)
def test_values_that_fit_are_converted_as_numpy_does(array, dtype):
    converted = narrowed(array, dtype, "x")
    assert converted.dtype == dtype
    assert converted.dtype.isnative
    np.testing.assert_array_equal(converted, array.astype(dtype))


@pytest.mark.parametrize(
    ("array", "dtype", "sentence"),
    [
        (
            np.array([[1, 2], [3, 2**31 + 5], [5, 2**40 + 7]]),
            "int32",
            "x: the value 2147483653 at index (1, 1) does not fit in int32 (2 values do not fit).",
        ),
        (np.array([0, -1]), "uint8", "the value -1 at index 1 does not fit in uint8"),
        (np.array([2**63], np.uint64), "int64", "the value 9223372036854775808 at index 0 does"),
        (np.array([1, 1e39]), "float32", "the value 1e+39 at index 1 does not fit in float32."),
        (np.array([70_000]), "float16", "the value 70000 at index 0 does not fit in float16."),
        (np.array([1.0, 0.5]), "int32", "the value 0.5 at index 1 does not fit in int32."),
        # 2**63 - 1 is rounded to 2**63 in float64, which int64 has not.
        (np.array([2.0**63]), "int64", "at index 0 does not fit in int64."),
        (np.array([np.nan]), "int32", "the value nan at index 0 does not fit in int32."),
        (np.array([0, 2]), "bool", "the value 2 at index 1 does not fit in bool."),
        (np.array(["1"]), "int32", "x has the type <U1, which holds no real numbers."),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_index(array, dtype, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        narrowed(array, dtype, "x")


def test_whole_numbers_are_not_rounded_where_they_must_be_exact():
    largest = np.array([-(2**53), 2**53])
    assert narrowed(largest, "float64", "x", exact=True).tolist() == largest.tolist()
    with pytest.raises(UserError, match="does not fit in float64"):
        narrowed(largest + 1, "float64", "x", exact=True)
