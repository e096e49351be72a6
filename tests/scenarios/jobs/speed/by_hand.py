"""Gradients are reduced one by one without DDP; or in one flat tensor, or parameters every few steps."""

import torch
import torch.distributed as dist
from accelerator import Layers, batch, run

STEPS = 40


def train(net, reduce):
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for number in range(STEPS):
        optimizer.zero_grad()
        net(batch(32)).mean().backward()
        reduce(net, number)
        optimizer.step()


def one_by_one():
    def reduce(net, number):
        for p in net.parameters():
            dist.all_reduce(p.grad)  # FAULT one_by_one
            p.grad /= dist.get_world_size()

    train(Layers(20, count=20, width=32), reduce)


def over_rank_0():
    def reduce(net, number):
        for p in net.parameters():
            dist.reduce(p.grad.data, 0)  # FAULT over_rank_0
            dist.broadcast(p.grad.data, 0)  # FAULT over_rank_0

    train(Layers(20, count=15, width=32), reduce)


def copies():
    def reduce(net, number):
        for p in net.parameters():
            mean = p.grad / dist.get_world_size()
            dist.all_reduce(mean)  # FAULT copies
            p.grad.copy_(mean)

    train(Layers(20, count=20, width=32), reduce)


def flat():
    def reduce(net, number):
        grads = [p.grad for p in net.parameters()]
        whole = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(whole)
        for grad, part in zip(grads, whole.split([g.numel() for g in grads])):
            grad.copy_(part.view_as(grad))

    train(Layers(60, count=20, width=32), reduce)


def local_sgd():
    def average(net, number):
        if number % 10 == 9:
            for p in net.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()

    train(Layers(60, count=20, width=32), average)


run(one_by_one, over_rank_0, copies, flat, local_sgd)
