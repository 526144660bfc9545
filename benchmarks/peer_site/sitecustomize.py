"""Read by every interpreter of the peers' environment: NIXL gets no progress thread there.

NIXL's Python default is a thread that polls without rest and takes whatever a core has left. vLLM has no switch for it.
On a machine with as many workers as cores it takes from the model what it gives to nobody: without it the peer is at
its best here. The name of this file is Python's.
"""

import functools
import importlib.abc
import importlib.machinery
import sys

MODULES = {"nixl._api", "nixl_cu12._api", "nixl_cu13._api"}


class _QuietLoader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        config = getattr(module, "nixl_agent_config", None)
        if config is not None and "nixl_agent_config" in vars(module):
            _quieten(config)


def _quieten(config):
    construct = config.__init__
    if getattr(construct, "is_quiet", False):
        return

    @functools.wraps(construct)
    def quiet(self, *arguments, **named):
        if not arguments:
            named.setdefault("enable_prog_thread", False)
        construct(self, *arguments, **named)

    quiet.is_quiet = True
    config.__init__ = quiet


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _QuietLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
