"""The loop over members keeps a member's bits: the shipped networks, on random examples."""

import runpy

import jax
import numpy as np
import pytest

from dist_ens.ensemble import update_steps
from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.ground.state import select_members
from dist_ens.layout import BATCHES, MEMBERS, Layout
from test_hlo import CONFIGS, SPECS

BATCH = 4
CALLS = 3  # of one step each, so that one program takes several


def random_batches(spec):
    random = np.random.default_rng(0)
    shape = (1, BATCH, *spec.input_shape)
    if spec.input_dtype.startswith("float"):
        inputs = random.normal(size=shape)
    else:
        inputs = random.integers(0, spec.num_classes, shape)
    labels = random.integers(0, spec.num_classes or 2, (1, BATCH, *spec.label_shape))
    return {"inputs": inputs.astype(spec.input_dtype), "labels": labels.astype(spec.label_dtype)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.stem)
def test_a_shipped_configs_member_has_the_same_bits_among_2_on_1_device_and_6_on_2(
    config, monkeypatch
):
    looped = []

    class Counted(update_steps.Loop):
        def __call__(self, *args):
            looped.append(self)
            return super().__call__(*args)

    monkeypatch.setattr(update_steps, "Loop", Counted)
    values = runpy.run_path(str(config))["get_config"]().to_dict()
    experiment, spec = Experiment.from_dict(values | {"execution": "loop"}), SPECS[config.stem]
    run = Run(experiment, spec, 1000)
    alone = Layout.make(6, ensemble_axis=1, devices=jax.devices()[:1])
    initial = build_ensemble(run, alone).init(run.batch(BATCH))

    def member_1(num_members, num_devices):
        layout = Layout.make(
            num_members, ensemble_axis=num_devices, devices=jax.devices()[:num_devices]
        )
        ensemble = build_ensemble(run, layout)
        state = layout.moved(select_members(initial, range(num_members)), MEMBERS)
        batches = layout.put(random_batches(spec), BATCHES)
        looped.clear()
        for _ in range(CALLS):
            state, metrics = ensemble.update_steps(state, batches)
        assert len(looped) == CALLS
        assert len(set(looped)) == 1  # one loop took all calls
        state, metrics = jax.device_get((state, metrics))
        leaves = (state.params, state.model_state, state.opt_state, metrics["loss"].T)
        return [leaf[1] for leaf in jax.tree.leaves(leaves)]

    # XLA's thread pool is that of this process, so that its size is the same for both.
    for a, b in zip(member_1(2, 1), member_1(6, 2), strict=True):
        np.testing.assert_array_equal(a, b)
