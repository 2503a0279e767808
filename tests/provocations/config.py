"""How the messages of `dist_ens.config` are provoked."""

from dist_ens.config import Experiment, checks, reading, schema
from dist_ens.config.execution_spec import Execution


def _experiment(**fields):
    return Experiment.from_dict({"steps": 10} | fields)


def a_choice_that_is_unknown():
    _experiment(data={"examples": "premuted"})


def a_count_of_none():
    _experiment(num_members=0)


def a_rate_of_zero():
    _experiment(optimizer={"learning_rate": 0.0})


def a_count_that_is_too_large():
    _experiment(num_members=2**31)


def a_coefficient_that_is_infinite():
    checks.require_coefficient("alpha of mixup", float("inf"), "0.2 is usual.")


def a_fraction_of_one():
    _experiment(loss={"label_smoothing": 1.0})


def mixup_of_a_bootstrap():
    _experiment(loss={"mixup": 0.2}, data={"examples": "bootstrap"})


def a_text_instead_of_a_coefficient():
    checks.require_coefficient("alpha of mixup", "0.2", "0.2 is usual.")


def a_count_that_is_not_whole():
    checks.whole_number("num_members", 2.5, least=1)


def a_way_with_auto():
    Execution.parse("auto+patches")


def an_execution_that_says_twice_how():
    Execution.parse("vmap+patches+apart")


def an_execution_that_is_unknown():
    Execution.parse("vmpa")


def a_chunk_without_a_size():
    Execution.parse("chunk+patches")


def splits_of_a_source_with_one():
    _experiment(data={"examples": "splits"}).total_members(1)


def several_splits_that_would_be_mixed():
    _experiment(data={"source": "uci:boston.npz"}).total_members(20)


def mixup_of_examples_in_order():
    _experiment(loss={"mixup": 0.2}, data={"shuffle": False})


def ids_of_another_number_of_members():
    _experiment(num_members=8, member_ids=(3, 5))


def neither_members_nor_members_per_group():
    _experiment(num_members=None)


def members_that_do_not_divide_over_groups():
    _experiment(num_members=8, data={"source": "uci:a.npz", "examples": "splits"}).total_members(20)


def a_seed_that_is_negative():
    _experiment(seed=-1)


def both_steps_and_epochs():
    _experiment(epochs=1.0)


def a_section_of_a_record_that_is_a_number():
    reading.fields_from_record(schema.LayoutConfig, 3)


def a_record_with_an_unknown_field():
    reading.fields_from_record(schema.LayoutConfig, {"wave": 2})


def a_field_that_is_unknown():
    _experiment(data={"sorce": "digits"})


def a_field_of_another_type():
    _experiment(num_members="8")


def a_section_that_is_a_number():
    _experiment(data=3)


def folds_in_order():
    _experiment(data={"examples": "permuted", "shuffle": False})


def one_fold():
    _experiment(data={"examples": "kfold", "num_folds": 1})


def folds_without_their_number():
    _experiment(data={"examples": "kfold"})


def a_beta_above_one():
    _experiment(loss={"name": "beta_nll", "beta": 1.5})


def levels_without_the_middle():
    _experiment(loss={"name": "pinball", "levels": (0.1, 0.9)})


def smoothed_labels_of_a_table():
    _experiment(loss={"name": "mse", "label_smoothing": 0.1})


def a_beta_of_another_loss():
    _experiment(loss={"name": "mse", "beta": 0.7})


def a_schedule_without_a_learning_rate():
    _experiment(optimizer={"schedule": "cosine", "schedule_steps": 9, "learning_rate": None})


def a_schedule_without_its_length():
    _experiment(optimizer={"schedule": "cosine"})


def a_negative_weight_decay():
    _experiment(optimizer={"weight_decay": -0.1})


def a_threshold_of_losses_that_nobody_checks():
    _experiment(failures={"loss_threshold": 6.0})
