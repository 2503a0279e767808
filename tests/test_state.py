"""Lists of members and pytrees of arrays."""

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
    for member, again in zip(members, unstack_members(stacked), strict=True):
        jax.tree.map(np.testing.assert_array_equal, member, again)


def test_a_subset_is_taken_in_the_order_asked_for():
    stacked = stack_members([mlp(3, seed) for seed in range(5)])
    chosen = select_members(stacked, [4, 0])
    np.testing.assert_array_equal(chosen[0]["w"], stacked[0]["w"][np.array([4, 0])])
    with pytest.raises(
        UserError, match=re.escape("Positions [5, -1] do not exist: the ensemble has 5 m")
    ):
        select_members(stacked, [5, 0, -1])


@pytest.mark.parametrize(
    ("third", "sentence"),
    [
        (
            mlp(512),
            "Member 2 cannot be stacked with member 0: leaf [0]['b'] is float32[512] in member 2 "
            "and float32[3] in member 0. All members of one ensemble share one architecture.",
        ),
        (mlp(3) + mlp(3), "leaf [1]['b'] is float32[3] in member 2 and absent in member 0."),
        ([{"w": mlp(3)[0]["w"]}], "leaf [0]['b'] is absent in member 2"),
    ],
)
def test_members_that_do_not_fit_are_named(third, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        stack_members([mlp(3), mlp(3), third])


def test_an_empty_list_and_leaves_of_several_lengths_are_refused():
    with pytest.raises(UserError, match="The list of members is empty"):
        stack_members([])
    with pytest.raises(UserError, match=re.escape("[2] in leaf ['a'], [3] in leaf ['b']")):
        unstack_members({"a": np.zeros(2), "b": np.zeros((3, 1))})


def test_members_are_selected_by_the_ids_of_an_array_each_once():
    state = State(np.zeros(3, np.int32), np.array([4, 1, 2], np.int32), (), {}, (), ())
    assert state.select(np.array([1, 4])).member_id.tolist() == [1, 4]
    for ids in ([1, 1], [], np.array([3])):
        with pytest.raises(UserError, match="Give ids that it has, each once"):
            state.select(ids)


def test_a_members_key_is_its_own():
    keys = {tuple(jax.random.key_data(member_key(s, i)).tolist()) for s in (0, 1) for i in range(9)}
    assert len(keys) == 18


def test_a_number_of_a_member_that_does_not_fit_in_32_bits_is_refused():
    stacked = stack_members([{"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 4.0])}])
    assert stacked["w"].dtype == np.float32
    for too_large in (np.array([0.0, 1e300]), np.array([0, 2**31])):
        with pytest.raises(UserError, match=r"Leaf \['w'\]: the value .* at index 1 does not fit"):
            stack_members([{"w": too_large}] * 2)
