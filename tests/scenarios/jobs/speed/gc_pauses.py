"""Collecting garbage takes a part of the time on all ranks; or little, although there are as many objects."""

import gc

from accelerator import Layers, Stepper, batch, run

STEPS = 40


def train(ms, each_step):
    step = Stepper(Layers(ms))
    for number in range(STEPS):
        each_step(number)
        step(batch())


def collects():
    gc.freeze()
    cache = [[i] for i in range(60_000)]
    train(20, lambda step: gc.collect())  # FAULT collects
    del cache


def keeps():
    """Each step keeps many objects, so Python goes through all of them again and again."""
    gc.freeze()
    history = []
    train(20, lambda step: history.append([[i] for i in range(12_000)]))  # FAULT keeps


def eagerly():
    """Thresholds so low that all objects are gone through in each step."""
    gc.freeze()
    gc.set_threshold(500, 2, 2)
    train(20, lambda step: [[i] for i in range(60_000)])  # FAULT eagerly


def frozen():
    cache = [[i] for i in range(60_000)]
    gc.freeze()
    train(40, lambda step: gc.collect())
    del cache


def young():
    train(40, lambda step: [[i] for i in range(2_000)])


run(collects, keeps, eagerly, frozen, young)
