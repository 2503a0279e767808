"""Steps of one's own for the tests, which need more than a loss, and loops by hand for them."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de
from dist_ens.ground.randomness import INIT, UPDATE, member_key
from networks import layout_on

MEMBERS, STEPS, SEED = 4, 3, 7
MESHES = {"1x1": (1, 1), "4x1": (4, 1), "2x2": (2, 2)}


def layout_of(mesh, num_members=MEMBERS):
    return layout_on(MESHES[mesh], num_members)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A step of one's own, with the batches of its steps and inputs for its predictions."""

    init: Callable
    step: Callable
    apply: Callable
    batches: list
    inputs: np.ndarray
    settings: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def jitted(self):
        return jax.jit(self.step)

    def ensemble(self, **settings):
        settings = {"num_members": MEMBERS, "seed": SEED, "execution": "vmap"} | settings
        settings = self.settings | settings
        return de.Ensemble.from_step(init=self.init, step=self.step, apply=self.apply, **settings)

    @functools.cache  # noqa: B019  # The cases live as long as the module.
    def by_hand(self, member_id):
        """The state and the metrics of a member, by a loop with the keys that the docs give."""
        key, step = member_key(SEED, member_id), self.jitted
        state = self.init(jax.random.fold_in(key, INIT), self.batches[0])
        seen = []
        for number, batch in enumerate(self.batches):
            of_step = jax.random.fold_in(jax.random.fold_in(key, UPDATE), number)
            state, metrics = step(state, batch, of_step)
            seen.append({name: float(value) for name, value in metrics.items()})
        return state, seen


def layers(key, *sizes):
    keys = jax.random.split(key, len(sizes))
    return [
        jax.random.normal(k, (m, n)) / np.sqrt(m)
        for k, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]


def mlp(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


def normals(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# A DQN: a target network that moves after the update, and a buffer from which it draws.

SGD = optax.sgd(0.05, momentum=0.9)


def dqn_init(key, batch):
    params = layers(key, 2, 8, 3)
    room = 3 * batch["action"].shape[0] // 2  # The batch is the whole one, on every mesh.
    seen = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape[1:]), leaf.dtype), batch)
    return {"q": params, "target": params, "opt": SGD.init(params), "buffer": seen, "time": 0}


def dqn_step(agent, batch, key):
    size, room = batch["action"].shape[0], agent["buffer"]["action"].shape[0]
    rows = (agent["time"] * size + jnp.arange(size)) % room
    buffer = jax.tree.map(lambda old, new: old.at[rows].set(new), agent["buffer"], batch)
    stored = jnp.minimum((agent["time"] + 1) * size, room)
    drawn = jax.tree.map(lambda leaf: leaf[jax.random.randint(key, (16,), 0, stored)], buffer)
    goal = drawn["reward"] + 0.9 * mlp(agent["target"], drawn["next"]).max(axis=1)

    def loss_of(q):
        chosen = mlp(q, drawn["state"])[jnp.arange(16), drawn["action"]]
        return ((chosen - goal) ** 2).mean()

    td_error, grads = jax.value_and_grad(loss_of)(agent["q"])
    updates, opt = SGD.update(grads, agent["opt"])
    q = optax.apply_updates(agent["q"], updates)
    target = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, agent["target"], q)
    new = {"q": q, "target": target, "opt": opt, "buffer": buffer, "time": agent["time"] + 1}
    return new, {"td_error": td_error}


def transitions(seed):
    state = normals(16, 2, seed=seed)
    return {
        "state": state,
        "action": np.random.default_rng(seed).integers(0, 3, 16).astype(np.int32),
        "reward": -np.abs(state[:, 0]),
        "next": state + 0.1,
    }


DQN = Case(
    dqn_init,
    dqn_step,
    lambda agent, states: mlp(agent["q"], states),
    [transitions(seed) for seed in range(STEPS)],
    normals(5, 2),
)


# A GAN: two networks with two optimizers, and noise from the key of the step.

OF_G, OF_D = optax.sgd(0.1), optax.sgd(0.2, momentum=0.5)


def gan_init(key, batch):
    g, d = layers(key, 2, 8, 2), layers(jax.random.fold_in(key, 1), 2, 8, 1)
    return {"g": g, "d": d, "of_g": OF_G.init(g), "of_d": OF_D.init(d)}


def gan_step(state, real, key):
    noise = jax.random.normal(key, (real.shape[0], 2))

    def loss_of_d(d, g):
        outputs = mlp(d, real), mlp(d, mlp(g, noise))
        return (jax.nn.softplus(-outputs[0]) + jax.nn.softplus(outputs[1])).mean()

    def loss_of_g(g, d):
        return jax.nn.softplus(-mlp(d, mlp(g, noise))).mean()

    d_loss, grads = jax.value_and_grad(loss_of_d)(state["d"], state["g"])
    updates, of_d = OF_D.update(grads, state["of_d"])
    d = optax.apply_updates(state["d"], updates)
    g_loss, grads = jax.value_and_grad(loss_of_g)(state["g"], d)
    updates, of_g = OF_G.update(grads, state["of_g"])
    new = {"g": optax.apply_updates(state["g"], updates), "d": d, "of_g": of_g, "of_d": of_d}
    return new, {"loss": d_loss + g_loss, "d_loss": d_loss}


GAN = Case(
    gan_init,
    gan_step,
    lambda state, noise: mlp(state["g"], noise),
    [normals(16, 2, seed=seed) + 2 for seed in range(STEPS)],
    normals(5, 2),
)


# A padded graph, in the form of jraph: the last edges are padding. A batch is no rows, as it has
# other numbers of nodes and edges.


def graph_init(key, graph):
    return {"message": layers(key, 3, 4), "out": layers(jax.random.fold_in(key, 1), 7, 4, 1)}


def graph_outputs(weights, graph):
    messages = jnp.tanh(mlp(weights["message"], graph["nodes"][graph["senders"]]))
    messages = jnp.where(graph["edge_is_real"][:, None], messages, 0)
    count = graph["nodes"].shape[0]
    received = jax.ops.segment_sum(messages, graph["receivers"], num_segments=count)
    return mlp(weights["out"], jnp.concatenate([graph["nodes"], received], axis=1))[:, 0]


def graph_step(weights, graph, key):
    def loss_of(weights):
        errors = (graph_outputs(weights, graph) - graph["targets"]) ** 2
        return (errors * graph["node_is_real"]).sum() / graph["node_is_real"].sum()

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), {"loss": loss}


def graph(seed, nodes=24, padded_nodes=26, edges=30, padded_edges=32):
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, nodes, (2, padded_edges)).astype(np.int32)
    return {
        "nodes": rng.normal(size=(padded_nodes, 3)).astype(np.float32),
        "targets": rng.normal(size=padded_nodes).astype(np.float32),
        "senders": ends[0],
        "receivers": ends[1],
        "node_is_real": np.arange(padded_nodes) < nodes,
        "edge_is_real": np.arange(padded_edges) < edges,
    }


GRAPH = Case(
    graph_init,
    graph_step,
    graph_outputs,
    [graph(seed) for seed in range(STEPS)],
    graph(9),
    {"batch_specs": "shared"},
)


CASES = {"dqn": DQN, "gan": GAN, "graph": GRAPH}
