"""Which batches of an iterable `fit` trains on: from a checkpoint, a given state, several hosts."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
from dist_ens.checkpoint import saved_steps
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import UPDATE, member_key
from test_bad_input import CLASSES, DATA, EXAMPLES, classifier, with_loss
from test_bad_input import fit as train
from test_bad_input import loss_fn as loss_of_pytree
from test_cluster import finish_two
from test_fit_checks import regression


def loss_fn(params, model_state, batch, key):
    """A loss that reports the number of each batch."""
    return (params["w"] ** 2).sum(), (model_state, {"number": batch["number"].mean()})


def batches():
    """Batches whose numbers are 0, 1, 2, …"""
    for number in range(100):
        yield {"inputs": DATA["inputs"], "number": np.full(16, number, np.float32)}


def fit(data, steps, *, seen, execution="vmap", **options):
    """Trains, and adds the numbers of the batches that were trained on to a list."""

    def looks(info):
        if info.metrics:
            seen.extend(info.metrics["number"][:, 0].astype(int).tolist())

    ensemble = with_loss(loss_fn, execution=execution)
    return train(ensemble, data, steps=steps, callbacks=[looks], **{"steps_per_call": 1} | options)


def test_a_loader_may_fill_the_same_buffer_with_each_batch():
    def in_one_buffer():
        buffer = np.empty(16, np.float32)
        for number in range(100):
            buffer[:] = number
            yield {"inputs": DATA["inputs"], "number": buffer}

    seen = []
    fit(in_one_buffer, 4, seen=seen, steps_per_call=2)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("execution", ["vmap", "auto"])
@pytest.mark.parametrize("is_iterator", [False, True])
def test_a_given_state_goes_on_where_the_data_is(execution, is_iterator):
    seen, data = [], batches() if is_iterator else batches
    state = fit(data, 3, seen=seen, execution=execution).state
    fit(data, 5, seen=seen, state=state, execution=execution)
    assert seen == [0, 1, 2, *([3, 4] if is_iterator else [0, 1])]


@pytest.mark.parametrize("first_step", [0, 3])
def test_a_run_that_is_resumed_skips_only_the_batches_that_it_has_seen(first_step, tmp_path):
    state = fit(batches, first_step, seen=[]).state if first_step else None
    seen, said, saved = [], [], de.Checkpoints(tmp_path, every_secs=None)
    for count in (2, 3, 4):
        steps = first_step + count
        fit(batches, steps, seen=seen, state=state, checkpoints=saved, say=said.append)
    assert seen == [0, 1, 2, 3]
    for count in (2, 3):
        assert sum(f"advanced by {count} batches" in sentence for sentence in said) == 1


class Numbered:
    """An iterator of the same batches that can be moved."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return {"inputs": DATA["inputs"], "number": np.full(16, self.number - 1, np.float32)}

    def get_state(self):
        return self.number

    def set_state(self, number):
        self.number = number


class StopsFirst:
    """A callback that ends the run before its first step."""

    def begin(self, _run):
        return de.callbacks.STOP


@pytest.mark.parametrize("execution", ["vmap", "auto"])
@pytest.mark.parametrize("data", [batches, partial(Numbered)], ids=["without state", "with state"])
@pytest.mark.parametrize("num_more", [0, 2])
def test_a_run_that_ended_before_its_first_batch_resumes_at_it(data, execution, num_more, tmp_path):
    state = fit(batches, 3, seen=[]).state
    seen, saved = [], de.Checkpoints(tmp_path, every_secs=None)
    ensemble = with_loss(loss_fn, execution=execution)
    stops = [] if num_more == 0 else [StopsFirst()]
    options = {"state": state, "checkpoints": saved, "steps_per_call": 1}
    train(ensemble, data, steps=3 + num_more, callbacks=stops, **options)
    fit(data, 5, seen=seen, execution=execution, **options)
    fit(data, 6, seen=seen, execution=execution, **options)
    assert seen == [0, 1, 2]


def with_labels(labels, at=3):
    """Batches of which one has other labels."""
    return lambda: (DATA | ({"labels": labels} if number == at else {}) for number in range(8))


@pytest.mark.parametrize(("label", "at", "steps_per_call"), [(-1, 0, 1), (CLASSES, 3, 4)])
def test_labels_of_an_iterable_that_are_no_classes_are_refused(label, at, steps_per_call):
    labels = DATA["labels"].copy()
    labels[5] = label
    message = f"^The labels of batch {at} lie in .*, and the objective has 3 classes"
    with pytest.raises(UserError, match=message):
        train(classifier(), with_labels(jnp.asarray(labels), at), steps_per_call=steps_per_call)
    # A loss function may take any labels.
    assert train(with_loss(loss_of_pytree), with_labels(labels, at), steps=4).step == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": np.full(EXAMPLES, np.nan)}, "The labels of batch 3 have NaN in row 0 of 16"),
        ({"weights": -np.ones(EXAMPLES)}, "16 of 16 weights of batch 3 are negative or not fin"),
    ],
)
def test_targets_and_weights_of_a_later_batch_are_checked_like_those_of_arrays(wrong, message):
    right = {"inputs": DATA["inputs"], "labels": np.ones(EXAMPLES, np.float32)}
    right["weights"] = np.ones(EXAMPLES, np.float32)
    wrong = {name: leaf.astype(np.float32) for name, leaf in wrong.items()}
    data = [right, right, right | {"weights": 0 * right["weights"]}, right | wrong]
    with pytest.raises(UserError, match=f"^{message}"):
        train(regression(standardize=False), data)


def test_a_trained_state_keeps_its_scale_of_labels_on_an_iterable():
    batch = {"inputs": DATA["inputs"], "labels": np.arange(EXAMPLES, dtype=np.float32)}
    ensemble = regression()
    state = train(ensemble, batch, steps=2).state
    # The labels of other arrays, equal ones too, are no new scale.
    others = batch | {"labels": np.full(EXAMPLES, 9, np.float32)}
    of_arrays, of_iterable = (
        train(ensemble, data, steps=4, state=state).state.model_state
        for data in (others, [others] * 4)
    )
    for name, value in state.model_state.items():
        np.testing.assert_array_equal(of_iterable[name], value)
        np.testing.assert_array_equal(of_arrays[name], value)
    for begun in (None, ensemble.init(batch)):
        with pytest.raises(UserError, match="reads all training labels, and the data is an iter"):
            train(ensemble, [batch] * 4, steps=4, state=begun)


def test_labels_whose_digits_float32_does_not_hold_are_refused():
    draw = np.random.default_rng(0).normal(size=EXAMPLES)
    for mean, is_right in ((1e3, True), (1e7, False)):
        data = {"inputs": DATA["inputs"], "labels": mean + draw}
        if is_right:
            train(regression(), data, steps=1)
            continue
        with pytest.raises(UserError, match=r"The labels have mean 1e\+07 and standard deviation"):
            train(regression(), data, steps=1)


def test_a_run_resumes_from_its_last_checkpoint_when_wrong_labels_are_corrected(tmp_path):
    saved = de.Checkpoints(tmp_path, every_secs=None, every_steps=1)
    with pytest.raises(UserError, match="^The labels of batch 3 lie in"):
        train(classifier(), with_labels(DATA["labels"] - 1), checkpoints=saved)
    assert saved_steps(tmp_path)[-1] == 3
    resumed = train(classifier(), with_labels(DATA["labels"]), checkpoints=saved)
    never_stopped = train(classifier(), with_labels(DATA["labels"]))
    np.testing.assert_array_equal(resumed.state.params["w"], never_stopped.state.params["w"])


@pytest.fixture(scope="module")
def said_by_two(tmp_path_factory):
    """What `fit` said on each of two hosts, of each pair of iterators."""
    folder = tmp_path_factory.mktemp("two_iterators")
    finish_two("yield", folder)
    return [json.loads((folder / f"said_{i}.json").read_text()) for i in range(2)]


def test_a_batch_has_the_examples_of_each_column_once(said_by_two):
    for of_host in said_by_two:
        # 4 examples of each host: of columns of its own, and of one column that both feed.
        assert (of_host["alike"], of_host["shared"]) == (8, 4)


SHAPES = "The hosts yield batches of different shapes: hosts [1] differ from host 0, and this host"
COLUMN = "Hosts [0, 1] feed column 0 of the mesh 8 x 1 (ensemble x data), and yield different"


@pytest.mark.parametrize(
    ("name", "on_first", "on_second"),
    [
        *((name, SHAPES, SHAPES) for name in ("width", "length", "keys")),
        ("labels", "Process 1 has no batch for the next", "The labels of batch 1 lie in [-1, -1]"),
        ("different", COLUMN, COLUMN),
    ],
)
def test_what_one_host_yields_wrongly_ends_the_run_on_both(said_by_two, name, on_first, on_second):
    assert said_by_two[0][name].startswith(on_first)
    assert said_by_two[1][name].startswith(on_second)


def test_leaves_that_are_shared_are_the_same_on_all_hosts(said_by_two):
    for of_host in said_by_two:
        # The mean of the rows of both hosts, (1 + 2) / 2, and ten times the points of both, 2.
        assert of_host["points"] == pytest.approx(1.5 + 10 * 2)
        assert of_host["other points"].startswith(
            "The hosts yield different values of the leaves that batch_specs calls shared."
        )


def test_hosts_draw_the_same_points_without_data(said_by_two):
    drawn = [
        jax.random.uniform(jax.random.fold_in(jax.random.fold_in(member_key(0, i), UPDATE), 0))
        for i in range(2)
    ]
    for of_host in said_by_two:
        assert of_host["nothing"] == pytest.approx(float(np.mean(drawn)))
