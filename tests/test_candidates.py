"""Which executions are worth trying, by the operations of a network."""

import jax
import numpy as np
import pytest

import dist_ens
import networks
from dist_ens.ensemble.programs import step_of_one
from dist_ens.execution import heuristics as room
from dist_ens.execution.spec import Execution
from dist_ens.layout import Layout, copied
from marked import long
from test_executions import narrow, pooling


def program(network, num_members=4, steps=2, devices=1):
    """An ensemble on some devices, its state and the batches of a call."""
    layout = Layout.make(num_members, devices=jax.devices()[:devices])
    return networks.program(network, layout, steps)


def wide():
    """Of which one member's product keeps a core busy: 2**22 multiplications."""
    side = 2**11 // int(networks.BATCH**0.5)
    return networks.of_config("mlp", (4,), hidden_sizes=(side, side))


def candidates(ensemble, state, batches, steps=2):
    return room.candidates(ensemble.layout, ensemble.traced_update(state, batches), steps)


def candidates_of(network, num_members, steps=2):
    """Candidates for a program on one device, of which only shapes are known."""
    member, inputs, label_shape = network()
    layout = networks.layout_on((1, 1), num_members)
    ensemble = networks.ensemble_of(member, networks.SGD, layout)
    state = ensemble.abstract_state({"inputs": inputs})
    return candidates(ensemble, state, networks.batches_for(inputs, label_shape, steps), steps)


@pytest.mark.parametrize(
    ("network", "num_members", "first"),
    [
        (networks.mlp, 4, "vmap"),
        (networks.mlp, 1, "vmap"),
        (narrow, 4, "vmap+aligned"),
        (narrow, 1, "vmap+aligned"),
        (networks.transformer, 4, "vmap+flat"),
        (networks.transformer, 1, "vmap+flat"),
        (networks.convolutional, 4, "unroll+canonical"),
        (pooling, 4, "unroll+canonical+masks"),
        (pooling, 17, "map+canonical+masks"),  # so many copies take long to compile
        (wide, 4, "map+aligned"),
    ],
)
def test_the_rule_goes_by_the_networks_operations(network, num_members, first):
    names = candidates_of(network, num_members)
    assert names[0] == first
    assert len(set(names)) == len(names) > 1
    assert [str(Execution.parse(name)) for name in names] == names


@pytest.mark.parametrize("network", [narrow, *long(pooling)])
def test_every_program_outside_of_fit_takes_the_rules_choice_for_auto(network):
    ensemble, state, batches = program(network)
    inputs = batches["inputs"][0]

    def texts(execution):
        """The programs of an update of several steps, of an update, and of a prediction."""
        by = ensemble.replace(execution=execution)
        step = step_of_one(by)
        specs = {"in_specs": ("members", "batch"), "out_specs": "members"}
        lifted = dist_ens.lift(step, layout=by.layout, execution=execution, **specs)
        one = {name: leaf[0] for name, leaf in batches.items()}
        lowered = (
            by.update_steps.lower(state, batches),
            lifted.lower(state, one),
            by.outputs.lower(state, inputs),
        )
        return [each.as_text() for each in lowered], by.update(copied(state), one)[1]["loss"]

    (found, loss), (expected, same_loss) = map(
        texts, ("auto", candidates(ensemble, state, batches)[0])
    )
    assert found == expected
    np.testing.assert_array_equal(loss, same_loss)
    others, _ = texts("vmap")
    assert all(a != b for a, b in zip(found, others, strict=True))


def test_what_takes_long_to_compile_is_no_candidate():
    def ways(network, num_members, steps=2):
        found = candidates_of(network, num_members, steps)
        return {name.partition("+")[0] for name in found if "canonical" not in name}

    assert "unroll" in ways(wide, 16, steps=20)  # a loop over the steps: one copy per member
    assert "unroll" not in ways(wide, 17)
    assert "unroll" in ways(networks.convolutional, 8)
    assert "unroll" not in ways(networks.convolutional, 8, steps=3)  # a copy per step too


def test_many_small_members_may_be_batched_some_at_a_time():
    for network, num_members, expected in [
        (networks.mlp, 20, ["chunk:10"]),
        (narrow, 14, ["chunk:7+aligned"]),
        (networks.mlp, 512, ["chunk:64"]),
        (networks.mlp, 23, []),  # no size from 5 to 64 divides it
        (networks.mlp, 10, []),  # few
        (wide, 20, []),  # a member's own products keep a core busy
    ]:
        found = candidates_of(network, num_members)
        assert [name for name in found if "chunk" in name] == expected
