"""Members that fail start again from another seed, and the other members do not notice.

The learning rate of each member is random, and some are too high. The policy `freeze` stops the
members that fail, and a callback restarts them. Result: all members train.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de

X = np.random.default_rng(0).normal(size=(256, 2)).astype(np.float32)
DATA = {"x": X, "y": 3 * np.sin(X[:, 0])}


class RestartMembers:
    """A callback that gives frozen members the initial state of another seed."""

    every = 10  # Reading the state waits for the devices.

    def begin(self, run):
        self.ensemble = run.ensemble

    def __call__(self, info):
        old, is_frozen = info.state, np.asarray(info.state.failures.is_frozen)
        if not is_frozen.any():
            return None
        seed = self.ensemble.seed + info.step
        new = self.ensemble.replace(seed=seed).init(DATA)
        print(f"Step {info.step}: members {np.flatnonzero(is_frozen)} start again, seed {seed}.")
        # The step stays, so that a member sees the batches that it would have seen.
        failures = old.failures._replace(is_frozen=new.failures.is_frozen)
        new = new._replace(step=old.step, failures=failures)
        return jax.tree.map(lambda new, old: jax.vmap(jnp.where)(is_frozen, new, old), new, old)


def init(key, batch):
    return {"w": jax.random.normal(key, 2)}, {"rate": 10 ** jax.random.uniform(key, minval=-2)}


def loss_fn(params, model_state, batch, key):
    error = batch["x"] @ params["w"] - batch["y"]
    return (model_state["rate"] * error**4).mean(), (model_state, {})


def main(**options):
    member = de.as_member(init=init)
    ensemble = de.Ensemble(member, optax.sgd(0.05), loss_fn, num_members=8, failure_policy="freeze")
    return de.fit(ensemble, DATA, steps=200, batch_size=32, callbacks=[RestartMembers()], **options)


if __name__ == "__main__":
    main()
