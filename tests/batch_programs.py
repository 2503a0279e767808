"""Losses that see more than one example at a time, or draw random numbers, each with a network.

A program has `init(key, inputs) -> (params, model_state)` and `loss(params, model_state, batch,
key) -> (loss, model_state, drawn)`, in JAX and flax alone. `drawn` is an array of
the random numbers that the loss used, or None.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

BATCH, FEATURES, OUTPUTS, STEPS, SEED = 16, 6, 4, 3, 7
RATE = np.float32(0.05)


class Program(NamedTuple):
    init: Any
    loss: Any


def batches():
    """Returns batches, leaves [batch, ...], that are no alike in the parts of a divided one."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        x = random.normal(size=(BATCH, FEATURES)).astype(np.float32)
        x += np.linspace(-1, 1, BATCH, dtype=np.float32)[:, None]
        made.append(
            {
                "inputs": x,
                "view": x + 0.1 * random.normal(size=x.shape).astype(np.float32),
                "target": random.normal(size=BATCH).astype(np.float32),
                # Parts of two or four examples have one class alone, or no event.
                "label": (np.arange(BATCH) // 4 % 3).astype(np.int32),
                "time": random.permutation(BATCH).astype(np.float32),
                "event": (np.arange(BATCH) % 8 < 3).astype(np.float32),
            }
        )
    return made


# Losses of the outputs of a small network: `net` is the network with its parameters.


def normals(key, scale, **shapes):
    """Returns arrays drawn from one key, by name."""
    keys = zip(shapes, jax.random.split(key, len(shapes)), strict=True)
    return {name: scale * jax.random.normal(of_name, shapes[name]) for name, of_name in keys}


def mlp_init(key, x):
    params = normals(key, 0.5, hidden=(FEATURES, 8), out=(8, OUTPUTS))
    return params | {"bias": jnp.zeros(8)}, ()


def mlp(params, x):
    return jnp.tanh(x @ params["hidden"] + params["bias"][None]) @ params["out"]


def distances(a, b):
    return jnp.square(a[:, None] - b[None]).sum(axis=-1)


def cross_entropies(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def info_nce(net, batch):
    a, b = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in map(net, views(batch)))
    return cross_entropies(a @ b.T / 0.5, jnp.arange(len(a))).mean()


def views(batch):
    return batch["inputs"], batch["view"]


def hardest_triplet(net, batch):
    z, label = net(batch["inputs"]), batch["label"]
    apart, same = distances(z, z), label[:, None] == label[None]
    furthest = jnp.where(same, apart, -jnp.inf).max(axis=1)
    nearest = jnp.where(same, jnp.inf, apart).min(axis=1)
    return jax.nn.softplus(furthest - nearest).mean()


def cox(net, batch):
    latest_first = jnp.argsort(-batch["time"])
    risk = net(batch["inputs"])[latest_first, 0]
    event = batch["event"][latest_first]
    return -(event * (risk - jax.lax.cumlogsumexp(risk))).sum() / event.sum()


def barlow_twins(net, batch):
    a, b = ((z - z.mean(axis=0)[None]) / z.std(axis=0)[None] for z in map(net, views(batch)))
    return jnp.square(a.T @ b / len(a) - jnp.eye(OUTPUTS)).mean()


@jax.custom_vjp
def clipped(x):
    """Identity whose cotangent, of the whole batch, is scaled to a norm of at most 0.1."""
    return x


clipped.defvjp(
    lambda x: (x, None),
    lambda _, g: (g * jnp.minimum(1, 0.1 / jnp.linalg.norm(g)),),
)


def clipped_cotangent(net, batch):
    return jnp.square(clipped(net(batch["inputs"]))[:, 0] - batch["target"]).mean()


# Operations along the batch that a partitioner may get wrong.


def sliced_wasserstein(net, batch):
    return jnp.abs(
        jnp.sort(net(batch["inputs"]), axis=0) - jnp.sort(batch["view"][:, :4], axis=0)
    ).mean()


def gaussian_process(net, batch):
    z = net(batch["inputs"])
    root = jnp.linalg.cholesky(jnp.exp(-distances(z, z)) + 0.5 * jnp.eye(len(z)))
    white = jax.scipy.linalg.solve_triangular(root, batch["target"], lower=True)
    return (jnp.square(white).sum() / 2 + jnp.log(jnp.diagonal(root)).sum()) / len(z)


def recurrence_over_the_batch(net, batch):
    z = net(batch["inputs"])
    _, states = jax.lax.scan(lambda h, x: (jnp.tanh(0.5 * h + x),) * 2, jnp.zeros(OUTPUTS), z)
    return jnp.square(states).mean() + jnp.square(z[1:] - jnp.roll(z, 1, axis=0)[:-1]).mean()


def prototypes(net, batch):
    z, label = net(batch["inputs"]), batch["label"]
    centres = (
        jax.ops.segment_sum(z, label, 3) / jax.ops.segment_sum(jnp.ones(len(z)), label, 3)[:, None]
    )
    return cross_entropies(-distances(z, centres), label).mean() + jnp.median(z[:, 1]) ** 2


def of_outputs(loss):
    def of_params(params, model_state, batch, key):
        return loss(functools.partial(mlp, params), batch), model_state, None

    return Program(mlp_init, of_params)


# Networks with statistics of the batch and with a spectral norm. No bias precedes the statistics,
# as its gradient would be rounding alone. Those of other libraries are in
# `test_global_batch_networks.py`.


def mean_error(outputs, batch):
    return jnp.square(outputs[:, 0] - batch["target"]).mean()


NORMALIZED = [nn.Dense(8, use_bias=False), nn.BatchNorm(use_running_average=False)]


def of_linen(*layers, **options):
    module = nn.Sequential([*layers, jnp.tanh, nn.Dense(1)])

    def init(key, x):
        variables = module.init(key, x, **options)
        return variables["params"], {"batch_stats": variables["batch_stats"]}

    def loss(params, model_state, batch, key):
        variables = {"params": params, **model_state}
        outputs, new_state = module.apply(
            variables, batch["inputs"], mutable=["batch_stats"], **options
        )
        return mean_error(outputs, batch), dict(new_state), None

    return Program(init, loss)


# Losses that draw random numbers.


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        dropped = nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(8)(x)))
        return nn.Dense(1)(dropped), dropped != 0


def dropout_init(key, x):
    return Dropping().init({"params": key, "dropout": key}, x)["params"], ()


def dropout_loss(params, model_state, batch, key):
    outputs, mask = Dropping().apply({"params": params}, batch["inputs"], rngs={"dropout": key})
    return mean_error(outputs, batch), model_state, mask


def vae_init(key, x):
    return normals(key, 0.3, encoder=(FEATURES, 4), decoder=(2, FEATURES)), ()


def vae(params, model_state, batch, key):
    mean, log_deviation = jnp.split(jnp.tanh(batch["inputs"] @ params["encoder"]), 2, axis=1)
    noise = jax.random.normal(key, mean.shape)
    z = mean + jnp.exp(log_deviation) * noise
    error = jnp.square(jnp.tanh(z) @ params["decoder"] - batch["inputs"]).sum(axis=1)
    divergence = (jnp.square(mean) + jnp.exp(2 * log_deviation) - 1) / 2 - log_deviation
    return 0.1 * (error + divergence.sum(axis=1)).mean(), model_state, noise


def diffusion_init(key, x):
    return normals(key, 0.3, first=(FEATURES + 1, 8), last=(8, FEATURES)), ()


def diffusion(params, model_state, batch, key):
    """Denoising score matching with a time in each stratum, an example at a time."""

    def of_one(x, t, key):
        deviation = jnp.sqrt(1 - jnp.exp(-t))
        noise = jax.random.normal(key, x.shape)
        noisy = x * jnp.exp(-0.5 * t) + deviation * noise
        score = jnp.tanh(jnp.append(noisy, t) @ params["first"]) @ params["last"]
        return jnp.square(deviation * score + noise).mean(), noise

    of_times, of_noise = jax.random.split(key)
    width = 10 / BATCH
    times = jax.random.uniform(of_times, (BATCH,), maxval=width) + width * jnp.arange(BATCH)
    keys = jax.random.split(of_noise, BATCH)
    losses, noise = jax.vmap(of_one)(batch["inputs"], times, keys)
    return losses.mean(), model_state, noise


def mixup(params, model_state, batch, key):
    order = jax.random.permutation(key, BATCH)
    x = 0.7 * batch["inputs"] + 0.3 * batch["inputs"][order]
    target = 0.7 * batch["target"] + 0.3 * batch["target"][order]
    return jnp.square(mlp(params, x)[:, 0] - target).mean(), model_state, order


PROGRAMS = {
    "InfoNCE": of_outputs(info_nce),
    "hardest triplet": of_outputs(hardest_triplet),
    "Cox": of_outputs(cox),
    "Barlow twins": of_outputs(barlow_twins),
    "clipped cotangent": of_outputs(clipped_cotangent),
    "sliced Wasserstein": of_outputs(sliced_wasserstein),
    "Gaussian process": of_outputs(gaussian_process),
    "recurrence over the batch": of_outputs(recurrence_over_the_batch),
    "prototypes": of_outputs(prototypes),
    "BatchNorm of linen": of_linen(*NORMALIZED),
    "SpectralNorm": of_linen(nn.SpectralNorm(nn.Dense(8)), update_stats=True),
    "dropout": Program(dropout_init, dropout_loss),
    "VAE": Program(vae_init, vae),
    "diffusion": Program(diffusion_init, diffusion),
    "mixup": Program(mlp_init, mixup),
}


NAMES = tuple(PROGRAMS)
# Pairs, statistics, masks and noise.
FEW = ("InfoNCE", "BatchNorm of linen", "dropout", "VAE")


def drawn_metric(name, drawn):
    """Returns a metric, exact in float32, that differs if a bit of what was drawn does."""
    if drawn is None:
        return {}
    bits = drawn if drawn.dtype == bool else jax.lax.bitcast_convert_type(drawn, jnp.uint32)
    bits = bits.ravel().astype(jnp.uint32)
    weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
    total = (bits * weights).sum(dtype=jnp.uint32)  # modulo 2**32, so in any order
    return {f"{name}: drawn": (total >> 8).astype(jnp.float32)}


class Trained(NamedTuple):
    """Parameters and model state by program, and metrics by name, float32[steps]."""

    params: Any
    model_state: Any
    metrics: Any


def network_and_loss(names=NAMES):
    """Returns `init` and `loss` of a network that holds those of all programs side by side.

    The gradient of a sum of losses that share no parameter is that of each, so that an update of
    all by SGD is one of each, and one compilation serves all.
    """

    def init(key, inputs):
        inits = {name: PROGRAMS[name].init for name in names}
        made = {init: init(key, inputs) for init in dict.fromkeys(inits.values())}
        params, model_state = ({n: made[f][i] for n, f in inits.items()} for i in range(2))
        return params, model_state

    def loss(params, model_state, batch, key):
        total, metrics, new_state = 0.0, {}, {}
        for name in names:
            metrics[name], new_state[name], drawn = PROGRAMS[name].loss(
                params[name], model_state[name], batch, key
            )
            total += metrics[name]
            metrics |= drawn_metric(name, drawn)
        return total, (new_state, metrics)

    return init, loss
