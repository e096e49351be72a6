"""Collecting garbage takes a part of the time on all ranks; or little, although there are as many objects."""

import gc

from accelerator import Layers, Stepper, batch, run

STEPS = 40


def train(ms, each_step):
    """Freeze what the imports left, so that what a collection takes is this job's own."""
    step = Stepper(Layers(ms))
    gc.freeze()
    for number in range(STEPS):
        each_step(number)
        step(batch())


def collects():
    cache = []

    def step(number):
        if not cache:
            cache.extend([i] for i in range(100_000))
        gc.collect()  # FAULT collects

    train(20, step)


def keeps():
    """Each step keeps many objects, so Python goes through all of them again and again."""
    history = []
    train(20, lambda number: history.append([[i] for i in range(24_000)]))  # FAULT keeps


def eagerly():
    """Thresholds so low that all objects are gone through in each step."""
    gc.set_threshold(500, 2, 2)
    train(20, lambda number: [[i] for i in range(60_000)])  # FAULT eagerly


def frozen():
    cache = [[i] for i in range(100_000)]
    train(40, lambda number: gc.collect())
    del cache


def young():
    train(40, lambda number: [[i] for i in range(2_000)])


run(collects, keeps, eagerly, frozen, young)
