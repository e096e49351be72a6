"""Python imports this at its start because ``wrap`` puts this folder on PYTHONPATH.

It loads the recorder by file path, since a rank's Python may not have ddpdoctor installed, and then the
``sitecustomize`` that this one stands in front of.
"""

import os
import sys


def _load_recorder():
    import importlib.util

    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    name = "_ddpdoctor_recorder"
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(home, "__init__.py"), submodule_search_locations=[home]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    from _ddpdoctor_recorder import start

    start.install()


def _load_hidden():
    """Import the sitecustomize that would have been found without us, as a module or a package."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    import importlib.util

    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("DDPDOCTOR_RUN"):
    try:
        _load_recorder()
    except Exception as error:  # a recorder that fails must never keep a rank from running
        try:
            with open(os.path.join(os.environ["DDPDOCTOR_RUN"], "lost-%d-0" % os.getpid()), "w") as lost:
                lost.write("%s\nthe recorder failed at its start: %r" % (os.environ.get("RANK", ""), error))
        except Exception:
            pass
_load_hidden()
