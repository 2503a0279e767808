"""How the messages of `dist_ens.layout`, `sampling` and `execution` are provoked."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.execution.lift import lift
from dist_ens.layout import REPLICATED, Layout, specs_of_batch
from dist_ens.sampling import Order
from provocations._parts import layout


def fewer_devices_than_asked_for(monkeypatch):
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--xla_force_host_platform_device_count=64")
    Layout.make(4)


def no_devices():
    Layout.make(4, devices=[])


def members_that_do_not_divide_over_the_mesh():
    Layout.make(6, ensemble_axis=4)


def devices_that_do_not_divide_over_the_mesh():
    Layout.make(6, ensemble_axis=6)


def a_batch_that_does_not_divide_over_the_columns():
    layout(2, num_devices=8).check_batch_size("data.global_batch_size", 30)


def a_batch_smaller_than_the_columns():
    layout(2, num_devices=8).check_batch_size("data.global_batch_size", 3)


def an_array_on_other_devices():
    there = jax.device_put(jnp.zeros(8), jax.devices()[5])
    layout().placed({"inputs": there}, REPLICATED, "the batch")


def a_spec_that_no_argument_has():
    layout().put(jnp.zeros(8), jax.sharding.PartitionSpec(None, "ensemble"))


def a_name_of_a_spec_that_is_unknown():
    layout().put(jnp.zeros(8), "replicated")


def a_batch_that_does_not_divide_over_the_mesh():
    layout(2, num_devices=8).put(jnp.zeros((30, 4)))


def an_array_for_another_number_of_members():
    layout().put({"w": jnp.zeros((3, 4))}, "members")


def a_number_among_the_batch():
    layout(2, num_devices=4).put({"inputs": np.zeros((8, 4)), "temperature": np.float32(1)})


def a_leaf_that_does_not_divide():
    layout(2, num_devices=4).put({"inputs": np.zeros((8, 4)), "labels": np.zeros(7)})


def a_part_of_the_batch_that_is_not_there():
    specs_of_batch({"border": "shared"}, {"inputs": np.zeros((8, 4))})


def a_split_that_is_too_large():
    Order(2**31, 128)


def groups_in_one_order():
    Order(100, 10, num_groups=2)


def more_folds_than_examples():
    Order(4, 2, num_folds=5)


def a_batch_larger_than_an_epoch():
    Order(100, 128)


def _lift(fn=jnp.sum, in_specs=("members", "batch"), **options):
    return lift(fn, layout=layout(), in_specs=in_specs, **options)


def a_lifted_array():
    _lift(3)


def one_spec_for_all_arguments():
    _lift(in_specs="members")


def a_lifted_function_in_its_fastest_way():
    _lift(execution="auto")


def a_lifted_function_of_several_steps():
    _lift(execution="vmap+scanned")


def a_result_without_members():
    _lift(lambda params, batch: params, out_specs="shared")(jnp.zeros(2), jnp.zeros(8))


def a_lifted_function_with_one_argument():
    _lift()(jnp.zeros(2))
