"""Keras 3 on TensorFlow, over all GPUs of a node (MirroredStrategy) or of several (MultiWorkerMirroredStrategy).

The node sets TF_CONFIG on several nodes; the loop is the same.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf

from launch_train import metrics


def prepare_gpus() -> None:
    """Limit this process to machine.gpu_memory_gb, or let its memory grow as needed; compute in bf16 on GPUs."""
    limit = os.environ.get("LAUNCH_GPU_MEMORY_GB")
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        if limit:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=1024 * float(limit))
            tf.config.set_logical_device_configuration(gpu, [part])
        else:
            tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        keras.mixed_precision.set_global_policy("mixed_bfloat16")


def main(steps: int, folder: str) -> None:
    several = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.MirroredStrategy()
    node = int(os.environ.get("LAUNCH_NODE", "0"))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1, dtype="float32")]
        )
        weights = model.trainable_variables
        velocity = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]
        done = tf.Variable(0, dtype=tf.int64)
    replicas = strategy.num_replicas_in_sync

    @tf.function
    def train(seed: tf.Tensor) -> tf.Tensor:
        def one() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            number = context.replica_id_in_sync_group
            x = tf.random.stateless_normal((32, 16), tf.stack([seed, tf.cast(number, tf.int64)]))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - tf.reduce_sum(x, axis=1, keepdims=True)) ** 2)
            grads = context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, [w.value for w in weights]))
            for weight, speed, grad in zip(weights, velocity, grads, strict=True):
                speed.assign(0.9 * speed + grad)
                weight.value.assign_sub(0.003 * speed)
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(one), axis=None)

    saved = tf.train.Checkpoint(weights=[w.value for w in weights], velocity=velocity, done=done)
    # All workers must call save; those other than the first write elsewhere (TensorFlow's multi-worker guide).
    keeper = tf.train.CheckpointManager(
        saved, folder if node == 0 else f"{tempfile.gettempdir()}/keras-{node}", max_to_keep=2
    )
    saved.restore(tf.train.latest_checkpoint(folder))
    for step in range(int(done.numpy()) + 1, steps + 1):
        loss = float(train(tf.constant(step, tf.int64)))
        metrics.log(step, loss=loss)
        if step % 20 == 0:
            done.assign(step)
            keeper.save()
            print(f"step {step}: loss {loss:.4f} on {replicas} replicas", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    prepare_gpus()
    main(parser.parse_args().steps, os.environ.get("LAUNCH_RUN_FOLDER", "out") + "/keras")  # TensorFlow writes to gs://
