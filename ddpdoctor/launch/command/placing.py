"""Finds the place of a ``wrap`` in its job from options, Slurm or an operator's variables, without probing the machine.

The ranks wait for this, so modules that a job on one node does not need are imported only when needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.launch.command.placement import Placement, Style
from ddpdoctor.launch.command.torchrun_nodes import SHAPE, TorchrunSettings, settings_of_command
from ddpdoctor.model.launch import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command.command_line import SplitCommand

MAX_PORT = 65_535


def place(split: SplitCommand, env: Mapping[str, str], exchange_port: int | None = None) -> Placement:
    """Return the place that options, Slurm or an operator's variables give to this process.

    Node options on the command line take precedence over Slurm, and Slurm over RANK and WORLD_SIZE. Raises
    ``UserError`` if each of several tasks on a node would start the ranks of the whole node.
    """
    placed = _place(split, settings_of_command(split, env), env)
    if placed.alone:
        return placed
    return replace(placed, port=exchange_port or placed.port, token=_token(placed, env))


def _place(split: SplitCommand, torchrun: TorchrunSettings | None, env: Mapping[str, str]) -> Placement:
    style = Style.COMMAND if split.is_command else Style.TORCHRUN
    if torchrun is not None and (torchrun.standalone or torchrun.nnodes == (1, 1)):
        return Placement(style=style)
    if "SLURM_JOB_ID" in env and (task := _in_step(split, torchrun, env)):
        return task
    if torchrun is not None and torchrun.nnodes is not None:
        return _by_torchrun(style, torchrun, torchrun.nnodes)
    return _by_variables(split, torchrun, env) or Placement(style=style, note=_idle_note(env))


def _in_step(split: SplitCommand, torchrun: TorchrunSettings | None, env: Mapping[str, str]) -> Placement | None:
    from ddpdoctor.launch.command.slurm_placing import place_task
    from ddpdoctor.launch.command.slurm_step import read_step

    step = read_step(env)
    return None if step is None else place_task(split, torchrun, step, env)


def _idle_note(env: Mapping[str, str]) -> str | None:
    if "SLURM_JOB_ID" not in env:
        return None
    from ddpdoctor.launch.command.slurm_placing import idle_note

    return idle_note(env)


def _by_torchrun(style: Style, torchrun: TorchrunSettings, nnodes: tuple[int, int]) -> Placement:
    """Place a node by torchrun's options. Only a static rendezvous uses --node-rank."""
    host, port = torchrun.endpoint or ("", 0)
    one_host = is_loopback(host)
    return Placement(
        style=style,
        number=(torchrun.number("--node-rank") or 0) if torchrun.backend == "static" else None,
        expected=nnodes[0],
        most=nnodes[1],
        hosts=("127.0.0.1",) if one_host else tuple(filter(None, (host,))),
        port=_beside(port),
        one_host=one_host,
        store=torchrun.endpoint,
    )


def _by_variables(split: SplitCommand, torchrun: TorchrunSettings | None, env: Mapping[str, str]) -> Placement | None:
    """Place a rank by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as set by an operator or another launcher."""
    if not env.get("RANK") or not env.get("WORLD_SIZE"):
        return None
    from ddpdoctor.collect.launch import number

    rank, size, port = (number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = env.get("MASTER_ADDR", "").strip()
    if rank is None or size is None or port is None or not host or not rank < size or size < 2:
        return None
    if torchrun is not None and (split.is_command or split.torchrun or any(map(torchrun.text, SHAPE))):
        return None
    note = (
        f"becoming rank {rank} of {size}, because RANK and WORLD_SIZE are set; with --nproc-per-node, torchrun starts "
        "the ranks"
    )
    one_host = is_loopback(host)
    return Placement(
        style=Style.COMMAND if split.is_command else Style.RANK,
        number=rank,
        expected=size,
        most=size,
        of_ranks=True,
        nodes=1 if one_host else -(-size // (number(env, "LOCAL_WORLD_SIZE") or 1)),
        hosts=("127.0.0.1",) if one_host else (host,),
        port=_beside(port),
        one_host=one_host,
        store=(host, port),
        note=None if split.is_command or rank else note,
    )


def _token(placed: Placement, env: Mapping[str, str]) -> bytes | None:
    """Return the job's secret; in a Slurm step, the same one that the other ddpdoctor commands use."""
    from ddpdoctor.exchange.wire import job_token
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.node import Launcher

    launcher = Launcher.SLURM if placed.batch_job else Launcher.NNODES
    return job_token(Launch(launcher=launcher, run=f"slurm {placed.batch_job}"), env)


def _beside(port: int) -> int:
    """Return the port next to the store's, or 0 if that is unknown."""
    if not port:
        return 0
    return port + 1 if port < MAX_PORT else port - 1
