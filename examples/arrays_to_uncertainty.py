"""Predictions with uncertainty from two arrays: eight small networks on scikit-learn's digits.

    python examples/arrays_to_uncertainty.py

Result: an accuracy above 0.9 on digits by writers who are not in the training data.
"""

import flax.linen as nn
import optax
from sklearn.datasets import load_digits

import dist_ens as de

mlp = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
x, y = load_digits(return_X_y=True)
ensemble = de.Ensemble(mlp, optax.adam(1e-3), de.losses.categorical(10), num_members=8)
result = de.fit(ensemble, {"inputs": x[:1300], "labels": y[:1300]}, steps=500, batch_size=128)
scores = de.evaluate(ensemble, result.state, {"inputs": x[1300:], "labels": y[1300:]})
p = ensemble.predict(result.state, x[1300:])

print(scores)
print(p)
surest, least_sure = p.total.argmin(), p.total.argmax()
print(f"Test digit {surest} has the least entropy, {p.total[surest]:.3f} nats.")
print(f"Test digit {least_sure} has the greatest entropy, {p.total[least_sure]:.3f} nats,")
print(f"of which {p.epistemic[least_sure]:.3f} nats are disagreement between the members.")
