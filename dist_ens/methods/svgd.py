"""Stein variational gradient descent: heads that follow a posterior, and keep apart."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_coefficient, require_one_of
from dist_ens.ground.types import Batch, ModelState, Params, PyTree, Tree
from dist_ens.losses.averaging import Ratio, averaged
from dist_ens.methods.loss import LossInfo, LossResults, MemberLoss, Method

_HEADS = "heads"


def svgd(
    num_examples: float = 1.0,
    *,
    prior_std: float | None = None,
    bandwidth: float | None = None,
    space: str = "parameters",
) -> Method:
    """Trains the heads of a member as particles of Stein variational gradient descent.

    With theta_i the parameters of head i of H, the gradient that the optimizer is given is

        -1/H sum_j (k(theta_j, theta_i) grad log p(theta_j) + grad_{theta_j} k(theta_j, theta_i))
        k(x, y) = exp(-|x - y|^2 / h),   log p(theta) = -num_examples * loss(theta) + log prior

    The first term follows the posterior, and the second keeps the heads apart. The loss must be the
    mean of the heads' losses, as `losses.of_heads` computes it. If the parameters of the member are
    a dict with the key `heads`, as those of `models.trunk_and_heads`, these are the particles, and
    the others have their ordinary gradient. Otherwise all parameters are particles, and each leaf
    is [heads, ...].

    Args:
        num_examples: Number of training examples, by which the mean loss is multiplied.
        prior_std: Standard deviation of a normal prior with mean 0 on each number. Default: a flat
            prior.
        bandwidth: The h of the kernel. Default: the median of the squared distances of all pairs,
            each head with itself included, divided by `log(H + 1)`.
        space: "parameters", or "outputs" to keep the heads' outputs on the batch apart instead, in
            which case theta_i is the outputs of head i. Then there is no prior, and the loss is an
            objective.

    Raises:
        UserError: If an argument is out of range; when the loss is traced, if the parameters have
            no axis of heads.

    >>> from dist_ens.methods import LossInfo
    >>> loss = lambda theta, state, batch, info: ((theta**2).sum(axis=1).mean() / 2, (state, {}))
    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), 0, None, None)
    >>> gradient = jax.grad(lambda theta: svgd(bandwidth=1.0)(loss)(theta, (), {}, info)[0])
    >>> gradient(jnp.array([[1.0], [1.0]])).ravel().tolist()  # Equal heads do not repel each other.
    [1.0, 1.0]

    Source: Liu and Wang (2016), https://arxiv.org/abs/1608.04471; D'Angelo and Fortuin (2021),
    https://arxiv.org/abs/2106.11642, for outputs.
    """
    require_coefficient("num_examples of svgd", num_examples, "Give the size of the training set.")
    for name, value in (("prior_std", prior_std), ("bandwidth", bandwidth)):
        if value is not None:
            require_coefficient(f"The {name} of svgd", value, "Leave it out for the default.")
    require_one_of("space", space, ("parameters", "outputs"))
    if space == "outputs" and prior_std is not None:
        raise UserError("prior_std is that of parameters, and space is 'outputs'. Leave one out.")
    transformed = partial(_transformed, float(num_examples), prior_std, bandwidth)

    def require_mean(info: LossInfo) -> None:
        if info.objective is not None and info.objective.joint is not None:
            raise UserError(
                f"svgd needs the mean of the heads' losses, and the objective is "
                f"{info.objective.name}. Leave joint out."
            )

    def method(loss: MemberLoss) -> MemberLoss:
        def of_outputs(
            params: Params, model_state: ModelState, batch: Batch, info: LossInfo
        ) -> LossResults:
            def repelled(
                loss_of: Callable[[jax.Array], jax.Array], outputs: jax.Array
            ) -> jax.Array:
                value, grads = jax.value_and_grad(loss_of)(outputs)
                return _with_gradient(value, outputs, transformed(outputs, grads))

            require_mean(info)
            if info.objective is None:
                raise UserError("svgd of outputs needs an objective, such as losses.of_heads(...).")
            return loss(params, model_state, batch, info._replace(of_outputs=repelled))

        def of_parameters(
            params: Params, model_state: ModelState, batch: Batch, info: LossInfo
        ) -> LossResults:
            require_mean(info)

            def value_of(params: Params) -> tuple[jax.Array, tuple[jax.Array | Ratio, PyTree]]:
                value, rest = loss(params, model_state, batch, info)
                return averaged(value), (value, rest)

            grads, (value, rest) = jax.grad(value_of, has_aux=True)(params)
            is_part = isinstance(params, dict) and _HEADS in params
            if is_part:
                particles = transformed(params[_HEADS], grads[_HEADS])
                grads = {**grads, _HEADS: particles}
            else:
                grads = transformed(params, grads)
            return _with_gradient(averaged(value), params, grads), rest

        return of_outputs if space == "outputs" else of_parameters

    method.needs_heads = True  # type: ignore[attr-defined]  # see `checked_methods`
    return method


def _transformed(
    num_examples: float,
    prior_std: float | None,
    bandwidth: float | None,
    particles: Tree,
    grads: Tree,
) -> Tree:
    """Returns the negative direction of each particle, from the gradients of the mean loss."""
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(particles)}
    if len(counts) != 1 or counts == {()}:
        raise UserError(
            "svgd takes a member whose parameters all have a leading axis of heads, or a dict with "
            "the key 'heads', such as that of models.trunk_and_heads."
        )
    [(count,)] = counts
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], particles))
    theta, slopes = (
        jax.vmap(lambda tree: ravel_pytree(tree)[0])(each) for each in (particles, grads)
    )
    # The loss is the mean over the heads, so that each has 1 / count of its own gradient.
    score = -count * num_examples * slopes
    if prior_std is not None:
        score = score - theta / prior_std**2
    apart = theta[:, None] - theta[None]
    squared = (apart**2).sum(axis=-1)
    h = jnp.asarray(bandwidth or jnp.median(squared) / math.log(count + 1))
    h = jnp.where(h > 0, h, 1.0)  # All heads may be equal.
    kernel = jnp.exp(-squared / h)
    repulsion = 2 / h * (kernel[..., None] * apart).sum(axis=1)
    direction = (kernel @ score + repulsion) / count
    return jax.vmap(unravel)(-direction)


def _with_gradient(value: jax.Array, at: Tree, gradient: Tree) -> jax.Array:
    """Returns a number whose gradient with respect to a pytree is the given one."""
    fixed = jax.lax.stop_gradient(gradient)
    along = sum(
        jnp.vdot(leaf, slope)
        for leaf, slope in zip(jax.tree.leaves(at), jax.tree.leaves(fixed), strict=True)
    )
    # In this order, a large number takes no digits of the value.
    return jax.lax.stop_gradient(value) + (along - jax.lax.stop_gradient(along))
