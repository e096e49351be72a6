"""Makes an environment in which torch's CUDA build runs without a GPU, over the stand-ins that ``cuda/*.c`` compile to.

``make()`` returns its Python. The wheel is installed once for each version of torch and of Python. Each state of the C
sources gets an environment beside it, whose files are links to those of the first, so that a change takes seconds and
no other clone's jobs lose their libraries. All of it is in ``$XDG_CACHE_HOME/ddpdoctor-standin``.

What ddpdoctor imports is installed there too, and the tests' own environment is not on its path: that one has another
torch, and the one of ``.ci/run`` goes away. ddpdoctor itself comes from ``PYTHONPATH``, so that clones share all this.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "cuda"
TORCH = "2.14.1"
NEEDS_OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "setuptools", "sympy", "typing-extensions")
NEEDS_OF_OURS = ("nvidia-ml-py", "packaging", "psutil", "rich", "tomli; python_version < '3.11'", "typer")
TOOLS = ("cc", "nm", "readelf")
UNUSED_S = 7 * 86400
"""After this long an environment of other C sources goes away."""
COMPILE = ("cc", "-std=gnu11", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread")
OURS = {
    "libcudart.so": (("cudart.c", "kernels.c"), ()),
    "libcuda.so": (("cuda.c",), ("libcudart.so",)),
    "libnccl.so": (("nccl.c",), ("libcudart.so",)),
    "libcublas.so": (("cublas.c",), ("libcudart.so",)),
    "libcublasLt.so": (("handles.c",), ()),
    "libcudnn.so": (("handles.c",), ()),
}
"""What a library's name begins with: our sources, and our libraries that it needs."""
PREFIXES = {
    "nccl": "libnccl.so", "cudnn": "libcudnn.so", "cupti": "libcupti.so", "cusparseLt": "libcusparseLt.so",
    "cuFile": "libcufile.so", "cu[A-Z]": "libcuda.so", "nvshmem": "libnvshmem_host.so", "nvrtc": "libnvrtc.so",
    "nvJitLink": "libnvJitLink.so", "curand": "libcurand.so", "cufft": "libcufft.so", "cusolver": "libcusolver.so",
    "cusparse": "libcusparse.so", "cublas": "libcublas.so",
}  # fmt: skip
"""How symbols without a version begin, and where they are looked for."""
FOREIGN = re.compile(r"lib(cu|nv|nccl)")
SCRIPTS = {"ddpdoctor": "ddpdoctor.cli.app", "torchrun": "torch.distributed.run"}
Symbols = dict[str, str]
"""Names of functions, and the version of each, which is the name of its library or empty."""


class NotMadeError(RuntimeError):
    """The environment could not be made; the text says why, and what to do."""


class NoToolsError(NotMadeError):
    """There is no compiler."""


class NoWheelError(NotMadeError):
    """The package index did not give what it takes."""


def make(torch: str = TORCH) -> Path:
    """Return the Python of the environment with this version of torch; the first time takes a minute and 1.4 GB.

    Raises:
        NoToolsError: ``cc``, ``nm`` or ``readelf`` is lacking.
        NoWheelError: there is no wheel, or no package index.
        NotMadeError: the stand-ins do not compile.
    """
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        raise NoToolsError(f"needs {', '.join(lacking)}: install gcc, libc6-dev and binutils, or what they are called")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpdoctor-standin"
    cache.mkdir(parents=True, exist_ok=True)
    base = cache / f"torch-{torch}-python{sys.version_info[0]}.{sys.version_info[1]}"
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(source.read_bytes())
    place = cache / f"{base.name}-{digest.hexdigest()[:12]}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _install(torch, Path(folder, "new")).rename(base)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _link(base, Path(folder, "new"), place).rename(place)
        place.touch()
        for other in cache.glob(f"{base.name}-*"):
            if time.time() - other.stat().st_mtime > UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
    return place / "bin" / "python"


def variables(python: Path) -> dict[str, str]:
    """Return what a command needs in its environment to run there, with this clone's ddpdoctor."""
    return {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": str(python.parents[1]),
    }


def _install(torch: str, folder: Path) -> Path:
    """Make an environment with torch alone, none of its CUDA packages, and what it and ddpdoctor import."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--retries", "1", "-q")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    for what in (("--no-deps", f"torch=={torch}"), (*constraints, *NEEDS_OF_TORCH, *NEEDS_OF_OURS)):
        done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
            raise NoWheelError(
                f"torch {torch} for this Python could not be installed: {errors[-1]} "
                "Its wheel of 530 MB comes from PyPI: see that pip reaches it, or a mirror, and has 3 GB of disk"
            )
    (about,) = folder.glob("lib/python*/site-packages/torch/version.py")
    if "cuda: Optional[str] = None" in about.read_text():
        raise NoWheelError(
            f"pip has taken a build of torch {torch} without CUDA, from an index or folder of its configuration: "
            "set PIP_CONFIG_FILE=/dev/null and PIP_FIND_LINKS="
        )
    return folder


def _link(base: Path, folder: Path, place: Path) -> Path:
    """Make an environment of links to the files of another one, with the stand-ins in ``torch/lib``."""
    shutil.copytree(base, folder, symlinks=True, copy_function=os.link)
    for name, module in SCRIPTS.items():
        script = folder / "bin" / name
        script.unlink(missing_ok=True)
        script.write_text(f"#!{place}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    (packages,) = folder.glob("lib/python*/site-packages")
    _build(packages / "torch")
    return folder


def _build(torch: Path) -> None:
    """Compile a stand-in for each CUDA library that torch imports from, into ``torch/lib``, which its path names last.

    What a C file of ours defines is used. All else is a function that returns 0, or "not supported" for the driver.
    """
    libraries = [*sorted((torch / "lib").glob("*.so*")), *torch.glob("_C.*.so")]
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(_imports, [path for path in libraries if not FOREIGN.match(path.name)]))
    wanted: dict[str, Symbols] = {name: {} for needed, _ in told for name in needed} | {"libcuda.so.1": {}}
    for _, symbols in told:
        for symbol, version in symbols.items():
            start = "libnvshmem" if version == "NVSHMEM" else version
            if not version:
                start = next((home for prefix, home in PREFIXES.items() if re.match(prefix, symbol)), "-")
            home = next((name for name in wanted if name.startswith(start)), None)
            if home is not None:
                wanted[home][symbol] = version
    about = (torch / "version.py").read_text()
    versions = [re.search(rf"^{name}\b.*?'(\d+)\.(\d+)", about, re.MULTILINE) for name in ("__version__", "cuda")]
    numbers = [int(found[1]) * 100 + int(found[2]) for found in versions if found]
    flags = [f"-D{name}={number}" for name, number in zip(("TORCH", "CUDA"), numbers, strict=True)]
    with tempfile.TemporaryDirectory() as work:
        # The others are linked with the first.
        for name in sorted(wanted, key=lambda name: not name.startswith("libcudart.so")):
            _compile(name, wanted[name], torch / "lib", Path(work), flags)


def _imports(library: Path) -> tuple[list[str], Symbols]:
    """Return the CUDA libraries that a library names, and all that it imports."""
    needed = re.findall(r"NEEDED.*\[(.*?)\]", _said("readelf", "-dW", library))
    symbols = {}
    for line in _said("nm", "-D", "--undefined-only", library).splitlines():
        name, _, version = line.split()[-1].partition("@")
        symbols[name] = version.lstrip("@")
    return [name for name in needed if FOREIGN.match(name)], symbols


def _compile(name: str, symbols: Symbols, out: Path, work: Path, flags: Sequence[str]) -> None:
    sources, beside = next((ours for start, ours in OURS.items() if name.startswith(start)), ((), ()))
    objects = [work / f"{source}.o" for source in sources]
    for source, compiled in zip(sources, objects, strict=True):
        _said(*COMPILE, *flags, "-c", SOURCES / source, "-o", compiled)
    lines = _said("nm", "--defined-only", "-g", *objects).splitlines() if objects else []
    defined = {line.split()[-1] for line in lines if " T " in line}
    code = 801 if name.startswith("libcuda.so") else 0
    rest, script = work / "rest.c", work / "versions"
    rest.write_text("".join(f"long {symbol}(void) {{ return {code}; }}\n" for symbol in sorted(set(symbols) - defined)))
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in {*symbols.values()} - {""}))
    versions = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
    others = [path for start in beside for path in out.glob(f"{start}*")]
    _said(
        "cc", "-shared", "-fPIC", "-w", "-pthread", "-o", out / name, f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN",
        *objects, rest, *versions, *others, "-ldl", "-lrt",
    )  # fmt: skip


def _said(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotMadeError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout
