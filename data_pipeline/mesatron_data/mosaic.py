"""Import MosaicML streaming where the installed torchvision does not fit the installed torch.

streaming depends on torchvision, whose PyPI build fails to import beside a CPU build of torch ("operator
torchvision::nms does not exist"); only streaming's image data sets need it. Every module that uses streaming imports
it from here.
"""

import sys
import types

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    for _name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[_name]
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))

import streaming

__all__ = ["streaming"]
