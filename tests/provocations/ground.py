"""How the messages of the files that lie in `dist_ens` itself are provoked."""

import jax
import numpy as np

from dist_ens import cluster, narrowing, optimizers, paths, state
from dist_ens.config import OptimizerConfig
from dist_ens.errors import BrokenMembersError


def _optimizer(**fields):
    return optimizers.make_optimizer(OptimizerConfig(**fields))


def a_cluster_without_all_its_flags():
    cluster.start(num_processes=2, process_id=0)


def an_address_without_a_port():
    cluster.start("10.0.0.1", 2, 0)


def a_number_of_a_process_that_is_not_there():
    cluster.start("10.0.0.1:1234", 2, 2)


def a_cluster_that_jax_does_not_find(monkeypatch):
    def refused(**_):
        raise ValueError("process_id and num_processes must be nonnegative.")

    monkeypatch.setattr(jax.distributed, "initialize", refused)
    cluster.start("10.0.0.1:1234", 2, 0)


def members_that_predict_nan():
    raise BrokenMembersError([3, 7])


def text_in_place_of_numbers():
    narrowing.narrowed(np.array(["a"]), "float32", "--input 'a.npy'")


def a_value_that_is_too_large():
    narrowing.narrowed(np.array([[1, 300]]), "uint8", "--input 'a.npy'")


def values_that_are_not_exact_in_another_type():
    narrowing.narrowed(np.array([2**25 + 1, 2**26 + 1]), "float32", "data.source", exact=True)


def an_optimizer_that_is_none():
    _optimizer(name="adamm")


def a_part_of_an_optimizer():
    _optimizer(name="scale_by_adam")


def a_field_among_the_options():
    _optimizer(options={"momentum": 0.9})


def an_option_that_is_a_python_object():
    _optimizer(name="adamw", options={"mask": 1})


def an_option_that_is_unknown():
    _optimizer(options={"beta1": 0.9})


def an_option_that_the_optimizer_refuses(monkeypatch):
    def refused(learning_rate, nesterov=False):
        raise TypeError("nesterov is a bool")

    monkeypatch.setitem(optimizers._FUNCTIONS, "adam", refused)
    _optimizer(name="adam")


def a_learning_rate_that_the_optimizer_does_not_take():
    _optimizer(name="polyak_sgd", learning_rate=0.1)


def a_momentum_that_the_optimizer_does_not_take():
    _optimizer(name="adam", momentum=0.9)


def a_weight_decay_of_adam():
    _optimizer(name="adam", weight_decay=0.1)


def no_learning_rate():
    _optimizer(name="sgd", learning_rate=None)


def a_schedule_of_an_optimizer_with_one_rate():
    _optimizer(name="sm3", schedule="cosine", schedule_steps=9)


def an_unknown_user():
    paths.given_path("~nobody_of_this_name/runs", "--workdir")


def an_empty_path():
    paths.given_path("", "--workdir")


def an_object_in_place_of_an_array():
    state.stack_members([{"w": object()}])


def members_of_other_shapes():
    state.stack_members([{"w": np.zeros(2)}, {"w": np.zeros(3)}])


def members_of_other_structure():
    state.stack_members([{"w": np.zeros(2)}, {"w": np.zeros(2), "b": None}])


def a_member_that_is_not_there():
    state.select_members({"w": np.zeros((2, 3))}, [0, 5])


def leaves_of_other_numbers_of_members():
    state.unstack_members({"w": np.zeros((2, 3)), "b": np.zeros((3, 3))})


def no_members():
    state.stack_members([])


def labels_that_are_text():
    state.held_array(np.array(["cat"]), "data['labels']")


def a_list_in_place_of_an_array():
    state.refuse_lists({"inputs": [[1.0, 2.0]]}, "the data")


def a_number_in_place_of_an_array():
    state.refuse_lists({"inputs": 1.0}, "the data")
