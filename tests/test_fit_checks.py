"""What `fit` is given is checked before anything is trained, and what was trained is not lost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.errors import UserError
from test_bad_input import DATA, classifier, fit, layout_of


def regression(**options):
    """An ensemble of linear networks whose labels are standardised."""
    network = (
        lambda key, inputs: ({"w": jax.random.normal(key, (4, 1))}, ()),
        lambda params, model_state, inputs, key, train: (inputs @ params["w"], model_state),
    )
    options = {"layout": layout_of(), "execution": "vmap", "num_members": 2} | options
    objective = de.losses.squared_error(standardize=True)
    return de.Ensemble(network, optax.sgd(0.1), objective, **options)


# A given state


def test_a_state_of_other_members_is_refused():
    of_others = classifier(member_ids=(2, 5))
    state = of_others.init(DATA)
    message = (
        "The given state holds the members [2, 5], and the ensemble has the members [0, 1]. Make "
        "the ensemble with member_ids=[2, 5]."
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        fit(classifier(), state=state)
    fit(of_others, steps=1, state=state)


def test_the_leaves_in_which_a_given_state_differs_are_named():
    state = classifier().init(DATA)
    other = state._replace(params={"w": jnp.zeros((2, 5, 3)), "b": jnp.zeros((2, 3))})
    message = (
        "The given state does not fit this ensemble: leaf .params['w'] is float32[2, 5, 3] there "
        "and float32[2, 4, 3] here; leaf .params['b'] is float32[2, 3] there and absent here. Give"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        fit(classifier(), state=other)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_that_has_all_steps_already_is_returned(tmp_path, steps):
    auto = classifier(execution="auto")
    state = fit(classifier(), steps=steps).state if steps else auto.init(DATA)
    result = fit(auto, steps=steps, state=state, eval_data=DATA)
    assert result.step == steps
    np.testing.assert_array_equal(result.state.params["w"], state.params["w"])
    # Saved like that, the run can be trained further, and its execution is chosen then.
    checkpoints = de.Checkpoints(tmp_path, every_secs=None)
    fit(auto, steps=steps, state=state, checkpoints=checkpoints)
    assert fit(auto, steps=3, state=state, checkpoints=checkpoints).step == 3


def test_a_folder_that_is_resumed_says_that_a_given_state_is_not_used(tmp_path):
    state, said = classifier().init(DATA), []
    for steps in (2, 4):
        checkpoints = de.Checkpoints(tmp_path, every_secs=None)
        options = {"steps": steps, "checkpoints": checkpoints, "say": said.append}
        result = fit(classifier(), state=state, **options)
    assert result.step == 4
    assert [sentence for sentence in said if "given state" in sentence] == [
        f"Note: the given state is not used, since the folder {tmp_path} holds step 2 of this "
        "run, which is resumed. Choose another folder to start from the given state."
    ]


# Standardised labels

LABELS = 100 + 10 * np.random.default_rng(1).normal(size=(16, 1)).astype(np.float32)
TARGETS = {"inputs": DATA["inputs"], "labels": LABELS}


def test_the_labels_of_a_given_state_at_step_0_are_standardised():
    ensemble = regression()
    new = fit(ensemble, TARGETS).state
    given = fit(ensemble, TARGETS, state=ensemble.init(TARGETS)).state
    jax.tree.map(np.testing.assert_array_equal, given.params, new.params)
    np.testing.assert_allclose(given.model_state["label_mean"], np.full(2, LABELS.mean()), 1e-6)


def test_networks_that_were_trained_elsewhere_predict_and_train_with_standardised_labels():
    ensemble = regression()
    state = ensemble.state_of([{"w": np.full((4, 1), k, np.float32)} for k in (1, 3)])
    # The networks predict sums of inputs, times 1 and 3; nothing is scaled yet.
    mean = ensemble.predict(state, DATA["inputs"]).mean
    np.testing.assert_allclose(np.ravel(mean), 2 * DATA["inputs"].sum(axis=1), rtol=1e-4)
    trained = fit(ensemble, TARGETS, steps=1, state=state)
    mean, std = LABELS.mean(), LABELS.std()
    expected = mean + std * (DATA["inputs"] @ np.mean(trained.state.params["w"], axis=0))
    found = trained.ensemble.predict(trained.state, DATA["inputs"]).mean
    np.testing.assert_allclose(np.ravel(found), np.ravel(expected), rtol=1e-4)
    # A state that was taken apart is put together as it was.
    parts = de.unstack_members(trained.state.model_state)
    again = ensemble.state_of(de.unstack_members(trained.state.params), parts)
    assert jax.tree.structure(again.model_state) == jax.tree.structure(trained.state.model_state)


def test_the_message_of_a_structure_names_at_most_five_leaves():
    state = classifier().init(DATA)
    params = {f"w{k}": jnp.zeros(2) for k in range(8)}
    with pytest.raises(UserError, match=r"is absent there .*; 4 more leaves differ\. Give a state"):
        fit(classifier(), state=state._replace(params=params))
