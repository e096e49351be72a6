"""The settings that a trial tries: what a user calls them, what else they change, and how to make them last."""

from __future__ import annotations

from ddpdoctor.model.tuning import AGAIN
from ddpdoctor.rules.speed.reduction import MIB
from ddpdoctor.rules.speed.state import KNOBS as SPEED_KNOBS

CAP = "bucket_cap"
ACCUMULATE = "accumulate"
NO_SYNC = "no_sync"
UNREDUCED = "unreduced"
WORKERS = "workers"
THREADS = "threads"
NUMERICS = "changes numerics"

TITLES = {
    AGAIN: "no change (noise)",
    CAP: "bucket_cap_mb={mib}",
    "gradient_as_bucket_view": "gradient_as_bucket_view=True",
    "static_graph": "static_graph=True",
    "find_unused_off": "find_unused_parameters=False",
    "buffers_off": "broadcast_buffers=False",
    ACCUMULATE: "no_sync() over {value} steps",
    NO_SYNC: "no_sync() within a step",
    "bf16_reduction": "reduction in bf16",
    "bf16_autocast": "autocast to bf16",
    UNREDUCED: "no reduction at all",
    WORKERS: "num_workers={value}",
    THREADS: "OMP_NUM_THREADS={value}",
}
NOTES = {
    ACCUMULATE: "a larger batch: the learning rate may need another value",
    "bf16_reduction": NUMERICS,
    "bf16_autocast": NUMERICS,
    "buffers_off": "each rank keeps its own buffers, such as the running statistics of BatchNorm",
    UNREDUCED: "only for comparison: shows the total cost of the reduction",
}
"""What else a setting changes. One without a note trains the same."""
REFUSED_FOR_TRAINING = frozenset({ACCUMULATE, "bf16_reduction", "bf16_autocast"})
"""Settings that train differently: they are named beside the line to change, and never as that line."""

KNOBS: dict[str, dict[str, str]] = {
    CAP: SPEED_KNOBS["bucket_cap"],
    "gradient_as_bucket_view": {
        "": "DistributedDataParallel(..., gradient_as_bucket_view=True)",
        "lightning": "DDPStrategy(gradient_as_bucket_view=True)",
        "accelerate": "DistributedDataParallelKwargs(gradient_as_bucket_view=True)",
    },
    "static_graph": {
        "": "DistributedDataParallel(..., static_graph=True)",
        "lightning": "DDPStrategy(static_graph=True)",
        "transformers": "TrainingArguments(ddp_static_graph=True)",
        "accelerate": "DistributedDataParallelKwargs(static_graph=True)",
    },
    "find_unused_off": {
        "": "DistributedDataParallel(..., find_unused_parameters=False)",
        "lightning": 'Trainer(strategy="ddp")',
        "transformers": "TrainingArguments(ddp_find_unused_parameters=False)",
        "accelerate": "DistributedDataParallelKwargs(find_unused_parameters=False)",
    },
    "buffers_off": SPEED_KNOBS["buffers_off"],
    ACCUMULATE: {
        "": "with model.no_sync(): around forward and backward of all but the last of {value} batches",
        "lightning": "Trainer(accumulate_grad_batches={value})",
        "transformers": "TrainingArguments(gradient_accumulation_steps={value})",
        "accelerate": "Accelerator(gradient_accumulation_steps={value}) and accelerator.accumulate(model)",
    },
    NO_SYNC: {
        "": "with model.no_sync(): around forward and backward of all but the last batch before optimizer.step()",
        "accelerate": "with accelerator.accumulate(model): around the step",
    },
    "bf16_reduction": {
        "": "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        "lightning": "DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)",
        "accelerate": "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)",
    },
    "bf16_autocast": {
        "": 'with torch.autocast("cuda", dtype=torch.bfloat16): around forward and loss',
        "lightning": 'Trainer(precision="bf16-mixed")',
        "transformers": "TrainingArguments(bf16=True)",
        "accelerate": 'Accelerator(mixed_precision="bf16")',
    },
    WORKERS: {
        "": "DataLoader(num_workers={value}, persistent_workers=True)",
        "transformers": "TrainingArguments(dataloader_num_workers={value}, dataloader_persistent_workers=True)",
    },
    THREADS: {"": "OMP_NUM_THREADS={value}"},
}
"""By setting and framework, "" for DDP itself."""
FRAMEWORKS = ("lightning", "transformers", "accelerate")


def name_of(setting: str) -> str:
    """Return a setting without its value: "bucket_cap" of "bucket_cap=1048576"."""
    return setting.partition("=")[0]


def value_of(setting: str) -> int:
    """Return the number in a setting: 4 of "workers=4"."""
    return int(setting.partition("=")[2])


def title_of_setting(setting: str) -> str:
    """Return what a user calls a setting."""
    return _filled(TITLES.get(name_of(setting), setting), setting)


def fix_of(setting: str, frameworks: frozenset[str]) -> str:
    """Return the option of the framework in use that makes a setting last; "" if there is none."""
    knobs = KNOBS.get(name_of(setting), {})
    text = next((knobs[name] for name in FRAMEWORKS if name in frameworks and name in knobs), knobs.get("", ""))
    return _filled(text, setting)


def _filled(text: str, setting: str) -> str:
    value = setting.partition("=")[2]
    mib = f"{int(value) / MIB:g}" if value.isdigit() else value
    return text.replace("{mib}", mib).replace("{value}", value)
