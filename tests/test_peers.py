"""The benchmark's ways train the same networks on the same batches."""

import dataclasses
import json
import time
from functools import partial

import jax
import numpy as np
import pytest

import fast_xla
import networks
from benchmarks.peers import compare
from benchmarks.peers.by_hand import first_states
from benchmarks.peers.dist_ens_way import DistEns
from benchmarks.peers.flax_pmap import FlaxPmap
from benchmarks.peers.flops import model_flops
from benchmarks.peers.jax_loop import JaxLoop
from benchmarks.peers.jax_scan import JaxScan
from benchmarks.peers.jax_vmap import JaxVmap
from benchmarks.peers.order import Order
from benchmarks.peers.way import Absent
from benchmarks.workloads import WORKLOADS, Workload
from commands import python
from dist_ens.execution import timing
from dist_ens.experiment import OptimizerConfig

# Of Adam's, steps along a gradient that is zero but for rounding are as long as any other.
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9)


def small(name, optimizer=SGD):
    """A workload with few members and examples."""
    workload = WORKLOADS[name]()
    few = {"inputs": workload.inputs[:10], "labels": workload.labels[:10]}
    few |= {"num_members": 2, "batch_size": 4}
    return dataclasses.replace(workload, optimizer=optimizer, **few)


def tiny(network):
    """A workload of one of the tests' networks."""
    member, inputs, label_shape = network()
    first = {k: v[0] for k, v in networks.batches_for(inputs, label_shape, 1).items()}
    first |= {"name": "tiny", "title": "", "network": network.__name__}
    return Workload(**first, num_members=2, batch_size=4, bare_member=member, optimizer=SGD)


KINDS = {
    "mlp with own batches": lambda: small("W2"),
    "convolutional": lambda: tiny(networks.convolutional),
    "transformer": lambda: tiny(networks.transformer),
}


def states_after(make_way, workload, num_steps):
    """Of all members, leaves [members, ...]."""
    way = make_way(workload)
    way.run(num_steps)
    if isinstance(way.states, list):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *way.states)
    return jax.device_get(way.states)


def assert_close(tree, other):
    """The leaves of two trees are the same to rounding."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), tree, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_jax_ways_end_with_the_same_members(kind):
    workload = KINDS[kind]()
    loop, scan, vmap = (states_after(way, workload, 3) for way in (JaxLoop, JaxScan, JaxVmap))
    first = jax.tree.leaves(first_states(workload)[0].params)
    ends = zip(jax.tree.leaves(loop.params), first, strict=True)
    assert max(np.abs(end[0] - begin).max() for end, begin in ends) > 1e-3
    assert_close(loop, scan)
    assert_close(loop, vmap)


def test_dist_ens_trains_the_members_of_the_loop():
    # All examples at every step, for they draw batches in orders of their own.
    workload = dataclasses.replace(tiny(networks.mlp), batch_size=networks.BATCH)
    loop, lifted = JaxLoop(workload), DistEns(workload, "vmap")
    for way in (loop, lifted):
        way.run(3)
    for m, state in enumerate(loop.states):
        assert_close(state.params, jax.tree.map(lambda leaf, m=m: leaf[m], lifted.state.params))


def test_pmap_puts_a_member_on_each_device():
    workload = tiny(networks.mlp)
    loop, pmap = (states_after(way, workload, 3) for way in (JaxLoop, FlaxPmap))
    assert_close(loop, pmap)
    with pytest.raises(Absent, match="one device for each of 9 members, and there are 8 devices"):
        FlaxPmap(dataclasses.replace(workload, num_members=9))


def test_an_epoch_holds_every_example_once_however_it_is_drawn():
    workload = small("W2")  # batches of 4 out of 10: 5 batches are 2 epochs
    order = Order(workload)
    stream = np.concatenate([order.draw(n) for n in (1, 3, 1)], axis=1).reshape(2, 2, 10)
    np.testing.assert_array_equal(np.sort(stream), np.broadcast_to(np.arange(10), (2, 2, 10)))
    assert len({tuple(epoch) for epoch in stream.reshape(4, 10)}) == 4
    shared = Order(dataclasses.replace(workload, own_batches=False))
    assert shared.draw(3).shape == (1, 3, 4)


def test_the_flops_of_a_step_are_those_of_its_matrix_products():
    # 784-512-512-10: weights 401,408 + 262,144 + 5,120 = 668,672; forward, and backward for the
    # weights and for the inputs, but for the first layer's: 3 * 668,672 - 401,408 = 1,604,608
    # multiplications and additions per example.
    assert model_flops(small("W3")) == 2 * 4 * 2 * 1_604_608


class Sleep:
    """A way of a millisecond a step."""

    execution = "asleep"

    def run(self, num_steps):
        time.sleep(num_steps * 1e-3)


def test_a_comparison_has_a_figure_for_every_way_that_can_do_the_workload(monkeypatch, sleep):
    monkeypatch.setattr(timing, "TURN_SECS", 0.01)
    monkeypatch.setattr(compare, "Matmul", Sleep)
    workload = dataclasses.replace(tiny(networks.mlp), name="W3", num_members=16)
    makers = {"dist_ens": lambda _: Sleep(), "asleep": lambda _: Sleep(), "flax_pmap": FlaxPmap}
    result, reasons = compare.compare(workload, makers, num_turns=3)
    assert list(reasons) == ["flax_pmap"]
    assert result["dist_ens_ms"] == pytest.approx(1)
    assert result["peers_ms"] == pytest.approx({"asleep": 1})
    assert set(result["spread"]) == {"dist_ens", "asleep", "matmul"}
    # A millisecond each: 2 * 2048^3 operations against 16 members' 4 examples' 2 * 4320, of layers
    # 12-32-32-5: three times 12 * 32 + 32 * 32 + 32 * 5, less once 12 * 32.
    assert result["model_flops_share"] == pytest.approx(16 * 4 * 4320 / 2048**3)
    assert compare.table_of("", result).row_count == 2


@pytest.mark.long
def test_the_command_writes_what_it_has_timed(tmp_path):
    flags = ["--workloads=W2", "--ways=jax_loop,flax_pmap", "--turns=1"]
    flags.append(f"--json={tmp_path / 'peers.json'}")
    done = python("-m", "benchmarks.peers", *flags, XLA_FLAGS=fast_xla.flags(1))
    assert done.returncode == 0, done.stderr
    assert "flax_pmap was not timed: it needs one device for each of 5 members" in done.stdout
    (workload,) = json.loads((tmp_path / "peers.json").read_text())["workloads"]
    assert 0 < workload["peers_ms"]["jax_loop"] < 1e3


@pytest.mark.torch
@pytest.mark.parametrize("name", ["W1", "W3", "W4", "W5", "W6"])
def test_pytorch_has_the_same_loss_and_gradients(name):
    import torch

    from benchmarks.peers.torch_networks import loss_of, network_of

    workload = small(name, WORKLOADS[name]().optimizer)
    state, inputs, labels = first_states(workload)[0], workload.inputs[:4], workload.labels[:4]

    def jax_loss(params):
        key = jax.random.key(0)
        outputs, _ = workload.member.apply(params, state.model_state, inputs, key, True)
        return workload.loss(outputs, labels).mean()

    loss, grads = jax.jit(jax.value_and_grad(jax_loss))(state.params)
    network = network_of(workload, jax.device_get(state.params))
    classes = labels.astype(np.int64) if labels.dtype.kind == "i" else labels
    torch_loss = loss_of(workload)(network(torch.from_numpy(inputs)), torch.from_numpy(classes))
    torch_loss.backward()
    assert torch_loss.item() == pytest.approx(float(loss), rel=1e-4)
    expected = network_of(workload, jax.device_get(grads)).parameters()
    for param, grad in zip(network.parameters(), expected, strict=True):
        largest = grad.abs().max().item()
        np.testing.assert_allclose(param.grad, grad.detach(), rtol=1e-4, atol=1e-4 * largest + 1e-7)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["W2", "W5"])  # Adam, and SGD with BatchNorm
def test_the_pytorch_ways_end_with_the_members_of_the_jax_loop(name):
    from benchmarks.peers import torch_func, torch_loop
    from benchmarks.peers.torch_networks import network_of

    workload = small(name, WORKLOADS[name]().optimizer)
    jax_loop = JaxLoop(workload)
    loop = torch_loop._Form(workload, threads=1, fused=True, channels_last=name == "W5")
    func = torch_func._Form(workload, threads=1, fused=False)
    for way in (jax_loop, loop, func):
        way.run(3)
    atol = 1e-3 * workload.optimizer.learning_rate
    for m, state in enumerate(jax_loop.states):
        expected = network_of(workload, jax.device_get(state.params)).parameters()
        of_loop, of_func = loop.networks[m].parameters(), func.params.values()
        for wanted, one, stacked in zip(expected, of_loop, of_func, strict=True):
            for param in (one, stacked[m]):
                np.testing.assert_allclose(param.detach(), wanted.detach(), rtol=1e-3, atol=atol)
