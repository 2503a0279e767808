"""A run that was made in Python resumes on the data with which it began, and on no other."""

import jax
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.checkpoint import notes_on_resuming, saved_step
from dist_ens.data.source import fingerprint_of
from dist_ens.ground.errors import UserError
from dist_ens.processes import cluster
from saving import steps_in
from test_bad_input import CLASSES, DATA, classifier, fit
from two_savers import RECORD

INPUTS, LABELS = DATA["inputs"], DATA["labels"]
OTHER_ORDER = {name: leaf[::-1] for name, leaf in DATA.items()}
TWICE = {name: np.concatenate([leaf, leaf]) for name, leaf in DATA.items()}


def trained(folder, data=DATA, *, resume="same", optimizer=None, **options):
    saved = de.Checkpoints(folder, every_secs=None, resume=resume)
    made = classifier() if optimizer is None else classifier().replace(optimizer=optimizer)
    return fit(made, data, checkpoints=saved, **{"batch_size": 8} | options)


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        (OTHER_ORDER, {}, "the hash of the training examples is '"),
        (DATA | {"labels": (LABELS + 1) % CLASSES}, {}, "the hash of the training examples is '"),
        (TWICE, {}, f"the number of training examples is {len(LABELS)} there and "),
        (DATA, {"validation": 0.25}, "validation is None there and 0.25 here"),
    ],
)
def test_other_training_data_is_refused_and_resumed_anyway(tmp_path, data, options, told):
    trained(tmp_path, steps=2)
    assert trained(tmp_path, {name: leaf.copy() for name, leaf in DATA.items()}, steps=4).step == 4
    with pytest.raises(UserError, match=f"^The training data differs from that of .*: .*{told}"):
        trained(tmp_path, data, steps=6, **options)
    assert trained(tmp_path, data, steps=6, resume="anyway", **options).step == 6


def test_a_changed_step_is_told_and_resumed_anyway_only_if_the_state_fits(tmp_path):
    trained(tmp_path, steps=2)
    told = "all parts have the same names, and the training step computes something else.*'anyway'"
    with pytest.raises(UserError, match=told):
        trained(tmp_path, optimizer=optax.sgd(0.2))
    with pytest.raises(UserError, match="The saved state has other arrays than a state of these"):
        trained(tmp_path, optimizer=optax.adam(0.1))
    assert trained(tmp_path, optimizer=optax.sgd(0.2), resume="anyway").step == 8


def test_iterables_have_no_facts_of_their_data(tmp_path):
    for steps in (2, 4):
        trained(tmp_path, [DATA], steps=steps, batch_size=None)
    assert saved_step(tmp_path).run["num_examples"] is None


def test_a_run_whose_members_draw_other_random_numbers_is_not_resumed():
    with pytest.raises(UserError, match="^runs/a holds a run of another version of dist_ens, who"):
        notes_on_resuming(RECORD | {"key_rule": 2}, RECORD, "runs/a")


def test_all_hosts_compare_the_examples_of_process_0(tmp_path, monkeypatch):
    def of_main(value, sent=cluster.bytes_of_main):
        return b"\x01" * 32 if len(value) == 32 else sent(value)  # Steps are shorter.

    monkeypatch.setattr(cluster, "bytes_of_main", of_main)
    trained(tmp_path, steps=2)
    assert saved_step(tmp_path).run["examples"] == "01" * 32


class Rows:
    """A split of one number an example, which counts the examples that are taken of it."""

    in_memory = True

    def __init__(self, count, draw=lambda: 0):
        self.count, self.draw, self.num_taken = count, draw, 0

    def __len__(self):
        return self.count

    def take(self, indices):
        self.num_taken += len(indices)
        return (indices + self.draw(),)


def test_a_large_split_is_sampled_and_one_that_changes_has_no_fingerprint():
    limits = {"most_bytes": 8_000, "sampled": 100}
    small, large = Rows(1_000), Rows(1_001)
    assert fingerprint_of(small, 8, **limits) == fingerprint_of(Rows(1_000), 8, **limits)
    assert fingerprint_of(large, 8, **limits) != fingerprint_of(Rows(1_002), 8, **limits)
    assert (small.num_taken, large.num_taken) == (1_200, 300)
    drawn = iter(range(9))
    assert fingerprint_of(Rows(9, lambda: next(drawn)), 8, **limits) is None


def test_a_run_goes_on_beyond_2_to_the_31_steps_as_one_never_stopped(tmp_path):
    began = fit(classifier(), DATA, steps=1, batch_size=8).state
    first = 2**31 - 2
    step = jax.device_put(np.full_like(began.step, first), began.step.sharding)
    state = began._replace(step=step)
    options = {"batch_size": 8, "steps_per_call": 1, "log_every": 1}
    saved = de.Checkpoints(tmp_path, every_secs=None, every_steps=1, keep=9)
    fit(classifier(), DATA, steps=first + 3, state=state, checkpoints=saved, **options)
    assert steps_in(tmp_path) == [first + i for i in (1, 2, 3)]
    resumed = fit(classifier(), DATA, steps=first + 5, checkpoints=saved, **options)
    assert [record["step"] for record in resumed.history] == [first + 4, first + 5]
    never_stopped = fit(classifier(), DATA, steps=first + 5, state=state, **options)
    found, expected = jax.device_get((resumed.state.params, never_stopped.state.params))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
