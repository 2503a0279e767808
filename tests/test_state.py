"""Lists of members and pytrees of arrays."""

import functools
import re

import jax
import numpy as np
import pytest

from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import member_key
from dist_ens.ground.state import State, select_members, stack_members, unstack_members

pytestmark = pytest.mark.quick


def mlp(hidden, seed=0):
    random = np.random.default_rng(seed)
    return [{"w": random.normal(size=(4, hidden)).astype(np.float32), "b": np.zeros(hidden)}]


def test_stacking_and_unstacking_are_inverse():
    members = [mlp(3, seed) for seed in range(5)]
    stacked = stack_members(members)
    assert stacked[0]["w"].shape == (5, 4, 3)
    assert stacked[0]["b"].dtype == np.float32  # which was float64
    for member, again in zip(members, unstack_members(stacked), strict=True):
        jax.tree.map(np.testing.assert_array_equal, member, again)


def test_a_subset_is_taken_in_the_order_asked_for():
    stacked = stack_members([mlp(3, seed) for seed in range(5)])
    chosen = select_members(stacked, [4, 0])
    np.testing.assert_array_equal(chosen[0]["w"], stacked[0]["w"][np.array([4, 0])])
    assert STATE.select(np.array([1, 4])).member_id.tolist() == [1, 4]


STATE = State(np.zeros(3, np.int32), np.array([4, 1, 2], np.int32), (), {}, (), ())
REFUSED = [
    (stack_members, [], "The list of members is empty"),
    (
        *(stack_members, [mlp(3), mlp(3), mlp(512)]),
        "Member 2 cannot be stacked with member 0: leaf [0]['b'] is float32[512] in member 2 "
        "and float32[3] in member 0. All members of one ensemble share one architecture.",
    ),
    (stack_members, [mlp(3), mlp(3) * 2], "[1]['b'] is float32[3] in member 1 and absent in memb"),
    (stack_members, [mlp(3), [{"w": mlp(3)[0]["w"]}]], "leaf [0]['b'] is absent in member 1"),
    (stack_members, [{"w": np.array([0, 1e300])}] * 2, "Leaf ['w']: the value 1e+300 at index 1 "),
    (stack_members, [{"w": np.array([0, 2**31])}] * 2, "the value 2147483648 at index 1 does not"),
    (
        *(unstack_members, {"a": np.zeros(2), "b": np.zeros((3, 1))}),
        "[2] in leaf ['a'], [3] in leaf ['b']",
    ),
    (
        *(functools.partial(select_members, stack_members([mlp(3)] * 5)), [5, 0, -1]),
        "Positions [5, -1] do not exist: the ensemble has 5 members",
    ),
    *(
        (STATE.select, ids, "Give ids that it has, each once")
        for ids in ([1, 1], [], np.array([3]))
    ),
]


@pytest.mark.parametrize(("function", "argument", "sentence"), REFUSED)
def test_members_that_do_not_fit_or_do_not_exist_are_named(function, argument, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        function(argument)


def test_a_members_key_is_its_own():
    keys = {tuple(jax.random.key_data(member_key(s, i)).tolist()) for s in (0, 1) for i in range(9)}
    assert len(keys) == 18
