"""The optimizer of one member, from its config."""

import optax

from dist_ens.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """An Optax optimizer; lifted, it clips and adapts every member by itself.

    Args:
        config: Name, learning rate and schedule.

    Returns:
        The gradient transformation of one member.
    """
    learning_rate = _schedule(config)
    if config.name == "adam":
        optimizer = optax.adam(learning_rate)
    elif config.name == "adamw":
        optimizer = optax.adamw(learning_rate, weight_decay=config.weight_decay)
    else:
        optimizer = optax.chain(
            optax.add_decayed_weights(config.weight_decay)
            if config.weight_decay
            else optax.identity(),
            optax.sgd(learning_rate, momentum=config.momentum or None),
        )
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def _schedule(config: OptimizerConfig) -> optax.ScalarOrSchedule:
    if config.schedule_steps is None:
        return config.learning_rate
    if config.schedule == "linear":
        return optax.linear_schedule(config.learning_rate, 0.0, config.schedule_steps)
    return optax.cosine_decay_schedule(config.learning_rate, config.schedule_steps)
