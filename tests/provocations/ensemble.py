"""How the messages of `dist_ens.ensemble` are provoked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens.ensemble import argument_checks, loss_checks, optimizer
from dist_ens.losses import categorical
from dist_ens.members import as_member
from dist_ens.methods import bootstrap, mixup
from dist_ens.training.checks import check_ensemble
from dist_ens.training.data import training_data
from provocations._parts import CLASSES, FEATURES, apply, batch, ensemble, layout, network, raises

_SCALAR = jnp.float32(1.0)


def _mean_loss(params, model_state, batch, key):
    return jnp.square(apply(params, batch["inputs"])).mean(), (model_state, {})


def inputs_that_the_network_does_not_take():
    made = ensemble(member=network(raises))
    made.apply(made.init(batch()), np.zeros((8, FEATURES)))


def one_id():
    ensemble(member_ids=3)


def an_id_twice():
    ensemble(member_ids=[0, 0])


def one_method_in_place_of_a_tuple():
    ensemble(methods=bootstrap())


def a_method_that_was_not_called():
    ensemble(methods=[mixup])


def a_name_in_place_of_a_method():
    ensemble(methods=["mixup"])


def microbatches_that_do_not_divide_the_batch():
    made = ensemble(microbatches=3)
    made.update(made.init(batch()), batch())


def a_layout_for_another_number_of_members():
    ensemble(layout=layout(4))


def a_batch_without_inputs():
    ensemble().init({"image": np.zeros((8, FEATURES))})


def a_batch_that_is_an_array():
    ensemble().init(np.zeros((8, FEATURES)))


def one_prediction_of_several_groups():
    made = ensemble(num_groups=2)
    made.predict(made.init(batch()), np.zeros((8, FEATURES)))


def a_prediction_without_apply():
    made = ensemble(_mean_loss, as_member(init=lambda key: {"w": jnp.zeros((FEATURES, CLASSES))}))
    made.predict(made.init(batch()), np.zeros((8, FEATURES)))


def parameters_in_place_of_a_state():
    ensemble().predict({"w": jnp.zeros((2, FEATURES, CLASSES))}, np.zeros((8, FEATURES)))


def a_name_in_place_of_a_loss():
    ensemble("nll")


def an_array_of_another_trace():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(1.0)

    def loss(params, model_state, batch, key):
        return apply(params, batch["inputs"]).mean() * kept[0], (model_state, {})

    train = training_data(batch(), None, ensemble(loss))
    check_ensemble(ensemble(loss), train)


def parameters_that_are_stacked():
    ensemble().state_of({"w": jnp.zeros((2, FEATURES, CLASSES))})


def parameters_of_one_member():
    ensemble().state_of([{"w": jnp.zeros((FEATURES, CLASSES))}])


def a_loss_of_two_arguments():
    def loss(params, batch):
        return 0.0

    ensemble(loss)


def _checked(*results, model_state=()):
    loss_checks.check_loss_outputs(results, model_state)


def a_loss_that_returns_one_number():
    loss_checks.check_loss_outputs(_SCALAR, ())


def a_loss_that_returns_three_values():
    _checked(_SCALAR, (), {})


def a_loss_that_returns_no_auxiliary_values():
    _checked(_SCALAR, {})


def a_loss_that_returns_the_loss_of_each_example():
    _checked(jnp.zeros(8), ((), {}))


def a_loss_that_is_a_whole_number():
    _checked(jnp.int32(1), ((), {}))


def auxiliary_values_in_a_list():
    _checked(_SCALAR, ((), [_SCALAR]))


def an_auxiliary_value_named_loss():
    _checked(_SCALAR, ((), {"loss": _SCALAR}))


def an_auxiliary_value_that_is_text():
    _checked(_SCALAR, ((), {"name": "nll"}))


def an_auxiliary_value_of_each_example():
    _checked(_SCALAR, ((), {"accuracy": jnp.zeros(8)}))


def a_model_state_of_another_shape():
    _checked(_SCALAR, ({"mean": jnp.zeros(4)}, {}), model_state={"mean": jnp.zeros(3)})


def _traced(fn):
    with loss_checks.explained_errors():
        jax.make_jaxpr(fn)(1.0)


def a_loss_that_calls_numpy():
    _traced(np.sin)


def a_loss_with_an_if():
    _traced(lambda x: x if x > 0 else -x)


def a_loss_that_uses_another_trace():
    with loss_checks.explained_errors():
        raise jax.errors.UnexpectedTracerError("Encountered an unexpected tracer.")


def no_optimizer():
    optimizer.require_optimizer(0.001)


def an_optimizer_that_was_not_called():
    optimizer.require_optimizer(optax.sgd)


def an_optimizer_with_one_key_for_all_members():
    def noisy(grads, state, params=None):
        noise = jax.random.normal(jax.random.key(0))
        return jax.tree.map(lambda leaf: leaf * noise, grads), state

    transformation = optax.GradientTransformation(lambda params: (), noisy)
    ensemble(optimizer=transformation).init(batch())


def inputs_of_unequal_length():
    made = ensemble()
    made.apply(made.init(batch()), {"a": np.zeros((2, 4)), "b": np.zeros((3, 4))})


def no_inputs():
    made = ensemble()
    made.apply(made.init(batch()), np.zeros((0, FEATURES)))


def a_layout_that_is_a_number():
    ensemble(layout=8)


class _Loss:
    def __call__(self, params, model_state, batch, key):
        return _mean_loss(params, model_state, batch, key)


def a_loss_that_is_a_class():
    ensemble(_Loss)


def fewer_model_states_than_parameters():
    params = {"w": jnp.zeros((FEATURES, CLASSES))}
    ensemble().state_of([params, params], [()])


def parameters_of_another_network():
    params = {"w": jnp.zeros((FEATURES, CLASSES + 1))}
    ensemble().state_of([params, params])


def an_objective_that_was_not_called():
    ensemble(categorical)


def a_state_that_was_given_twice():
    made = ensemble()
    state = made.init(batch())
    made.update(state, batch())
    made.update(state, batch())


def members_that_are_not_as_many_of_each_group():
    argument_checks.check_ids_of_groups([0, 1, 2], 2)


def a_policy_that_is_a_number():
    ensemble(failures=3)


def an_auxiliary_value_with_the_name_of_a_metric_of_failures():
    def loss(params, model_state, batch, key):
        return params["w"].sum(), (model_state, {"is_frozen": 1.0})

    made = ensemble(loss, failures="skip")
    made.update(made.init(batch()), batch())
