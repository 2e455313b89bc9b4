"""Data-parallel JAX: one process per node, over all of its devices. The node sets the three JAX_ variables."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch_train import metrics


def loss_of(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ weights["w1"] + weights["b1"])
    return jnp.mean((hidden @ weights["w2"] - x.sum(axis=1, keepdims=True)) ** 2)


@jax.jit
def train(weights: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent; JAX averages over the devices, as `x` is sharded and the weights are not."""
    loss, grads = jax.value_and_grad(loss_of)(weights, x)
    return jax.tree.map(lambda weight, grad: weight - 0.01 * grad, weights, grads), loss


def main(steps: int, folder: Path) -> None:
    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # which JAX reads itself
        nodes, node = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
        jax.distributed.initialize(num_processes=nodes, process_id=node)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    draws = np.random.default_rng(0)
    start = {"w1": draws.normal(0, 0.2, (16, 64)), "b1": np.zeros(64), "w2": draws.normal(0, 0.2, (64, 1))}
    saved, first = folder / "checkpoint.npz", 0
    if saved.exists():
        with np.load(saved) as found:
            first, start = int(found["step"]), {name: found[name] for name in start}
    weights = {
        name: jax.make_array_from_process_local_data(everywhere, value.astype(np.float32))
        for name, value in start.items()
    }
    per_node = 32 * jax.local_device_count()
    for step in range(first + 1, steps + 1):
        mine = np.random.default_rng([step, jax.process_index()]).normal(size=(per_node, 16)).astype(np.float32)
        weights, loss = train(weights, jax.make_array_from_process_local_data(sharded, mine))
        metrics.log(step, loss=float(loss))
        if step % 20 == 0 and jax.process_index() == 0:
            save({name: np.asarray(value) for name, value in weights.items()} | {"step": np.array(step)}, saved)
            print(f"step {step}: loss {float(loss):.4f} on {jax.device_count()} devices", flush=True)


def save(values: dict[str, np.ndarray], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path.with_suffix(".new.npz"), **values)
    path.with_suffix(".new.npz").replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    # On Vertex AI each bucket is a folder below /gcs.
    run = os.environ.get("LAUNCH_RUN_FOLDER", "out").replace("gs://", "/gcs/", 1)
    main(parser.parse_args().steps, Path(run) / "jax")
