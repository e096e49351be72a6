"""GPUs of a recorded machine that are changed one by one: what no row of tests/data/environment can say in short."""

from dataclasses import replace

from ddpdoctor.model.node import GpuOnBus, Launcher, NvLink
from tests.golden import table
from tests.rules.environment.build import all_named, fleet, gpus_of, node, pci_of, process, torch_of

CVD = "CUDA_VISIBLE_DEVICES"


def unopened(error):
    """A machine of which one GPU of the bus could not be opened for this reason."""
    gpus = gpus_of("one-fewer")
    return node(gpus=replace(gpus, on_bus=(*gpus.on_bus[:-1], replace(gpus.on_bus[-1], open_error=error))))


def beside(driver, device):
    """A machine with one GPU more on the bus, which has this driver."""
    extra = GpuOnBus(bus_id="0000:f0:00.0", device=device, driver=driver)
    return node(gpus=replace(gpus_of(), on_bus=(*gpus_of().on_bus, extra)))


def job(*nodes):
    return fleet(*nodes, launcher=Launcher.TORCHRUN, world_size=sum(len(one.processes) for one in nodes))


def ranks_with(values, first=0, **more):
    return tuple(
        process(first + n, local_rank=n, **({} if value is None else {CVD: value}), **more)
        for n, value in enumerate(values)
    )


# nvlink, fabric


def links(active, of):
    return tuple(NvLink(index=index, active=index < active, errors=None) for index in range(of))


def linked(*counts, of=18, name="NVIDIA H100 80GB HBM3", **more):
    """A node whose GPUs have so many active links each."""
    gpus = all_named(gpus_of(), name)
    devices = tuple(replace(gpu, nvlinks=links(count, of)) for gpu, count in zip(gpus.devices, counts, strict=False))
    return node(gpus=replace(gpus, devices=devices, pairs=()), **more)


def pcie(ancestor, p2p, **more):
    gpus = all_named(gpus_of(machine="workstation2"), "NVIDIA L40S")
    return node(gpus=replace(gpus, pairs=tuple(replace(p, ancestor=ancestor, p2p=p2p) for p in gpus.pairs)), **more)


def a100(*, manager, switches=6, virtual=False, torch_count=0, state=None):
    """A driver that tells nothing of the fabric, or says ``state``."""
    gpus = all_named(gpus_of(), "NVIDIA A100-SXM4-80GB")
    devices = tuple(replace(gpu, fabric_state=state, fabric_status=state and "success") for gpu in gpus.devices)
    gpus = replace(gpus, devices=devices, fabric_manager=manager)
    return node(gpus=gpus, pci=pci_of(switches=switches, virtual=virtual), torch=torch_of(gpus, count=torch_count))


test_rows = table("gpus", "ddpdoctor.model.node ddpdoctor.model.reading tests.rules.environment.build", globals())
