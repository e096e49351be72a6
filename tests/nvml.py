"""A recorded NVML: answers by function, arguments and device, in the form in which pynvml gives them.

``tests/data/MACHINE/nvml.json`` has what the driver answers, what every device and every pair answers, and what each
device answers of its own. A key is a function with its arguments, "nvmlDeviceGetTotalEccErrors 1 0"; a value is the
answer: an object for a structure, "! GPU_IS_LOST" for an error. What is not there is not supported.
``nvml-states.json`` has changes to it, by name.
"""

import json
from types import SimpleNamespace

import pynvml

from ddpdoctor.collect.gpus import Nvml
from tests.machines import DATA


class RecordedNvml:
    """Answers like the module pynvml; constants and structures are pynvml's own, and so are its errors."""

    NVMLError = pynvml.NVMLError

    def __init__(self, driver, devices, pairs):
        self._driver, self._devices, self._pairs = driver, devices, pairs

    def __dir__(self):
        return dir(pynvml)

    def __getattr__(self, name):
        found = getattr(pynvml, name)
        if not name.startswith("nvml") or not callable(found):
            return found
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, function, arguments):
        handles = [one for one in arguments if isinstance(one, _Handle)]
        if function == "nvmlDeviceGetHandleByIndex":
            return self._handle(arguments[0])
        plain = [str(one) for one in arguments if isinstance(one, int)]
        key = " ".join([function, *plain])
        answers = self._pairs if len(handles) == 2 else self._devices[handles[0].index] if handles else self._driver
        answer = _give(answers.get(key, "! NOT_SUPPORTED"))
        structs = [one._obj for one in arguments if hasattr(one, "_obj")]
        for struct in structs:
            for field, value in vars(answer).items():
                setattr(struct, field, value)
        return answer

    def _handle(self, index):
        _give(self._devices[index].get("nvmlDeviceGetHandleByIndex", 0))
        return _Handle(index)


class _Handle:
    def __init__(self, index):
        self.index = index


def _give(answer):
    if isinstance(answer, str) and answer.startswith("! "):
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{answer[2:]}"))
    if isinstance(answer, dict):
        return SimpleNamespace(**answer)
    if isinstance(answer, list):
        return [_give(one) for one in answer]
    return answer


def load_nvml(machine, *states):
    """Return the recorded NVML of a machine, changed by the states in turn."""
    data = json.loads((DATA / machine / "nvml.json").read_text(encoding="utf-8"))
    changes = DATA / machine / "nvml-states.json"
    known = json.loads(changes.read_text(encoding="utf-8")) if changes.exists() else {}
    for state in states:
        change = known[state]
        for part in ("driver", "every", "every_pair"):
            data[part] |= change.get(part, {})
        for index, answers in change.get("devices", {}).items():
            data["devices"][int(index)] |= answers
    devices = [data["every"] | device for device in data["devices"]]
    return Nvml(RecordedNvml(data["driver"], devices, data["every_pair"]))
